"""Time the scheduler's decisions under load, one call of `handle` at a time.

The device is arithmetic: every decode gives a token, every chunk is computed, so that all of the time is the
scheduler's. Processor time is measured: on a busy machine the clock would count what others did.
"""

from __future__ import annotations

import argparse
import random
import time

from engine_service.scheduling.decisions import Compose, Decision, Preempt
from engine_service.scheduling.events import (
    Arrived,
    CapacityChanged,
    IterationDone,
    ResidentsChanged,
    SequenceResult,
)
from engine_service.scheduling.model import (
    Capacity,
    Policy,
    Request,
    RequestId,
    Resident,
    ResidentId,
    WorkloadClass,
)
from engine_service.scheduling.scheduler import Scheduler

NUM_RUNNING = 64
# Spoken requests never wait here: they would be served at once and measure something else.
CLASSES = [c for c in WorkloadClass if not c.is_spoken]
ITERATION_S = 0.03


class Load:
    """A scheduler that always has num_waiting requests waiting and NUM_RUNNING running."""

    def __init__(self, seed: int, *, num_waiting: int, num_residents: int) -> None:
        """Fill the queue and run until sequences come and go steadily."""
        self._random = random.Random(seed)
        self._residents = [ResidentId(f"resident{i}") for i in range(num_residents)]
        self._scheduler = Scheduler(Policy(max_waiting=10 * num_waiting))
        self._now = 1.0
        self._composed: Compose | None = None
        self._left: dict[RequestId, list[int]] = {}
        self._count = 0
        self.arrivals_s: list[float] = []
        self.iterations_s: list[float] = []
        residents = tuple(
            Resident(resident_id=name, max_waiting=10 * num_waiting) for name in self._residents
        )
        self._handle(ResidentsChanged(residents=residents))
        capacity = Capacity(
            num_pages=100_000, page_tokens=32, max_sequences=NUM_RUNNING + 1, max_context_tokens=8192
        )
        self._handle(CapacityChanged(capacity=capacity))
        for _ in range(num_waiting + NUM_RUNNING):
            self.arrive()
        for _ in range(400):
            self.iterate()
        self.arrivals_s.clear()
        self.iterations_s.clear()

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many wait and how many hold pages."""
        return self._scheduler.state.total_waiting, len(self._scheduler.state.holding)

    def arrive(self) -> None:
        """Let a request arrive and time it."""
        self._count += 1
        request = Request(
            request_id=RequestId(f"q{self._count:07d}"),
            resident_id=self._random.choice(self._residents),
            class_id=self._random.choice(CLASSES),
            prompt_tokens=self._random.randint(50, 400),
            max_tokens=self._random.randint(100, 300),
        )
        # Tokens to compute, output tokens to come, tokens a preemption would have to compute again.
        self._left[request.request_id] = [request.prompt_tokens, request.max_tokens, request.prompt_tokens]
        self.arrivals_s.append(self._handle(Arrived(request=request)))

    def iterate(self) -> None:
        """Finish the iteration under way, time the next decision, replace who finished."""
        composed, self._composed = self._composed, None
        assert composed is not None
        self._now += ITERATION_S
        results = [self._token(request_id, 0) for request_id in composed.decode_ids]
        for chunk in composed.prefills:
            left = self._left[chunk.request_id]
            left[0] -= chunk.num_tokens
            if left[0]:
                results.append(SequenceResult(request_id=chunk.request_id, prefill_tokens=chunk.num_tokens))
            else:
                results.append(self._token(chunk.request_id, chunk.num_tokens))
        event = IterationDone(results=tuple(results), seconds=ITERATION_S)
        self.iterations_s.append(self._handle(event))
        for result in results:
            if result.finished:
                self.arrive()

    def _token(self, request_id: RequestId, prefilled: int) -> SequenceResult:
        left = self._left[request_id]
        left[1] -= 1
        left[2] += 1
        return SequenceResult(
            request_id=request_id, prefill_tokens=prefilled, decode_tokens=1, finished=not left[1]
        )

    def _handle(self, event: Arrived | CapacityChanged | IterationDone | ResidentsChanged) -> float:
        started = time.thread_time()
        decisions = self._scheduler.handle(event, now=self._now)
        seconds = time.thread_time() - started
        self._note(decisions)
        return seconds

    def _note(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Compose):
                self._composed = decision
            elif isinstance(decision, Preempt):
                self._left[decision.request_id][0] = self._left[decision.request_id][2]


def percentile(values: list[float], share: float) -> float:
    """Return a percentile in microseconds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=3_000, help="decisions to time")
    parser.add_argument("--waiting", type=int, default=1_000, help="requests that wait at any time")
    parser.add_argument("--residents", type=int, default=8, help="residents they belong to")
    given = parser.parse_args()
    load = Load(seed=1, num_waiting=given.waiting, num_residents=given.residents)
    for _ in range(given.iterations):
        load.iterate()
    waiting, running = load.counts
    print(f"{waiting} waiting, {running} running, {given.residents} residents, {len(CLASSES)} classes")
    decisions = load.arrivals_s + load.iterations_s
    shown = ", ".join(f"p{int(100 * p)} {percentile(decisions, p):6.0f} us" for p in (0.5, 0.95, 0.99))
    print(f"{'all decisions':15} {len(decisions):6} calls   {shown}")
    for name, values in (("arrival", load.arrivals_s), ("iteration done", load.iterations_s)):
        shown = ", ".join(f"p{int(100 * p)} {percentile(values, p):6.0f} us" for p in (0.5, 0.95, 0.99))
        print(f"{name:15} {len(values):6} calls   {shown}")
    per_result = percentile(load.iterations_s, 0.5) / running
    print(f"an iteration's answer holds {running} results: {per_result:.1f} us each at the median")


if __name__ == "__main__":
    main()
