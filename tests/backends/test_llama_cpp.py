"""What only the real backend can be asked: aborts, grammars, rounding, llama.cpp's own accounts."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence

import pytest

from engine_service.backends.base import (
    BackendError,
    ChunkOrder,
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerationOrder,
    InvalidConstraint,
    Sampling,
    StepOutcome,
)
from engine_service.backends.llama_cpp.backend import LlamaCppBackend
from engine_service.backends.llama_cpp.binding import ABORTED, NO_ROOM, Batch, Library
from engine_service.backends.llama_cpp.model import Model
from engine_service.scheduling.model import PreemptionMode, RequestId
from tests.backends.driver import GREEDY, Driver, assert_same_but_near_ties

Embedding = tuple[float, ...]

STORY = "The keeper climbed the stairs, trimmed the wick and wrote the weather into the log. " * 40


@pytest.fixture
def real(llama_cpp: LlamaCppBackend) -> Driver:
    return Driver(llama_cpp)


@pytest.fixture
def small(model: Model) -> Iterator[Driver]:
    """A cache of 256 cells, so that it can be filled to the brim in a second."""
    own_model = Model(model.library, model.path)
    backend = LlamaCppBackend(own_model, context_tokens=256, max_sequences=4, threads=1, micro_batch=32)
    yield Driver(backend)
    backend.check()
    backend.close()


def story(driver: Driver, length: int, first: int = 50) -> tuple[int, ...]:
    ids = driver.backend.tokenizer.encode(STORY)
    return (first, *itertools.islice(itertools.cycle(ids), length - 1))


# -- abort ---------------------------------------------------------------------------------------------


class Aborter:
    """Orders steps that another thread aborts, after a delay that adapts itself to the machine.

    It grows while nothing is kept and shrinks when a step gets through, so that most steps lose a part.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._delay_s = 0.01

    def step(self, *, decodes: Sequence[str] = (), chunks: dict[str, int]) -> StepOutcome:
        timer = threading.Timer(self._delay_s, self._driver.backend.abort)
        timer.start()
        outcome = self._driver.step(decodes=decodes, chunks=chunks)
        timer.cancel()
        timer.join()
        self._driver.backend.check()
        if not outcome.aborted:
            self._delay_s *= 0.5
        elif not any(one.prefill_tokens for one in outcome.outcomes):
            self._delay_s *= 1.6
        return outcome


def test_an_abort_stops_a_long_prefill_and_reports_what_is_stored(real: Driver) -> None:
    backend = real.backend
    real.admit(real.order("long", story(real, 1500), 4))
    outcome = Aborter(real).step(chunks={"long": 1500})
    assert outcome.aborted
    kept = outcome.outcomes[0].prefill_tokens
    assert kept < 1500
    assert kept % 32 == 0, "whole micro-batches are kept"
    again = real.step(chunks={"long": 40})
    assert not again.aborted
    assert again.outcomes[0].prefill_tokens == 40
    assert backend.num_cells_held == kept + 40


def test_aborts_change_no_text(real: Driver) -> None:
    """Decodes and a prompt share every aborted iteration; what was lost is computed again."""
    backend = real.backend
    orders = [real.order("prompt", story(real, 300), 3), real.order("chat", "Tell me about rain.", 30)]
    reference = {}
    for order in orders:
        reference[order.request_id] = real.run(order).token_ids
        backend.drop_cache()
    for order in orders:
        real.admit(order)
    real.prefill("chat")
    aborter, seen = Aborter(real), []
    while not real.outputs[RequestId("prompt")].token_ids and not real.outputs[RequestId("chat")].is_over:
        outcome = aborter.step(decodes=["chat"], chunks={"prompt": real.left[RequestId("prompt")]})
        chat, prompt = outcome.outcomes
        if outcome.aborted and prompt.prefill_tokens:
            seen.append(len(chat.token_ids))
    assert seen, "no abort hit between two micro-batches"
    assert set(seen) == {1}, "decodes come first: a prompt's abort loses none of them"
    real.finish("prompt", "chat")
    assert {r: real.outputs[r].token_ids for r in reference} == reference


