"""What only the simulated backend can be asked: virtual time, failures on demand, paging mistakes."""

from __future__ import annotations

import threading

import jinja2
import numpy as np
import pytest

from engine_service.backends.base import (
    BackendError,
    Constraint,
    ConstraintKind,
    FinishReason,
    InvalidConstraint,
    Sampling,
)
from engine_service.backends.cost_model import RTX4090_8B, CostModel
from engine_service.backends.simulated import SimulatedBackend, SlotStore
from engine_service.scheduling.model import RequestId
from tests.backends.driver import Driver

SLOW = CostModel(
    prefill_s=0.0,
    prefill_token_s=0.01,
    prefill_pair_s=0.0,
    decode_s=0.0,
    decode_sequence_s=0.001,
    decode_pair_s=0.0,
)
PROMPT = tuple(range(300, 320)) * 16  # 320 tokens


class Clock:
    """Virtual time that can stop short, as a simulator's event queue does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stop_at: float | None = None

    def advance(self, seconds: float) -> float:
        end = self.now + seconds
        if self.stop_at is not None and self.now <= self.stop_at < end:
            passed, self.stop_at = self.stop_at - self.now, None
        else:
            passed = seconds
        self.now += passed
        return passed


def virtual(cost: CostModel = SLOW) -> tuple[Driver, Clock]:
    clock = Clock()
    backend = SimulatedBackend(
        cost_model=cost, context_tokens=2048, max_sequences=4, micro_batch=64, advance=clock.advance
    )
    return Driver(backend), clock


def test_an_iteration_takes_what_the_cost_model_says() -> None:
    driver, clock = virtual(RTX4090_8B)
    driver.admit(driver.order("a", PROMPT, 4))
    first = driver.step(chunks={"a": 200})
    second = driver.step(chunks={"a": 120})
    third = driver.step(decodes=["a"])
    assert first.seconds == pytest.approx(RTX4090_8B.seconds(chunk_tokens=200))
    assert second.seconds == pytest.approx(RTX4090_8B.seconds(chunk_tokens=120, chunk_pairs=120 * 200))
    assert third.seconds == pytest.approx(RTX4090_8B.seconds(num_decodes=1, decode_context_tokens=320))
    assert clock.now == pytest.approx(first.seconds + second.seconds + third.seconds)


def test_an_aborted_iteration_keeps_finished_micro_batches_and_goes_on_to_the_same_text() -> None:
    driver, _ = virtual()
    reference = driver.run(driver.order("whole", PROMPT, 6))
    driver, clock = virtual()
    driver.admit(driver.order("a", PROMPT, 6))
    driver.admit(driver.order("b", PROMPT[5:40], 6))
    driver.prefill("b")
    clock.stop_at = clock.now + 1.5  # rows 0 to 63 end at 0.63 s, 64 to 127 at 1.27 s
    outcome = driver.step(decodes=["b"], chunks={"a": 320})
    assert outcome.aborted
    assert outcome.seconds == pytest.approx(1.5)
    by_id = {o.request_id: o for o in outcome.outcomes}
    assert len(by_id[RequestId("b")].token_ids) == 1
    assert by_id[RequestId("a")].prefill_tokens == 127  # one of the 128 rows was b's
    driver.finish("a", "b")
    assert driver.outputs[RequestId("a")].token_ids == reference.token_ids
    driver.backend.check()


def test_an_abort_before_the_first_micro_batch_keeps_nothing() -> None:
    driver, clock = virtual()
    driver.admit(driver.order("a", PROMPT, 2))
    clock.stop_at = 0.1
    outcome = driver.step(chunks={"a": 320})
    assert outcome.aborted
    assert outcome.outcomes[0].prefill_tokens == 0
    driver.finish("a")
    assert driver.outputs[RequestId("a")].prefilled == 320


def test_in_real_time_another_thread_can_abort() -> None:
    backend = SimulatedBackend(cost_model=SLOW, context_tokens=4096, max_sequences=2, micro_batch=8)
    driver = Driver(backend)
    driver.admit(driver.order("a", PROMPT * 8, 1))  # 25.6 s
    stop = threading.Timer(0.2, backend.abort)
    stop.start()
    outcome = driver.step(chunks={"a": 2560})
    stop.join()
    assert outcome.aborted
    assert 0 < outcome.outcomes[0].prefill_tokens < 2560
    assert outcome.outcomes[0].prefill_tokens % 8 == 0


def test_the_next_step_can_be_told_to_fail() -> None:
    driver, _ = virtual()
    driver.admit(driver.order("a", PROMPT, 2))
    driver.backend.fail_next_step(RuntimeError("cable"))
    with pytest.raises(RuntimeError, match="cable"):
        driver.step(chunks={"a": 100})
    driver.finish("a")
    assert driver.outputs[RequestId("a")].prefilled == 320, "nothing of the failed step was kept"


def test_one_request_can_be_told_to_fail() -> None:
    driver, _ = virtual()
    for name in ("a", "b"):
        driver.admit(driver.order(name, PROMPT, 5))
        driver.prefill(name)
    driver.backend.fail_request(RequestId("b"), RuntimeError("bad luck"))
    driver.finish("a", "b")
    assert str(driver.outputs[RequestId("b")].error) == "bad luck"
    assert driver.outputs[RequestId("a")].reason is FinishReason.LENGTH
    assert driver.backend.request_ids == ()
    driver.backend.check()


def test_everything_can_be_lost() -> None:
    driver, _ = virtual()
    driver.admit(driver.order("a", PROMPT, 5))
    driver.backend.lose_everything()
    for _ in range(2):
        with pytest.raises(BackendError, match="lost everything"):
            driver.step(chunks={"a": 10})


def test_a_wrong_slot_changes_the_text() -> None:
    driver, _ = virtual()
    reference = driver.run(driver.order("right", PROMPT, 6))
    driver, _ = virtual()
    driver.admit(driver.order("wrong", PROMPT, 6))
    driver.step(chunks={"wrong": 319})
    slots = driver.backend._slots
    (table,) = slots._tables.values()
    slots._tokens[table[5]] = 301
    driver.finish("wrong")
    assert driver.outputs[RequestId("wrong")].token_ids != reference.token_ids


def test_a_slot_is_free_only_when_nobody_holds_it() -> None:
    store = SlotStore(10)
    store.write(0, np.arange(6, dtype=np.int32))
    store.share(0, 1, 0, 4)
    store.write(1, np.array([8, 9], dtype=np.int32))
    assert store.num_free == 2
    assert store.num_held([0, 1]) == 8
    store.cut(0, 0)
    assert store.num_free == 4
    assert store.read(1).tolist() == [0, 1, 2, 3, 8, 9]
    store.cut(1, 3)
    assert store.num_free == 7
    with pytest.raises(AssertionError, match="cannot share"):
        store.share(1, 2, 0, 4)


def test_half_characters_are_streamed_whole() -> None:
    driver, _ = virtual()
    half = driver.backend.tokenizer.encode(" lamp")[0]
    half_id = next(
        i
        for i in range(half, driver.backend.info.vocab_size)
        if driver.backend.tokenizer.decode([i]) == "\ufffd"
    )
    sampling = Sampling(temperature=0.0, logit_bias={half_id: 25.0})
    output = driver.run(driver.order("bulbs", PROMPT, 7, sampling=sampling, ignore_eos=True))
    assert output.texts == ["", "💡", "", "💡", "", "💡", ""]


def test_a_grammar_is_refused_in_plain_words() -> None:
    driver, _ = virtual()
    order = driver.order("g", PROMPT, 2, constraint=Constraint(kind=ConstraintKind.REGEX, text="a+"))
    with pytest.raises(InvalidConstraint, match="cannot force an output to match a regex"):
        driver.backend.validate(order)
    with pytest.raises(InvalidConstraint, match="use the llama_cpp backend"):
        driver.admit(order)


def test_its_chat_template_renders_what_its_tokenizer_reads() -> None:
    backend = SimulatedBackend()
    template = jinja2.Environment(autoescape=False).from_string(backend.info.chat_template)
    text = template.render(messages=[{"role": "user", "content": "lamp?"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nlamp?<|im_end|>\n<|im_start|>assistant\n"
    assert (
        backend.tokenizer.decode(backend.tokenizer.encode(text, parse_special=True))
        == "user\nlamp?\nassistant\n"
    )


def test_texts_end_by_themselves_sooner_or_later() -> None:
    driver, _ = virtual()
    reasons = {driver.run(driver.order(f"r{n}", (300 + n, 5), 400)).reason for n in range(8)}
    assert FinishReason.STOP in reasons


@pytest.mark.parametrize("wrong", [{"context_tokens": 3}, {"max_sequences": 0}, {"micro_batch": 0}])
def test_counts_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be >="):
        SimulatedBackend(**wrong)
