"""P1 under a storm: counters of those who wait stay within U + V + A, whatever arrives.

One class competes (chat), speech goes before it within its bucket: between classes a difference is meant, and
no bound on it is promised. The device refuses what no backend could do, so a storm also tests memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import pytest

from engine_service.backends.cost_model import CostModel
from engine_service.scheduling.decisions import AbortIteration, Reject
from engine_service.scheduling.events import (
    Arrived,
    Cancelled,
    CapacityChanged,
    Event,
    IterationDone,
    ResidentsChanged,
)
from engine_service.scheduling.invariants import check, counter_bound, counter_spread
from engine_service.scheduling.model import (
    MICRO,
    Capacity,
    Policy,
    Request,
    RequestId,
    Resident,
    ResidentId,
    WorkloadClass,
)
from engine_service.scheduling.scheduler import Scheduler
from engine_service.simulator.device import Device, Sequence
from engine_service.simulator.profiles import DeviceProfile
from tests.scheduling.mutants import ArtifactLift, NoLift

MACHINE: Final = DeviceProfile(
    name="storm",
    cost=CostModel(
        prefill_s=1e-3,
        prefill_token_s=2e-5,
        prefill_pair_s=0.0,
        decode_s=4e-3,
        decode_sequence_s=5e-5,
        decode_pair_s=0.0,
    ),
    capacity=Capacity(num_pages=256, page_tokens=16, max_sequences=48, max_context_tokens=1024),
)
# Small budgets make a sharp bound: U = 2 * 4096 tokens, V = 1,500, A = 500.
POLICY: Final = Policy(
    voice_bucket=1_500,
    due_budget=500,
    background_reserve=0.0,
    prefix_share=0.0,
    voice_headroom_pages=16,
    output_slice_tokens=8,
    max_chunk_tokens=1024,
    max_prefilling=8,
    max_waiting=100_000,
)
RESIDENTS: Final = tuple(
    Resident(resident_id=ResidentId(f"r{i}"), weight=1 + i % 3, max_waiting=400) for i in range(7)
)


class Storm:
    """Residents who come and go, ask for much or little, speak, lie about lengths and walk away."""

    def __init__(self, scheduler: Scheduler, *, seed: int, check_every: int = 2_000) -> None:
        self.scheduler = scheduler
        self.device = Device(MACHINE)
        self.rng = random.Random(seed)
        self.now = 0.0
        self.asked = self.finished = self.refused = self.backlogged_turns = 0
        self.worst = 0.0
        self.running: list[RequestId] = []
        self._check_every = check_every
        self._num_turns = 0
        self._active = list(RESIDENTS)
        self._next_mood_at = 0.0
        self._next_at = 0.0
        self._rate = 0.0
        self.tell(CapacityChanged(capacity=MACHINE.capacity))
        self.tell(ResidentsChanged(residents=RESIDENTS))

    def tell(self, event: Event) -> None:
        """Hand an event over, carry out what is decided, and look at the counters."""
        for decision in self.scheduler.handle(event, now=self.now):
            if isinstance(decision, Reject):
                self.refused += 1
            elif not isinstance(decision, AbortIteration):
                self.device.carry_out(decision, now=self.now)
        self._num_turns += 1
        state = self.scheduler.state
        spread = counter_spread(state)
        self.backlogged_turns += spread > 0
        self.worst = max(self.worst, spread / counter_bound(state))
        assert spread <= counter_bound(state), f"P1: {spread / MICRO} after {self.asked} requests"
        if self._num_turns % self._check_every == 0:
            check(self.scheduler)

    def run(self, num_requests: int) -> None:
        """Send that many requests, and let the last of them end."""
        while self.asked < num_requests or self.device.flight is not None:
            flight = self.device.flight
            if self.asked < num_requests and (flight is None or self._next_at < flight.ends_at):
                self._arrive()
                continue
            assert flight is not None
            self.now = max(self.now, flight.ends_at)
            results = self.device.finish()
            self.finished += sum(result.finished for result in results)
            self.tell(IterationDone(results=results, seconds=flight.seconds))
        check(self.scheduler)

    def _arrive(self) -> None:
        rng = self.rng
        self.now = max(self.now, self._next_at)
        if self.now >= self._next_mood_at:
            # Some go silent, others flood; sometimes nobody comes and the queue runs empty.
            self._active = rng.sample(RESIDENTS, rng.randint(1, len(RESIDENTS)))
            self._rate = rng.choice((20.0, 200.0, 500.0, 900.0))
            self._next_mood_at = self.now + rng.expovariate(1 / 3.0)
        self._next_at = self.now + rng.expovariate(self._rate)
        speaks = rng.random() < 0.03
        output = rng.randint(1, 12)
        self.asked += 1
        request = Request(
            request_id=RequestId(f"q{self.asked:07d}"),
            resident_id=self._active[min(int(rng.expovariate(0.7)), len(self._active) - 1)].resident_id,
            class_id=WorkloadClass.VOICE if speaks else WorkloadClass.CHAT,
            prompt_tokens=rng.randint(1, 200 if rng.random() < 0.1 else 60),
            max_tokens=output if rng.random() < 0.7 else rng.randint(output, 400),
        )
        self.device.introduce(Sequence(request=request, output_length=output))
        self.tell(Arrived(request=request))
        if rng.random() < 0.01 and self.scheduler.knows(request.request_id):
            self.tell(Cancelled(request_id=request.request_id))


def storm(num_requests: int, *, seed: int, make: Callable[[Policy], Scheduler] = Scheduler) -> Storm:
    """Run a storm to its end."""
    it = Storm(make(POLICY), seed=seed)
    it.run(num_requests)
    return it


def assert_was_a_storm(it: Storm, num_requests: int) -> None:
    """Fail where nobody competed: then nothing was tested."""
    assert it.finished > 0.7 * num_requests
    assert it.finished + it.refused <= num_requests
    assert it.backlogged_turns > num_requests / 4
    assert not it.scheduler.state.records


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_hundred_thousand_requests_keep_counters_within_the_bound() -> None:
    it = storm(200_000, seed=1)
    assert_was_a_storm(it, 200_000)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_million_requests_keep_counters_within_the_bound() -> None:
    it = storm(1_000_000, seed=2)
    assert_was_a_storm(it, 1_000_000)


@pytest.mark.parametrize("mutant", [NoLift, ArtifactLift])
def test_a_storm_finds_a_wrong_lift(mutant: Callable[[Policy], Scheduler]) -> None:
    with pytest.raises(AssertionError, match="P1"):
        storm(30_000, seed=1, make=mutant)
