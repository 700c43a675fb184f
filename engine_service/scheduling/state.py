"""Everything the scheduler knows at one instant, and the questions that can be asked of it.

Decides nothing and changes nothing but its own bookkeeping (flows, waiting counts). `admission`,
`preemption` and `composition` read it; `scheduler` alone acts on it.

A *flow* is all waiting requests of one class, resident and model, oldest first. Heads of flows are all that
is ever looked at, so the work per decision does not grow with the number of waiting requests. Flows of paused
classes, and of models that do not serve, are set aside: they take part in nothing until they are resumed, as
if they were not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine_service.scheduling.counters import Account, Counters
from engine_service.scheduling.decisions import Compose
from engine_service.scheduling.estimator import CostEstimator, IterationShape
from engine_service.scheduling.flows import Bill, Flow, FlowId, Lead
from engine_service.scheduling.lengths import OutputLengths
from engine_service.scheduling.model import (
    MICRO,
    SYSTEM,
    THE_MODEL,
    Capacity,
    FairnessGoal,
    ModelId,
    Policy,
    RequestId,
    Resident,
    ResidentId,
    WorkloadClass,
    pages_for,
)
from engine_service.scheduling.pace import Pace
from engine_service.scheduling.pages import PageLedger
from engine_service.scheduling.programs import ProgramId, Programs
from engine_service.scheduling.quota import DailyQuota, RollingQuota
from engine_service.scheduling.records import Record
from engine_service.scheduling.windows import WindowSum

OrderKey = tuple[int, int, float, RequestId]
_CHAT = WorkloadClass.CHAT
_CHAT_URGENCY = _CHAT.urgency
_LOWEST_URGENCY = WorkloadClass.BACKGROUND.urgency
_NOBODY: frozenset[ResidentId] = frozenset()


@dataclass(slots=True, kw_only=True)
class InFlight:
    """The iteration under way."""

    composed: Compose
    shape: IterationShape
    started_at: float
    most_chunk_tokens: float = math.inf  #: what the policy allowed when it was composed
    is_aborting: bool = False


@dataclass(slots=True)
class State:
    """The scheduler's memory."""

    policy: Policy
    capacity: Capacity | None = None
    is_backend_up: bool = False  #: False from `BackendLost` to the next `CapacityChanged`
    serving: ModelId = THE_MODEL  #: the model whose memory this is
    is_leaving: bool = False  #: from `ServingStopped` to the next `CapacityChanged`: nobody is admitted
    puts_back_from: int | None = None  #: then: who is no more urgent than that is put back
    switch_micros: int = 0  #: microseconds for which nobody was served because the model changed
    residents: dict[ResidentId, Resident] = field(default_factory=dict)
    records: dict[RequestId, Record] = field(default_factory=dict)
    holding: dict[RequestId, Record] = field(default_factory=dict)
    flows: dict[FlowId, Flow] = field(default_factory=dict)
    bills: dict[tuple[Flow, bool, bool, bool], Bill] = field(default_factory=dict)
    num_waiting: dict[ResidentId, int] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    pages: PageLedger = field(default_factory=PageLedger)
    quota: DailyQuota = field(default_factory=DailyQuota)
    rolling: RollingQuota = field(default_factory=RollingQuota)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    programs: Programs = field(default_factory=Programs)
    estimator: CostEstimator = field(default_factory=CostEstimator)  #: of the model that serves
    estimators: dict[ModelId, CostEstimator] = field(default_factory=dict)  #: of those that served before
    accounts: dict[ResidentId, Account] = field(default_factory=dict)
    class_accounts: dict[WorkloadClass, Account] = field(
        default_factory=lambda: {class_id: Account() for class_id in WorkloadClass}
    )
    in_flight: InFlight | None = None
    coming_prefixes: dict[RequestId, int] = field(default_factory=dict)  #: pages, arrived and not yet pinned
    recomputed_tokens: int = 0
    epoch: int = 0  #: grows when counters stop being comparable (weights, goal, prices, memory)
    leads: dict[tuple[Flow, Flow], Lead] = field(default_factory=dict)  #: kept by `invariants`
    has_changed_cost: bool = False  #: the unit or its prices changed: sums before and after do not compare
    num_iterations: int = 0
    spoken_spent: dict[ResidentId, WindowSum] = field(default_factory=dict)
    due_spent: WindowSum = field(init=False)
    all_service: WindowSum = field(init=False)
    pace: Pace = field(init=False)
    lower_service: WindowSum = field(init=False)
    waited: dict[ResidentId, int] = field(default_factory=dict)
    waiting_since: dict[ResidentId, float] = field(default_factory=dict)
    prefilling: dict[RequestId, Record] = field(default_factory=dict)  #: holding, prompt not computed
    spoken: dict[RequestId, Record] = field(default_factory=dict)  #: holding, voice or accessibility
    paused: dict[RequestId, Record] = field(default_factory=dict)  #: holding, sits iterations out
    leaving: dict[RequestId, Record] = field(default_factory=dict)  #: holding, cancelled
    growing: dict[RequestId, Record] = field(default_factory=dict)  #: decoding beyond their reservation
    waiting_flows: dict[Flow, None] = field(default_factory=dict)  #: flows with something waiting
    set_aside: dict[Flow, None] = field(default_factory=dict)  #: the same, of who is kept waiting
    waiting_by_urgency: list[int] = field(default_factory=lambda: [0] * (_LOWEST_URGENCY + 1))
    held_by_urgency: list[int] = field(default_factory=lambda: [0] * (_LOWEST_URGENCY + 1))
    capped: tuple[Resident, ...] = ()  #: residents with a page cap
    _decodes: tuple[Record, ...] | None = field(default=None, init=False)
    _decode_ids: tuple[RequestId, ...] = field(default=(), init=False)
    _asked_at: float = field(default=-1.0, init=False)
    _out_of_quota: frozenset[ResidentId] = field(default=_NOBODY, init=False)
    _out_of_voice: frozenset[ResidentId] = field(default=_NOBODY, init=False)
    services: dict[ResidentId, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Open the windows of the policy."""
        self.open_windows()
        self.pace = Pace(self.class_accounts)

    def open_windows(self) -> None:
        """Start all windows afresh (a new policy may have other lengths)."""
        self.spoken_spent = {}
        self.due_spent = WindowSum(self.policy.due_window_s)
        self.all_service = WindowSum(self.policy.reserve_window_s)
        self.lower_service = WindowSum(self.policy.reserve_window_s)
        for flow in self.flows.values():
            flow.rules = self.policy.classes[flow.class_id]

    # ---- flows

    def flow(self, class_id: WorkloadClass, resident_id: ResidentId, model_id: ModelId = THE_MODEL) -> Flow:
        """Return the flow of a class, resident and model, opening it if needed."""
        flow = self.flows.get((class_id, resident_id, model_id))
        if flow is None:
            rules = self.policy.classes[class_id]
            flow = Flow(class_id=class_id, resident_id=resident_id, rules=rules, model_id=model_id)
            flow.urgency = self._urgency_of(flow)
            flow.is_paused = self.is_kept_waiting(flow)
            self.flows[flow.flow_id] = flow
        return flow

    def is_kept_waiting(self, flow: Flow) -> bool:
        """Return whether the flow takes part in nothing: its class is paused, or its model does not serve."""
        is_elsewhere = self.is_leaving or flow.model_id != self.serving
        return is_elsewhere or flow.class_id in self.policy.paused_classes

    def bill(self, record: Record) -> Bill:
        """Return where the record's tokens are added up."""
        is_systems = record.request.paid_by_system
        key = (record.flow, is_systems, record.was_due, record.was_in_order)
        bill = self.bills.get(key)
        if bill is None:
            charged = self.account(record.resident_id)
            bill = self.bills[key] = Bill(
                flow=record.flow,
                is_systems=is_systems,
                was_due=record.was_due,
                was_in_order=record.was_in_order,
                payer=self.account(SYSTEM) if is_systems else charged,
                charged=charged,
                by_class=self.class_accounts[record.class_id],
            )
        record.bill = bill
        return bill

    # ---- who is waiting

    def enqueue(self, record: Record, *, now: float) -> None:
        """Put a waiting record into its flow."""
        resident_id = record.resident_id
        flow = record.flow = self.flow(record.class_id, resident_id, record.model_id)
        program_id = self.program_of(record)
        flow.push(record, attained=self.programs.attained(program_id) if program_id else None)
        record.ticket = flow.num_enqueued
        flow.num_enqueued += 1
        flow.num_waiting += 1
        if flow.is_paused:
            self.set_aside[flow] = None
        else:
            self._join(flow, 1, now=now)

    def _join(self, flow: Flow, number: int, *, now: float) -> None:
        """Let that many requests of the flow take part."""
        resident_id = flow.resident_id
        if flow not in self.waiting_flows:
            flow.spell += 1
        if not self.num_waiting.get(resident_id):
            self.waiting_since[resident_id] = now
        self.num_waiting[resident_id] = self.num_waiting.get(resident_id, 0) + number
        self.waiting_by_urgency[flow.urgency] += number
        self.waiting_flows[flow] = None

    def dequeue(self, record: Record, *, now: float) -> None:
        """Note that the record waits no more; its heap entry goes when it surfaces."""
        flow = record.flow
        flow.num_waiting -= 1
        if not flow.num_waiting:
            flow.empty()
            self.set_aside.pop(flow, None)
            self.waiting_flows.pop(flow, None)
        if not flow.is_paused:
            self._leave(flow, 1, now=now)

    def _leave(self, flow: Flow, number: int, *, now: float) -> None:
        """Let that many requests of the flow take part no more."""
        resident_id = flow.resident_id
        self.waiting_by_urgency[flow.urgency] -= number
        self.num_waiting[resident_id] -= number
        if not self.num_waiting[resident_id]:
            self.counters.left_queue(resident_id)
            since = self.waiting_since.pop(resident_id)
            self.waited[resident_id] = self.waited.get(resident_id, 0) + self._weighted_wait(
                resident_id, now - since
            )

    def set_flows_aside(self, *, now: float) -> None:
        """Set the flows aside that are kept waiting, and let the others take part again."""
        turned = [f for f in self.flows.values() if f.is_paused != self.is_kept_waiting(f)]
        idle = {f.resident_id: None for f in turned if f.is_paused and f.num_waiting}
        back = [r for r in idle if not self.num_waiting.get(r)]
        if back:
            self.counters.lift(*back, backlogged=self.backlogged)
        for flow in turned:
            flow.is_paused = not flow.is_paused
            if not flow.num_waiting:
                continue
            if flow.is_paused:
                del self.waiting_flows[flow]
                self.set_aside[flow] = None
                self._leave(flow, flow.num_waiting, now=now)
            else:
                del self.set_aside[flow]
                self._join(flow, flow.num_waiting, now=now)

    def num_set_aside(self, resident_id: ResidentId | None = None) -> int:
        """Return how many requests (of a resident) wait for their class, or their model, to be resumed."""
        return sum(f.num_waiting for f in self.set_aside if resident_id in (None, f.resident_id))

    def heads(self) -> Iterator[tuple[FlowId, Record]]:
        """Yield the oldest waiting record of every flow that has one."""
        for flow in list(self.waiting_flows):
            yield flow.flow_id, flow.head(self.records)

    @property
    def backlogged(self) -> list[ResidentId]:
        """Residents with something waiting."""
        return [resident_id for resident_id, count in self.num_waiting.items() if count]

    @property
    def total_waiting(self) -> int:
        """Waiting requests of all residents, without those set aside."""
        return sum(self.num_waiting.values())

    # ---- who holds pages

    def hold(self, record: Record) -> None:
        """Note that the record holds pages now, with its prompt still to be computed."""
        self.holding[record.request_id] = self.prefilling[record.request_id] = record
        record.decodes, record.bill = False, None
        flow = record.flow
        flow.num_held += 1
        self.held_by_urgency[flow.urgency] += 1
        if flow.is_spoken:
            self.spoken[record.request_id] = record

    def let_go(self, record: Record) -> None:
        """Note that the record holds nothing any more; harmless if it held nothing."""
        if self.holding.pop(record.request_id, None) is None:
            return
        self._close_account(record)
        record.flow.num_held -= 1
        self.held_by_urgency[record.flow.urgency] -= 1
        for group in (self.prefilling, self.spoken, self.growing, self.paused, self.leaving):
            group.pop(record.request_id, None)
        if record.decodes:
            record.decodes, self._decodes = False, None

    def _close_account(self, record: Record) -> None:
        """Settle what changes only while it computes: forecast, program, highest position computed."""
        record.charged = max(record.charged, record.stored)
        if record.prepaid:
            self.counters.repay(record.resident_id, record.prepaid)
            self.services.pop(record.resident_id, None)
            record.prepaid = 0
        program_id = self.program_of(record)
        if program_id is not None:
            units = record.attained_units(self.policy.prefill_cost, self.policy.decode_cost)
            self.programs.add(program_id, max(0, units - record.attained))
            record.attained = max(record.attained, units)

    def program_of(self, record: Record) -> ProgramId | None:
        """Return the agent run that an agent's call belongs to, None for all other work."""
        if record.class_id is not WorkloadClass.AGENT or record.request.program_id is None:
            return None
        return record.resident_id, record.request.program_id

    def note_progress(self, record: Record) -> None:
        """Note whether the record decodes now: also a recomputed prompt of which one token is left."""
        if record.is_decoding != record.decodes:
            record.decodes, self._decodes = not record.decodes, None
        if record.decodes:
            self.prefilling.pop(record.request_id, None)
            if record.length > record.reserved:
                self.growing[record.request_id] = record

    def note_cancelled(self, record: Record) -> None:
        """Mark a record that holds pages; it takes part in no further iteration."""
        record.is_cancelled = True
        self.leaving[record.request_id] = record
        self._decodes = None

    def decodes(self) -> tuple[Record, ...]:
        """Return who decodes, in the order of admission; the same tuple until somebody comes or goes."""
        if self._decodes is None:
            self._decodes = tuple([r for r in self.holding.values() if r.decodes and not r.is_cancelled])
            self._decode_ids = tuple([r.request_id for r in self._decodes])
        return self._decodes

    def ids_of(self, decodes: tuple[Record, ...]) -> tuple[RequestId, ...]:
        """Return the ids of records that decode."""
        return self._decode_ids if decodes is self._decodes else tuple([r.request_id for r in decodes])

    # ---- how urgent, how served

    def forget_answers(self) -> None:
        """Forget cached urgencies and services (something was charged or changed)."""
        self._asked_at = -1.0

    def refresh(self, now: float) -> None:
        """Bring the urgency of all flows up to date; what was asked since the last event stays."""
        if now == self._asked_at:
            return
        self._asked_at = now
        self.services.clear()
        out_of_quota = self.quota.exhausted() | self.rolling.exhausted(now=now)
        out_of_voice = self._silenced(now=now)
        if out_of_quota != self._out_of_quota or out_of_voice != self._out_of_voice:
            self._out_of_quota, self._out_of_voice = out_of_quota, out_of_voice
            for flow in self.flows.values():
                self._set_urgency(flow, self._urgency_of(flow))

    def _silenced(self, *, now: float) -> frozenset[ResidentId]:
        bucket = self.policy.voice_bucket
        spoken = self.spoken_spent.items()
        return frozenset([r for r, spent in spoken if spent.has_reached(bucket, now=now)]) or _NOBODY

    def _set_urgency(self, flow: Flow, urgency: int) -> None:
        for counts, number in (
            (self.waiting_by_urgency, 0 if flow.is_paused else flow.num_waiting),
            (self.held_by_urgency, flow.num_held),
        ):
            counts[flow.urgency] -= number
            counts[urgency] += number
        flow.urgency = urgency

    def _urgency_of(self, flow: Flow) -> int:
        if flow.resident_id in self._out_of_quota:
            return _LOWEST_URGENCY
        if flow.is_spoken and flow.resident_id in self._out_of_voice:
            return _CHAT_URGENCY
        return flow.own_urgency

    def urgency(self, record: Record, *, now: float) -> int:
        """Return the class's urgency, or less where a bucket or a soft quota is exhausted."""
        self.refresh(now)
        return record.flow.urgency

    def someone_speaks(self, *, now: float) -> bool:
        """Return whether a spoken request (within its bucket) holds pages."""
        if not self.spoken:
            return False
        self.refresh(now)
        return any(record.flow.urgency == 0 for record in self.spoken.values())

    def least_urgent_held(self, *, now: float) -> int:
        """Return the highest urgency number among requests that hold pages (-1 if none does)."""
        self.refresh(now)
        for urgency in range(_LOWEST_URGENCY, -1, -1):
            if self.held_by_urgency[urgency]:
                return urgency
        return -1

    def most_urgent_waiting(self, *, now: float) -> int | None:
        """Return the lowest urgency number among waiting requests, None if nothing waits."""
        self.refresh(now)
        for urgency, count in enumerate(self.waiting_by_urgency):
            if count:
                return urgency
        return None

    def due_at(self, record: Record, *, urgency: int) -> float:
        """Return when the request becomes due.

        Whoever competes as another class (bucket or quota exhausted) also waits like it: otherwise a flood
        of voice would come back through the due tier.
        """
        if urgency == record.flow.own_urgency:
            return record.due_at
        stand_in = _CHAT if urgency == _CHAT_URGENCY else WorkloadClass.BACKGROUND
        return record.arrived_at + max(
            self.policy.classes[stand_in].max_wait_s, self.policy.classes[record.class_id].max_wait_s
        )

    def serving_key(self, record: Record, *, now: float) -> tuple[int, float, RequestId]:
        """Least served first, then oldest, then by id: no tie is left to chance."""
        return (self.served(record.resident_id, now=now), record.arrived_at, record.request_id)

    def order_key(self, record: Record, *, now: float) -> OrderKey:
        """Return urgency and then the serving key."""
        return (self.urgency(record, now=now), *self.serving_key(record, now=now))

    def served(self, resident_id: ResidentId, *, now: float) -> int:
        """Return what the household's idea of equal compares: less goes first."""
        self.refresh(now)
        served = self.services.get(resident_id)
        if served is None:
            served = self.services[resident_id] = self._served_of(resident_id, now=now)
        return served

    def _served_of(self, resident_id: ResidentId, *, now: float) -> int:
        match self.policy.fairness:
            case FairnessGoal.SERVICE:
                return self.counters.value(resident_id)
            case FairnessGoal.WAITING:
                return -self.waited_total(resident_id, now=now)
            case FairnessGoal.COMPLETIONS:
                return self.account(resident_id).finished * MICRO // self.weight(resident_id)
            case FairnessGoal.CLASS_ONLY:
                return 0

    def waited_total(self, resident_id: ResidentId, *, now: float) -> int:
        """Return the weighted time (micro-units) the resident has had something waiting."""
        waited = self.waited.get(resident_id, 0)
        since = self.waiting_since.get(resident_id)
        return waited if since is None else waited + self._weighted_wait(resident_id, now - since)

    def _weighted_wait(self, resident_id: ResidentId, seconds: float) -> int:
        return int(seconds * MICRO) * self.weight(resident_id)

    def weight(self, resident_id: ResidentId) -> int:
        """Return the weight; a removed resident drains with weight 1."""
        resident = self.residents.get(resident_id)
        return 1 if resident is None else resident.weight

    def account(self, resident_id: ResidentId) -> Account:
        """Return the resident's account, opening it if needed."""
        account = self.accounts.get(resident_id)
        if account is None:
            account = self.accounts[resident_id] = Account()
        return account

    # ---- memory: one formula for everybody

    @property
    def known_capacity(self) -> Capacity:
        """The capacity; asking before it is known is a bug of the shell."""
        if self.capacity is None:
            raise RuntimeError("CapacityChanged must be the first event")
        return self.capacity

    def headroom_pages(self, urgency: int) -> int:
        """Return the pages that this urgency must leave free (Llumnix's headroom as virtual usage)."""
        return (
            0 if urgency == 0 else min(self.policy.voice_headroom_pages, self.known_capacity.num_pages // 4)
        )

    def headroom_sequences(self, urgency: int) -> int:
        """Return the sequences that this urgency must leave free."""
        return (
            0
            if urgency == 0
            else min(self.policy.voice_headroom_sequences, self.known_capacity.max_sequences - 1)
        )

    def prefix_allowance(self) -> int:
        """Return the most pages that pinned prefixes may hold."""
        return int(self.known_capacity.num_pages * self.policy.prefix_share)

    def admission_tokens(self, record: Record) -> int:
        """Return the token slots to reserve at admission.

        All it may ever need where it cannot be taken back (or was taken back often enough), else the
        length it will probably have, and at least one slice of growth: to take in more requests than will
        fit when they have grown is to compute some of them twice.
        """
        if not self.known_capacity.can_release or record.preemptions >= self.policy.max_preemptions:
            return record.most_tokens
        expected = self.lengths.expected(record.flow.flow_id, most=record.request.max_tokens) or 0
        growth = max(self.policy.output_slice_tokens, expected - record.output)
        return min(record.most_tokens, record.length + growth)

    def pages_needed(self, record: Record, reserved_tokens: int) -> int:
        """Return the pages for that many slots, the shared prefix not counted."""
        return pages_for(reserved_tokens - record.shared, self.known_capacity.page_tokens)

    def is_over_cap(self, resident_id: ResidentId, *, more_pages: int = 0) -> bool:
        """Return whether the resident holds (or would hold) more than its page cap."""
        if not self.capped:
            return False
        resident = self.residents.get(resident_id)
        if resident is None or resident.page_cap is None:
            return False
        return self.pages.held_by(resident_id) + more_pages > resident.page_cap

    @property
    def has_borrowers(self) -> bool:
        """Return whether some resident holds more than its page cap."""
        return any(
            self.pages.held_by(r.resident_id) > r.page_cap for r in self.capped if r.page_cap is not None
        )
