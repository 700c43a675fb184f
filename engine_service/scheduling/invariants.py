"""Every promise of the core, executable: `check(scheduler)` raises `InvariantBroken` at the first lie.

Called after every core test and after every step of the property tests; cheap enough (one pass over the
records) to be called by the engine now and then, where its answer becomes the "policy met" sensor.
"""

from __future__ import annotations

import itertools
from collections import Counter

from engine_service.scheduling import admission
from engine_service.scheduling.flows import Flow, Lead
from engine_service.scheduling.model import (
    MICRO,
    FairnessGoal,
    RequestState,
    ResidentId,
    ServiceUnit,
)
from engine_service.scheduling.records import Record
from engine_service.scheduling.scheduler import Scheduler
from engine_service.scheduling.state import State


class InvariantBroken(Exception):
    """The core broke a promise: our fault. Carries the request's story where one is involved."""

    def __init__(self, promise: str, message: str, record: Record | None = None) -> None:
        """Name the promise (P1 to P10), what was seen, and the events that touched the request."""
        story = "" if record is None else "\n  " + "\n  ".join([record.request_id, *record.story])
        super().__init__(f"{promise}: {message}{story}")
        self.promise = promise


class TooFarAhead(InvariantBroken):
    """P1 does not hold for two residents who wait in the same class."""

    def __init__(self, flow: Flow, other: Flow, *, gained: int, allowed: int) -> None:
        """Say who got ahead of whom since both wait, and how far it may (micro-units by weight)."""
        super().__init__(
            "P1",
            f"{flow.resident_id} gained {gained} over {other.resident_id} in {flow.class_id}; "
            f"{allowed} is allowed",
        )
        self.ahead, self.behind = flow.resident_id, other.resident_id
        self.gained, self.allowed = gained, allowed


def check(scheduler: Scheduler) -> None:
    """Raise InvariantBroken unless every promise holds."""
    state = scheduler.state
    _check_states(state)
    _check_groups(state)
    _check_pages(state)
    _check_charges(state)
    _check_flight(state)
    _check_leads(state)


def counter_spread(state: State) -> int:
    """Return max - min of the counters of backlogged residents, in micro-units (0 for fewer than two)."""
    values = [state.counters.value(resident_id) for resident_id in state.backlogged]
    return max(values) - min(values) if len(values) > 1 else 0


def counter_bound(state: State) -> int:
    """Return U + V + A in micro-units of a weight-1 resident.

    U = max(w_p * L_in, w_q * M) with M the tokens the memory holds; V and A are what the voice bucket,
    the due tier and the background reserve may spend out of order per window.
    """
    policy = state.policy
    return (_unit_bound(state) + policy.voice_bucket + policy.due_budget) * MICRO


def bound_used(state: State) -> float | None:
    """Return the widest difference in service between two who wait in the same class, as part of 2(U+V+A).

    VTC's D (theorem 4.4): over all intervals since both wait, as seen by each `check`. None while no memory
    is known, and where it is not service in tokens that the household calls equal.
    """
    if state.capacity is None or not _compares_service(state):
        return None
    widest = max((lead.highest - lead.lowest for lead in state.leads.values()), default=0)
    return widest / (2 * counter_bound(state))


def _compares_service(state: State) -> bool:
    return state.policy.fairness is FairnessGoal.SERVICE and state.policy.unit is ServiceUnit.TOKENS


def lead_bound(state: State) -> int:
    """Return how far one resident may get ahead of another by being served in order, in micro-units.

    U of what may be under way when the order turns, what a head that does not fit may be passed by, and what
    a forecast may charge in advance. Service out of order comes on top as it happens.
    """
    policy, capacity = state.policy, state.known_capacity
    per_request = (policy.prefill_cost + policy.decode_cost) * capacity.max_context_tokens
    ahead = capacity.max_sequences * per_request if policy.predict_output else 0
    return (_unit_bound(state) + ahead) * MICRO + admission.pass_allowance(state)


def _unit_bound(state: State) -> int:
    policy, capacity = state.policy, state.known_capacity
    most_held = capacity.num_pages * capacity.page_tokens
    return max(policy.prefill_cost * capacity.max_context_tokens, policy.decode_cost * most_held)


