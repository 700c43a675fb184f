"""What all requests of one class, resident and model have in common: their queue, their urgency, their bills.

Decides nothing; only `state` and `scheduler` change a flow. Urgency is kept here, once per flow, because
nothing but the class, the resident's voice bucket and the resident's quota decides it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_service.scheduling.counters import Account
from engine_service.scheduling.model import (
    FIRST_LOWER_URGENCY,
    THE_MODEL,
    ClassPolicy,
    ModelId,
    Policy,
    RequestId,
    RequestState,
    ResidentId,
    WorkloadClass,
)

if TYPE_CHECKING:
    from engine_service.scheduling.records import Record

FlowId = tuple[WorkloadClass, ResidentId, ModelId]


@dataclass(slots=True, eq=False)
class Flow:
    """One class of one resident, asking one model."""

    class_id: WorkloadClass
    resident_id: ResidentId
    rules: ClassPolicy
    model_id: ModelId = THE_MODEL
    urgency: int = field(init=False)  #: the class's, or less where a bucket or a soft quota is exhausted
    own_urgency: int = field(init=False)  #: the class's
    is_spoken: bool = field(init=False)
    is_lower: bool = field(init=False)  #: served by the background reserve
    is_paused: bool = False  #: kept waiting: the policy pauses the class, or another model serves
    num_waiting: int = 0
    num_held: int = 0  #: requests that hold pages
    num_enqueued: int = 0  #: ever
    spell: int = 0  #: how often it went from nothing waiting to something waiting
    in_order: int = 0  #: service units of requests that were admitted in the usual order
    queue: list[tuple[int, int, float, RequestId]] = field(default_factory=list)  #: a heap; may hold who left
    by_age: list[tuple[float, RequestId]] = field(default_factory=list)  #: the same by age, if that differs

    def __post_init__(self) -> None:
        """Derive what is asked for in every iteration."""
        self.own_urgency = self.urgency = self.class_id.urgency
        self.is_spoken = self.own_urgency == 0
        self.is_lower = self.own_urgency >= FIRST_LOWER_URGENCY

    @property
    def flow_id(self) -> FlowId:
        """Class, resident and model."""
        return self.class_id, self.resident_id, self.model_id

    def push(self, record: Record, *, attained: int | None) -> None:
        """Queue a record: preempted first, then its program's attained service, then age.

        attained None: of a program nothing is known, or nothing matters.
        """
        place = 0 if record.preemptions else 1
        entry = (place, attained or 0, record.arrived_at, record.request_id)
        heapq.heappush(self.queue, entry)
        if self.by_age:
            heapq.heappush(self.by_age, (record.arrived_at, record.request_id))
        elif attained is not None:
            self.by_age = [(arrived_at, request_id) for _, _, arrived_at, request_id in self.queue]
            heapq.heapify(self.by_age)

    def head(self, records: Mapping[RequestId, Record]) -> Record:
        """Return the request that is next in this flow; only while something waits."""
        queue = self.queue
        while True:
            _, _, arrived_at, request_id = queue[0]
            record = records.get(request_id)
            if record is not None and _still_waits(record, arrived_at):
                return record
            heapq.heappop(queue)

    def oldest(self, records: Mapping[RequestId, Record]) -> Record:
        """Return the request that has waited longest; only while something waits."""
        by_age = self.by_age
        while by_age:
            arrived_at, request_id = by_age[0]
            record = records.get(request_id)
            if record is not None and _still_waits(record, arrived_at):
                return record
            heapq.heappop(by_age)
        return self.head(records)

    def empty(self) -> None:
        """Forget who left, now that nothing waits."""
        self.queue.clear()
        self.by_age.clear()


def _still_waits(record: Record, arrived_at: float) -> bool:
    return record.state is RequestState.WAITING and record.arrived_at == arrived_at


@dataclass(slots=True, eq=False)
class Lead:
    """How far one flow's resident was ahead of another's while both waited in the class (micro-units)."""

    spells: tuple[int, int, int]  #: epoch and spells of waiting that it holds for
    at_start: int
    out_of_order: int  #: what the leading one had been served beside its turn at the start
    lowest: int
    highest: int


@dataclass(slots=True, eq=False)
class Bill:
    """What one iteration computed for one payer: tokens are added here, booked and priced by `close`."""

    flow: Flow
    is_systems: bool  #: computed for everybody: the household pays
    was_due: bool  #: admitted by the due tier, whose budget is spent
    was_in_order: bool  #: admitted in the usual order, not ahead of it
    payer: Account  #: who is shown to have used the tokens
    charged: Account  #: the resident's account
    by_class: Account
    is_open: bool = False  #: something was added since it was last closed
    fresh: int = 0  #: prompt tokens computed for the first time
    recomputed: int = 0  #: tokens computed again after a preemption
    decoded: int = 0
    settled: int = 0  #: units of it that a forecast had charged ahead
    micros: int = 0  #: measured time of `fresh` and `decoded`, where time is the unit
    system_micros: int = 0  #: measured time of `recomputed`

    def close(self, policy: Policy, *, is_timed: bool) -> tuple[int, int]:
        """Book the tokens, start afresh, and return what the resident and the system owe (service units)."""
        decoded, payer, by_class = self.decoded, self.payer, self.by_class
        payer.decode_tokens += decoded
        by_class.decode_tokens += decoded
        units, system_units = decoded * policy.decode_cost, 0
        self.decoded = 0
        self.is_open = False
        if self.fresh or self.recomputed:
            payer.prefill_tokens += self.fresh
            by_class.prefill_tokens += self.fresh
            units += self.fresh * policy.prefill_cost
            system_units = self.recomputed * policy.prefill_cost
            self.fresh = self.recomputed = 0
        if is_timed:
            units, system_units = self.micros, self.system_micros
            self.micros = self.system_micros = 0
        return (0, units + system_units) if self.is_systems else (units, system_units)
