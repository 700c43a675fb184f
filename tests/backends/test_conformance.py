"""What every backend promises: the simulated one, llama.cpp with the real default model, and the real
generators of ExLlamaV2 and ExLlamaV3 over a model that reads its own cache back.

Texts are compared for equality where the library guarantees it: one thread and fewer than 64 rows per
micro-batch (then llama.cpp's attention adds in the same order whatever else is in the batch), and cells that
were not refilled out of order. Where a test refills cells it compares up to near ties and says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from engine_service.backends.base import (
    Backend,
    ChunkOrder,
    Constraint,
    ConstraintKind,
    FinishReason,
    Picture,
    PlacedPicture,
    Sampling,
)
from engine_service.backends.divided import DividedHolder
from engine_service.scheduling.model import PreemptionMode, RequestId
from tests.backends.conftest import EXLLAMA, AnyBackend
from tests.backends.driver import Driver, Output, assert_same_but_near_ties

QUESTIONS = {
    "sky": "Explain why the sky is blue in simple words.",
    "fruit": "List five fruits and their colours.",
    "poem": "Write a short poem about rain.",
    "keeper": "Write a short story about a lighthouse keeper.",
}
# Promises about single cells and parking; where pages are shared, test_exllama_guards.py has their like.
ON_CELLS = pytest.mark.parametrize("backend", ["simulated", "llama_cpp"], indirect=True)
WITHOUT_LLAMA_CPP = ["simulated", *EXLLAMA]
WITH_GRAMMARS = ["llama_cpp", *EXLLAMA]
WITH_GAPS = Sampling(temperature=0.0, num_logprobs=2)


def rid(name: str) -> RequestId:
    return RequestId(name)


_REFERENCE_TOKENS = 24
_references: dict[type, dict[str, Output]] = {}


def alone(backend: AnyBackend, max_tokens: int) -> dict[str, Output]:
    """Return what every question gives by itself on an empty store (computed once per kind of backend)."""
    known = _references.setdefault(type(backend), {})
    for name in QUESTIONS.keys() - known.keys():
        driver = Driver(backend)
        order = driver.order(f"alone-{name}", QUESTIONS[name], _REFERENCE_TOKENS, sampling=WITH_GAPS)
        known[name] = driver.run(order)
        backend.drop_cache()
    return {
        name: Output(whole.texts[:max_tokens], whole.token_ids[:max_tokens], whole.logprobs[:max_tokens])
        for name, whole in known.items()
    }


def admit_all(driver: Driver, max_tokens: int) -> None:
    for name, question in QUESTIONS.items():
        driver.admit(driver.order(name, question, max_tokens))


# -- batching ------------------------------------------------------------------------------------------


def test_batched_text_equals_text_generated_alone(backend: AnyBackend, driver: Driver) -> None:
    reference = alone(backend, 24)
    admit_all(driver, 24)
    driver.finish(*QUESTIONS, chunk=16, budget=24)
    for name in QUESTIONS:
        assert driver.outputs[rid(name)].token_ids == reference[name].token_ids
        assert driver.outputs[rid(name)].text == reference[name].text


@pytest.mark.parametrize("chunk", [1, 7, 31])
def test_the_chunk_size_does_not_change_the_text(backend: AnyBackend, driver: Driver, chunk: int) -> None:
    whole = driver.run(driver.order("whole", QUESTIONS["keeper"], 12))
    backend.drop_cache()
    pieces = driver.run(driver.order("pieces", QUESTIONS["keeper"], 12), chunk=chunk)
    assert pieces.token_ids == whole.token_ids
    assert pieces.prefilled == whole.prefilled == len(driver.prompt(QUESTIONS["keeper"]))


def test_several_prompts_and_decodes_share_one_iteration(driver: Driver) -> None:
    admit_all(driver, 8)
    driver.prefill("sky")
    outcome = driver.step(decodes=["sky"], chunks={"fruit": 5, "poem": 6, "keeper": 7})
    by_id = {o.request_id: o for o in outcome.outcomes}
    assert len(by_id[rid("sky")].token_ids) == 1
    assert by_id[rid("sky")].prefill_tokens == 0
    assert [by_id[rid(n)].prefill_tokens for n in ("fruit", "poem", "keeper")] == [5, 6, 7]
    assert not any(by_id[rid(n)].token_ids for n in ("fruit", "poem", "keeper"))
    assert outcome.seconds > 0
    assert not outcome.aborted


def test_an_empty_iteration_does_nothing(backend: AnyBackend) -> None:
    assert backend.step([], []).outcomes == ()


# -- pausing, preemption -------------------------------------------------------------------------------


def test_a_paused_request_loses_nothing(backend: AnyBackend, driver: Driver) -> None:
    reference = alone(backend, 16)
    admit_all(driver, 16)
    for name in QUESTIONS:
        driver.prefill(name)
    backend.preempt(rid("sky"), PreemptionMode.PAUSE)
    driver.finish("fruit", "poem", "keeper")
    assert len(driver.outputs[rid("sky")].token_ids) == 1
    driver.finish("sky")
    assert driver.outputs[rid("sky")].token_ids == reference["sky"].token_ids


@pytest.mark.parametrize("at", [1, 9])
def test_a_preempted_request_resumes_exactly(backend: AnyBackend, driver: Driver, at: int) -> None:
    reference = alone(backend, 12)
    admit_all(driver, 12)
    for name in QUESTIONS:
        driver.prefill(name)
    while len(driver.outputs[rid("poem")].token_ids) < at:
        driver.step(decodes=QUESTIONS)
    held = backend.num_cells_held
    backend.preempt(rid("poem"), PreemptionMode.RELEASE)
    assert backend.num_cells_held < held
    driver.step(
        decodes=[
            n for n in QUESTIONS if n != "poem" and driver.decodes(n) and not driver.outputs[rid(n)].is_over
        ]
    )
    cached = driver.resume(rid("poem"))
    assert cached == len(driver.prompt(QUESTIONS["poem"])) + at - 1, "its cells were free to stay"
    driver.finish(*QUESTIONS)
    for name in QUESTIONS:
        assert driver.outputs[rid(name)].text == reference[name].text


def test_a_preempted_request_whose_cells_were_taken_is_computed_again(
    backend: AnyBackend, driver: Driver
) -> None:
    """Its cells are refilled elsewhere, which may change rounding: compared up to near ties."""
    reference = alone(backend, 20)
    driver.admit(driver.order("poem", QUESTIONS["poem"], 20))
    driver.prefill("poem")
    for _ in range(7):
        driver.step(decodes=["poem"])
    backend.preempt(rid("poem"), PreemptionMode.RELEASE)
    assert backend.num_cells_held == 0
    backend.drop_cache()
    assert driver.resume(rid("poem")) == 0
    driver.finish("poem", chunk=13)
    output = driver.outputs[rid("poem")]
    assert output.prefilled == 2 * len(driver.prompt(QUESTIONS["poem"])) + 8
    assert_same_but_near_ties(reference["poem"], output)


def test_a_preempted_request_goes_on_in_a_backend_that_it_is_handed_over_to(
    backend: AnyBackend, driver: Driver
) -> None:
    """Tokens, sampler and text held back are handed over; what still holds cells is not."""
    reference = alone(backend, 20)
    for name in ("poem", "sky"):
        driver.admit(driver.order(name, QUESTIONS[name], 20))
        driver.prefill(name)
    for _ in range(7):
        driver.step(decodes=["poem", "sky"])
    backend.preempt(rid("poem"), PreemptionMode.RELEASE)
    handed = backend.hand_over()
    assert set(handed) == {rid("poem")}
    assert backend.request_ids == (rid("sky"),)
    driver.finish("sky")
    backend.drop_cache()
    assert backend.num_cells_held == 0
    backend.adopt(handed)
    assert driver.resume(rid("poem")) == 0
    driver.finish("poem", chunk=13)
    assert_same_but_near_ties(reference["poem"], driver.outputs[rid("poem")])


def test_a_model_that_sees_nothing_takes_no_picture(backend: AnyBackend, driver: Driver) -> None:
    assert (backend.info.can_see, backend.eye) == (False, None)
    picture = Picture(num_tokens=2, width=1, height=1, pixels=b"rgb", digest=b"x")
    placed = PlacedPicture(start=0, picture=picture)
    with pytest.raises(ValueError, match="cannot look at pictures"):
        driver.admit(driver.order("cat", (1, 1, 2), 5, pictures=(placed,)))
    assert backend.request_ids == ()


def test_a_sampled_text_survives_preemption(backend: AnyBackend, driver: Driver) -> None:
    sampling = Sampling(temperature=1.1, top_p=0.9, repetition_penalty=1.2, seed=7)
    reference = driver.run(driver.order("whole", QUESTIONS["sky"], 16, sampling=sampling))
    backend.drop_cache()
    driver.admit(driver.order("cut", QUESTIONS["sky"], 16, sampling=sampling))
    driver.prefill("cut")
    for _ in range(6):
        driver.step(decodes=["cut"])
        backend.preempt(rid("cut"), PreemptionMode.RELEASE)
        driver.resume(rid("cut"))
    driver.finish("cut")
    assert driver.outputs[rid("cut")].token_ids == reference.token_ids


def test_a_prompt_preempted_half_way_goes_on_where_it_was(driver: Driver, backend: AnyBackend) -> None:
    reference = alone(backend, 6)
    driver.admit(driver.order("sky", QUESTIONS["sky"], 6))
    driver.step(chunks={"sky": 9})
    backend.preempt(rid("sky"), PreemptionMode.RELEASE)
    assert driver.resume(rid("sky")) == 9
    driver.finish("sky")
    assert driver.outputs[rid("sky")].token_ids == reference["sky"].token_ids


# -- prefixes ------------------------------------------------------------------------------------------

SYSTEM = "<|im_start|>system\nYou control a smart home with a lamp, a door and a clock. Be brief.<|im_end|>\n"


def shares(backend: AnyBackend) -> int:
    """Return how many tokens a backend can share at once: one, or a page where pages are shared."""
    return backend.capacity.page_tokens if backend.info.backend in EXLLAMA else 1


def pinned_cells(backend: AnyBackend, num_tokens: int) -> int:
    """Return the cells a pinned prefix holds: none where the cache is divided and it lies in host memory."""
    return 0 if isinstance(backend, DividedHolder) else num_tokens


def system_prompt(backend: AnyBackend) -> tuple[int, ...]:
    """Return a prompt's beginning; where pages are shared, as long as one of them."""
    ids = tuple(backend.tokenizer.encode(SYSTEM, parse_special=True))
    return ids if shares(backend) == 1 else (ids * shares(backend))[: shares(backend)]