def test_an_aborted_last_chunk_is_sampled_once(real: Driver) -> None:
    """Whatever moment the abort hits, the first token comes exactly once and is the right one."""
    order = real.order("p", story(real, 40), 3)
    reference = real.run(order).token_ids
    aborter = Aborter(real)
    for name in ("p1", "p2"):
        real.backend.drop_cache()
        real.admit(real.order(name, order.prompt_ids, 3))
        while not real.outputs[RequestId(name)].token_ids:
            aborter.step(chunks={name: real.left[RequestId(name)]})
        real.finish(name)
        assert real.outputs[RequestId(name)].token_ids == reference
        assert real.outputs[RequestId(name)].prefilled == 40


# -- rounding ------------------------------------------------------------------------------------------


def test_with_big_micro_batches_texts_agree_up_to_near_ties(model: Model) -> None:
    """The default micro-batch: from 64 rows on llama.cpp adds attention in another order."""
    backend = LlamaCppBackend(
        Model(model.library, model.path), context_tokens=1024, max_sequences=4, threads=1, micro_batch=128
    )
    driver = Driver(backend)
    with_gaps = Sampling(temperature=0.0, num_logprobs=2)
    reference = {}
    for number in range(3):
        order = driver.order(
            f"alone{number}", story(driver, 90 + number, 50 + number), 10, sampling=with_gaps
        )
        reference[number] = driver.run(order, chunk=30)
        backend.drop_cache()
    for number in range(3):
        driver.admit(driver.order(f"r{number}", story(driver, 90 + number, 50 + number), 10))
    driver.finish("r0", "r1", "r2", chunk=75)
    for number in range(3):
        assert_same_but_near_ties(reference[number], driver.outputs[RequestId(f"r{number}")])
    backend.close()


# -- cells ---------------------------------------------------------------------------------------------


def test_every_reserved_cell_can_be_used_and_not_one_more(small: Driver) -> None:
    backend = small.backend
    small.run(small.order("old", story(small, 100, 9), 2))
    assert backend.num_cells_cached == 101
    for number in range(4):
        small.admit(small.order(f"r{number}", story(small, 60, 100 + number), 5))
    small.finish("r0", "r1", "r2", "r3", chunk=30)
    assert all(small.outputs[RequestId(f"r{n}")].reason is FinishReason.LENGTH for n in range(4))
    for number in range(4):
        small.admit(small.order(f"s{number}", story(small, 65, 200 + number), 0))
        small.step(chunks={f"s{number}": 64})
    assert backend.num_cells_held == 256
    assert backend.num_cells_cached == 0
    context = backend._context
    context.begin()
    context.add_token(0, 5, 64)
    assert context.run() == NO_ROOM, "llama.cpp agrees that the cache is full"
    with pytest.raises(BackendError, match="no room for 1 tokens"):
        small.step(chunks={"s0": 1})
    backend.release(RequestId("s1"))
    small.step(chunks={"s0": 1})
    assert backend.num_cells_held == 2 * 64, "s0 is finished now"


def test_shared_cells_are_one_cell_to_llama_cpp_too(small: Driver) -> None:
    prefix = story(small, 200, 7)
    small.run(small.order("pin", prefix, 0, keep_prefix=True))
    for number in range(4):
        small.admit(small.order(f"r{number}", (*prefix, 300 + number), 12), reserved_tokens=214)
    small.finish("r0", "r1", "r2", "r3")
    assert all(len(small.outputs[RequestId(f"r{n}")].token_ids) == 12 for n in range(4))
    assert small.backend.num_cells_held == 200


def test_an_answer_ends_where_the_real_context_does(small: Driver) -> None:
    order = small.order("full", story(small, 250), 100, ignore_eos=True)
    small.admit(order, reserved_tokens=256)
    small.finish("full", chunk=30)
    output = small.outputs[RequestId("full")]
    assert output.reason is FinishReason.LENGTH
    assert len(output.token_ids) == 6


# -- grammars ------------------------------------------------------------------------------------------

TOOL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["turn_on", "turn_off"]},
        "arguments": {
            "type": "object",
            "properties": {
                "entity": {"enum": ["kitchen lamp", "hall door"]},
                "level": {"type": "integer", "minimum": 0, "maximum": 100},
            },
            "required": ["entity", "level"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
NOTE = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
        "done": {"type": "boolean"},
    },
    "required": ["title", "tags", "done"],
    "additionalProperties": False,
}


