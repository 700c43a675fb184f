"""From what the meter saw to the figures of `summary`: sums and quantiles, no judgement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine_service.scheduling import invariants
from engine_service.scheduling.model import MICRO, RequestId, WorkloadClass
from engine_service.scheduling.scheduler import Scheduler
from engine_service.scheduling.targets import TARGETS
from engine_service.simulator import fairness
from engine_service.simulator.fairness import Ledger
from engine_service.simulator.meter import Outcome
from engine_service.simulator.quantiles import Histogram, Quantiles, of_values
from engine_service.simulator.runner import Run
from engine_service.simulator.summary import (
    GroupSummary,
    Life,
    PhaseSummary,
    PreemptionSummary,
    RunSummary,
    Timeline,
)

_BACKGROUND_WINDOW_S = 600
_STEPS = 180  #: about as many steps as a chart has room for


def summarise(
    run: Run,
    *,
    policy: str,
    seed: int,
    only: str | None = None,
    replay: Callable[[], Scheduler] | None = None,
    with_timeline: bool = True,
) -> RunSummary:
    """Return the figures of a run.

    replay makes a fresh scheduler for the comparison of the event log, where one was kept.
    """
    return _Summing(run).summary(policy, seed, only, replay, with_timeline)


class _Summing:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.meter = run.meter
        self.duration = run.scenario.duration_s
        self.seconds = max(1, int(self.duration))
        self.outcomes = list(run.meter.outcomes.values())
        self.ids = list(run.meter.index)
        self.served = [_cut(row, self.seconds) for row in self.meter.served]
        self.asked = [_cut(row, self.seconds) for row in self.meter.asked]
        self.total_service = sum(map(sum, self.served))
        self.entitlements = fairness.entitlements(
            [float(sum(row)) for row in self.asked], self.meter.weights, float(self.total_service)
        )

    def summary(
        self,
        policy: str,
        seed: int,
        only: str | None,
        replay: Callable[[], Scheduler] | None,
        with_timeline: bool,
    ) -> RunSummary:
        meter, state = self.meter, self.run.scheduler.state
        profile, capacity = self.run.profile, self.run.profile.capacity
        chunk = state.policy.max_chunk_tokens
        tokens = sum(_cut(meter.tokens, self.seconds))
        computed = sum(o.prefilled + o.sequence.output for o in self.outcomes)
        recomputed = sum(o.recomputed for o in self.outcomes)
        bound = self._bound()
        groups = self._groups(self.outcomes)
        deepest = max((o.sequence.request.prompt_tokens for o in self.outcomes), default=0)
        ledger = self._busy_ledger()
        return RunSummary(
            scenario=self.run.scenario.name,
            policy=policy,
            seed=seed,
            profile=profile.name,
            only=only,
            duration=self.duration,
            ended_at=self.run.ended_at,
            iterations=meter.num_iterations,
            utilisation=meter.busy_s / self.run.ended_at if self.run.ended_at else 0.0,
            idle_waiting=meter.idle_waiting_s,
            longest_iteration=meter.longest_iteration,
            longest_stall=meter.longest_stall,
            iteration_bound=profile.seconds(
                chunks=[(chunk, max(0, deepest - chunk))],
                num_decodes=capacity.max_sequences,
                decode_context_tokens=self._most_held(),
            ),
            over_bound=meter.over_bound,
            decode_iteration=meter.decode_iterations.quantiles(),
            chunk=chunk,
            max_sequences=capacity.max_sequences,
            tokens=tokens,
            completed_tokens=sum(
                o.sequence.length
                for o in self.outcomes
                if o.end == "finished" and o.ended_at is not None and o.ended_at <= self.duration
            ),
            throughput=tokens / self.duration,
            service=self.total_service,
            recomputed=recomputed,
            recompute_share=recomputed / (computed + recomputed) if computed else 0.0,
            preemptions=sum(meter.preempted.values()),
            reclaim_excess=meter.reclaim_excess,
            over_cap=meter.longest_over_cap,
            aborts=meter.aborts,
            jain=fairness.jain(ledger),
            service_difference=meter.gap.worst,
            bound=bound,
            bound_used=meter.gap.worst / bound if bound else 0.0,
            window_difference=fairness.window_difference(ledger),
            counter_spread=meter.spread / MICRO,
            spread_used=meter.spread / invariants.counter_bound(state),
            gap_half=self._gap_near(self.duration / 2),
            gap_end=self._gap_near(self.duration),
            background_share=self._background_share(),
            goodput=sum(map(_is_attained, self.outcomes)) / self.duration,
            leaked_pages=self._leaked(),
            stuck=self.run.stuck,
            replay_differs=_replay_differences(self.run, replay) if replay is not None else 0,
            losses=self.run.losses,
            disconnects=self.run.disconnects,
            groups=groups,
            cells=self._cells(),
            phases=self._phases(),
            preempted=[
                PreemptionSummary(
                    victim_class=victim,
                    beneficiary_class=beneficiary,
                    count=count,
                    pages=meter.preempted_pages[victim, beneficiary],
                )
                for (victim, beneficiary), count in sorted(meter.preempted.items())
            ],
            timeline=self._timeline() if with_timeline else None,
        )

    # ---- bounds

    def _most_held(self) -> int:
        """Return M: the tokens that can run at once, by memory and by sequences."""
        capacity = self.run.profile.capacity
        longest = max(
            (o.sequence.request.prompt_tokens + o.sequence.output_length for o in self.outcomes), default=0
        )
        return min(capacity.num_pages * capacity.page_tokens, capacity.max_sequences * longest)

    def _bound(self) -> float:
        """Return VTC's 2 U, in units of a weight-1 resident."""
        policy = self.run.scheduler.state.policy
        longest = max((o.sequence.request.prompt_tokens for o in self.outcomes), default=0)
        return 2.0 * max(policy.prefill_cost * longest, policy.decode_cost * self._most_held())

    def _gap_near(self, at_s: float) -> float | None:
        samples = [(abs(at - at_s), value) for at, value in self.meter.gap_samples if value is not None]
        near = min(samples, default=None, key=lambda sample: sample[0])
        return None if near is None or near[0] > self.duration / 10 else near[1]

    def _busy_ledger(self) -> Ledger:
        """Return the ledger of who asked for anything; others would count as starved."""
        busy = [i for i, row in enumerate(self.asked) if sum(row)]
        return Ledger(
            weights=[self.meter.weights[i] for i in busy],
            served=[self.served[i] for i in busy],
            asked=[self.asked[i] for i in busy],
        )

    def _background_share(self) -> float | None:
        lower = [
            _cut(row, self.seconds)
            for class_id, row in self.meter.served_by_class.items()
            if class_id.urgency >= WorkloadClass.AGENT.urgency
        ]
        part = fairness.added(lower, self.seconds)
        if not sum(part):
            return None
        return fairness.least_window_share(
            part, fairness.added(self.served, self.seconds), _BACKGROUND_WINDOW_S
        )

    def _leaked(self) -> int:
        """Return pages held by nobody alive, by the scheduler's ledger or the device's."""
        state, device = self.run.scheduler.state, self.run.device
        alive = sum(record.pages for record in state.holding.values())
        return abs(state.pages.num_held - alive) + abs(
            device.num_held - state.pages.num_held - state.pages.num_pinned
        )

    # ---- groups

    def _groups(self, outcomes: Sequence[Outcome]) -> dict[str, GroupSummary]:
        found: dict[str, GroupSummary] = {}
        for class_id in WorkloadClass:
            chosen = [o for o in outcomes if o.class_id is class_id]
            if chosen:
                found[class_id.value] = self._group(class_id.value, "class", chosen)
        for i, resident_id in enumerate(self.ids):
            chosen = [o for o in outcomes if o.resident == resident_id]
            if chosen:
                found[resident_id] = self._group(resident_id, "resident", chosen, entitled=i)
        for stream in self.run.scenario.streams:
            chosen = [o for o in outcomes if o.stream == stream.name]
            if chosen:
                found[stream.name] = self._group(stream.name, "stream", chosen)
        return found

    def _cells(self) -> list[GroupSummary]:
        cells = []
        for class_id in WorkloadClass:
            for resident_id in self.ids:
                chosen = [o for o in self.outcomes if o.class_id is class_id and o.resident == resident_id]
                if chosen:
                    cells.append(self._group(f"{class_id.value}/{resident_id}", "cell", chosen))
        return cells

    def _group(
        self, name: str, kind: str, chosen: Sequence[Outcome], *, entitled: int | None = None
    ) -> GroupSummary:
        end = self.run.ended_at
        accepted = [o for o in chosen if o.end != "rejected"]
        heard = [o for o in accepted if o.sequence.request.max_tokens]
        service = sum(self._service_of(o) for o in accepted)
        tokens = sum(o.prefilled + o.sequence.output for o in accepted)
        share, entitlement = service / self.total_service if self.total_service else 0.0, None
        if entitled is not None and self.total_service:
            share = sum(self.served[entitled]) / self.total_service
            entitlement = self.entitlements[entitled] / self.total_service
        finished = sum(o.end == "finished" for o in chosen)
        targeted = [o for o in chosen if o.class_id in TARGETS]
        attained = sum(map(_is_attained, targeted))
        span = end or 1.0
        return GroupSummary(
            name=name,
            kind=kind,
            requests=len(chosen),
            finished=finished,
            unfinished=sum(o.end is None for o in chosen),
            rejected=len(chosen) - len(accepted),
            cancelled=sum(o.end in ("cancelled", "failed") for o in chosen),
            queue=_since_arrival(accepted, lambda o: o.admitted_at, end),
            requeue=of_values([o.requeued_s for o in accepted if o.preemptions]),
            ttft=_since_arrival(heard, lambda o: o.first_token_at, end),
            itl=self._itl(chosen),
            e2e=_since_arrival(accepted, lambda o: o.ended_at, end),
            starvation=max((_longest_wait(o, end) for o in accepted), default=0.0),
            due=sum(_longest_wait(o, end) > self._max_wait_s(o) for o in accepted),
            tokens=tokens,
            tokens_per_s=tokens / span,
            finished_per_s=finished / span,
            service=service,
            share=share,
            entitlement=entitlement,
            gain=share / entitlement if entitlement else None,
            attained=attained / len(targeted) if targeted else None,
            goodput=attained / self.duration if targeted else None,
            preemptions=sum(o.preemptions for o in chosen),
            recomputed=sum(o.recomputed for o in chosen),
        )

    def _itl(self, chosen: Sequence[Outcome]) -> Quantiles:
        keys = {(o.class_id, o.resident, o.stream) for o in chosen}
        total = Histogram()
        for key, histogram in self.meter.gaps.items():
            if key in keys:
                total.merge(histogram)
        return total.quantiles()

    def _service_of(self, outcome: Outcome) -> int:
        policy = self.run.scheduler.state.policy
        return outcome.prefilled * policy.prefill_cost + outcome.sequence.output * policy.decode_cost

    def _max_wait_s(self, outcome: Outcome) -> float:
        return self.run.scenario.policy.classes[outcome.class_id].max_wait_s

    # ---- time

    def _phases(self) -> dict[str, PhaseSummary]:
        phases = {}
        for phase in self.run.scenario.phases:
            window = slice(int(phase.from_s), int(phase.to_s))
            services = {
                resident_id: sum(row[window]) for resident_id, row in zip(self.ids, self.served, strict=True)
            }
            total = sum(services.values())
            arrived = [o for o in self.outcomes if phase.from_s <= o.arrived_at < phase.to_s]
            phases[phase.name] = PhaseSummary(
                name=phase.name,
                shares={name: value / total if total else 0.0 for name, value in services.items()},
                groups=self._groups(arrived),
            )
        return phases

    def _timeline(self) -> Timeline:
        step = max(1, -(-self.seconds // _STEPS))
        waiting = {
            class_id.value: self._waiting(class_id, step)
            for class_id in WorkloadClass
            if any(o.class_id is class_id for o in self.outcomes)
        }
        return Timeline(
            step_s=step,
            served={
                resident_id: _stepped(row, step)
                for resident_id, row in zip(self.ids, self.served, strict=True)
                if sum(row)
            },
            waiting=waiting,
            gap=self.meter.gap_samples,
            lives=[
                Life(
                    resident=o.resident,
                    class_id=o.class_id.value,
                    arrived=o.arrived_at,
                    admitted=o.admitted_at,
                    first_token=o.first_token_at,
                    ended=o.ended_at,
                )
                for o in self.outcomes
                if o.end != "rejected"
            ],
        )

    def _waiting(self, class_id: WorkloadClass, step: int) -> list[int]:
        change = [0] * (self.seconds // step + 2)
        for o in self.outcomes:
            if o.class_id is not class_id or o.end == "rejected" or o.arrived_at >= self.duration:
                continue
            left = o.admitted_at if o.admitted_at is not None else o.ended_at
            change[int(o.arrived_at) // step + 1] += 1
            if left is not None and left < self.duration:
                change[int(left) // step + 1] -= 1
        total, levels = 0, []
        for value in change:
            total += value
            levels.append(total)
        return levels


def _cut(row: Sequence[int], length: int) -> list[int]:
    return [*row[:length], *([0] * (length - len(row)))]


def _stepped(row: Sequence[int], step: int) -> list[int]:
    return [sum(row[start : start + step]) for start in range(0, len(row), step)]


def _since_arrival(
    outcomes: Iterable[Outcome], when: Callable[[Outcome], float | None], end: float
) -> Quantiles:
    """Return the times since arrival; what has not come by the end counts as coming then.

    Who went away before it came has no such time.
    """
    values = []
    for outcome in outcomes:
        at = when(outcome)
        if at is not None:
            values.append(at - outcome.arrived_at)
        elif outcome.end is None:
            values.append(end - outcome.arrived_at)
    return of_values(values)


def _longest_wait(outcome: Outcome, end: float) -> float:
    now_waiting = end - outcome.waiting_since if outcome.is_waiting else 0.0
    return max(outcome.longest_wait_s, now_waiting)


def _is_attained(outcome: Outcome) -> bool:
    target = TARGETS.get(outcome.class_id)
    if target is None or outcome.end != "finished" or outcome.first_token_at is None:
        return False
    return target.is_met(
        first_token_s=outcome.first_token_at - outcome.arrived_at,
        num_gaps=outcome.sequence.output - 1,
        num_late=outcome.late_gaps,
    )


def _replay_differences(run: Run, make: Callable[[], Scheduler]) -> int:
    """Return how many turns a fresh scheduler decides otherwise, given the same events."""
    scheduler = make()
    differences = sum(scheduler.handle(event, now=now) != decisions for now, event, decisions in run.turns)
    mine, theirs = scheduler.state.counters, run.scheduler.state.counters
    return differences + sum(
        mine.value(resident_id) != theirs.value(resident_id) for resident_id in theirs.resident_ids
    )


def served_by_request(run: Run) -> dict[RequestId, int]:
    """Return the service units each request really got, from the device's account."""
    policy = run.scheduler.state.policy
    return {
        request_id: o.prefilled * policy.prefill_cost + o.sequence.output * policy.decode_cost
        for request_id, o in run.meter.outcomes.items()
    }
