"""The device does what a backend could do, takes as long as one would, and refuses the rest."""

from __future__ import annotations

import dataclasses

import pytest

from engine_service.backends.cost_model import CostModel
from engine_service.scheduling.decisions import Admit, Cancel, Compose, Grow, Preempt, PrefillChunk
from engine_service.scheduling.model import (
    Capacity,
    PreemptionMode,
    Request,
    RequestId,
    ResidentId,
    WorkloadClass,
)
from engine_service.simulator.device import Device, DeviceRefused, Sequence
from engine_service.simulator.profiles import PROFILES, DeviceProfile, profile

COST = CostModel(
    prefill_s=1.0,
    prefill_token_s=0.1,
    prefill_pair_s=0.0,
    decode_s=10.0,
    decode_sequence_s=0.5,
    decode_pair_s=0.0,
)
EXLLAMA = DeviceProfile(
    name="exllama",
    cost=COST,
    capacity=Capacity(
        num_pages=8, page_tokens=4, max_sequences=3, max_context_tokens=32, mixes_prefill_and_decode=False
    ),
    has_prefix_cache=True,
)
LLAMA = DeviceProfile(
    name="llama",
    cost=COST,
    capacity=Capacity(num_pages=8, page_tokens=4, max_sequences=3, max_context_tokens=32, can_abort=True),
    abort_grain_tokens=4,
)


class Bench:
    """A device, and orders in short."""

    def __init__(self, machine: DeviceProfile) -> None:
        self.device = Device(machine)

    def order(self, decision: object, *, now: float = 0.0) -> None:
        self.device.carry_out(decision, now=now)  # type: ignore[arg-type]

    def admit(self, name: str, prompt: int, output: int = 2, *, reserved: int | None = None) -> Sequence:
        request = Request(
            request_id=RequestId(name),
            resident_id=ResidentId("anna"),
            class_id=WorkloadClass.CHAT,
            prompt_tokens=prompt,
            max_tokens=output,
        )
        sequence = Sequence(request=request, output_length=output)
        self.device.introduce(sequence)
        self.order(Admit(request_id=request.request_id, reserved_tokens=reserved or prompt + output))
        return sequence

    def iterate(self, decodes: str = "", *, now: float = 0.0, **chunks: int):  # type: ignore[no-untyped-def]
        prefills = tuple(PrefillChunk(request_id=RequestId(k), num_tokens=n) for k, n in chunks.items())
        ids = tuple(RequestId(name) for name in decodes.split())
        self.order(Compose(decode_ids=ids, prefills=prefills), now=now)
        flight = self.device.flight
        assert flight is not None
        seconds = flight.ends_at - now
        return seconds, {r.request_id: r for r in self.device.finish()}


def test_every_prompt_is_a_pass_of_its_own_on_exllama() -> None:
    bench = Bench(EXLLAMA)
    bench.admit("a", 8)
    bench.admit("b", 6)
    seconds, results = bench.iterate(a=4, b=4)
    assert seconds == pytest.approx(2 * (1.0 + 0.4))
    assert {r.decode_tokens for r in results.values()} == {0}


def test_a_prompt_that_ends_decodes_in_the_same_iteration_on_exllama() -> None:
    bench = Bench(EXLLAMA)
    bench.admit("a", 4)
    seconds, results = bench.iterate(a=4)
    assert seconds == pytest.approx(1.0 + 0.4 + 10.0 + 0.5)
    assert results["a"].decode_tokens == 1


def test_prompts_and_decodes_share_a_pass_on_llama() -> None:
    bench = Bench(LLAMA)
    bench.admit("a", 4)
    bench.admit("b", 6)
    bench.iterate(a=4)
    bench.admit("c", 6)
    seconds, results = bench.iterate("a", b=6, c=2)
    assert seconds == pytest.approx(1.0 + 0.8 + 10.0 + 0.5)
    assert (results["b"].decode_tokens, results["c"].decode_tokens) == (1, 0)


def test_an_answer_ends_after_its_real_length_and_frees_its_pages() -> None:
    bench = Bench(EXLLAMA)
    bench.admit("a", 4, 3)
    bench.iterate(a=4)
    assert bench.device.num_held == 2
    _, results = bench.iterate("a")
    assert not results["a"].finished
    _, results = bench.iterate("a")
    assert results["a"].finished
    assert bench.device.num_held == 0


def test_pages_that_are_not_there_are_refused() -> None:
    bench = Bench(EXLLAMA)
    bench.admit("a", 24)
    with pytest.raises(DeviceRefused, match="9 pages are promised, there are 8"):
        bench.admit("b", 4)


def test_more_sequences_than_there_are_places_are_refused() -> None:
    bench = Bench(EXLLAMA)
    for name in "abc":
        bench.admit(name, 2)
    with pytest.raises(DeviceRefused, match="all 3 sequences are taken"):
        bench.admit("d", 2)


def test_tokens_beyond_the_reservation_are_refused() -> None:
    bench = Bench(EXLLAMA)
    bench.admit("a", 4, 6, reserved=5)
    bench.iterate(a=4)
    bench.iterate("a")
    with pytest.raises(DeviceRefused, match="stores 6 of 5 tokens"):
        bench.iterate("a")


