"""A household in virtual time: the real scheduler's `handle`, a device of lengths, a clock that leaps.

Decides nothing: it carries events and decisions between the two and lets the meter look on. The order of
events is total: what ends comes before what arrives at the same instant, then in the order of planning. The
same scenario, policy and seed therefore give the same decisions, byte for byte (`Run.turns`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine_service.scheduling.decisions import AbortIteration, Decision, Reject
from engine_service.scheduling.events import (
    Arrived,
    BackendLost,
    Cancelled,
    CapacityChanged,
    DayStarted,
    Event,
    IterationDone,
    ResidentsChanged,
    Ticked,
)
from engine_service.scheduling.invariants import check
from engine_service.scheduling.model import GUEST, HOUSE, Request, RequestId, Resident
from engine_service.scheduling.scheduler import Scheduler
from engine_service.simulator.device import Device, Sequence
from engine_service.simulator.meter import Meter, Outcome
from engine_service.simulator.profiles import DeviceProfile
from engine_service.simulator.scenario import Scenario
from engine_service.simulator.workload import FaultDraws, Order, RecordedOrder, StreamState

TICK_S: Final = 0.5  #: how often the shell reminds a scheduler that lets an idle device wait
AGAIN_S: Final = 5.0  #: a closed loop whose request was refused tries again after that
RECORDED: Final = "recorded"  #: the stream of requests that were really made once
_STUCK_AFTER_S: Final = 1800.0

Turn = tuple[float, Event, list[Decision]]


@dataclass(slots=True, kw_only=True)
class Run:
    """One run, not yet summed up."""

    scenario: Scenario
    profile: DeviceProfile
    scheduler: Scheduler
    device: Device
    meter: Meter
    ended_at: float = 0.0
    stuck: int = 0
    losses: int = 0
    disconnects: int = 0
    turns: list[Turn] = field(default_factory=list)  #: the event log, where it was asked for


class Runner:
    """Runs one scenario once."""

    def __init__(
        self,
        scenario: Scenario,
        scheduler: Scheduler,
        *,
        profile: DeviceProfile,
        seed: int,
        check_every: int = 0,
        keep_turns: bool = False,
        on_time: Callable[[float], None] | None = None,
    ) -> None:
        """Prepare a run on the profile's machine.

        check_every: the invariants are checked after every so many turns (0: never). keep_turns: remember all
        events and decisions. on_time is told the virtual time about once per virtual second.
        """
        self._scenario = scenario
        self._scheduler = scheduler
        self._device = Device(profile)
        self._everybody = _with_fixed(scenario.residents)
        self._meter = Meter(scheduler, self._device, self._everybody)
        self._run = Run(
            scenario=scenario, profile=profile, scheduler=scheduler, device=self._device, meter=self._meter
        )
        self._streams = {
            stream.name: StreamState(stream, seed, scenario.duration_s) for stream in scenario.streams
        }
        self._chance = FaultDraws(scenario.faults, seed)
        self._now = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        self._check_every = check_every
        self._keep_turns = keep_turns
        self._num_turns = 0
        self._on_time = on_time
        self._is_down = False
        self._clock_ahead_s = 0.0  #: how far the clock that the scheduler is told has jumped

    # ---- the loop

    def run(self) -> Run:
        """Run to the end and return what happened."""
        self._start()
        end = self._scenario.duration_s + self._scenario.drain_s
        idle_since: float | None = None
        while True:
            flight = self._device.flight
            planned = self._planned[0][0] if self._planned else None
            if flight is not None and (planned is None or flight.ends_at <= planned):
                idle_since = None
                if flight.ends_at > end:
                    break
                self._finish_iteration()
            elif (
                planned is not None
                and planned <= end
                and (flight is not None or not self._must_tick(planned))
            ):
                if flight is None and self._scheduler.state.total_waiting and not self._is_down:
                    self._meter.idle_waiting_s += max(0.0, planned - self._now)
                self._now = max(self._now, planned)
                heapq.heappop(self._planned)[2]()
            elif flight is not None or not self._scheduler.state.total_waiting or self._is_down:
                break
            else:
                idle_since = self._now if idle_since is None else idle_since
                if self._now + TICK_S > end or self._now - idle_since > _STUCK_AFTER_S:
                    break
                self._tick()
        return self._end(end)

    def _must_tick(self, planned: float) -> bool:
        """Return whether the device is idle, somebody waits, and nothing else happens for a while."""
        waits = self._scheduler.state.total_waiting > 0 and not self._is_down
        return waits and planned > self._now + TICK_S

    def _tick(self) -> None:
        self._now += TICK_S
        self._meter.idle_waiting_s += TICK_S
        self._tell(Ticked())

    def _end(self, end: float) -> Run:
        self._now = max(self._now, min(end, self._scenario.duration_s))
        run, state = self._run, self._scheduler.state
        run.ended_at = self._now
        is_drained = self._device.flight is None and not self._planned
        run.stuck = len(state.records) if is_drained else 0
        if self._check_every:
            check(self._scheduler)
        return run

    def _start(self) -> None:
        self._tell(ResidentsChanged(residents=self._scenario.residents))
        self._tell(CapacityChanged(capacity=self._device.profile.capacity))
        for state in self._streams.values():
            for order in state.first() if state.is_closed_loop else state.open_loop():
                self._plan(order.at_s, self._arrival(order))
        for recorded in self._scenario.recorded:
            self._plan(recorded.at_s, self._recorded_arrival(recorded))
        for second in range(0, int(self._scenario.duration_s) + 1, 10):
            self._plan(float(second), self._sample)
        self._plan_faults()

    def _plan(self, at_s: float, what: Callable[[], None]) -> None:
        self._num_planned += 1
        heapq.heappush(self._planned, (at_s, self._num_planned, what))

    def _sample(self) -> None:
        self._meter.sample_gap(now=self._now)
        if self._on_time is not None:
            self._on_time(self._now)

    # ---- what happens

    def _tell(self, event: Event) -> list[Decision]:
        told = self._now + self._clock_ahead_s
        decisions = self._scheduler.handle(event, now=told)
        self._num_turns += 1
        if self._keep_turns:
            self._run.turns.append((told, event, decisions))
        self._meter.decided(decisions, now=self._now)
        for decision in decisions:
            if isinstance(decision, AbortIteration):
                self._device.abort(now=self._now)
                self._meter.aborts += 1
            elif isinstance(decision, Reject) and not isinstance(event, Arrived):
                self._ended(self._meter.outcomes[decision.request_id], "cancelled")
            else:
                self._device.carry_out(decision, now=self._now)
        self._meter.turned(now=self._now)
        if self._check_every and self._num_turns % self._check_every == 0:
            check(self._scheduler)
        return decisions

    def _finish_iteration(self) -> None:
        flight = self._device.flight
        assert flight is not None
        self._now = max(self._now, flight.ends_at)
        results = self._device.finish()
        chunk = self._scheduler.state.policy.max_chunk_tokens
        self._meter.iteration_ended(flight, results, chunk_tokens=chunk, now=self._now)
        seconds = self._now - flight.started_at if flight.is_aborted else flight.seconds
        event = IterationDone(results=results, seconds=seconds, aborted=flight.is_aborted)
        self._tell(event)
        for result in results:
            if result.finished:
                self._goes_on(self._meter.outcomes[result.request_id])

    def _arrival(self, order: Order) -> Callable[[], None]:
        return lambda: self._arrive(order)

    def _recorded_arrival(self, recorded: RecordedOrder) -> Callable[[], None]:
        return lambda: self._arrive_again(recorded)

    def _arrive(self, order: Order) -> None:
        request = Request(
            request_id=RequestId(f"{order.stream.name}-{order.index:05d}"),
            resident_id=order.stream.resident_id,
            class_id=order.stream.class_id,
            prompt_tokens=order.prompt_tokens,
            max_tokens=order.max_tokens,
        )
        outcome = self._outcome(order.stream.name, request, order.output_tokens)
        self._draw_fate(outcome)
        self._hand_in(outcome)

    def _arrive_again(self, recorded: RecordedOrder) -> None:
        request = recorded.request
        outcome = self._outcome(RECORDED, request, recorded.output_tokens)
        if recorded.cancelled_at_s is not None:
            self._plan(recorded.cancelled_at_s, lambda: self._disconnect(request.request_id))
        self._hand_in(outcome)

    def _outcome(self, stream: str, request: Request, output_tokens: int) -> Outcome:
        return Outcome(
            stream=stream,
            resident=request.resident_id,
            class_id=request.class_id,
            sequence=Sequence(request=request, output_length=output_tokens),
            arrived_at=self._now,
            waiting_since=self._now,
        )

    def _hand_in(self, outcome: Outcome) -> None:
        request = outcome.sequence.request
        self._device.introduce(outcome.sequence)
        self._meter.arrived(outcome, now=self._now)
        decisions = self._tell(Arrived(request=request))
        if any(isinstance(d, Reject) and d.request_id == request.request_id for d in decisions):
            self._meter.rejected(outcome, now=self._now)
            self._goes_on(outcome)

    def _ended(self, outcome: Outcome, end: str) -> None:
        self._meter.ended(outcome, end, now=self._now)
        self._goes_on(outcome)

    def _goes_on(self, outcome: Outcome) -> None:
        """Let a closed loop send its next request."""
        state = self._streams.get(outcome.stream)
        if state is None or not state.is_closed_loop:
            return
        pause = state.think_s() + (AGAIN_S if outcome.end == "rejected" else 0.0)
        order = state.order(self._now + pause)
        if order is not None:
            self._plan(order.at_s, self._arrival(order))

    # ---- what goes wrong

    def _draw_fate(self, outcome: Outcome) -> None:
        sequence = outcome.sequence
        delay = self._chance.disconnects_after_s()
        if delay is not None:
            self._plan(self._now + delay, lambda: self._disconnect(sequence.request.request_id))
        sequence.fails_after = self._chance.fails_after(sequence.output_length)

    def _disconnect(self, request_id: RequestId) -> None:
        outcome = self._meter.outcomes[request_id]
        if outcome.end is None:
            self._run.disconnects += 1
            self._ended(outcome, "cancelled")
            self._tell(Cancelled(request_id=request_id))

    def _plan_faults(self) -> None:
        faults = self._scenario.faults
        for at_s in self._chance.losses_at_s(self._scenario.duration_s):
            self._plan(at_s, self._lose_backend)
        for at_s, by_s in faults.clock_jumps:
            self._plan(at_s, self._jump(by_s))
        for day in faults.days:
            event = DayStarted(day=day.day, ends_at=day.at_s + day.ends_in_s)
            self._plan(day.at_s, self._telling(event))

    def _telling(self, event: Event) -> Callable[[], None]:
        def tell() -> None:
            self._tell(event)

        return tell

    def _lose_backend(self) -> None:
        if self._is_down:
            return
        self._is_down = True
        self._run.losses += 1
        self._device.lose_everything()
        self._meter.backend_lost(now=self._now)
        self._tell(BackendLost())
        self._plan(self._now + self._scenario.faults.down_s, self._come_back)

    def _come_back(self) -> None:
        self._is_down = False
        self._tell(CapacityChanged(capacity=self._device.profile.capacity))

    def _jump(self, by_s: float) -> Callable[[], None]:
        def jump() -> None:
            self._clock_ahead_s += by_s
            self._tell(Ticked())

        return jump


def _with_fixed(residents: tuple[Resident, ...]) -> tuple[Resident, ...]:
    """Return everybody who may be charged."""
    known = {resident.resident_id for resident in residents}
    fixed = [Resident(resident_id=r) for r in (GUEST, HOUSE) if r not in known]
    return (*residents, *fixed)
