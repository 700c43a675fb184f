"""The yardstick: what a home server without this scheduler does, behind the same door.

First come, first served over a fixed number of slots: a request takes a free slot or waits in arrival
order; every iteration decodes all slots and fills the rest of a large batch with prompts in slot order.
No classes, no residents, no preemption, no abort. Used to measure what Fairhearth changes on the same
machine, model and work; never used to serve a household.

Source: the queueing of llama.cpp's server (deferred deque, `n_batch` 2048, 4 slots), as read and
measured; Ollama's default of one slot would only be slower.
"""

from __future__ import annotations

from engine_service.scheduling import composition
from engine_service.scheduling.decisions import Admit, Compose, Decision, PrefillChunk
from engine_service.scheduling.estimator import IterationShape
from engine_service.scheduling.model import FairnessGoal, Policy, RequestState
from engine_service.scheduling.records import Record
from engine_service.scheduling.scheduler import Scheduler
from engine_service.scheduling.state import InFlight


class FirstComeFirstServed(Scheduler):
    """The same accounts and ledger; the order of arrival instead of a policy."""

    def __init__(
        self, policy: Policy | None = None, *, num_slots: int = 4, max_batch_tokens: int = 2048
    ) -> None:
        """Serve num_slots requests at once, up to max_batch_tokens tokens per iteration."""
        super().__init__(policy or Policy(fairness=FairnessGoal.CLASS_ONLY))
        self._num_slots = num_slots
        self._max_batch_tokens = max_batch_tokens

    def _abort_for(self, record: Record, *, now: float) -> list[Decision]:
        return []

    def _plan(self, *, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        self._drain_overcommitted(decisions, now=now)
        self._put_back(decisions, now=now)
        self._take_slots(decisions, now=now)
        composed = self._compose_in_slot_order()
        if composed.is_empty:
            return decisions
        self._mark_participants(composed, decisions, now=now)
        order = Compose(decode_ids=tuple(r.request_id for r in composed.decodes), prefills=composed.prefills)
        self.state.in_flight = InFlight(composed=order, shape=composed.shape, started_at=now)
        decisions.append(order)
        return decisions

    def _take_slots(self, decisions: list[Decision], *, now: float) -> None:
        state = self.state
        slots = min(self._num_slots, state.known_capacity.max_sequences)
        while len(state.holding) < slots:
            heads = [record for _, record in state.heads()]
            if not heads:
                return
            record = min(heads, key=lambda r: (r.arrived_at, r.request_id))
            need = state.pages_needed(record, record.most_tokens)
            if need > state.pages.free:
                return
            state.dequeue(record, now=now)
            state.pages.reserve(record.request_id, record.resident_id, need)
            record.state = RequestState.RUNNING
            record.admitted_at = record.last_served_at = now
            record.pages, record.reserved = need, record.most_tokens
            record.stored = record.stored_at_admission = record.shared
            record.is_new_on_backend = True
            state.hold(record)
            decisions.append(Admit(request_id=record.request_id, reserved_tokens=record.most_tokens))

    def _compose_in_slot_order(self) -> composition.Composition:
        slots = [r for r in self.state.holding.values() if not r.is_cancelled]
        decodes = tuple(r for r in slots if r.is_decoding)
        budget = self._max_batch_tokens - len(decodes)
        prefills = []
        for record in slots:
            size = min(record.remaining, budget)
            if not record.is_decoding and size > 0:
                prefills.append(PrefillChunk(request_id=record.request_id, num_tokens=size))
                budget -= size
        shape = IterationShape(
            chunk_tokens=sum(chunk.num_tokens for chunk in prefills),
            num_decodes=len(decodes),
            decode_context=sum(r.stored for r in decodes),
        )
        return composition.Composition(
            decodes=decodes, prefills=tuple(prefills), shape=shape, predicted_s=None
        )
