"""Which waiting request runs next, and whether it fits.

Looks at the heads of flows only. Knows nothing of iterations.

Order (scheduler.md section 3):
 0  voice and accessibility, while the resident's voice bucket lasts
 1  due requests, by due time, while the due budget of the window lasts
 2  lower classes, while they had less than the background reserve and nobody speaks
 3  chat > agent > embedding > background, least served resident first

Sources: VTC (Sheng et al., OSDI 2024) for the order inside a tier; Llumnix (Sun et al., OSDI 2024) for
headroom as a term of the same formula. Differs: ageing never changes the class (it opens tier 1), and a
head that does not fit is passed over a bounded number of times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from engine_service.scheduling.flows import Flow
from engine_service.scheduling.model import FIRST_LOWER_URGENCY, MICRO, WorkloadClass
from engine_service.scheduling.records import Record
from engine_service.scheduling.state import State


class Tier(IntEnum):
    """Why a request is where it is in the order."""

    SPOKEN = 0
    DUE = 1
    RESERVE = 2
    ORDER = 3


@dataclass(slots=True)
class Candidate:
    """The head of a flow and its place in the order."""

    flow: Flow
    record: Record
    tier: Tier
    urgency: int


_TIERS = (Tier.SPOKEN, Tier.DUE, Tier.RESERVE)
_Entry = tuple[int, float, float, str, Record]
"""Rank (0 spoken, 1 due, 2 reserve, from 3 on by urgency), then who is first in it; ids differ."""


class Order:
    """The heads of all flows, first to be tried first; valid for one plan."""

    def __init__(self, state: State, *, now: float) -> None:
        """Look at who speaks and what the due tier and the reserve may spend, once."""
        self._state = state
        self._now = now
        self._due_left = state.due_spent.total(now=now) < state.policy.due_budget
        spoken = state.someone_speaks(now=now) or state.most_urgent_waiting(now=now) == 0
        self._reserve_owed = not spoken and _is_reserve_owed(state, now=now)
        self._tried: set[Flow] = set()
        self._heap: list[_Entry] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Look at all flows again (somebody lost its pages), but at none that was tried."""
        self._heap = [self._entry(flow) for flow in self._state.waiting_flows if flow not in self._tried]
        heapq.heapify(self._heap)

    def pop(self) -> Candidate | None:
        """Take the next candidate; its flow is not looked at again unless `put_back` is called."""
        if not self._heap:
            return None
        rank, _, _, _, record = heapq.heappop(self._heap)
        flow = record.flow
        self._tried.add(flow)
        return Candidate(flow, record, Tier.ORDER if rank > 2 else _TIERS[rank], flow.urgency)

    def put_back(self, flow: Flow) -> None:
        """Let the flow's new head be tried, if it has one (its last one was admitted)."""
        self._tried.discard(flow)
        if flow.num_waiting:
            heapq.heappush(self._heap, self._entry(flow))

    def _entry(self, flow: Flow) -> _Entry:
        state, urgency = self._state, flow.urgency
        record = flow.head(state.records)
        if urgency and self._due_left:
            oldest = flow.oldest(state.records) if flow.by_age else record
            # Who was demoted is due later than its class.
            if self._now >= oldest.due_at and self._now >= (due_at := state.due_at(oldest, urgency=urgency)):
                return 1, 0, due_at, oldest.request_id, oldest
        rank = 0 if not urgency else 3 + urgency
        if urgency >= FIRST_LOWER_URGENCY and self._reserve_owed:
            rank = 2
        served = state.services.get(flow.resident_id)
        if served is None:
            served = state.served(flow.resident_id, now=self._now)
        return rank, served, record.arrived_at, record.request_id, record


def _is_reserve_owed(state: State, *, now: float) -> bool:
    total = state.all_service.total(now=now)
    return state.lower_service.total(now=now) < state.policy.background_reserve * total


def has_prefill_slot(state: State, record: Record, *, urgency: int, now: float) -> bool:
    """Return whether its prompt could be computed now; who cannot start is not taken off the queue.

    Late binding (Llumnix's "no regret"): a request that holds pages but waits for its prefill could no
    longer be overtaken by a fairer choice. A more urgent prompt does not wait for a less urgent one, whose
    half-computed prompt keeps its pages and goes on afterwards.
    """
    return urgency == 0 or record.length - record.shared <= prefill_room(state, urgency=urgency, now=now)