def test_growing_makes_room_for_more_tokens() -> None:
    bench = Bench(EXLLAMA)
    bench.admit("a", 4, 6, reserved=5)
    bench.iterate(a=4)
    bench.order(Grow(request_id=RequestId("a"), reserved_tokens=8))
    for _ in range(3):
        bench.iterate("a")


def test_two_iterations_at_once_are_refused() -> None:
    bench = Bench(EXLLAMA)
    bench.admit("a", 4)
    order = Compose(decode_ids=(), prefills=(PrefillChunk(request_id=RequestId("a"), num_tokens=2),))
    bench.order(order)
    with pytest.raises(DeviceRefused, match="an iteration is under way"):
        bench.order(order)


def test_who_holds_no_pages_cannot_take_part() -> None:
    bench = Bench(EXLLAMA)
    bench.admit("a", 4)
    bench.order(Preempt(request_id=RequestId("a"), mode=PreemptionMode.RELEASE, beneficiary_id=None))
    with pytest.raises(DeviceRefused, match="holds no pages"):
        bench.iterate(a=4)


def preempted_and_back(machine: DeviceProfile, *, while_away: int) -> int:
    """Return the tokens found in the cache when a request of 16 stored tokens comes back."""
    bench = Bench(machine)
    bench.admit("a", 16, 4)
    bench.iterate(a=16)
    bench.order(Preempt(request_id=RequestId("a"), mode=PreemptionMode.RELEASE, beneficiary_id=None))
    if while_away:
        bench.admit("b", while_away, 0)
        bench.iterate(b=while_away)
    bench.order(Admit(request_id=RequestId("a"), reserved_tokens=20))
    _, results = bench.iterate(a=20)
    return int(results["a"].cached_tokens)


def test_a_preempted_request_finds_its_full_pages_again() -> None:
    assert preempted_and_back(EXLLAMA, while_away=0) == 16


def test_cached_pages_go_when_others_need_them() -> None:
    # 28 tokens take 7 of 8 pages: one of the four cached ones is left.
    assert preempted_and_back(EXLLAMA, while_away=28) == 4


def test_without_a_prefix_cache_everything_is_computed_again() -> None:
    assert preempted_and_back(LLAMA, while_away=0) == 0


def test_what_was_computed_before_is_not_fresh() -> None:
    bench = Bench(LLAMA)
    sequence = bench.admit("a", 16, 4)
    bench.iterate(a=12)
    assert sequence.fresh == 12
    bench.order(Preempt(request_id=RequestId("a"), mode=PreemptionMode.RELEASE, beneficiary_id=None))
    bench.order(Admit(request_id=RequestId("a"), reserved_tokens=20))
    bench.iterate(a=16)
    assert sequence.fresh == 4


@pytest.mark.parametrize(("at", "kept"), [(1.05, 0), (1.5, 4), (1.95, 8)])
def test_an_aborted_prefill_keeps_whole_grains(at: float, kept: int) -> None:
    bench = Bench(LLAMA)
    bench.admit("a", 12)
    bench.order(Compose(decode_ids=(), prefills=(PrefillChunk(request_id=RequestId("a"), num_tokens=12),)))
    bench.device.abort(now=at)
    assert sum(r.prefill_tokens for r in bench.device.finish()) == kept


def test_a_backend_that_cannot_abort_refuses_to() -> None:
    bench = Bench(EXLLAMA)
    bench.admit("a", 12)
    bench.order(Compose(decode_ids=(), prefills=(PrefillChunk(request_id=RequestId("a"), num_tokens=12),)))
    with pytest.raises(DeviceRefused):
        bench.device.abort(now=1.0)


def test_a_lost_backend_holds_nothing_and_requests_may_come_again() -> None:
    bench = Bench(EXLLAMA)
    bench.admit("a", 16)
    bench.iterate(a=16)
    bench.device.lose_everything()
    assert bench.device.num_held == 0
    bench.order(Admit(request_id=RequestId("a"), reserved_tokens=20))
    _, results = bench.iterate(a=20)
    assert results["a"].prefill_tokens == 17


def test_a_cancelled_request_is_gone() -> None:
    bench = Bench(EXLLAMA)
    bench.admit("a", 16)
    bench.order(Cancel(request_id=RequestId("a")))
    assert bench.device.num_held == 0


def test_a_request_the_backend_gives_up_fails_after_that_many_tokens() -> None:
    bench = Bench(EXLLAMA)
    sequence = bench.admit("a", 4, 9)
    sequence.fails_after = 2
    bench.iterate(a=4)
    _, results = bench.iterate("a")
    assert results["a"].failed
    assert bench.device.num_held == 0


@pytest.mark.parametrize("name", PROFILES)
def test_a_named_machine_takes_longer_for_more(name: str) -> None:
    machine = profile(name)
    less = machine.seconds(chunks=[(256, 0)], num_decodes=1, decode_context_tokens=100)
    more = machine.seconds(chunks=[(512, 256)], num_decodes=2, decode_context_tokens=900)
    assert 0 < less < more


def test_an_unknown_machine_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="no profile 'abacus'; there are rtx4090-8b, h200"):
        profile("abacus")


def test_a_negative_grain_is_refused() -> None:
    with pytest.raises(ValueError, match="abort_grain_tokens must be >= 0, not -1"):
        dataclasses.replace(LLAMA, abort_grain_tokens=-1)
