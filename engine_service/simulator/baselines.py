"""What others do, behind the same door and on the same device: the yardsticks of every comparison.

Each keeps the accounts, the ledger and the windows of the real scheduler, so that one meter measures all;
each replaces who is next and what an iteration holds. None is ever used to serve a household.

    fifo           an ungated ExLlamaV2 generator: starts all that fits with prompt and longest output
                   reserved, computes one chunk of every unfinished prompt per iteration, lets four pass
                   before it stops
    fifo-chunked   the same with the policy's chunk: small chunks alone are not stall-free
    vtc            Virtual Token Counter without classes (Sheng et al., OSDI 2024): fair, blind to urgency
    vllm-priority  vLLM's `priority`: running before waiting in the order of admission, memory is the only
                   reason to preempt, a head that does not fit blocks, a step that preempted admits nobody
    class_only     strict classes, then arrival; nothing ages. The real scheduler with a policy

Sources: the behaviour of exllamav2 0.3.2 and vLLM 0.33 as read by the team (scheduling notes, sections 0 and
1.2); VTC's algorithm 2. No code was taken from them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Final

from engine_service.scheduling import composition
from engine_service.scheduling.decisions import Admit, Compose, Decision, Grow, PrefillChunk, Reject
from engine_service.scheduling.estimator import IterationShape
from engine_service.scheduling.events import Arrived, BackendLost, Event
from engine_service.scheduling.model import (
    MICRO,
    FairnessGoal,
    Policy,
    RejectReason,
    RequestId,
    RequestState,
    ResidentId,
)
from engine_service.scheduling.records import Record
from engine_service.scheduling.scheduler import Scheduler
from engine_service.scheduling.state import InFlight

EXLLAMA_CHUNK_TOKENS: Final = 2048
EXLLAMA_MAX_SKIPS: Final = 4
VLLM_TOKEN_BUDGET: Final = 2048


class Baseline(Scheduler):
    """Admission and composition by another rule; nobody is aborted, paused or refused growth."""

    def __init__(self, policy: Policy, *, chunk_tokens: int) -> None:
        """Compute at most chunk_tokens of a prompt at a time."""
        super().__init__(policy)
        self._chunk_tokens = chunk_tokens

    def _abort_for(self, record: Record, *, now: float) -> list[Decision]:
        return []

    def _refusal(self, record: Record, *, now: float) -> Reject | None:
        """Refuse what cannot run at all; queues have no limits here."""
        refused = super()._refusal(record, now=now)
        limits = (
            RejectReason.TOO_MANY_REQUESTS,
            RejectReason.QUEUE_FULL,
            RejectReason.QUOTA_EXHAUSTED,
            RejectReason.ROLLING_EXHAUSTED,
        )
        return None if refused is not None and refused.reason in limits else refused

    def _plan(self, *, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        self._drain_overcommitted(decisions, now=now)
        self._start(decisions, now=now)
        decodes, prefills = self._take_part()
        if not decodes and not prefills:
            return decisions
        shape = IterationShape(
            chunk_tokens=sum(chunk.num_tokens for chunk in prefills),
            num_decodes=len(decodes),
            decode_context=sum(record.stored for record in decodes),
        )
        composed = composition.Composition(decodes=decodes, prefills=prefills, shape=shape, predicted_s=None)
        self._mark_participants(composed, decisions, now=now)
        order = Compose(decode_ids=tuple(r.request_id for r in decodes), prefills=prefills)
        self.state.in_flight = InFlight(composed=order, shape=shape, started_at=now)
        decisions.append(order)
        return decisions

    def _start(self, decisions: list[Decision], *, now: float) -> None:
        raise NotImplementedError

    def _take_part(self) -> tuple[tuple[Record, ...], tuple[PrefillChunk, ...]]:
        """Decode everybody and compute one chunk of every unfinished prompt."""
        running = [r for r in self.state.holding.values() if not r.is_cancelled]
        granularity = self.state.known_capacity.chunk_granularity
        chunks = []
        for record in running:
            if record.is_decoding:
                continue
            size = min(record.remaining, self._chunk_tokens)
            if size < record.remaining:
                size -= size % granularity
            chunks.append(PrefillChunk(request_id=record.request_id, num_tokens=size))
        return tuple(r for r in running if r.is_decoding), tuple(chunks)

    def _room_for(self, record: Record) -> bool:
        """Return whether a sequence is free, and pages for its prompt and its longest output."""
        state = self.state
        return (
            len(state.holding) < state.known_capacity.max_sequences
            and state.pages_needed(record, record.most_tokens) <= state.pages.free
        )

    def _take_in(self, record: Record, reserved: int, decisions: list[Decision], *, now: float) -> None:
        state = self.state
        need = state.pages_needed(record, reserved)
        state.dequeue(record, now=now)
        state.pages.reserve(record.request_id, record.resident_id, need)
        record.state = RequestState.RUNNING
        record.admitted_at = record.last_served_at = now
        record.pages, record.reserved = need, reserved
        record.stored = record.stored_at_admission = record.shared
        record.is_new_on_backend = True
        state.hold(record)
        decisions.append(Admit(request_id=record.request_id, reserved_tokens=reserved))


class Ungated(Baseline):
    """First come, first served, and everything that fits is started at once (ExLlamaV2)."""

    def __init__(self, policy: Policy, *, chunk_tokens: int = EXLLAMA_CHUNK_TOKENS) -> None:
        """Start with an empty queue."""
        super().__init__(policy, chunk_tokens=chunk_tokens)
        self._pending: deque[Record] = deque()  #: in the order of arrival; who went away is still in it
        self._looked_at: tuple[int, int, int] | None = None
        self._num_changes = 0

    def _note(self, event: Event, *, now: float) -> list[Decision]:
        decisions = super()._note(event, now=now)
        match event:
            case Arrived(request=request) if request.request_id in self.state.records:
                self._pending.append(self.state.records[request.request_id])
                self._num_changes += 1
            case BackendLost():
                self._pending = deque(r for r in self.state.records.values() if not r.holds_pages)
                self._num_changes += 1
            case _:
                pass
        return decisions

    def _start(self, decisions: list[Decision], *, now: float) -> None:
        state = self.state
        seen = (state.pages.free, len(state.holding), self._num_changes)
        if seen == self._looked_at or len(state.holding) >= state.known_capacity.max_sequences:
            return
        skipped: list[Record] = []
        while self._pending and len(state.holding) < state.known_capacity.max_sequences:
            record = self._pending.popleft()
            if record.state is not RequestState.WAITING:
                continue
            if not self._room_for(record):
                skipped.append(record)
                continue
            if any(other.skips >= EXLLAMA_MAX_SKIPS for other in skipped):
                skipped.append(record)
                break
            for other in skipped:
                other.skips += 1
            self._take_in(record, record.most_tokens, decisions, now=now)
        self._pending.extendleft(reversed(skipped))
        self._looked_at = (state.pages.free, len(state.holding), self._num_changes)


class PureVtc(Baseline):
    """The least served resident's oldest request is next; whoever does not fit stops the queue (VTC)."""

    def _start(self, decisions: list[Decision], *, now: float) -> None:
        state = self.state
        oldest: dict[ResidentId, Record] = {}
        for _, head in state.heads():
            other = oldest.get(head.resident_id)
            if other is None or (head.arrived_at, head.request_id) < (other.arrived_at, other.request_id):
                oldest[head.resident_id] = head
        while oldest:
            record = min(
                oldest.values(), key=lambda r: (self._dispatched(r.resident_id), r.arrived_at, r.request_id)
            )
            if not self._room_for(record):
                return
            self._take_in(record, record.most_tokens, decisions, now=now)
            following = [r for (_, resident, _), r in state.heads() if resident == record.resident_id]
            if following:
                oldest[record.resident_id] = min(following, key=lambda r: (r.arrived_at, r.request_id))
            else:
                del oldest[record.resident_id]

    def _dispatched(self, resident_id: ResidentId) -> int:
        """Return the counter with prompts charged when they are dispatched, as the paper does."""
        state = self.state
        owed = sum(
            max(0, r.request.prompt_tokens - max(r.stored, r.charged))
            for r in state.holding.values()
            if r.resident_id == resident_id
        )
        return state.counters.value(resident_id) + owed * state.policy.prefill_cost * MICRO // state.weight(
            resident_id
        )