def pin(driver: Driver, name: str = "system") -> tuple[int, ...]:
    ids = system_prompt(driver.backend)
    output = driver.run(driver.order(name, ids, 0, keep_prefix=True))
    assert output.reason is FinishReason.PREFIX
    assert output.token_ids == []
    assert output.text == ""
    return ids


def test_a_pinned_prefix_is_shared_and_not_computed_again(backend: AnyBackend, driver: Driver) -> None:
    question = driver.prompt("Is the door open?")
    prefix = system_prompt(backend)
    reference = driver.run(driver.order("cold", prefix + question, 8))
    backend.drop_cache()
    assert pin(driver) == prefix
    assert backend.num_cells_held == pinned_cells(backend, len(prefix))
    assert backend.shared_prefix_tokens(prefix + question) == len(prefix)
    assert driver.admit(driver.order("warm", prefix + question, 8)) == len(prefix)
    assert backend.num_cells_held == len(prefix), "what is shared is held once"
    driver.finish("warm")
    warm = driver.outputs[rid("warm")]
    assert warm.prefilled == len(question)
    assert warm.text == reference.text
    backend.drop_prefix(rid("system"))
    assert backend.shared_prefix_tokens(prefix + question) == 0
    assert backend.num_cells_held == 0


def test_a_prompt_equal_to_the_pinned_prefix_computes_its_last_token(
    backend: AnyBackend, driver: Driver
) -> None:
    prefix = pin(driver)
    assert backend.shared_prefix_tokens(prefix) == (len(prefix) - 1) // shares(backend) * shares(backend)
    assert driver.admit(driver.order("same", prefix, 2)) == len(prefix) - 1
    driver.finish("same")
    assert len(driver.outputs[rid("same")].token_ids) == 2