def json_schema(schema: object) -> Constraint:
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, text=json.dumps(schema))


def regex(text: str) -> Constraint:
    return Constraint(kind=ConstraintKind.REGEX, text=text)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_schema_always_gives_json_that_matches_it(real: Driver, temperature: float) -> None:
    names = []
    for seed in range(2):
        for label, schema in (("tool", TOOL), ("note", NOTE)):
            names.append(f"{label}{seed}")
            sampling = Sampling(temperature=temperature, seed=seed)
            prompt = f"Make a {label} call, please. Number {seed}."
            real.admit(real.order(names[-1], prompt, 60, sampling=sampling, constraint=json_schema(schema)))
    real.finish(*names, chunk=16, budget=30)
    for name in names:
        output = real.outputs[RequestId(name)]
        value = json.loads(output.text)
        assert output.reason is FinishReason.STOP
        if name.startswith("tool"):
            assert value["name"] in ("turn_on", "turn_off")
            assert isinstance(value["arguments"]["level"], int)
            assert output.text == json.dumps(value, separators=(",", ":")), "no free white space"
        else:
            assert len(value["title"]) <= 12
            assert isinstance(value["done"], bool)


def test_a_regex_and_a_lark_grammar_rule_the_output(real: Driver) -> None:
    date = real.run(real.order("date", "When?", 30, constraint=regex(r"20\d\d-(0[1-9]|1[0-2])-[0-2]\d")))
    assert date.reason is FinishReason.STOP
    assert len(date.text) == 10
    assert real.backend.tokenizer.decode(date.token_ids[-1:]), "no iteration is spent on an end token"
    lark = Constraint(kind=ConstraintKind.LARK, text='start: "yes" | "no" | "perhaps" " " /[a-z]{3}/')
    word = real.run(real.order("word", "Really?", 30, constraint=lark))
    assert word.text in ("yes", "no") or word.text.startswith("perhaps ")


def test_a_grammar_that_may_go_on_ends_with_the_end_token(real: Driver) -> None:
    output = real.run(real.order("many", "Count.", 12, constraint=regex("(one |two ){1,3}")))
    assert output.reason is FinishReason.STOP
    assert output.text.split() in [
        list(p) for n in (1, 2, 3) for p in itertools.product(["one", "two"], repeat=n)
    ]


def test_grammar_state_survives_preemption(real: Driver) -> None:
    reference = real.run(real.order("whole", "Make a note.", 60, constraint=json_schema(NOTE)))
    real.backend.drop_cache()
    real.admit(real.order("cut", "Make a note.", 60, constraint=json_schema(NOTE)))
    real.prefill("cut")
    while not real.outputs[RequestId("cut")].is_over:
        real.backend.preempt(RequestId("cut"), PreemptionMode.RELEASE)
        real.resume(RequestId("cut"))
        real.step(decodes=["cut"])
    assert real.outputs[RequestId("cut")].text == reference.text


def test_emoji_are_streamed_as_whole_characters(real: Driver) -> None:
    output = real.run(real.order("emoji", "Smile!", 60, constraint=regex("(🙂|🚀|日本|ü){6}")))
    assert output.reason is FinishReason.STOP
    assert "" in output.texts[:-1], "some tokens are parts of a character"
    assert not any("\ufffd" in text for text in output.texts)
    assert real.backend.tokenizer.decode(output.token_ids) == output.text


