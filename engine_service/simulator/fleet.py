"""Several machines behind one queue, in virtual time: what `scheduling.placement` is tried out with.

Every machine has a real `Scheduler` and a `Device`. The queue is a `State` of its own: its order (classes,
due work, the reserve, least served first) and its counters are those of one machine, over what all machines
compute. Decides nothing but when to ask. The engine drives one backend and does not use this.

Not spread over the machines: quotas, page caps and limits of running requests hold on each one alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from engine_service.scheduling.admission import Candidate, Order, Tier
from engine_service.scheduling.decisions import AbortIteration, Cancel, Reject
from engine_service.scheduling.events import (
    Arrived,
    Cancelled,
    CapacityChanged,
    Event,
    IterationDone,
    ResidentsChanged,
)
from engine_service.scheduling.invariants import check
from engine_service.scheduling.model import Policy, Request, RequestId, Resident
from engine_service.scheduling.placement import (
    InstanceId,
    Move,
    MoveRule,
    choose_instance,
    movables,
    plan_rebalance,
    view,
)
from engine_service.scheduling.records import Record
from engine_service.scheduling.scheduler import Scheduler
from engine_service.scheduling.state import State
from engine_service.scheduling.windows import WindowSum
from engine_service.simulator.device import Device, Flight, Sequence
from engine_service.simulator.profiles import DeviceProfile

REBALANCE_EVERY_S: Final = 1.0


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One request from arrival to end, wherever it is computed."""

    record: Record  #: as the queue sees it
    sequence: Sequence  #: on the machine that has it now
    output_length: int
    arrived_at: float
    place: InstanceId | None = None  #: None: in the queue, or ended
    output: int = 0  #: tokens it got
    times_moved: int = 0
    places: list[InstanceId] = field(default_factory=list)
    first_token_at: float | None = None
    ended_at: float | None = None


@dataclass(slots=True, kw_only=True)
class _Machine:
    scheduler: Scheduler
    device: Device