def _check_leads(state: State) -> None:
    """P1: of two who wait in the same class, none gets ahead by more than the bound, or than it was before.

    The order compares counters of all service, so a resident who chatted all day is ahead of one who only
    waits for a summary, and waits for it to catch up. What it may not do is run further ahead, except by
    what is served out of order (speech, due work, the reserve, other classes), which is counted exactly.
    All pairs are looked at before the worst is told: what is known of the others must outlive the complaint.
    Whoever is held back by limits of its own (page cap, running requests) is not compared.
    """
    leads, state.leads = state.leads, {}
    if state.capacity is None or not _compares_service(state):
        return
    bound, passing = lead_bound(state), admission.pass_allowance(state)
    compared: dict[int, list[tuple[Flow, int, int]]] = {}
    for flow in state.waiting_flows:
        if flow.urgency == flow.own_urgency and not _is_limited(state, flow):
            value = state.counters.value(flow.resident_id)
            compared.setdefault(flow.urgency, []).append((flow, value, _out_of_order(state, flow)))
    broken: list[TooFarAhead] = []
    for rivals in compared.values():
        for (flow, value, extra), (other, other_value, _) in itertools.permutations(rivals, 2):
            if flow.resident_id == other.resident_id:
                continue
            spells, lead = (state.epoch, flow.spell, other.spell), value - other_value
            known = leads.get((flow, other))
            if known is None or known.spells != spells:
                known = Lead(spells, lead, extra, lowest=lead, highest=lead)
            known.lowest, known.highest = min(known.lowest, lead), max(known.highest, lead)
            state.leads[flow, other] = known
            allowed = bound + max(0, known.at_start - passing) + extra - known.out_of_order
            if lead > allowed:
                gained, allowed = lead - known.at_start, allowed - known.at_start
                broken.append(TooFarAhead(flow, other, gained=gained, allowed=allowed))
    if broken:
        raise max(broken, key=lambda error: error.gained - error.allowed)


def _is_limited(state: State, flow: Flow) -> bool:
    resident = state.residents.get(flow.resident_id)
    return resident is None or resident.page_cap is not None or resident.max_running is not None


def _out_of_order(state: State, flow: Flow) -> int:
    """Return what the resident was ever served beside this flow's turn, in micro-units by weight."""
    units = state.counters.service(flow.resident_id) - flow.in_order
    return units * MICRO // state.weight(flow.resident_id)


def _check_states(state: State) -> None:
    waiting: dict[str, int] = {}
    for request_id, record in state.records.items():
        if record.request_id != request_id:
            raise InvariantBroken("P10", f"filed under {request_id}", record)
        is_held = request_id in state.holding
        if record.holds_pages != is_held:
            raise InvariantBroken("P4", f"state {record.state} but holding={is_held}", record)
        if record.state is RequestState.WAITING:
            if not record.flow.is_paused:
                waiting[record.resident_id] = waiting.get(record.resident_id, 0) + 1
            if record.pages or record.reserved:
                raise InvariantBroken("P4", "waits and holds pages", record)
        if record.state is RequestState.FINISHED:
            raise InvariantBroken("P8", "finished but still known", record)
    told = {resident_id: count for resident_id, count in state.num_waiting.items() if count}
    if told != waiting:
        raise InvariantBroken("P8", f"waiting counts {told} but {waiting} wait")
    for flow in (*state.waiting_flows, *state.set_aside):
        if flow.head(state.records).flow is not flow:
            raise InvariantBroken("P6", f"the head of {flow.class_id} of {flow.resident_id} is not its own")


def _check_groups(state: State) -> None:
    """The groups that save scans hold exactly who belongs to them."""
    prefilling = {r.request_id for r in state.holding.values() if not r.is_decoding}
    if prefilling != set(state.prefilling):
        raise InvariantBroken("P3", f"prefilling are {prefilling}, noted are {set(state.prefilling)}")
    spoken = {r.request_id for r in state.holding.values() if r.class_id.is_spoken}
    if spoken != set(state.spoken):
        raise InvariantBroken("P3", f"spoken are {spoken}, noted are {set(state.spoken)}")
    decoding = {r.request_id for r in state.holding.values() if r.is_decoding}
    if decoding != {r.request_id for r in state.holding.values() if r.decodes}:
        raise InvariantBroken("P3", f"decoding are {decoding}, noted are others")
    if any(not r.decodes or r.is_cancelled or r.request_id not in state.holding for r in state.decodes()):
        raise InvariantBroken("P3", "somebody would decode who does not")
    if len(state.decodes()) != sum(1 for r in state.holding.values() if r.decodes and not r.is_cancelled):
        raise InvariantBroken("P3", "somebody decodes and is forgotten")
    paused = {r.request_id for r in state.holding.values() if r.state is RequestState.PAUSED}
    if paused != set(state.paused):
        raise InvariantBroken("P3", f"paused are {paused}, noted are {set(state.paused)}")
    leaving = {r.request_id for r in state.holding.values() if r.is_cancelled}
    if leaving != set(state.leaving):
        raise InvariantBroken("P8", f"cancelled are {leaving}, noted are {set(state.leaving)}")
    _check_flows(state)