def test_half_a_character_at_the_end_is_not_shown(real: Driver) -> None:
    output = real.run(real.order("half", "Smile!", 1, constraint=regex("🚀{3}")))
    assert output.reason is FinishReason.LENGTH
    assert output.text == ""


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (ConstraintKind.JSON_SCHEMA, '{"type":', "line 1 column 9"),
        (ConstraintKind.JSON_SCHEMA, '{"type": "objekt"}', "objekt"),
        (ConstraintKind.JSON_SCHEMA, "[1]", "a schema must be an object"),
        (ConstraintKind.JSON_SCHEMA, '{"$ref": "#/nowhere"}', "nowhere"),
        (ConstraintKind.JSON_SCHEMA, '{"type": "array", "if": {}}', "if"),
        (ConstraintKind.JSON_SCHEMA, '{"$ref": "#"}', "nothing matches it"),
        (ConstraintKind.REGEX, "(ab", "unclosed group"),
        (ConstraintKind.LARK, "start: thing", 'at 1.*"thing"'),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_with_its_place(
    real: Driver, kind: ConstraintKind, text: str, message: str
) -> None:
    order = real.order("bad", "x", 5, constraint=Constraint(kind=kind, text=text))
    with pytest.raises(InvalidConstraint, match=message):
        real.backend.validate(order)
    with pytest.raises(InvalidConstraint, match=message):
        real.admit(order)
    assert real.backend.request_ids == ()


def test_any_thread_may_validate_and_tokenize(real: Driver) -> None:
    order = real.order("ok", "x", 5, constraint=json_schema(TOOL))
    expected = real.backend.tokenizer.encode(STORY)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                real.backend.validate(order)
                assert real.backend.tokenizer.encode(STORY) == expected
                assert real.backend.shared_prefix_tokens(expected) == 0
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    real.run(real.order("meanwhile", "Hello", 5))
    for thread in threads:
        thread.join()
    assert not failures


# -- what is loaded ------------------------------------------------------------------------------------


def test_the_model_is_described_from_its_file(llama_cpp: LlamaCppBackend) -> None:
    info = llama_cpp.info
    assert info.name == "SmolLM2-135M-Instruct"
    assert info.architecture == "llama"
    assert info.vocab_size == 49_152
    assert "<|im_start|>" in info.chat_template
    assert info.backend == "llama_cpp"
    assert llama_cpp.capacity.can_abort


def test_the_trained_context_limits_a_request(model: Model) -> None:
    backend = LlamaCppBackend(
        Model(model.library, model.path), context_tokens=10_240, max_sequences=2, threads=1
    )
    assert backend.capacity.num_pages * backend.capacity.page_tokens == 10_240
    assert backend.capacity.max_context_tokens == 8192
    order = GenerationOrder(request_id=RequestId("x"), prompt_ids=(5,) * 8192, max_tokens=1, sampling=GREEDY)
    with pytest.raises(ValueError, match="in a context of 8192"):
        backend.admit(order, reserved_tokens=8193)
    backend.close()