def test_a_pinned_prefix_outlives_everything_that_is_only_cached(backend: AnyBackend, driver: Driver) -> None:
    prefix = pin(driver)
    for number in range(backend.num_sequence_ids + 5):
        driver.admit(driver.order(f"r{number}", (prefix[0], 40 + number % 50, number % 7), 1))
        driver.finish(f"r{number}")
    backend.drop_cache()
    assert backend.shared_prefix_tokens((*prefix, 5)) == len(prefix)
    assert backend.pinned_ids == (rid("system"),)


def test_dropping_a_prefix_in_use_leaves_its_users_their_copy(backend: AnyBackend, driver: Driver) -> None:
    prefix = pin(driver)
    order = driver.order("user", prefix + driver.prompt("Which lamp is on?"), 8)
    reference = driver.run(order)
    driver.admit(driver.order("again", order.prompt_ids, 8))
    backend.drop_prefix(rid("system"))
    backend.drop_cache()
    assert backend.num_cells_held == len(order.prompt_ids) - 1
    driver.finish("again")
    assert driver.outputs[rid("again")].token_ids == reference.token_ids


def test_a_kept_prompt_with_an_answer_keeps_only_the_prompt(backend: AnyBackend, driver: Driver) -> None:
    order = driver.order("kept", QUESTIONS["fruit"], 4, keep_prefix=True)
    output = driver.run(order)
    assert len(output.token_ids) == 4
    assert backend.num_cells_held == pinned_cells(backend, len(order.prompt_ids))
    shared = len(order.prompt_ids) // shares(backend) * shares(backend)
    assert backend.shared_prefix_tokens((*order.prompt_ids, *output.token_ids)) == shared


def test_a_finished_sequence_is_reused_without_being_held(backend: AnyBackend, driver: Driver) -> None:
    first = driver.order("first", QUESTIONS["sky"], 6)
    output = driver.run(first)
    assert backend.num_cells_held == 0
    assert backend.num_cells_cached == len(first.prompt_ids) + 5
    assert backend.shared_prefix_tokens(first.prompt_ids) == 0, "only pinned prefixes are promised"
    next_turn = (*first.prompt_ids, *output.token_ids, *driver.prompt("And at night?"))
    assert driver.admit(driver.order("second", next_turn, 1)) == len(first.prompt_ids) + 5


