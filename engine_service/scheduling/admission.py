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

from dataclasses import dataclass
from enum import IntEnum

from engine_service.scheduling.model import WorkloadClass
from engine_service.scheduling.records import Record
from engine_service.scheduling.state import FlowId, State

_FIRST_LOWER_URGENCY = WorkloadClass.AGENT.urgency


class Tier(IntEnum):
    """Why a request is where it is in the order."""

    SPOKEN = 0
    DUE = 1
    RESERVE = 2
    ORDER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The head of a flow and its place in the order."""

    flow_id: FlowId
    record: Record
    tier: Tier
    urgency: int


def candidates(state: State, *, now: float) -> list[Candidate]:
    """Return the heads in the order they are to be tried."""
    heads = list(state.heads())
    due_left = state.due_spent.total(now=now) < state.policy.due_budget
    spoken = state.someone_speaks(now=now) or state.most_urgent_waiting(now=now) == 0
    reserve_owed = not spoken and _is_reserve_owed(state, now=now)
    ordered = []
    for flow_id, record in heads:
        urgency = state.urgency(record, now=now)
        served, arrived_at, request_id = state.serving_key(record, now=now)
        key: tuple[int, int, float, float, str]
        if urgency == 0:
            tier, key = Tier.SPOKEN, (0, served, arrived_at, 0.0, request_id)
        elif due_left and now >= (due_at := state.due_at(record, urgency=urgency)):
            tier, key = Tier.DUE, (1, 0, due_at, 0.0, request_id)
        elif reserve_owed and urgency >= _FIRST_LOWER_URGENCY:
            tier, key = Tier.RESERVE, (2, served, arrived_at, 0.0, request_id)
        else:
            tier, key = Tier.ORDER, (3 + urgency, served, arrived_at, 0.0, request_id)
        ordered.append((key, Candidate(flow_id=flow_id, record=record, tier=tier, urgency=urgency)))
    ordered.sort(key=lambda pair: pair[0])
    return [candidate for _, candidate in ordered]


def _is_reserve_owed(state: State, *, now: float) -> bool:
    total = state.all_service.total(now=now)
    return state.lower_service.total(now=now) < state.policy.background_reserve * total


def has_prefill_slot(state: State, record: Record, *, urgency: int, now: float) -> bool:
    """Return whether its prompt could be computed now; who cannot start is not taken off the queue.

    Late binding (Llumnix's "no regret"): a request that holds pages but waits for its prefill could no
    longer be overtaken by a fairer choice. A more urgent prompt does not wait for a less urgent one, whose
    half-computed prompt keeps its pages and goes on afterwards.
    """
    if urgency == 0:
        return True
    if state.policy.sprint and state.someone_speaks(now=now):
        return False
    ahead = [
        r for r in state.prefilling.values() if not r.is_cancelled and state.urgency(r, now=now) <= urgency
    ]
    if len(ahead) < state.policy.max_prefilling:
        return True
    backlog = sum(r.remaining for r in ahead) + record.length - record.shared
    return state.known_capacity.mixes_prefill_and_decode and backlog <= state.policy.max_chunk_tokens


def has_sequence(state: State, *, urgency: int) -> bool:
    """Return whether a sequence is free for this urgency."""
    limit = state.known_capacity.max_sequences - state.headroom_sequences(urgency)
    return len(state.holding) < limit


def may_run_more(state: State, record: Record) -> bool:
    """Return whether the resident's limit of running requests allows one more."""
    resident = state.residents.get(record.resident_id)
    if resident is None or resident.max_running is None:
        return True
    running = sum(1 for r in state.holding.values() if r.resident_id == record.resident_id)
    return running < resident.max_running


def fits(state: State, num_pages: int, *, urgency: int) -> bool:
    """Return whether that many pages are free beyond the headroom."""
    return num_pages <= state.pages.free - state.headroom_pages(urgency)


def most_pages_ever(state: State, record: Record) -> int:
    """Return the pages the request needs at its longest."""
    return state.pages_needed(record, record.most_tokens)


def pages_ever_free(state: State, class_id: WorkloadClass, *, keeps_prefix: bool) -> int:
    """Return the pages a request of the class could have on an otherwise empty machine."""
    capacity = state.known_capacity
    if keeps_prefix:
        return state.prefix_allowance() - state.pages.num_pinned - sum(state.coming_prefixes.values())
    # Beyond its bucket speech competes as chat: it may not count on the headroom.
    return capacity.num_pages - state.prefix_allowance() - state.headroom_pages(class_id.urgency or 1)


def most_tokens_ever(state: State, class_id: WorkloadClass, *, shared: int = 0) -> int:
    """Return the longest sequence (prompt and output) that a request of the class may have."""
    capacity, policy = state.known_capacity, state.policy.classes[class_id]
    fitting = pages_ever_free(state, class_id, keeps_prefix=False) * capacity.page_tokens + shared
    context = min(capacity.max_context_tokens, policy.max_context_tokens or capacity.max_context_tokens)
    return max(0, min(context, fitting))
