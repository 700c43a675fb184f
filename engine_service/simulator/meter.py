"""What happened in a run: who waited how long, who was served what, and what the device did.

Decides nothing and is asked by nobody who decides. It counts tokens and pages from the device's own account,
so that a mistake in the scheduler's books would show as a difference (the tests compare the two).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine_service.scheduling import admission
from engine_service.scheduling.decisions import Admit, Decision, Preempt
from engine_service.scheduling.events import SequenceResult
from engine_service.scheduling.model import RequestId, RequestState, Resident, ResidentId, WorkloadClass
from engine_service.scheduling.scheduler import Scheduler
from engine_service.scheduling.targets import TARGETS
from engine_service.simulator.device import Device, Flight, Sequence as DeviceSequence
from engine_service.simulator.fairness import ServiceGap
from engine_service.simulator.quantiles import Histogram


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request's life as its caller saw it."""

    stream: str
    resident: ResidentId
    class_id: WorkloadClass
    sequence: DeviceSequence
    arrived_at: float
    waiting_since: float
    is_waiting: bool = True
    admitted_at: float | None = None
    requeued_s: float = 0.0
    longest_wait_s: float = 0.0
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    end: str | None = None  #: finished, cancelled, rejected or failed
    preemptions: int = 0
    prefilled: int = 0  #: prompt tokens computed, each counted once
    recomputed: int = 0
    late_gaps: int = 0