def test_a_running_request_shares_its_beginning_too(backend: AnyBackend, driver: Driver) -> None:
    question = QUESTIONS["sky"] * 4  # long enough to be copied where it cannot be shared
    driver.admit(driver.order("first", question, 6))
    driver.prefill("first")
    assert driver.admit(driver.order("twin", question, 6)) == len(driver.prompt(question)) - 1
    driver.finish("first", "twin")
    assert driver.outputs[rid("twin")].token_ids == driver.outputs[rid("first")].token_ids


@ON_CELLS
def test_finished_sequences_leave_most_of_the_store_empty(backend: AnyBackend, driver: Driver) -> None:
    """Idle cells slow every row down, so the cache is bounded; its newest sequence stays in any case."""
    for number in range(12):
        driver.run(driver.order(f"r{number}", (300 + number, *range(40, 80)), 0))
    assert backend.num_cells_cached == backend.max_idle_cells // 41 * 41
    assert driver.admit(driver.order("again", (311, *range(40, 80)), 1)) == 40
    backend.release(rid("again"))
    driver.run(driver.order("big", (299, *itertools.islice(itertools.cycle(range(40, 80)), 299)), 0))
    assert backend.num_cells_cached == 300


def many(num_tokens: int) -> Iterator[int]:
    """Yield so many token ids that every backend knows."""
    return itertools.islice(itertools.cycle(range(40, 80)), num_tokens)


@ON_CELLS
def test_what_left_the_cache_is_fetched_from_host_memory(backend: AnyBackend, driver: Driver) -> None:
    """Who goes on with a conversation of an hour ago computes only the new turn, and reads the same text."""
    orders = [driver.order(f"r{n}", (300 + n, *range(40, 140)), 4) for n in range(6)]
    texts = [driver.run(order).token_ids for order in orders]
    assert backend.num_parked >= 3
    first = (*orders[0].prompt_ids, *texts[0], 77, 78)
    assert driver.admit(driver.order("turn 2", first, 4)) == len(orders[0].prompt_ids) + 3
    assert backend.num_cells_held == len(orders[0].prompt_ids) + 3, "no second copy stays in the cache"
    driver.finish("turn 2")
    backend.drop_cache()
    fresh = driver.run(driver.order("fresh", first, 4))
    assert driver.outputs[rid("turn 2")].token_ids == fresh.token_ids


@ON_CELLS
def test_a_fetched_sequence_shares_the_pinned_cells_themselves(backend: AnyBackend, driver: Driver) -> None:
    driver.run(driver.order("pin", tuple(range(40, 100)), 0, keep_prefix=True))
    for number in range(8):
        driver.run(driver.order(f"r{number}", (*range(40, 100), 300 + number, *range(140, 199)), 0))
    assert backend.num_parked
    assert driver.admit(driver.order("back", (*range(40, 100), 300, *range(140, 199), 7), 2)) == 120
    assert backend.num_cells_held == 120, "60 pinned, 60 of its own"


@ON_CELLS
def test_nothing_is_fetched_where_there_is_no_room(backend: AnyBackend, driver: Driver) -> None:
    driver.run(driver.order("old", (300, *many(300)), 0))
    driver.run(driver.order("newer", (301, *many(100)), 0))
    assert backend.num_parked == 1
    for number in range(4):
        driver.admit(driver.order(f"r{number}", (310 + number, *many(459)), 4))
        driver.step(chunks={f"r{number}": 460})
    assert driver.admit(driver.order("again", (300, *many(300)), 2), reserved_tokens=60) == 0


def test_what_a_preempted_request_comes_back_for_is_given_up_last(
    backend: AnyBackend, driver: Driver
) -> None:
    driver.admit(driver.order("back", (290, *range(40, 80)), 4))
    driver.step(chunks={"back": 30})
    backend.preempt(rid("back"), PreemptionMode.RELEASE)
    for number in range(30):
        driver.run(driver.order(f"r{number}", (40 + number, *range(100, 110)), 0))
    assert driver.resume(rid("back")) == 30
    backend.release(rid("back"))


@ON_CELLS
def test_a_cancelled_request_leaves_its_preempted_cells_like_any_finished_one(
    backend: AnyBackend, driver: Driver
) -> None:
    driver.admit(driver.order("gone", (298, *itertools.islice(itertools.cycle(range(40, 80)), 299)), 4))
    driver.step(chunks={"gone": 280})
    backend.preempt(rid("gone"), PreemptionMode.RELEASE)
    backend.release(rid("gone"))
    assert backend.num_cells_cached == 280, "the newest stays"
    driver.run(driver.order("next", (297, *range(40, 80)), 0))
    assert backend.num_cells_cached == 41


@ON_CELLS
def test_a_resumed_request_holds_one_sequence_only(backend: AnyBackend, driver: Driver) -> None:
    driver.admit(driver.order("back", QUESTIONS["sky"], 4))
    driver.step(chunks={"back": 9})
    for _ in range(3):
        backend.preempt(rid("back"), PreemptionMode.RELEASE)
        assert len(backend.cached_lengths) == 1
        driver.resume(rid("back"))
        assert backend.cached_lengths == ()