@pytest.mark.parametrize("wrong", [{"context_tokens": 10}, {"max_sequences": 0}, {"threads": 0}])
def test_counts_that_cannot_be_are_refused(model: Model, wrong: dict[str, int]) -> None:
    counts = {"context_tokens": 256, "max_sequences": 2, "threads": 1, **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LlamaCppBackend(model, **counts)


def test_the_number_of_threads_can_change_between_steps(real: Driver) -> None:
    real.backend.set_threads(2)
    try:
        # One token only: two threads on a busy machine wait for each other at every layer.
        assert len(real.run(real.order("two", (19556, 28), 1)).token_ids) == 1
    finally:
        real.backend.set_threads(1)


# -- embeddings ----------------------------------------------------------------------------------------


def embed(
    backend: LlamaCppBackend, prompt_ids: Sequence[int], *, chunks: Sequence[int], preempt_after: int = -1
) -> Embedding:
    """Compute the embedding chunk by chunk, preempted and begun anew after one of them."""
    request_id = RequestId("embedded")
    order = GenerationOrder(
        request_id=request_id, prompt_ids=tuple(prompt_ids), max_tokens=0, wants_embedding=True
    )
    assert backend.admit(order, reserved_tokens=len(prompt_ids)) == 0, "every token is computed"
    left = len(prompt_ids)
    for number, size in enumerate(itertools.cycle(chunks)):
        ordered = ChunkOrder(request_id=request_id, num_tokens=min(size, left))
        [outcome] = backend.step([], [ordered]).outcomes
        left -= outcome.prefill_tokens
        if outcome.finish_reason is not None:
            assert left == 0
            assert outcome.embedding is not None
            return outcome.embedding
        assert outcome.embedding is None
        if number == preempt_after:
            backend.preempt(request_id, PreemptionMode.RELEASE)
            assert backend.resume(request_id, reserved_tokens=len(prompt_ids)) == 0
            left = len(prompt_ids)
    raise AssertionError("unreachable")


def nearness(left: Embedding, right: Embedding) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def test_an_embedding_is_the_same_however_it_is_computed(real: Driver) -> None:
    backend, ids = real.backend, story(real, 150)
    whole = embed(backend, ids, chunks=[150])
    assert len(whole) == backend.info.embedding_size
    assert nearness(whole, whole) == pytest.approx(1.0, abs=1e-5)
    assert nearness(whole, embed(backend, ids, chunks=[7, 31, 64])) > 0.9999
    assert nearness(whole, embed(backend, ids, chunks=[40], preempt_after=2)) > 0.9999
    assert nearness(whole, embed(backend, ids[::-1], chunks=[150])) < 0.999, "the text matters"


def test_an_embedding_that_speech_interrupts_goes_on_from_where_it_was(
    real: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, ids = real.backend, story(real, 150)
    whole = embed(backend, ids, chunks=[150])
    run, calls = backend._context.run, itertools.count(1)

    def run_but_every_third(*, expected_s: float | None = None) -> int:
        return ABORTED if next(calls) % 3 == 0 else run(expected_s=expected_s)

    monkeypatch.setattr(backend._context, "run", run_but_every_third)
    assert nearness(whole, embed(backend, ids, chunks=[150])) > 0.9999
    assert next(calls) > 6, "it was interrupted"


def test_embeddings_beside_and_before_it_do_not_change_a_text(real: Driver) -> None:
    backend = real.backend
    prompt = tuple(story(real, 40, first=70))

    def written(beside: bool) -> list[int]:
        backend.drop_cache()
        writer, other = RequestId("writer"), RequestId("other")
        backend.admit(
            GenerationOrder(request_id=writer, prompt_ids=prompt, max_tokens=12, sampling=GREEDY),
            reserved_tokens=60,
        )
        token_ids = list(
            backend.step([], [ChunkOrder(request_id=writer, num_tokens=40)]).outcomes[0].token_ids
        )
        if beside:
            backend.admit(
                GenerationOrder(
                    request_id=other, prompt_ids=tuple(story(real, 88)), max_tokens=0, wants_embedding=True
                ),
                reserved_tokens=88,
            )
        while len(token_ids) < 12:
            beside = beside and other in backend.request_ids
            chunks = [ChunkOrder(request_id=other, num_tokens=8)] if beside else []
            for outcome in backend.step([writer], chunks).outcomes:
                token_ids += outcome.token_ids
        return token_ids

    assert written(beside=True) == written(beside=False)


def test_short_prompts_are_not_divided_over_passes(real: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequally long pieces would be computed apart."""
    passes: list[int] = []
    decode = Library.decode

    def counted(library: Library, context: int, batch: Batch) -> int:
        passes.append(batch.n_tokens)
        return decode(library, context, batch)

    monkeypatch.setattr(Library, "decode", counted)
    for number in range(3):
        real.admit(real.order(f"r{number}", (5, 40 + number, *range(60, 78)), 2))
    real.step(chunks={"r0": 20, "r1": 20, "r2": 20})
    assert passes == [20, 20, 20], "with micro-batches of 32 rows"
    real.finish("r0", "r1", "r2")
    real.admit(real.order("long", range(100, 170), 1))
    passes.clear()
    real.step(chunks={"long": 70})
    assert passes == [32, 32, 6]


def test_a_sweep_of_embeddings_drives_no_conversation_out(real: Driver) -> None:
    backend = real.backend
    said = real.order("said", story(real, 60, first=500), 4)
    real.run(said)
    cached, parked = backend.cached_lengths, backend.num_parked
    for number in range(4):
        embed(backend, story(real, 150, first=number), chunks=[40], preempt_after=1)
    assert (backend.cached_lengths, backend.num_parked) == (cached, parked)


def test_an_embedding_with_an_answer_is_refused(real: Driver) -> None:
    order = GenerationOrder(request_id=RequestId("x"), prompt_ids=(1,), max_tokens=1, wants_embedding=True)
    with pytest.raises(ValueError, match="made of a prompt alone"):
        real.backend.admit(order, reserved_tokens=32)