def _check_flows(state: State) -> None:
    waiting: Counter[Flow] = Counter()
    held: Counter[Flow] = Counter()
    for record in state.records.values():
        if state.flows.get((record.class_id, record.resident_id, record.model_id)) is not record.flow:
            raise InvariantBroken("P10", "is not in the flow of its class, resident and model", record)
        (held if record.holds_pages else waiting)[record.flow] += 1
    if {*state.waiting_flows, *state.set_aside} != set(waiting):
        noted = len(state.waiting_flows) + len(state.set_aside)
        raise InvariantBroken("P6", f"{len(waiting)} flows wait, {noted} are noted")
    if any(flow.is_paused for flow in state.waiting_flows) or not all(f.is_paused for f in state.set_aside):
        raise InvariantBroken("P9", "a class is paused and takes part, or is not and does not")
    for flow in state.flows.values():
        if (flow.num_waiting, flow.num_held) != (waiting[flow], held[flow]):
            raise InvariantBroken("P6", f"{flow.class_id} of {flow.resident_id} is counted wrongly")
        if flow.is_paused != state.is_kept_waiting(flow):
            raise InvariantBroken("P9", f"{flow.class_id} of {flow.resident_id} is paused and should not be")
        if flow.class_id.urgency > flow.urgency:
            raise InvariantBroken("P10", f"{flow.class_id} of {flow.resident_id} was made more urgent")
    for counts, by_flow in ((state.waiting_by_urgency, waiting), (state.held_by_urgency, held)):
        told: Counter[int] = Counter()
        for flow, count in by_flow.items():
            told[flow.urgency] += 0 if by_flow is waiting and flow.is_paused else count
        if [told[urgency] for urgency in range(len(counts))] != counts:
            raise InvariantBroken("P6", f"by urgency {counts} are noted, {dict(told)} are there")


def _check_pages(state: State) -> None:
    held, pinned, by_resident = state.pages.audit()
    if (held, pinned) != (state.pages.num_held, state.pages.num_pinned):
        raise InvariantBroken(
            "P4", f"ledger says {state.pages.num_held}+{state.pages.num_pinned}, holds {held}+{pinned}"
        )
    for resident_id, num_pages in by_resident.items():
        if state.pages.held_by(resident_id) != num_pages:
            raise InvariantBroken(
                "P4", f"{resident_id} holds {num_pages}, ledger says {state.pages.held_by(resident_id)}"
            )
    for record in state.holding.values():
        if record.pages != state.pages.pages_of(record.request_id):
            raise InvariantBroken("P4", f"record says {record.pages} pages", record)
        if not record.is_cancelled and record.stored > record.reserved:
            raise InvariantBroken(
                "P4", f"stores {record.stored} of {record.reserved} reserved tokens", record
            )
    if sum(r.pages for r in state.holding.values()) != held:
        raise InvariantBroken("P4", "pages are held by nobody")


def _check_charges(state: State) -> None:
    """P5: charged = computed (fresh prefill and decode), and the rest is the system's."""
    ahead: Counter[ResidentId] = Counter()
    for record in state.records.values():
        ahead[record.resident_id] += record.prepaid
        if record.prepaid and not record.holds_pages:
            raise InvariantBroken("P5", "waits and is charged ahead", record)
    for resident_id in state.counters.resident_ids:
        if state.counters.ahead(resident_id) != ahead[resident_id]:
            raise InvariantBroken("P5", f"{resident_id} is charged ahead for no request")
    charged = sum(state.counters.service(resident_id) for resident_id in state.counters.resident_ids)
    booked = sum(account.service for account in state.class_accounts.values())
    if charged != booked:
        raise InvariantBroken("P5", f"charged {charged} to residents, booked {booked} to classes")
    if state.policy.unit is not ServiceUnit.TOKENS or state.has_changed_cost:
        return
    computed = 0
    for account in state.accounts.values():
        computed += account.prefill_tokens * state.policy.prefill_cost
        computed += account.decode_tokens * state.policy.decode_cost
    computed += state.recomputed_tokens * state.policy.prefill_cost
    if computed != charged + state.counters.system_service:
        raise InvariantBroken(
            "P5", f"computed {computed} units, charged {charged} and system {state.counters.system_service}"
        )


def _check_flight(state: State) -> None:
    if state.in_flight is None:
        return
    composed = state.in_flight.composed
    chunk = sum(part.num_tokens for part in composed.prefills)
    if not composed.decode_ids and not composed.prefills:
        raise InvariantBroken("P9", "an iteration computes nothing")
    if chunk > state.in_flight.most_chunk_tokens:
        raise InvariantBroken("P2", f"computes {chunk} of {state.in_flight.most_chunk_tokens} prompt tokens")
    ids = [*composed.decode_ids, *(chunk.request_id for chunk in composed.prefills)]
    if len(set(ids)) != len(ids):
        raise InvariantBroken("P3", f"an iteration names a request twice: {ids}")
    for request_id in ids:
        record = state.records.get(request_id)
        if record is None or not record.holds_pages:
            raise InvariantBroken("P4", f"an iteration runs {request_id}, which holds no pages", record)
        if record.state is RequestState.PAUSED:
            raise InvariantBroken("P3", "takes part and is paused", record)
    for record in state.holding.values():
        if record.state is RequestState.RUNNING and record.request_id not in ids:
            raise InvariantBroken("P3", "running, but neither in the iteration nor paused", record)
