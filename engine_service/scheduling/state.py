"""Everything the scheduler knows at one instant, and the questions that can be asked of it.

Decides nothing and changes nothing but its own bookkeeping (flows, waiting counts). `admission`,
`preemption` and `composition` read it; `scheduler` alone acts on it.

A *flow* is all waiting requests of one class and resident, oldest first. Heads of flows are all that is
ever looked at, so the work per decision does not grow with the number of waiting requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine_service.scheduling.counters import Account, Counters
from engine_service.scheduling.decisions import Compose
from engine_service.scheduling.estimator import CostEstimator, IterationShape
from engine_service.scheduling.model import (
    MICRO,
    Capacity,
    FairnessGoal,
    Policy,
    RequestId,
    RequestState,
    Resident,
    ResidentId,
    WorkloadClass,
    pages_for,
)
from engine_service.scheduling.pages import PageLedger
from engine_service.scheduling.quota import DailyQuota
from engine_service.scheduling.records import Record
from engine_service.scheduling.windows import WindowSum

FlowId = tuple[WorkloadClass, ResidentId]
OrderKey = tuple[int, int, float, RequestId]
_CHAT = WorkloadClass.CHAT
_CHAT_URGENCY = _CHAT.urgency
_LOWEST_URGENCY = WorkloadClass.BACKGROUND.urgency


@dataclass(slots=True, kw_only=True)
class InFlight:
    """The iteration under way."""

    composed: Compose
    shape: IterationShape
    started_at: float
    is_aborting: bool = False


@dataclass(slots=True)
class State:
    """The scheduler's memory."""

    policy: Policy
    capacity: Capacity | None = None
    is_backend_up: bool = False  #: False from `BackendLost` to the next `CapacityChanged`
    residents: dict[ResidentId, Resident] = field(default_factory=dict)
    records: dict[RequestId, Record] = field(default_factory=dict)
    holding: dict[RequestId, Record] = field(default_factory=dict)
    flows: dict[FlowId, list[tuple[int, float, RequestId]]] = field(default_factory=dict)
    num_waiting: dict[ResidentId, int] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    pages: PageLedger = field(default_factory=PageLedger)
    quota: DailyQuota = field(default_factory=DailyQuota)
    estimator: CostEstimator = field(default_factory=CostEstimator)
    accounts: dict[ResidentId, Account] = field(default_factory=dict)
    class_accounts: dict[WorkloadClass, Account] = field(
        default_factory=lambda: {class_id: Account() for class_id in WorkloadClass}
    )
    in_flight: InFlight | None = None
    coming_prefixes: dict[RequestId, int] = field(default_factory=dict)  #: pages, arrived and not yet pinned
    recomputed_tokens: int = 0
    has_changed_cost: bool = False  #: the unit or its prices changed: sums before and after do not compare
    num_iterations: int = 0
    spoken_spent: dict[ResidentId, WindowSum] = field(default_factory=dict)
    due_spent: WindowSum = field(init=False)
    all_service: WindowSum = field(init=False)
    lower_service: WindowSum = field(init=False)
    waited: dict[ResidentId, int] = field(default_factory=dict)
    waiting_since: dict[ResidentId, float] = field(default_factory=dict)
    prefilling: dict[RequestId, Record] = field(default_factory=dict)  #: holding, prompt not computed
    spoken: dict[RequestId, Record] = field(default_factory=dict)  #: holding, voice or accessibility
    held_flows: dict[FlowId, int] = field(default_factory=dict)  #: holding requests by flow
    waiting_flows: dict[FlowId, int] = field(default_factory=dict)  #: waiting requests by flow
    growing: dict[RequestId, Record] = field(default_factory=dict)  #: decoding beyond their reservation
    losable: list[Record] | None = None  #: cached by `preemption`; None: ask again
    _asked_at: float = field(default=-1.0, init=False)
    _urgencies: dict[FlowId, int] = field(default_factory=dict, init=False)
    _services: dict[ResidentId, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Open the windows of the policy."""
        self.open_windows()

    def open_windows(self) -> None:
        """Start all windows afresh (a new policy may have other lengths)."""
        self.spoken_spent = {}
        self.due_spent = WindowSum(self.policy.due_window_s)
        self.all_service = WindowSum(self.policy.reserve_window_s)
        self.lower_service = WindowSum(self.policy.reserve_window_s)

    # ---- who is waiting

    def enqueue(self, record: Record, *, now: float) -> None:
        """Put a waiting record into its flow."""
        resident_id = record.resident_id
        flow = self.flows.setdefault(record.flow_id, [])
        heapq.heappush(flow, (0 if record.preemptions else 1, record.arrived_at, record.request_id))
        if not self.num_waiting.get(resident_id):
            self.waiting_since[resident_id] = now
        self.num_waiting[resident_id] = self.num_waiting.get(resident_id, 0) + 1
        self.waiting_flows[record.flow_id] = self.waiting_flows.get(record.flow_id, 0) + 1

    def dequeue(self, record: Record, *, now: float) -> None:
        """Note that the record waits no more; its heap entry goes when it surfaces."""
        resident_id = record.resident_id
        self.waiting_flows[record.flow_id] -= 1
        self.num_waiting[resident_id] -= 1
        if not self.num_waiting[resident_id]:
            self.counters.left_queue(resident_id)
            since = self.waiting_since.pop(resident_id)
            self.waited[resident_id] = self.waited.get(resident_id, 0) + self._weighted_wait(
                resident_id, now - since
            )

    def heads(self) -> Iterator[tuple[FlowId, Record]]:
        """Yield the oldest waiting record of every flow, in the order the flows came to be."""
        for flow_id, flow in self.flows.items():
            if not self.waiting_flows.get(flow_id):
                flow.clear()
            while flow:
                _, arrived_at, request_id = flow[0]
                record = self.records.get(request_id)
                if (
                    record is not None
                    and record.state is RequestState.WAITING
                    and record.arrived_at == arrived_at
                ):
                    yield flow_id, record
                    break
                heapq.heappop(flow)

    @property
    def backlogged(self) -> list[ResidentId]:
        """Residents with something waiting."""
        return [resident_id for resident_id, count in self.num_waiting.items() if count]

    @property
    def total_waiting(self) -> int:
        """Waiting requests of all residents."""
        return sum(self.num_waiting.values())

    # ---- who holds pages

    def hold(self, record: Record) -> None:
        """Note that the record holds pages now, with its prompt still to be computed."""
        self.holding[record.request_id] = self.prefilling[record.request_id] = record
        self.held_flows[record.flow_id] = self.held_flows.get(record.flow_id, 0) + 1
        if record.class_id.is_spoken:
            self.spoken[record.request_id] = record

    def let_go(self, record: Record) -> None:
        """Note that the record holds nothing any more; harmless if it held nothing."""
        if self.holding.pop(record.request_id, None) is None:
            return
        self.losable = None
        self.held_flows[record.flow_id] -= 1
        for group in (self.prefilling, self.spoken, self.growing):
            group.pop(record.request_id, None)

    # ---- how urgent, how served

    def forget_answers(self) -> None:
        """Forget cached urgencies, services and victims (something was charged or changed)."""
        self._asked_at = -1.0
        self.losable = None

    def _ask(self, now: float) -> None:
        if now != self._asked_at:
            self._asked_at = now
            self._urgencies.clear()
            self._services.clear()

    def urgency(self, record: Record, *, now: float) -> int:
        """Return the class's urgency, or less where a bucket or a soft quota is exhausted."""
        return self.flow_urgency(record.flow_id, now=now)

    def flow_urgency(self, flow_id: FlowId, *, now: float) -> int:
        """Return the urgency that all requests of a class and resident have now."""
        self._ask(now)
        urgency = self._urgencies.get(flow_id)
        if urgency is None:
            urgency = self._urgencies[flow_id] = self._urgency_of(*flow_id, now=now)
        return urgency

    def _urgency_of(self, class_id: WorkloadClass, resident_id: ResidentId, *, now: float) -> int:
        if self.quota.is_spent(resident_id):
            return _LOWEST_URGENCY
        if class_id.is_spoken and not self.has_voice_bucket(resident_id, now=now):
            return _CHAT_URGENCY
        return class_id.urgency

    def someone_speaks(self, *, now: float) -> bool:
        """Return whether a spoken request (within its bucket) holds pages."""
        return any(self.flow_urgency(record.flow_id, now=now) == 0 for record in self.spoken.values())

    def least_urgent_held(self, *, now: float) -> int:
        """Return the highest urgency number among requests that hold pages (-1 if none does)."""
        return max(
            (self.flow_urgency(flow_id, now=now) for flow_id, count in self.held_flows.items() if count),
            default=-1,
        )

    def most_urgent_waiting(self, *, now: float) -> int | None:
        """Return the lowest urgency number among waiting requests, None if nothing waits."""
        return min(
            (self.flow_urgency(flow_id, now=now) for flow_id, count in self.waiting_flows.items() if count),
            default=None,
        )

    def due_at(self, record: Record, *, urgency: int) -> float:
        """Return when the request becomes due.

        Whoever competes as another class (bucket or quota exhausted) also waits like it: otherwise a flood
        of voice would come back through the due tier.
        """
        if urgency == record.class_id.urgency:
            return record.due_at
        stand_in = _CHAT if urgency == _CHAT_URGENCY else WorkloadClass.BACKGROUND
        return record.arrived_at + max(
            self.policy.classes[stand_in].max_wait_s, self.policy.classes[record.class_id].max_wait_s
        )

    def has_voice_bucket(self, resident_id: ResidentId, *, now: float) -> bool:
        """Return whether the resident may still speak ahead of the order."""
        spent = self.spoken_spent.get(resident_id)
        return spent is None or spent.total(now=now) < self.policy.voice_bucket

    def serving_key(self, record: Record, *, now: float) -> tuple[int, float, RequestId]:
        """Least served first, then oldest, then by id: no tie is left to chance."""
        return (self._served(record.resident_id, now=now), record.arrived_at, record.request_id)

    def order_key(self, record: Record, *, now: float) -> OrderKey:
        """Return urgency and then the serving key."""
        return (self.urgency(record, now=now), *self.serving_key(record, now=now))

    def _served(self, resident_id: ResidentId, *, now: float) -> int:
        self._ask(now)
        served = self._services.get(resident_id)
        if served is None:
            served = self._services[resident_id] = self._served_of(resident_id, now=now)
        return served

    def _served_of(self, resident_id: ResidentId, *, now: float) -> int:
        match self.policy.fairness:
            case FairnessGoal.SERVICE:
                return self.counters.value(resident_id)
            case FairnessGoal.WAITING:
                waited = self.waited.get(resident_id, 0)
                since = self.waiting_since.get(resident_id)
                if since is not None:
                    waited += self._weighted_wait(resident_id, now - since)
                return -waited
            case FairnessGoal.COMPLETIONS:
                return self.account(resident_id).finished * MICRO // self.weight(resident_id)
            case FairnessGoal.CLASS_ONLY:
                return 0

    def _weighted_wait(self, resident_id: ResidentId, seconds: float) -> int:
        return int(seconds * MICRO) * self.weight(resident_id)

    def weight(self, resident_id: ResidentId) -> int:
        """Return the weight; a removed resident drains with weight 1."""
        resident = self.residents.get(resident_id)
        return 1 if resident is None else resident.weight

    def account(self, resident_id: ResidentId) -> Account:
        """Return the resident's account, opening it if needed."""
        return self.accounts.setdefault(resident_id, Account())

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

        All it may ever need where it cannot be taken back (or was taken back often enough), else its
        length and one slice of growth.
        """
        is_fixed = not self.known_capacity.can_release or record.preemptions >= self.policy.max_preemptions
        grown = record.length + self.policy.output_slice_tokens
        return record.most_tokens if is_fixed else min(record.most_tokens, grown)

    def pages_needed(self, record: Record, reserved_tokens: int) -> int:
        """Return the pages for that many slots, the shared prefix not counted."""
        return pages_for(reserved_tokens - record.shared, self.known_capacity.page_tokens)

    def is_over_cap(self, resident_id: ResidentId, *, more_pages: int = 0) -> bool:
        """Return whether the resident holds (or would hold) more than its page cap."""
        resident = self.residents.get(resident_id)
        if resident is None or resident.page_cap is None:
            return False
        return self.pages.held_by(resident_id) + more_pages > resident.page_cap

    @property
    def has_borrowers(self) -> bool:
        """Return whether some resident holds more than its page cap."""
        return any(self.is_over_cap(resident_id) for resident_id in self.residents)