@ON_CELLS
def test_the_pinned_cells_themselves_are_shared_even_where_a_longer_copy_exists(
    backend: AnyBackend, driver: Driver
) -> None:
    """Both are computed together, so each has cells of its own; the ledger counts on the pinned ones."""
    prompt = driver.prompt(QUESTIONS["keeper"])
    prefix = prompt[:12]
    driver.admit(driver.order("pin", prefix, 0, keep_prefix=True))
    driver.admit(driver.order("copy", prompt, 4))
    driver.step(chunks={"pin": 12, "copy": len(prompt) - 1})
    assert backend.num_cells_held == 12 + len(prompt) - 1
    assert driver.admit(driver.order("new", prompt, 4)) == len(prompt) - 1
    backend.release(rid("copy"))
    backend.drop_cache()
    assert backend.num_cells_held == len(prompt) - 1


# -- cells and ids -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["admitted", "prefilling", "decoding", "paused", "preempted", "finished"])
def test_a_cancelled_request_gives_everything_back(backend: AnyBackend, driver: Driver, state: str) -> None:
    order = driver.order("gone", QUESTIONS["keeper"], 8)
    driver.admit(order)
    if state == "prefilling":
        driver.step(chunks={"gone": 9})
    elif state != "admitted":
        driver.prefill("gone")
        driver.step(decodes=["gone"])
    if state in ("paused", "preempted"):
        mode = PreemptionMode.PAUSE if state == "paused" else PreemptionMode.RELEASE
        backend.preempt(rid("gone"), mode)
    elif state == "finished":
        driver.finish("gone")
    backend.release(rid("gone"))
    backend.release(rid("gone"))
    assert backend.num_cells_held == 0
    assert backend.request_ids == ()
    backend.check()
    with pytest.raises(ValueError, match="no request gone"):
        backend.step([rid("gone")], [])


def test_releasing_an_unknown_request_is_ignored(backend: AnyBackend) -> None:
    backend.release(rid("never"))
    backend.drop_prefix(rid("never"))
    backend.check()