def prefill_room(state: State, *, urgency: int, now: float) -> float:
    """Return the longest prompt of this urgency that could be begun now (0: none, inf: any)."""
    if state.policy.sprint and state.someone_speaks(now=now):
        return 0
    ahead = [r for r in state.prefilling.values() if not r.is_cancelled and r.flow.urgency <= urgency]
    if len(ahead) < state.policy.max_prefilling:
        return math.inf
    if not state.known_capacity.mixes_prefill_and_decode:
        return 0
    return state.policy.max_chunk_tokens - sum([r.remaining for r in ahead])


def has_sequence(state: State, *, urgency: int) -> bool:
    """Return whether a sequence is free for this urgency."""
    return len(state.holding) < state.known_capacity.max_sequences and keeps_headroom(
        state, num_pages=0, num_sequences=1, urgency=urgency
    )


def keeps_headroom(state: State, *, num_pages: int, num_sequences: int, urgency: int) -> bool:
    """Return whether speech would still find its headroom if this urgency took that much.

    What is lent to requests that can be preempted at once is as good as free: an empty place serves nobody.
    """
    missing_pages = num_pages + state.headroom_pages(urgency) - state.pages.free
    taken = len(state.holding) + num_sequences + state.headroom_sequences(urgency)
    missing_sequences = taken - state.known_capacity.max_sequences
    if missing_pages <= 0 and missing_sequences <= 0:
        return True
    if not urgency:
        return False
    for record in losable(state, at_least=1):
        missing_pages -= record.pages
        missing_sequences -= 1
        if missing_pages <= 0 and missing_sequences <= 0:
            return True
    return False


def losable(state: State, *, at_least: int) -> Iterator[Record]:
    """Yield who is no more urgent than that, may lose its pages and has made progress.

    Progress is at least one page computed since the last admission.
    """
    page = state.known_capacity.page_tokens
    for record in state.holding.values():
        if (
            record.flow.urgency >= at_least
            and record.stored - record.stored_at_admission >= page
            and is_preemptible(state, record)
        ):
            yield record


def is_preemptible(state: State, record: Record) -> bool:
    """Return whether the request may lose its pages at all."""
    return (
        state.known_capacity.can_release
        and not record.is_cancelled
        and not record.request.keep_prefix
        and record.preemptions < state.policy.max_preemptions
    )


def may_run_more(state: State, record: Record) -> bool:
    """Return whether the resident's limit of running requests allows one more."""
    resident = state.residents.get(record.resident_id)
    if resident is None or resident.max_running is None:
        return True
    running = sum(1 for r in state.holding.values() if r.resident_id == record.resident_id)
    return running < resident.max_running


def fits(state: State, num_pages: int, *, urgency: int) -> bool:
    """Return whether that many pages are free, and speech would still find its headroom."""
    return num_pages <= state.pages.free and keeps_headroom(
        state, num_pages=num_pages, num_sequences=0, urgency=urgency
    )


def pass_allowance(state: State) -> int:
    """Return how far ahead (micro-units) a resident may be and still pass a head that does not fit.

    What the longest request costs: whoever is that far ahead has had the place it would take now.
    """
    policy = state.policy
    longest = state.known_capacity.max_context_tokens
    return (policy.prefill_cost + policy.decode_cost) * longest * MICRO


def most_pages_ever(state: State, record: Record) -> int:
    """Return the pages the request needs at its longest."""
    return state.pages_needed(record, record.most_tokens)


def pages_ever_free(state: State, class_id: WorkloadClass, *, keeps_prefix: bool) -> int:
    """Return the pages a request of the class could have on an otherwise empty machine."""
    capacity = state.known_capacity
    if keeps_prefix:
        return state.prefix_allowance() - state.pages.num_pinned - sum(state.coming_prefixes.values())
    # Prefixes that were pinned while there was more memory keep what they have.
    pinned = max(state.prefix_allowance(), state.pages.num_pinned)
    # Beyond its bucket speech competes as chat: it may not count on the headroom.
    return capacity.num_pages - pinned - state.headroom_pages(class_id.urgency or 1)


def most_tokens_ever(
    state: State, class_id: WorkloadClass, *, shared: int = 0, keeps_prefix: bool = False
) -> int:
    """Return the longest sequence (prompt and output) that a request of the class may have."""
    capacity, policy = state.known_capacity, state.policy.classes[class_id]
    fitting = pages_ever_free(state, class_id, keeps_prefix=keeps_prefix) * capacity.page_tokens + shared
    context = min(capacity.max_context_tokens, policy.max_context_tokens or capacity.max_context_tokens)
    return max(0, min(context, fitting))