class Meter:
    """Watches one run."""

    def __init__(self, scheduler: Scheduler, device: Device, residents: Sequence[Resident]) -> None:
        """Watch the scheduler and the device on behalf of the residents."""
        self._state = scheduler.state
        self._device = device
        self._ids = [resident.resident_id for resident in residents]
        self.index = {resident_id: i for i, resident_id in enumerate(self._ids)}
        self.weights = [resident.weight for resident in residents]
        self._has_caps = any(resident.page_cap is not None for resident in residents)
        self._cost = (scheduler.state.policy.prefill_cost, scheduler.state.policy.decode_cost)
        self.outcomes: dict[RequestId, Outcome] = {}
        self.gap = ServiceGap(self.weights)
        self._num_waiting: dict[tuple[WorkloadClass, int], int] = {}
        self.tokens: list[int] = []  #: per second, each token counted once
        self.served: list[list[int]] = [[] for _ in self._ids]
        self.asked: list[list[int]] = [[] for _ in self._ids]
        self.served_by_class: dict[WorkloadClass, list[int]] = {c: [] for c in WorkloadClass}
        self.gaps: dict[tuple[WorkloadClass, str, str], Histogram] = {}
        self.decode_iterations = Histogram()
        self.num_iterations = 0
        self.busy_s = self.idle_waiting_s = 0.0
        self.longest_iteration = self.longest_stall = 0.0
        self.over_bound = 0
        self.spread = 0
        self.preempted: Counter[tuple[str, str]] = Counter()
        self.preempted_pages: Counter[tuple[str, str]] = Counter()
        self.reclaim_excess = 0
        self.longest_over_cap = 0.0
        self._over_cap_since: float | None = None
        self._freed_for: dict[RequestId | None, tuple[int, int, int]] = {}
        self.aborts = 0
        self.gap_samples: list[tuple[float, float | None]] = []

    # ---- requests

    def arrived(self, outcome: Outcome, *, now: float) -> None:
        """Note an accepted request."""
        self.outcomes[outcome.sequence.request.request_id] = outcome
        request = outcome.sequence.request
        who = self.index[request.resident_id]
        self._wait(outcome, +1)
        units = request.prompt_tokens * self._cost[0] + outcome.sequence.output_length * self._cost[1]
        _add(self.asked[who], now, units)

    def rejected(self, outcome: Outcome, *, now: float) -> None:
        """Note that the request that just arrived was refused: what is refused was not asked for."""
        request = outcome.sequence.request
        units = request.prompt_tokens * self._cost[0] + outcome.sequence.output_length * self._cost[1]
        self.asked[self.index[request.resident_id]][-1] -= units
        self.ended(outcome, "rejected", now=now)

    def ended(self, outcome: Outcome, end: str, *, now: float) -> None:
        """Note the end of a request that was not rejected; a second end changes nothing."""
        if outcome.end is not None:
            return
        if outcome.is_waiting:
            self._stops_waiting(outcome, now=now)
        outcome.ended_at, outcome.end = now, end

    def _wait(self, outcome: Outcome, change: int) -> None:
        who = self.index[outcome.resident]
        flow = (outcome.class_id, who)
        before = self._num_waiting.get(flow, 0)
        self._num_waiting[flow] = before + change
        if not before:
            self.gap.starts_waiting(outcome.class_id, who)
        elif not before + change:
            self.gap.stops_waiting(outcome.class_id, who)

    def _stops_waiting(self, outcome: Outcome, *, now: float) -> None:
        outcome.is_waiting = False
        outcome.longest_wait_s = max(outcome.longest_wait_s, now - outcome.waiting_since)
        self._wait(outcome, -1)

    # ---- decisions

    def decided(self, decisions: Sequence[Decision], *, now: float) -> None:
        """Note decisions, before the device carries them out."""
        self._freed_for.clear()
        for decision in decisions:
            if isinstance(decision, Admit):
                self._admitted(decision, now=now)
            elif isinstance(decision, Preempt):
                self._preempted(decision, now=now)

    def _admitted(self, decision: Admit, *, now: float) -> None:
        outcome = self.outcomes[decision.request_id]
        if outcome.admitted_at is None:
            outcome.admitted_at = now
        else:
            outcome.requeued_s += now - outcome.waiting_since
        self._stops_waiting(outcome, now=now)
        freed = self._freed_for.get(decision.request_id)
        if freed is not None:
            self._note_excess(decision, *freed)

    def _note_excess(self, decision: Admit, freed: int, largest: int, free_before: int) -> None:
        capacity = self._device.profile.capacity
        record = self._state.records.get(decision.request_id)
        shared = record.shared if record is not None else 0
        need = -(-(decision.reserved_tokens - shared) // capacity.page_tokens)
        missing = max(0, need - free_before)
        self.reclaim_excess = max(self.reclaim_excess, freed - missing - largest)

    def _preempted(self, decision: Preempt, *, now: float) -> None:
        outcome = self.outcomes[decision.request_id]
        pages = self._device.pages_of(decision.request_id)
        outcome.preemptions += 1
        self._waits_again(outcome, now=now)
        beneficiary = self.outcomes.get(decision.beneficiary_id) if decision.beneficiary_id else None
        is_growth = beneficiary is None or not beneficiary.is_waiting
        for_class = "growth" if is_growth or beneficiary is None else beneficiary.class_id.value
        pair = (outcome.class_id.value, for_class)
        self.preempted[pair] += 1
        self.preempted_pages[pair] += pages
        free = self._device.profile.capacity.num_pages - self._device.num_held
        freed, largest, before = self._freed_for.get(decision.beneficiary_id, (0, 0, free))
        self._freed_for[decision.beneficiary_id] = (freed + pages, max(largest, pages), before)

    def _waits_again(self, outcome: Outcome, *, now: float) -> None:
        outcome.is_waiting, outcome.waiting_since = True, now
        self._wait(outcome, +1)

    def backend_lost(self, *, now: float) -> None:
        """Note that whoever was running waits again."""
        for outcome in self.outcomes.values():
            if outcome.end is None and not outcome.is_waiting:
                self._waits_again(outcome, now=now)

    # ---- iterations

    def iteration_ended(
        self, flight: Flight, results: Sequence[SequenceResult], *, chunk_tokens: int, now: float
    ) -> None:
        """Note what an iteration brought, before the scheduler is told."""
        seconds = now - flight.started_at
        self.num_iterations += 1
        self.busy_s += seconds
        self.longest_iteration = max(self.longest_iteration, seconds)
        if flight.decodes:
            self.longest_stall = max(self.longest_stall, seconds)
            if not flight.chunks:
                self.decode_iterations.add(seconds)
            elif seconds > self._bound(flight, chunk_tokens):
                self.over_bound += 1
        self._book(results, now=now)

    def _bound(self, flight: Flight, chunk_tokens: int) -> float:
        """Return T_prefill(chunk) + T_decode for what the iteration really held.

        Where every prompt is a pass of its own, each costs its fixed part; so does a prompt that ends and
        decodes at once. Both are the device's, not the scheduler's.
        """
        profile = self._device.profile
        deepest = max(stored for _, _, stored in flight.chunks)
        passes = 1 if profile.capacity.mixes_prefill_and_decode else len(flight.chunks)
        return (
            profile.cost.seconds(chunk_tokens=chunk_tokens, chunk_pairs=chunk_tokens * deepest)
            + (passes - 1) * profile.cost.prefill_s
            + profile.cost.seconds(
                num_decodes=flight.num_decoding, decode_context_tokens=flight.decoding_context
            )
            + 1e-9
        )

    def _book(self, results: Sequence[SequenceResult], *, now: float) -> None:
        units: dict[int, int] = {}
        per_class: dict[WorkloadClass, int] = {}
        prefill_cost, decode_cost = self._cost
        tokens, outcomes = 0, self.outcomes
        for result in results:
            outcome = outcomes[result.request_id]
            amount = 0
            if result.prefill_tokens:
                fresh = outcome.sequence.fresh
                outcome.prefilled += fresh
                outcome.recomputed += result.prefill_tokens - fresh
                tokens += fresh
                amount = fresh * prefill_cost
            if result.decode_tokens:
                tokens += result.decode_tokens
                amount += decode_cost * result.decode_tokens
                self._note_token(outcome, now)
            who = self.index[outcome.resident]
            units[who] = units.get(who, 0) + amount
            per_class[outcome.class_id] = per_class.get(outcome.class_id, 0) + amount
            if result.finished:
                self.ended(outcome, "failed" if result.failed else "finished", now=now)
        for who, amount in units.items():
            _add(self.served[who], now, amount)
        for class_id, amount in per_class.items():
            _add(self.served_by_class[class_id], now, amount)
        _add(self.tokens, now, tokens)
        self.gap.served(units)

    def _note_token(self, outcome: Outcome, now: float) -> None:
        before = outcome.last_token_at
        outcome.last_token_at = now
        if before is None:
            outcome.first_token_at = now
            return
        gap = now - before
        key = (outcome.class_id, outcome.resident, outcome.stream)
        histogram = self.gaps.get(key)
        if histogram is None:
            histogram = self.gaps[key] = Histogram()
        histogram.add(gap)
        target = TARGETS.get(outcome.class_id)
        if target is not None and gap > target.inter_token_s:
            outcome.late_gaps += 1

    # ---- after every turn

    def turned(self, *, now: float) -> None:
        """Look at the whole after the scheduler had its turn."""
        self.spread = max(self.spread, self._counter_spread())
        if self._has_caps:
            self._watch_caps(now=now)

    def _counter_spread(self) -> int:
        """Return S: the most that the counters of residents who wait in the same class are apart."""
        value = self._state.counters.value
        lows: dict[WorkloadClass, int] = {}
        highs: dict[WorkloadClass, int] = {}
        for (class_id, who), count in self._num_waiting.items():
            if count:
                counter = value(self._ids[who])
                lows[class_id] = min(lows.get(class_id, counter), counter)
                highs[class_id] = max(highs.get(class_id, counter), counter)
        return max((highs[class_id] - low for class_id, low in lows.items()), default=0)

    def _watch_caps(self, *, now: float) -> None:
        """Measure how long somebody within its cap waits for pages that another holds beyond its own."""
        if not self._is_somebody_owed(now=now):
            self._over_cap_since = None
            return
        if self._over_cap_since is None:
            self._over_cap_since = now
        self.longest_over_cap = max(self.longest_over_cap, now - self._over_cap_since)

    def _is_somebody_owed(self, *, now: float) -> bool:
        state = self._state
        over = {resident_id for resident_id in self._ids if state.is_over_cap(resident_id)}
        if not over:
            return False
        for _, head in state.heads():
            need = state.pages_needed(head, state.admission_tokens(head))
            urgency = state.urgency(head, now=now)
            if (
                head.state is RequestState.WAITING
                and over - {head.resident_id}
                and not state.is_over_cap(head.resident_id, more_pages=need)
                # While somebody speaks no other prompt starts, wherever its pages come from.
                and admission.has_prefill_slot(state, head, urgency=urgency, now=now)
                and admission.has_sequence(state, urgency=urgency)
                and not admission.fits(state, need, urgency=urgency)
            ):
                return True
        return False

    def sample_gap(self, *, now: float) -> None:
        """Keep the accumulated difference between those who wait now."""
        self.gap_samples.append((now, self.gap.spread()))


def _add(row: list[int], now: float, amount: int) -> None:
    second = int(now)
    if second >= len(row):
        row.extend([0] * (second + 1 - len(row)))
    row[second] += amount