def test_hundreds_of_requests_leak_neither_sequences_nor_cells(backend: AnyBackend, driver: Driver) -> None:
    for number in range(backend.num_sequence_ids + 20):
        driver.admit(driver.order(f"r{number}", (3, 40 + number % 100, 60 + number // 100, 7), 1))
        if number % 3:
            driver.finish(f"r{number}")
        backend.release(rid(f"r{number}"))
    backend.check()
    assert backend.num_cells_held == 0


def test_no_more_requests_than_sequences_are_admitted(backend: AnyBackend, driver: Driver) -> None:
    most_pinned = backend.max_pinned
    for number in range(most_pinned):
        driver.run(driver.order(f"p{number}", (3, 40 + number), 0, keep_prefix=True))
    with pytest.raises(ValueError, match=f"{most_pinned} prefixes are pinned already"):
        driver.admit(driver.order("p", (3, 4), 0, keep_prefix=True))
    for number in range(backend.capacity.max_sequences):
        driver.admit(driver.order(f"r{number}", (9, 9, number), 1))
    with pytest.raises(ValueError, match="hold a sequence already"):
        driver.admit(driver.order("one-too-many", (9, 9), 1))
    backend.check()


def test_a_step_beyond_the_reservation_is_refused_before_anything_happens(
    backend: AnyBackend, driver: Driver
) -> None:
    driver.admit(driver.order("tight", QUESTIONS["sky"], 4), reserved_tokens=10)
    driver.admit(driver.order("other", QUESTIONS["fruit"], 4))
    with pytest.raises(ValueError, match="stores 0 tokens and reserved 10: no room for 11"):
        backend.step([], [ChunkOrder(request_id=rid("other"), num_tokens=5), chunk("tight", 11)])
    driver.step(chunks={"tight": 10, "other": 5})
    with pytest.raises(ValueError, match="no room for 1 more"):
        driver.step(chunks={"tight": 1})
    backend.grow(rid("tight"), reserved_tokens=11)
    driver.step(chunks={"tight": 1})
    with pytest.raises(ValueError, match="cannot reserve 3 tokens: it stores 11"):
        backend.grow(rid("tight"), reserved_tokens=3)
    with pytest.raises(ValueError, match="cannot reserve 99999"):
        backend.grow(rid("tight"), reserved_tokens=99_999)


def chunk(name: str, num_tokens: int) -> ChunkOrder:
    return ChunkOrder(request_id=rid(name), num_tokens=num_tokens)


def test_orders_that_cannot_be_are_refused_by_name(backend: AnyBackend, driver: Driver) -> None:
    driver.admit(driver.order("a", QUESTIONS["sky"], 4))
    length = len(driver.prompt(QUESTIONS["sky"]))
    with pytest.raises(ValueError, match="no request b"):
        backend.step([rid("b")], [])
    with pytest.raises(ValueError, match="a cannot decode: its prompt is not computed"):
        backend.step([rid("a")], [])
    with pytest.raises(ValueError, match=f"a has {length} tokens left to compute, not {length + 1}"):
        backend.step([], [chunk("a", length + 1)])
    with pytest.raises(ValueError, match="not 0"):
        backend.step([], [chunk("a", 0)])
    with pytest.raises(ValueError, match="only one part"):
        backend.step([], [chunk("a", 2), chunk("a", 2)])
    with pytest.raises(ValueError, match="a is known already"):
        driver.admit(driver.order("a", QUESTIONS["sky"], 4))
    with pytest.raises(ValueError, match="a is not preempted"):
        backend.resume(rid("a"), reserved_tokens=50)
    with pytest.raises(ValueError, match="does not swap"):
        backend.preempt(rid("a"), PreemptionMode.SWAP)
    backend.preempt(rid("a"), PreemptionMode.RELEASE)
    with pytest.raises(ValueError, match="a is preempted; resume it first"):
        backend.step([], [chunk("a", 2)])
    with pytest.raises(ValueError, match="a is preempted"):
        backend.preempt(rid("a"), PreemptionMode.RELEASE)


@pytest.mark.parametrize(
    ("prompt", "rest", "message"),
    [
        ((), {}, "at least one token"),
        ((5, -1), {}, "token ids outside 0 to"),
        ((5, 10**7), {}, "token ids outside 0 to"),
        ((5,) * 2048, {}, "leaves no room for an answer in a context of 2048"),
        ((5,), {"max_tokens": -1}, "max_tokens must be >= 0"),
        ((5,), {"stop": ("x", "")}, "a stop string must not be empty"),
        ((5,), {"sampling": Sampling(logit_bias={10**7: 1.0})}, "logit_bias names token 10000000"),
    ],
)
def test_an_order_the_model_cannot_carry_out_is_refused(
    backend: AnyBackend, driver: Driver, prompt: tuple[int, ...], rest: dict[str, object], message: str
) -> None:
    options = {"max_tokens": 2, **rest}
    with pytest.raises(ValueError, match=message):
        driver.admit(driver.order("bad", prompt, **options), reserved_tokens=2048)
    assert backend.request_ids == ()
    backend.check()


# -- ends ----------------------------------------------------------------------------------------------


def test_max_tokens_zero_computes_the_prompt_only(backend: AnyBackend, driver: Driver) -> None:
    output = driver.run(driver.order("only", QUESTIONS["sky"], 0), chunk=10)
    assert output.reason is FinishReason.PREFIX
    assert output.token_ids == []
    assert output.prefilled == len(driver.prompt(QUESTIONS["sky"]))
    assert backend.num_cells_held == 0


def test_an_answer_ends_at_max_tokens(driver: Driver) -> None:
    output = driver.run(driver.order("short", QUESTIONS["keeper"], 5))
    assert output.reason is FinishReason.LENGTH
    assert len(output.token_ids) == 5


@pytest.mark.parametrize("backend", WITHOUT_LLAMA_CPP, indirect=True)
def test_an_answer_ends_where_the_context_does(backend: AnyBackend, driver: Driver) -> None:
    """Filling 2048 tokens takes llama.cpp long; test_llama_cpp.py does it with a small context."""
    most = backend.capacity.max_context_tokens
    order = driver.order("full", tuple(range(20, 220)) * 10, 100, ignore_eos=True)
    driver.admit(order, reserved_tokens=most)
    driver.finish("full")
    output = driver.outputs[rid("full")]
    assert output.reason is FinishReason.LENGTH
    assert len(order.prompt_ids) + len(output.token_ids) == most


def end_id(backend: AnyBackend) -> int:
    return backend.tokenizer.encode(backend.info.eos_text, parse_special=True)[0]


def test_the_end_token_ends_the_answer_and_shows_nothing(backend: AnyBackend, driver: Driver) -> None:
    sampling = Sampling(temperature=0.0, logit_bias={end_id(backend): 1000.0})
    output = driver.run(driver.order("end", QUESTIONS["sky"], 9, sampling=sampling))
    assert output.reason is FinishReason.STOP
    assert output.token_ids == [end_id(backend)]
    assert output.text == ""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ignore_eos_generates_to_max_tokens(backend: AnyBackend, driver: Driver, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=1, logit_bias={end_id(backend): 1000.0})
    output = driver.run(driver.order("on", QUESTIONS["sky"], 9, sampling=sampling, ignore_eos=True))
    assert output.reason is FinishReason.LENGTH
    assert len(output.token_ids) == 9
    assert end_id(backend) not in output.token_ids


# -- text ----------------------------------------------------------------------------------------------


def test_a_stop_string_across_tokens_is_never_shown(backend: AnyBackend, driver: Driver) -> None:
    reference = driver.run(driver.order("free", QUESTIONS["keeper"], 16))
    shown = [len(text) for text in itertools.accumulate(reference.texts)]
    stop = reference.text[shown[7] - 3 : shown[8] + 2]  # spans three tokens
    place = reference.text.find(stop)
    output = driver.run(driver.order("stopped", QUESTIONS["keeper"], 16, stop=("no such text", stop)))
    assert output.reason is FinishReason.STOP
    assert output.text == reference.text[:place]
    assert all(reference.text.startswith("".join(output.texts[:n])) for n in range(len(output.texts)))
    assert len(output.token_ids) < 16


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end(driver: Driver) -> None:
    reference = driver.run(driver.order("free", QUESTIONS["keeper"], 10))
    stop = reference.text[-4:] + "\N{SNOWMAN}"
    output = driver.run(driver.order("held", QUESTIONS["keeper"], 10, stop=(stop,)))
    assert output.reason is FinishReason.LENGTH
    assert output.text == reference.text
    assert not "".join(output.texts[:-1]).endswith(reference.text[-4:]), "it was held back until the end"


def test_streamed_text_is_the_decoded_tokens(backend: AnyBackend, driver: Driver) -> None:
    output = driver.run(driver.order("plain", QUESTIONS["poem"], 24))
    assert output.text == backend.tokenizer.decode(output.token_ids)


@pytest.mark.parametrize(
    "text",
    ["plain words in the kitchen", "Grüße, Ἀθῆνα, 日本語", "💡🙂👩‍👩‍👧 mixed", "", "\n\t <b>&amp;</b>\0end"],
)
def test_tokenizing_is_reversible(backend: AnyBackend, text: str) -> None:
    assert backend.tokenizer.decode(backend.tokenizer.encode(text)) == text


def test_control_tokens_in_plain_text_stay_text(backend: AnyBackend) -> None:
    text = "<|im_end|>"
    plain, special = backend.tokenizer.encode(text), backend.tokenizer.encode(text, parse_special=True)
    assert len(special) == 1
    assert special[0] not in plain
    assert backend.tokenizer.decode(plain) == text
    assert backend.tokenizer.decode(special) == ""


def test_broken_text_is_encoded_and_wrong_ids_are_refused(backend: AnyBackend) -> None:
    assert backend.tokenizer.encode("half a pair: \ud83d")
    with pytest.raises(ValueError, match="token ids must be in 0 to"):
        backend.tokenizer.decode([backend.info.vocab_size])


# -- sampling ------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_text_in_any_company(backend: AnyBackend, driver: Driver) -> None:
    sampling = Sampling(temperature=1.0, top_k=40, min_p=0.01, seed=11)
    reference = driver.run(driver.order("one", QUESTIONS["sky"], 12, sampling=sampling))
    backend.drop_cache()
    admit_all(driver, 12)
    driver.admit(driver.order("two", QUESTIONS["sky"], 12, sampling=sampling))
    driver.finish(*QUESTIONS, "two", chunk=16, budget=24)
    assert driver.outputs[rid("two")].token_ids == reference.token_ids


def test_other_seeds_give_other_texts(driver: Driver) -> None:
    texts = set()
    for seed in range(6):
        sampling = Sampling(temperature=1.5, seed=seed)
        texts.add(driver.run(driver.order(f"s{seed}", QUESTIONS["poem"], 8, sampling=sampling)).text)
    assert len(texts) >= 5


def test_log_probabilities_belong_to_the_tokens(backend: AnyBackend, driver: Driver) -> None:
    sampling = Sampling(temperature=0.0, num_logprobs=4)
    output = driver.run(driver.order("sure", QUESTIONS["fruit"], 10, sampling=sampling))
    plain = driver.run(driver.order("plain", QUESTIONS["fruit"], 10))
    assert output.token_ids == plain.token_ids, "asking for log probabilities changes nothing"
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    for entry in output.logprobs:
        values = [value for _, _, value in entry.top]
        assert entry.top[0][0] == entry.token_id, "greedy chooses the best"
        assert entry.top[0][2] == pytest.approx(entry.logprob)
        assert values == sorted(values, reverse=True)
        assert len(values) == 4
        assert max(values) <= 0
    assert b"".join(entry.text for entry in output.logprobs).decode() == output.text


def test_zero_log_probabilities_are_the_chosen_tokens_only(driver: Driver) -> None:
    sampling = Sampling(temperature=0.8, seed=3, num_logprobs=0)
    output = driver.run(driver.order("few", QUESTIONS["sky"], 4, sampling=sampling))
    assert [entry.top for entry in output.logprobs] == [()] * 4
    assert all(entry.logprob <= 0 for entry in output.logprobs)


def test_a_bias_forces_and_forbids_tokens(backend: AnyBackend, driver: Driver) -> None:
    free = driver.run(driver.order("free", QUESTIONS["sky"], 1)).token_ids[0]
    banned = Sampling(temperature=0.0, logit_bias={free: -1000.0})
    assert driver.run(driver.order("not", QUESTIONS["sky"], 1, sampling=banned)).token_ids != [free]
    wanted = backend.tokenizer.encode(" lamp")[0]
    forced = Sampling(temperature=1.0, seed=1, logit_bias={wanted: 1000.0})
    assert driver.run(driver.order("so", QUESTIONS["sky"], 3, sampling=forced)).token_ids == [wanted] * 3


def test_penalties_break_repetition(backend: AnyBackend, driver: Driver) -> None:
    wanted = backend.tokenizer.encode(" lamp")[0]
    for name, rest in {
        "presence": {"presence_penalty": 2000.0},
        "frequency": {"frequency_penalty": 900.0},
    }.items():
        sampling = Sampling(temperature=0.0, logit_bias={wanted: 1000.0}, **rest)
        output = driver.run(driver.order(name, QUESTIONS["sky"], 4, sampling=sampling))
        assert output.token_ids.count(wanted) == (1 if name == "presence" else 2)


# -- faults --------------------------------------------------------------------------------------------


def test_a_fault_in_one_request_leaves_the_others_alone(backend: AnyBackend, driver: Driver) -> None:
    reference = alone(backend, 8)
    admit_all(driver, 8)
    # A penalty too small for 32-bit floats: the scores overflow when it is applied.
    broken = Sampling(temperature=0.0, repetition_penalty=1e-300)
    driver.admit(driver.order("broken", QUESTIONS["poem"], 8, sampling=broken))
    driver.finish(*QUESTIONS, "broken", chunk=16, budget=30)
    assert isinstance(driver.outputs[rid("broken")].error, ValueError)
    assert "not a number" in str(driver.outputs[rid("broken")].error)
    assert rid("broken") not in backend.request_ids
    for name in QUESTIONS:
        assert driver.outputs[rid(name)].token_ids == reference[name].token_ids


def test_an_abort_while_idle_does_not_stop_the_next_step(backend: AnyBackend, driver: Driver) -> None:
    backend.abort()
    driver.admit(driver.order("next", QUESTIONS["sky"], 2))
    outcome = driver.step(chunks={"next": len(driver.prompt(QUESTIONS["sky"]))})
    assert not outcome.aborted
    assert len(outcome.outcomes[0].token_ids) == 1


def test_all_are_backends(backend: AnyBackend) -> None:
    protocol: Backend = backend
    info, capacity = protocol.info, protocol.capacity
    assert info.max_context_tokens == capacity.max_context_tokens
    assert info.max_context_tokens <= capacity.num_pages * capacity.page_tokens
    assert info.chat_template
    assert info.eos_text == "<|im_end|>"


def test_a_banned_string_never_comes_out_and_preemption_changes_nothing(
    backend: AnyBackend, driver: Driver
) -> None:
    free = driver.run(driver.order("free", QUESTIONS["poem"], 16, ignore_eos=True)).text
    banned = free[len(free) // 3 :][:4].upper()
    assert banned.lower() in free.lower()
    output = driver.run(driver.order("banned", QUESTIONS["poem"], 16, ignore_eos=True, banned=(banned,)))
    assert banned.lower() not in output.text.lower()
    assert output.text[: len(free) // 3 - 4] == free[: len(free) // 3 - 4]
    driver.admit(driver.order("again", QUESTIONS["poem"], 16, ignore_eos=True, banned=(banned,)))
    driver.prefill("again")
    for _ in range(6):
        driver.step(decodes=["again"])
    backend.preempt(rid("again"), PreemptionMode.RELEASE)
    driver.resume(rid("again"))
    driver.finish("again")
    assert driver.outputs[rid("again")].text == output.text


def test_a_healed_prompt_goes_on_in_the_middle_of_a_token(driver: Driver) -> None:
    """With what the best token begins with as the beginning, the same tokens come out, and less text."""
    plain = driver.run(driver.order("plain", QUESTIONS["keeper"], 6, ignore_eos=True))
    beginning = driver.backend.tokenizer.decode(plain.token_ids[:1])[:2]
    assert plain.text.startswith(beginning)
    healed = driver.run(driver.order("healed", QUESTIONS["keeper"], 6, ignore_eos=True, healed=beginning))
    assert healed.token_ids == plain.token_ids
    assert healed.text == plain.text[len(beginning) :]
    other = driver.run(driver.order("other", QUESTIONS["keeper"], 6, ignore_eos=True, healed=" th"))
    assert (" th" + other.text).startswith(driver.backend.tokenizer.decode(other.token_ids[:1]))


@pytest.mark.parametrize("backend", WITH_GRAMMARS, indirect=True)
def test_healing_and_a_grammar_exclude_each_other(backend: AnyBackend, driver: Driver) -> None:
    constraint = Constraint(kind=ConstraintKind.REGEX, text="[a-z]+")
    order = driver.order("both", QUESTIONS["sky"], 4, healed=" a", constraint=constraint)
    with pytest.raises(ValueError, match="cannot be healed where a grammar rules"):
        driver.admit(order)
