"""Which running requests give their pages back, and for whom.

Rules
* Only for a strictly more urgent request, or to reclaim what a resident borrowed beyond its page cap.
* Only if the pages (and sequences) of the chosen victims admit the beneficiary now.
* Least urgent first, then most served, then cheapest to compute again; no victim more than needed.
* What the due tier or the background reserve admitted gives way to speech only, or neither would be kept.
* A victim has made at least one page of progress since its last admission, and is left alone after
  `max_preemptions`: then it held its whole reservation from the start.

Sources: SGLang's priority threshold and sum check, Andes' feasibility-first refiner, as described in the
papers; vLLM issue 49674 for the zero-progress cascade that the progress rule prevents.
"""

from __future__ import annotations

from engine_service.scheduling.admission import (
    Candidate,
    has_sequence,
    is_preemptible,
    keeps_headroom,
    losable,
    prefill_room,
)
from engine_service.scheduling.records import Record
from engine_service.scheduling.state import State


def can_anybody_run(state: State, *, now: float) -> bool:
    """Return False where no waiting request can possibly be admitted, without looking at any.

    True promises nothing. Sequences are what runs out first on a busy machine: without a free one,
    somebody less urgent must be able to give one up, or a resident must hold more than its page cap.
    """
    urgency = state.most_urgent_waiting(now=now)
    if urgency is None:
        return False
    # Only a spoken prompt may begin where the others leave no room for the shortest.
    if urgency > 0 and prefill_room(state, urgency=urgency, now=now) < 1:
        return False
    if has_sequence(state, urgency=urgency) or state.has_borrowers:
        return True
    if state.least_urgent_held(now=now) <= urgency:
        return False
    return any(not (r.is_promised and urgency > 0) for r in losable(state, at_least=urgency + 1))


def victims_for(state: State, candidate: Candidate, num_pages: int, *, now: float) -> list[Record]:
    """Return the requests to preempt so that the candidate fits, empty if that cannot be done.

    num_pages is what the candidate needs. The result frees enough pages and, if sequences are short, at
    least one sequence.
    """
    # Who gives way no longer backs the headroom, and frees as much of it: this does not depend on who it is.
    urgency = candidate.urgency
    if urgency and not keeps_headroom(state, num_pages=num_pages, num_sequences=1, urgency=urgency):
        return []
    missing_pages = num_pages - state.pages.free
    missing_sequences = len(state.holding) + 1 - state.known_capacity.max_sequences
    chosen: list[Record] = []
    for record in _by_cheapness(state, candidate, now=now):
        if missing_pages <= 0 and missing_sequences <= 0:
            break
        chosen.append(record)
        missing_pages -= record.pages
        missing_sequences -= 1
    if missing_pages > 0 or missing_sequences > 0:
        return []
    return _without_unneeded(chosen, spare_pages=-missing_pages, spare_sequences=-missing_sequences)


def _by_cheapness(state: State, candidate: Candidate, *, now: float) -> list[Record]:
    has_cap_room = not state.is_over_cap(candidate.record.resident_id)
    may_borrow = has_cap_room and state.has_borrowers
    if not may_borrow and state.least_urgent_held(now=now) <= candidate.urgency:
        return []
    found = []
    for record in losable(state, at_least=candidate.urgency):
        if record.is_promised and candidate.urgency > 0:
            continue
        if record.flow.urgency > candidate.urgency or (may_borrow and state.is_over_cap(record.resident_id)):
            served = state.served(record.resident_id, now=now)
            key = (-record.flow.urgency, -served, record.stored, -record.arrived_at, record.request_id)
            found.append((key, record))
    found.sort(key=lambda pair: pair[0])
    return [record for _, record in found]


def _without_unneeded(chosen: list[Record], *, spare_pages: int, spare_sequences: int) -> list[Record]:
    kept = list(chosen)
    for record in chosen:
        if record.pages <= spare_pages and spare_sequences >= 1:
            kept.remove(record)
            spare_pages -= record.pages
            spare_sequences -= 1
    return kept


def victim_for_growth(state: State, grower: Record, *, now: float) -> Record:
    """Return who makes room when a running request needs another slice: the last in order, maybe itself."""
    last = grower
    last_key = state.order_key(grower, now=now)
    for record in state.holding.values():
        if record is grower or not is_preemptible(state, record):
            continue
        key = state.order_key(record, now=now)
        if key > last_key:
            last, last_key = record, key
    return last