class Fleet:
    """The queue, the machines and the clock."""

    def __init__(
        self,
        profiles: Mapping[InstanceId, DeviceProfile],
        *,
        residents: tuple[Resident, ...],
        policy: Policy | None = None,
        rule: MoveRule | None = None,
        assign: Callable[[Request], InstanceId] | None = None,
    ) -> None:
        """Start empty at time 0.

        assign gives every request to a fixed machine as it arrives: what there was before the one queue, to
        compare with. Nobody is moved then.
        """
        self.policy = policy or Policy()
        self.rule = rule or MoveRule()
        self.now = 0.0
        self.tickets: dict[RequestId, Ticket] = {}
        self.rejected: list[RequestId] = []
        self.moves: list[Move] = []
        self.recomputed_tokens = 0
        self.queue = State(self.policy)
        self._assign = assign
        self._moving: dict[RequestId, Move] = {}
        self._rebalanced_at = -math.inf
        self._machines = {
            i: _Machine(scheduler=Scheduler(self.policy), device=Device(p)) for i, p in profiles.items()
        }
        self.queue.residents = {r.resident_id: r for r in residents}
        self.queue.counters.set_weights({r.resident_id: r.weight for r in residents})
        for instance_id, profile in profiles.items():
            self._tell(instance_id, ResidentsChanged(residents=residents))
            self._tell(instance_id, CapacityChanged(capacity=profile.capacity))

    @property
    def is_empty(self) -> bool:
        """Return whether no machine holds or waits for anything."""
        return not any(m.scheduler.state.records or m.device.num_held for m in self._machines.values())

    # ---- time

    def run(self, arrivals: Iterable[tuple[float, Request, int]], *, until: float = math.inf) -> None:
        """Let (time, request, length of its answer) arrive in that order; run to the end, or until then."""
        for at_s, request, output_length in arrivals:
            while self._step(before=at_s):
                pass
            self.now = max(self.now, at_s)
            self._arrive(request, output_length)
        while self._step(before=until):
            pass

    def _step(self, *, before: float) -> bool:
        """End the iteration that ends next, if it does so by then."""
        flying = [(m.device.flight.ends_at, i) for i, m in self._machines.items() if m.device.flight]
        if not flying or min(flying)[0] > before:
            return False
        ends_at, instance_id = min(flying)
        self.now = max(self.now, ends_at)
        self._end_iteration(instance_id)
        self._rebalance()
        self._dispatch()
        return True

    # ---- one queue

    def _arrive(self, request: Request, output_length: int) -> None:
        queue = self.queue
        record = Record(
            request=request,
            arrived_at=self.now,
            due_at=self.now + self.policy.classes[request.class_id].max_wait_s,
            shared=0,
        )
        self.tickets[request.request_id] = Ticket(
            record=record,
            sequence=Sequence(request=request, output_length=output_length),
            output_length=output_length,
            arrived_at=self.now,
        )
        most = max(view(i, m.scheduler.state).most_tokens for i, m in self._machines.items())
        if record.most_tokens > most:
            self._reject(request.request_id)
            return
        if not queue.num_waiting.get(record.resident_id):
            queue.counters.lift(record.resident_id, backlogged=queue.backlogged)
        queue.records[request.request_id] = record
        queue.enqueue(record, now=self.now)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give machines what they could begin, in order; a bounded number may pass who does not fit."""
        self.queue.forget_answers()
        self.queue.refresh(self.now)
        order = Order(self.queue, now=self.now)
        passed: list[Record] = []
        while (candidate := order.pop()) is not None:
            record = candidate.record
            target = self._target(candidate)
            if target is None:
                if record.skips >= self.policy.max_skips:
                    return
                passed.append(record)
                continue
            for skipped in passed:
                skipped.skips += 1
            record.was_due = candidate.tier is Tier.DUE
            self.queue.dequeue(record, now=self.now)
            del self.queue.records[record.request_id]
            self._hand_over(self.tickets[record.request_id], target)
            order.put_back(candidate.flow)

    def _target(self, candidate: Candidate) -> InstanceId | None:
        record = candidate.record
        if self._assign is not None:
            return self._assign(record.request)
        return choose_instance(
            [view(i, m.scheduler.state) for i, m in self._machines.items()],
            tokens=min(record.most_tokens, record.length + self.policy.output_slice_tokens),
            most_tokens=record.most_tokens,
            is_spoken=not candidate.urgency,
        )

    def _hand_over(self, ticket: Ticket, target: InstanceId) -> None:
        ticket.place = target
        ticket.places.append(target)
        self._machines[target].device.introduce(ticket.sequence)
        self._tell(target, Arrived(request=ticket.sequence.request))

    def _reject(self, request_id: RequestId) -> None:
        self.rejected.append(request_id)
        self.tickets[request_id].place = None
        self.tickets[request_id].ended_at = self.now

    # ---- machines

    def _tell(self, instance_id: InstanceId, event: Event) -> None:
        machine = self._machines[instance_id]
        for decision in machine.scheduler.handle(event, now=self.now):
            if isinstance(decision, AbortIteration):
                machine.device.abort(now=self.now)
            elif isinstance(decision, Reject):
                self._reject(decision.request_id)
            else:
                machine.device.carry_out(decision, now=self.now)
        check(machine.scheduler)

    def _end_iteration(self, instance_id: InstanceId) -> None:
        device = self._machines[instance_id].device
        flight = device.flight
        assert flight is not None
        results = device.finish()
        for result in results:
            ticket = self.tickets[result.request_id]
            ticket.output += result.decode_tokens
            if result.decode_tokens and ticket.first_token_at is None:
                ticket.first_token_at = self.now
            if result.finished:
                ticket.place, ticket.ended_at = None, self.now
                self.queue.account(ticket.record.resident_id).finished += 1
        self._charge(flight, {r.request_id: (r.prefill_tokens, r.decode_tokens) for r in results})
        seconds = self.now - flight.started_at
        self._tell(instance_id, IterationDone(results=results, seconds=seconds, aborted=flight.is_aborted))
        for request_id, move in list(self._moving.items()):
            if move.source == instance_id and not self._machines[instance_id].scheduler.knows(request_id):
                self._arrive_elsewhere(move)

    def _charge(self, flight: Flight, computed: Mapping[RequestId, tuple[int, int]]) -> None:
        """Book an iteration on the queue's counters; what had been computed before is the system's."""
        queue, policy = self.queue, self.policy
        fresh = {s.request.request_id: s.fresh for s, _, _ in flight.chunks}
        total = lower = due = 0
        for request_id, (prefilled, decoded) in computed.items():
            record = self.tickets[request_id].record
            new = min(prefilled, fresh.get(request_id, 0))
            self.recomputed_tokens += prefilled - new
            queue.counters.charge_system((prefilled - new) * policy.prefill_cost)
            units = new * policy.prefill_cost + decoded * policy.decode_cost
            queue.counters.charge(record.resident_id, units)
            total += units
            lower += units if record.flow.is_lower else 0
            due += units if record.was_due else 0
            if record.flow.is_spoken:
                window = queue.spoken_spent.setdefault(record.resident_id, WindowSum(policy.voice_window_s))
                window.add(units, now=self.now)
        queue.all_service.add(total, now=self.now)
        queue.lower_service.add(lower, now=self.now)
        queue.due_spent.add(due, now=self.now)

    # ---- moving

    def _rebalance(self) -> None:
        if self._assign is not None or self.now < self._rebalanced_at + REBALANCE_EVERY_S:
            return
        self._rebalanced_at = self.now
        loads = {}
        for instance_id, machine in self._machines.items():
            state = machine.scheduler.state
            free_to_go = [m for m in movables(state) if self._may_move(m.request_id)]
            loads[instance_id] = view(instance_id, state), free_to_go
        for move in plan_rebalance(loads, self.rule, num_moving=len(self._moving)):
            self.moves.append(move)
            self._moving[move.request_id] = move
            self._tell(move.source, Cancelled(request_id=move.request_id))
            if not self._machines[move.source].scheduler.knows(move.request_id):
                self._arrive_elsewhere(move)

    def _may_move(self, request_id: RequestId) -> bool:
        moved = self.tickets[request_id].times_moved
        return request_id not in self._moving and moved < self.policy.max_preemptions

    def _arrive_elsewhere(self, move: Move) -> None:
        """Hand the request over with what it has so far; the other machine computes that again."""
        del self._moving[move.request_id]
        ticket = self.tickets[move.request_id]
        self._machines[move.source].device.carry_out(Cancel(request_id=move.request_id), now=self.now)
        if ticket.ended_at is not None:
            return
        old = ticket.sequence
        request = replace(
            ticket.record.request,
            prompt_tokens=ticket.record.request.prompt_tokens + ticket.output,
            max_tokens=ticket.record.request.max_tokens - ticket.output,
        )
        ticket.sequence = Sequence(
            request=request,
            output_length=ticket.output_length - ticket.output,
            computed=max(old.computed, request.prompt_tokens if ticket.output else 0),
        )
        ticket.times_moved += 1
        self._hand_over(ticket, move.target)