class VllmPriority(Baseline):
    """What vLLM makes of `priority`: classes order the queue and choose victims, and nothing else."""

    def __init__(self, policy: Policy) -> None:
        """Plan at most `VLLM_TOKEN_BUDGET` tokens per iteration."""
        super().__init__(policy, chunk_tokens=VLLM_TOKEN_BUDGET)
        self._decodes: dict[RequestId, Record] = {}
        self._sizes: dict[RequestId, int] = {}

    def _start(self, decisions: list[Decision], *, now: float) -> None:
        self._decodes, self._sizes = {}, {}
        budget, has_preempted = VLLM_TOKEN_BUDGET, False
        for record in list(self.state.holding.values()):
            if record.is_cancelled or not record.holds_pages or budget < 1:
                continue
            size = 1 if record.is_decoding else min(record.remaining, budget)
            has_preempted |= self._make_room(record, size, decisions, now=now)
            if record.holds_pages:
                budget -= self._schedule(record, size)
        if not has_preempted:
            self._start_waiting(budget, decisions, now=now)

    def _schedule(self, record: Record, size: int) -> int:
        if record.is_decoding:
            self._decodes[record.request_id] = record
        else:
            self._sizes[record.request_id] = size
        return size

    def _make_room(self, record: Record, size: int, decisions: list[Decision], *, now: float) -> bool:
        """Give the running request the pages its tokens need; the last in priority pays."""
        state = self.state
        page = state.known_capacity.page_tokens
        # The token sampled at the end needs a slot when it is decoded from, not now.
        need = state.pages_needed(record, record.stored + size)
        has_preempted = False
        while need - record.pages > state.pages.free:
            victim = max(
                (r for r in state.holding.values() if not r.is_cancelled),
                key=lambda r: (r.class_id.urgency, r.arrived_at, r.request_id),
            )
            # What was planned for the victim in this step is taken back.
            self._decodes.pop(victim.request_id, None)
            self._sizes.pop(victim.request_id, None)
            self._preempt(victim, None if victim is record else record, decisions, now=now)
            has_preempted = True
            if victim is record:
                return True
        more = need - record.pages
        if more > 0:
            state.pages.reserve(record.request_id, record.resident_id, more)
            record.pages = need
            record.reserved = min(record.most_tokens, record.shared + need * page)
            decisions.append(Grow(request_id=record.request_id, reserved_tokens=record.reserved))
        return has_preempted

    def _start_waiting(self, budget: int, decisions: list[Decision], *, now: float) -> None:
        state = self.state
        while budget > 0 and len(state.holding) < state.known_capacity.max_sequences:
            heads = [record for _, record in state.heads()]
            if not heads:
                return
            record = min(heads, key=lambda r: (r.class_id.urgency, r.arrived_at, r.request_id))
            pages = state.pages_needed(record, record.length)
            if pages > state.pages.free:
                return
            reserved = min(record.most_tokens, record.shared + pages * state.known_capacity.page_tokens)
            self._take_in(record, reserved, decisions, now=now)
            size = min(record.remaining, budget)
            budget -= self._schedule(record, size)

    def _take_part(self) -> tuple[tuple[Record, ...], tuple[PrefillChunk, ...]]:
        chunks = [PrefillChunk(request_id=name, num_tokens=size) for name, size in self._sizes.items()]
        return tuple(self._decodes.values()), tuple(chunks)


def strict_classes(policy: Policy) -> Policy:
    """Return the policy without ageing, buckets, reserve and fairness: classes, then arrival."""
    never = {
        class_id: dataclasses.replace(rules, max_wait_s=1e12) for class_id, rules in policy.classes.items()
    }
    return dataclasses.replace(
        policy,
        fairness=FairnessGoal.CLASS_ONLY,
        background_reserve=0.0,
        voice_bucket=10**15,
        classes=never,
    )
