"""The one door of the core: an event goes in, decisions come out.

    decisions = scheduler.handle(event, now=clock())

State changes nowhere else. Decisions come in the order in which the shell carries them out. After a
`Compose` an iteration is under way until `IterationDone`; meanwhile events are noted, and nothing that
holds pages is touched. As soon as none is under way and there is work, `handle` composes the next.

Rules (each is checked by `invariants.check`)
* P4 pages are conserved, and are free only after the backend was told to free them.
* P5 what is charged is what was computed, plus what the system pays.
* P7 the same events at the same times give the same decisions.
* P8 a cancelled request gives its pages back within one iteration and settles once.
* P9 no idle iteration while an admissible request waits, unless a named reserve says so: the headroom of
  speech, the sprint, that its class is paused (`Policy.paused_classes`), that it asks another model than
  the one that serves, or that others may come at the same moment (`Arrived.may_have_company`).
* P10 a class is set by the arrival and never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from engine_service.scheduling import admission, composition, preemption, snapshot, waiting
from engine_service.scheduling.admission import Candidate, Order, Tier
from engine_service.scheduling.counters import Account
from engine_service.scheduling.decisions import (
    AbortIteration,
    Admit,
    Cancel,
    Compose,
    Decision,
    Grow,
    Pause,
    Preempt,
    Reject,
    Resume,
)
from engine_service.scheduling.estimator import CostEstimator
from engine_service.scheduling.events import (
    Arrived,
    BackendLost,
    Cancelled,
    CapacityChanged,
    DayStarted,
    Event,
    IterationDone,
    PolicyChanged,
    PrefixDropped,
    ResidentsChanged,
    SequenceResult,
    ServingStopped,
    Ticked,
)
from engine_service.scheduling.flows import Bill
from engine_service.scheduling.model import (
    GUEST,
    HOUSE,
    MICRO,
    SYSTEM,
    Capacity,
    FairnessGoal,
    Policy,
    PreemptionMode,
    RejectReason,
    RequestId,
    RequestState,
    Resident,
    ResidentId,
    ServiceUnit,
    WorkloadClass,
    pages_for,
)
from engine_service.scheduling.pace import Pace
from engine_service.scheduling.records import Record
from engine_service.scheduling.state import InFlight, State
from engine_service.scheduling.windows import WindowSum

_REBASE_EVERY = 4096
_NOBODY_STUCK = WorkloadClass.BACKGROUND.urgency + 1


class Scheduler:
    """Decides who is served, iteration by iteration. Deterministic; owns no thread, clock or device."""

    def __init__(self, policy: Policy | None = None) -> None:
        """Start with nobody but guest and house, and without a backend."""
        self.state = State(policy or Policy())
        self._set_residents(())

    # ---- the door

    def handle(self, event: Event, *, now: float) -> list[Decision]:
        """Take note of event at monotonic now (seconds) and return what to do, in order."""
        self.state.forget_answers()
        decisions: list[Decision] = []
        if (
            isinstance(event, Arrived)
            and self._is_idle
            and self._has_no_room_to_wait(event.request.resident_id)
        ):
            decisions += self._plan(now=now)  # who only waits for company keeps nobody out
        decisions += self._note(event, now=now)
        waits = isinstance(event, Arrived) and event.may_have_company and not event.request.class_id.is_spoken
        if self._is_idle and not waits:
            decisions += self._plan(now=now)
        return decisions

    @property
    def _is_idle(self) -> bool:
        return self.state.in_flight is None and self.state.is_backend_up

    def _note(self, event: Event, *, now: float) -> list[Decision]:
        match event:
            case Arrived():
                return self._arrived(event, now=now)
            case Cancelled():
                return self._cancelled(event.request_id, now=now)
            case IterationDone():
                return self._iteration_done(event, now=now)
            case CapacityChanged():
                return self._capacity_changed(event, now=now)
            case PolicyChanged():
                self._set_policy(event.policy, now=now)
                return self._refuse_hopeless(now=now)
            case ResidentsChanged():
                self._set_residents(event.residents)
                return []
            case DayStarted():
                self.state.quota.start_day(event.day, ends_at=event.ends_at)
                return []
            case BackendLost():
                return self._backend_lost(now=now)
            case ServingStopped():
                self.state.is_leaving = True
                self.state.puts_back_from = event.puts_back_from
                self.state.set_flows_aside(now=now)
                return []
            case PrefixDropped():
                return self._prefix_dropped(event.request_id)
            case Ticked():
                return []
            case _:
                assert_never(event)

    # ---- memory and the model in it

    def _capacity_changed(self, event: CapacityChanged, *, now: float) -> list[Decision]:
        state = self.state
        if event.model_id != state.serving:
            self._change_model(event)
        state.is_leaving, state.puts_back_from = False, None
        state.capacity = event.capacity
        state.epoch += 1
        state.is_backend_up = True
        state.pages.total = event.capacity.num_pages
        micros = int(event.switch_s * MICRO)
        state.switch_micros += micros
        if micros and state.policy.unit is ServiceUnit.ACCELERATOR_TIME:
            state.counters.charge_system(micros)
        state.set_flows_aside(now=now)
        return self._refuse_hopeless(now=now)

    def _change_model(self, event: CapacityChanged) -> None:
        """Take over another model's memory, with the prefixes that it still keeps."""
        state = self.state
        if state.holding or state.in_flight:
            raise RuntimeError("another model cannot serve while somebody runs on this one")
        state.pages.forget_all()
        for request_id, num_pages in event.pinned:
            state.pages.pin(request_id, num_pages=num_pages)
        state.estimators[state.serving] = state.estimator
        state.estimator = state.estimators.pop(event.model_id, CostEstimator())
        state.serving = event.model_id
        if not event.pinned:
            for record in state.records.values():
                if record.model_id == event.model_id:
                    record.shared = 0

    # ---- questions of the shell

    @property
    def residents(self) -> Mapping[ResidentId, Resident]:
        """Everybody who may order, guest and house included."""
        return self.state.residents

    def knows(self, request_id: RequestId) -> bool:
        """Return whether the request waits or holds pages."""
        return request_id in self.state.records

    @property
    def has_work(self) -> bool:
        """Return whether something runs or waits for its turn (not: for a paused class, another model)."""
        return bool(self.state.holding) or self.state.total_waiting > 0

    def most_tokens(
        self, class_id: WorkloadClass, *, shared: int = 0, elsewhere: Capacity | None = None
    ) -> int:
        """Return the longest sequence a request of the class may have; shared is its pinned beginning.

        elsewhere is the memory of a model that does not serve, for a request that is to wait for it.
        """
        state = self.state
        if elsewhere is not None:
            state = State(state.policy)
            state.capacity = elsewhere
        return admission.most_tokens_ever(state, class_id, shared=shared)

    def eta_s(self, request_id: RequestId, *, now: float) -> float | None:
        """Return the seconds (>= 0) until a waiting request probably starts.

        None for requests that do not wait, and while nothing was measured.
        """
        record = self.state.records.get(request_id)
        if record is None or record.state is not RequestState.WAITING:
            return None
        self.state.refresh(now)
        flow = record.flow
        behind = flow.num_enqueued - record.ticket - 1
        position = max(0, flow.num_waiting - behind - 1)
        return waiting.eta_s(self.state, flow, position=position, now=now)

    def snapshot(self, *, now: float) -> dict[str, Any]:
        """Return what must outlive a restart, as JSON values (see `snapshot`)."""
        return snapshot.take(self.state, now=now)

    def restore(self, saved: object, *, now: float, elapsed_s: float = 0.0) -> None:
        """Take over a snapshot before the first request; raises SnapshotError and then changes nothing."""
        residents = tuple(self.state.residents.values())
        snapshot.apply(self.state, saved, now=now, elapsed_s=elapsed_s)
        self._set_residents(residents)

    # ---- residents

    def _set_residents(self, residents: tuple[Resident, ...]) -> None:
        known = {r.resident_id: r for r in residents}
        for fixed in (GUEST, HOUSE):
            known.setdefault(fixed, Resident(resident_id=fixed))
        known.pop(SYSTEM, None)
        self.state.residents = known
        self.state.capped = tuple(r for r in known.values() if r.page_cap is not None)
        self.state.counters.set_weights({r.resident_id: r.weight for r in known.values()})
        self.state.quota.set_residents(known.values())
        self.state.rolling.set_residents(known.values())
        self.state.epoch += 1
        for resident_id in known:
            self.state.account(resident_id)

    def _set_policy(self, policy: Policy, *, now: float) -> None:
        before = self.state.policy
        if (before.unit, before.prefill_cost, before.decode_cost) != (
            policy.unit,
            policy.prefill_cost,
            policy.decode_cost,
        ):
            self.state.has_changed_cost = True
            self.state.pace = Pace(self.state.class_accounts)
        if policy.fairness is not before.fairness or self.state.has_changed_cost:
            self.state.epoch += 1
        self.state.policy = policy
        self.state.open_windows()
        self.state.set_flows_aside(now=now)

    # ---- arrivals

    def _arrived(self, event: Arrived, *, now: float) -> list[Decision]:
        request = event.request
        policy = self.state.policy.classes[request.class_id]
        record = Record(
            request=request,
            arrived_at=now,
            due_at=now + policy.max_wait_s,
            shared=request.shared_prefix_tokens,
            last_served_at=now,
        )
        refusal = self._refusal(record, now=now)
        if refusal is not None:
            self._count_rejection(record)
            return [refusal]
        flow = self.state.flow(record.class_id, record.resident_id, record.model_id)
        if not flow.is_paused and not self.state.num_waiting.get(record.resident_id):
            self.state.counters.lift(record.resident_id, backlogged=self.state.backlogged)
        self.state.records[record.request_id] = record
        if request.keep_prefix and self._is_asked_of_this(record):
            self.state.coming_prefixes[record.request_id] = admission.most_pages_ever(self.state, record)
        self.state.enqueue(record, now=now)
        record.tell("arrived", now=now)
        return self._abort_for(record, now=now)

    def _count_rejection(self, record: Record) -> None:
        self.state.class_accounts[record.class_id].rejected += 1
        if record.resident_id in self.state.residents:
            self.state.account(record.resident_id).rejected += 1

    def _refusal(self, record: Record, *, now: float) -> Reject | None:
        request, state = record.request, self.state

        def reject(reason: RejectReason, limit: int | None = None, retry: float | None = None) -> Reject:
            return Reject(request_id=request.request_id, reason=reason, limit=limit, retry_after_s=retry)

        if request.request_id in state.records:
            return reject(RejectReason.DUPLICATE_REQUEST)
        resident = state.residents.get(request.resident_id)
        if resident is None:
            return reject(RejectReason.UNKNOWN_RESIDENT)
        too_long = self._too_long(record)
        if too_long is not None:
            return too_long
        if state.quota.is_spent(request.resident_id) and state.quota.is_hard(request.resident_id):
            return reject(RejectReason.QUOTA_EXHAUSTED, 0, state.quota.resets_in_s(now=now))
        refused_for_s = state.rolling.refused_for_s(request.resident_id, now=now)
        if refused_for_s is not None:
            return reject(RejectReason.ROLLING_EXHAUSTED, 0, refused_for_s)
        num_waiting = self._num_waiting_of(request.resident_id)
        if num_waiting >= resident.max_waiting:
            return self._queue_is_full(
                record, RejectReason.TOO_MANY_REQUESTS, resident.max_waiting, num_waiting, now=now
            )
        num_waiting = self._num_waiting
        if num_waiting >= state.policy.max_waiting:
            return self._queue_is_full(
                record, RejectReason.QUEUE_FULL, state.policy.max_waiting, num_waiting, now=now
            )
        return None

    @property
    def _num_waiting(self) -> int:
        return self.state.total_waiting + self.state.num_set_aside()

    def _num_waiting_of(self, resident_id: ResidentId) -> int:
        return self.state.num_waiting.get(resident_id, 0) + self.state.num_set_aside(resident_id)

    def _has_no_room_to_wait(self, resident_id: ResidentId) -> bool:
        resident = self.state.residents.get(resident_id)
        return self._num_waiting >= self.state.policy.max_waiting or (
            resident is not None and self._num_waiting_of(resident_id) >= resident.max_waiting
        )

    def _queue_is_full(
        self, record: Record, reason: RejectReason, limit: int, num_waiting: int, *, now: float
    ) -> Reject:
        self.state.refresh(now)
        flow = self.state.flow(record.class_id, record.resident_id, record.model_id)
        return Reject(
            request_id=record.request_id,
            reason=reason,
            limit=limit,
            retry_after_s=waiting.drained_s(self.state, num_waiting, now=now),
            eta_s=waiting.eta_s(self.state, flow, position=flow.num_waiting, now=now),
        )

    def _too_long(self, record: Record) -> Reject | None:
        request, state = record.request, self.state
        policy = state.policy.classes[request.class_id]
        if policy.max_output_tokens is not None and request.max_tokens > policy.max_output_tokens:
            return Reject(
                request_id=request.request_id,
                reason=RejectReason.OUTPUT_TOO_LONG,
                limit=policy.max_output_tokens,
            )
        if not self._is_asked_of_this(record):
            return None  # it is measured against the memory of its model when that serves
        capacity = state.known_capacity
        context = min(capacity.max_context_tokens, policy.max_context_tokens or capacity.max_context_tokens)
        pages = admission.pages_ever_free(state, request.class_id, keeps_prefix=request.keep_prefix)
        if record.most_tokens > context:
            reason = RejectReason.PROMPT_TOO_LONG
        elif admission.most_pages_ever(state, record) > pages:
            reason = RejectReason.NEVER_FITS
        else:
            return None
        # Whoever obeys the one limit must not meet the other.
        most = admission.most_tokens_ever(
            state, request.class_id, shared=record.shared, keeps_prefix=request.keep_prefix
        )
        return Reject(request_id=request.request_id, reason=reason, limit=max(0, most - request.max_tokens))

    def _is_asked_of_this(self, record: Record) -> bool:
        """Return whether the model that serves is the one that is asked."""
        return record.model_id == self.state.serving

    def _refuse_hopeless(self, *, now: float) -> list[Decision]:
        """Refuse waiting requests that no longer fit at all; the only scan over all of them, and rare."""
        if self.state.capacity is None:
            return []
        refused: list[Decision] = []
        for record in [r for r in self.state.records.values() if r.state is RequestState.WAITING]:
            # A prefix is measured against what is left beside itself.
            self.state.coming_prefixes.pop(record.request_id, None)
            refusal = self._too_long(record)
            if refusal is None:
                if record.request.keep_prefix and self._is_asked_of_this(record):
                    pages = admission.most_pages_ever(self.state, record)
                    self.state.coming_prefixes[record.request_id] = pages
                continue
            self.state.dequeue(record, now=now)
            self._settle(record)
            self._count_rejection(record)
            refused.append(refusal)
        return refused

    def _abort_for(self, record: Record, *, now: float) -> list[Decision]:
        """Stop a prefill under way when somebody speaks, if the backend can."""
        flight = self.state.in_flight
        if flight is None or flight.is_aborting or not self.state.known_capacity.can_abort:
            return []
        if self.state.urgency(record, now=now) != 0 or self._ends_soon(flight, now=now):
            return []
        chunks = [self.state.records.get(chunk.request_id) for chunk in flight.composed.prefills]
        if not any(r is not None and r.flow.urgency > 0 for r in chunks):
            return []
        flight.is_aborting = True
        return [AbortIteration()]

    def _ends_soon(self, flight: InFlight, *, now: float) -> bool:
        """Return whether the iteration is expected to end shortly: what is nearly done is not thrown away."""
        if flight.composed.predicted_s is None:
            return False
        left_s = flight.started_at + flight.composed.predicted_s - now
        error_s = flight.composed.predicted_s * self.state.estimator.relative_error
        return left_s >= 0 and left_s + error_s <= self.state.policy.abort_patience_s

    # ---- leaving

    def _cancelled(self, request_id: RequestId, *, now: float) -> list[Decision]:
        record = self.state.records.get(request_id)
        if record is None or record.is_cancelled:
            return []
        record.tell("cancelled", now=now)
        if record.state is RequestState.WAITING:
            self._forget_waiting(record, now=now)
            # A preempted request still has its tokens and sampler on the backend.
            return [Cancel(request_id=request_id)] if record.preemptions else []
        self.state.note_cancelled(record)
        if self.state.in_flight is not None:
            return []
        return self._drop_cancelled()

    def _forget_waiting(self, record: Record, *, now: float) -> None:
        self.state.dequeue(record, now=now)
        self._settle(record)
        self._count(record, "cancelled")

    def _drop_cancelled(self) -> list[Decision]:
        decisions: list[Decision] = []
        for record in list(self.state.leaving.values()):
            self._give_back(record)
            self._settle(record)
            self._count(record, "cancelled")
            decisions.append(Cancel(request_id=record.request_id))
        return decisions

    def _give_back(self, record: Record) -> None:
        self.state.pages.release(record.request_id)
        self.state.let_go(record)
        record.pages = 0
        record.reserved = 0

    def _settle(self, record: Record) -> None:
        record.state = RequestState.FINISHED
        self.state.records.pop(record.request_id, None)
        self.state.coming_prefixes.pop(record.request_id, None)

    def _count(self, record: Record, what: str) -> None:
        for account in (self._payer(record), self.state.class_accounts[record.class_id]):
            setattr(account, what, getattr(account, what) + 1)

    def _payer(self, record: Record) -> Account:
        return self.state.account(SYSTEM if record.request.paid_by_system else record.resident_id)

    def _backend_lost(self, *, now: float) -> list[Decision]:
        self.state.in_flight = None
        self.state.is_backend_up = False
        for record in list(self.state.holding.values()):
            self.state.let_go(record)
            if record.is_cancelled:
                self._settle(record)
                self._count(record, "cancelled")
                continue
            record.pages = record.reserved = record.stored = 0
            record.state = RequestState.WAITING
            record.tell("backend lost", now=now)
            record.preemptions += 1
            self.state.enqueue(record, now=now)
        self.state.pages.forget_all()
        for record in self.state.records.values():
            record.shared = 0
        return []

    def _prefix_dropped(self, request_id: RequestId) -> list[Decision]:
        if self.state.pages.unpin(request_id):
            for record in self.state.records.values():
                if record.state is RequestState.WAITING:
                    record.shared = 0
        return []

    # ---- an iteration came back

    def _iteration_done(self, event: IterationDone, *, now: float) -> list[Decision]:
        flight, self.state.in_flight = self.state.in_flight, None
        if flight is None:
            return []
        self.state.num_iterations += 1
        if not event.aborted:
            self.state.estimator.observe(flight.shape.as_computed(event.results), event.seconds)
        bills = self._credit_all(event, now=now)
        self._charge_all(bills, seconds=event.seconds, now=now)
        if self.state.num_iterations % _REBASE_EVERY == 0:
            self.state.counters.rebase()
        self.state.forget_answers()
        return self._drop_cancelled()

    def _credit_all(self, event: IterationDone, *, now: float) -> list[Bill]:
        """Take over what the iteration did for each request; return the bills that gained something."""
        micros = self._micros_of(event)
        records, growing = self.state.records, self.state.growing
        bills: list[Bill] = []
        for result in event.results:
            record = records.get(result.request_id)
            if record is None:
                continue
            bill = record.bill or self.state.bill(record)
            if not bill.is_open:
                bill.is_open = True
                bills.append(bill)
            tokens = result.decode_tokens
            if not record.decodes or result.prefill_tokens or result.finished or result.failed or micros:
                self._credit(record, result, bill, micros.get(result.request_id, 0), now=now)
            elif tokens:
                # Nearly all results are this: one more token of an answer, and nothing else changed.
                record.length = length = record.length + tokens
                record.stored = length - 1
                if length > record.reserved:
                    growing[record.request_id] = record
                bill.decoded += tokens
                if record.prepaid:
                    self._settle_forecast(record, bill, tokens * self.state.policy.decode_cost)
        return bills

    def _settle_forecast(self, record: Record, bill: Bill, units: int) -> None:
        """Note that so much of what was charged ahead is charged as computed now."""
        settled = min(units, record.prepaid)
        record.prepaid -= settled
        bill.settled += settled

    def _micros_of(self, event: IterationDone) -> dict[RequestId, int]:
        """Split the measured time over the results, in whole microseconds; nothing gets lost."""
        if self.state.policy.unit is not ServiceUnit.ACCELERATOR_TIME:
            return {}
        parts = self._costs_of(event.results)
        whole, total = int(event.seconds * MICRO), sum(parts.values())
        if not total:
            return {}
        split = {request_id: whole * part // total for request_id, part in parts.items()}
        first = next(iter(split))
        split[first] += whole - sum(split.values())
        return split

    def _costs_of(self, results: tuple[SequenceResult, ...]) -> dict[RequestId, int]:
        """Return what each result cost in proportion: by the cost model, by tokens until it has learned."""
        policy, records = self.state.policy, self.state.records
        seconds = self.state.estimator.seconds
        tokens = {
            r.request_id: r.prefill_tokens * policy.prefill_cost + r.decode_tokens * policy.decode_cost
            for r in results
        }
        alone = seconds(0, 0, 0, 0)
        if alone is None:
            return tokens
        costs: dict[RequestId, int] = {}
        for r in results:
            record = records.get(r.request_id)
            stored = 0 if record is None else record.stored
            # A prompt's first token comes out of its last chunk; only other tokens are decoded.
            decodes = 0 if r.prefill_tokens or not r.decode_tokens else 1
            beside = seconds(r.prefill_tokens, stored, decodes, stored * decodes) or alone
            costs[r.request_id] = int((beside - alone) * 1e9) if tokens[r.request_id] else 0
        return costs if sum(costs.values()) else tokens

    def _credit(self, record: Record, result: SequenceResult, bill: Bill, micros: int, *, now: float) -> None:
        """Take over what the iteration did for one request, and add it to the bill it belongs to."""
        if record.is_new_on_backend:
            self._note_cached(record, result.cached_tokens)
        fresh = recomputed = 0
        if result.prefill_tokens:
            start, end = record.stored, record.stored + result.prefill_tokens
            fresh = max(0, min(end, record.request.prompt_tokens) - max(start, record.charged))
            recomputed = result.prefill_tokens - fresh
            record.stored = end
        if result.decode_tokens:
            # The token that was decoded from is stored now; the newest one is not yet.
            record.length += result.decode_tokens
            record.stored = record.length - 1
            if record.first_token_at is None:
                record.first_token_at = now
        record.charged = max(record.charged, record.stored)
        self.state.note_progress(record)
        bill.fresh += fresh
        bill.recomputed += recomputed
        bill.decoded += result.decode_tokens
        policy = self.state.policy
        units = fresh * policy.prefill_cost + result.decode_tokens * policy.decode_cost
        if record.prepaid:
            self._settle_forecast(record, bill, units)
        if micros:
            total = units + recomputed * policy.prefill_cost
            own = micros * units // total if total else 0
            bill.micros += own
            bill.system_micros += micros - own
        if result.finished or result.failed:
            self._finished(record, failed=result.failed)

    def _note_cached(self, record: Record, cached: int) -> None:
        record.is_new_on_backend = False
        record.stored = max(record.stored, cached)
        record.stored_at_admission = record.stored
        record.charged = max(record.charged, min(cached, record.request.prompt_tokens))
        if record.preemptions == 0:
            self._payer(record).cached_tokens += cached
            self.state.class_accounts[record.class_id].cached_tokens += cached

    def _charge_all(self, bills: list[Bill], *, seconds: float, now: float) -> None:
        """Book an iteration: accounts, counters and quotas by bill, windows once."""
        state = self.state
        is_timed = state.policy.unit is ServiceUnit.ACCELERATOR_TIME
        total = lower = due = 0
        for bill in bills:
            flow = bill.flow
            if not bill.is_systems:
                state.quota.spend(flow.resident_id, bill.fresh + bill.decoded)
                state.rolling.spend(flow.resident_id, bill.fresh + bill.decoded, now=now)
            if bill.settled:
                state.counters.repay(flow.resident_id, bill.settled)
                bill.settled = 0
            state.recomputed_tokens += bill.recomputed
            units, system_units = bill.close(state.policy, is_timed=is_timed)
            self._charge(bill, units, system_units)
            total += units
            if bill.was_in_order:
                flow.in_order += units
            if flow.is_lower:
                lower += units
            elif flow.is_spoken:
                self._spoken_window(flow.resident_id).add(units, now=now)
            if bill.was_due:
                due += units
        state.all_service.add(total, now=now)
        state.pace.note(total, seconds=seconds, now=now)
        state.lower_service.add(lower, now=now)
        state.due_spent.add(due, now=now)

    def _charge(self, bill: Bill, units: int, system_units: int) -> None:
        """Book what one class of one resident got in an iteration, and what it owes."""
        state, resident_id = self.state, bill.flow.resident_id
        bill.charged.service += units
        bill.by_class.service += units
        state.counters.charge(resident_id, units)
        if system_units:
            state.counters.charge_system(system_units)

    def _spoken_window(self, resident_id: ResidentId) -> WindowSum:
        spent = self.state.spoken_spent.get(resident_id)
        if spent is None:
            spent = self.state.spoken_spent[resident_id] = WindowSum(self.state.policy.voice_window_s)
        return spent

    def _finished(self, record: Record, *, failed: bool) -> None:
        if not failed and not record.is_cancelled:
            self.state.lengths.note(record.flow.flow_id, record.output)
        if record.request.keep_prefix and not failed and not record.is_cancelled:
            self.state.let_go(record)
            kept = pages_for(
                record.request.prompt_tokens - record.shared, self.state.known_capacity.page_tokens
            )
            self.state.pages.pin(record.request_id, num_pages=kept)
        else:
            self._give_back(record)
        self._settle(record)
        self._count(record, "cancelled" if failed or record.is_cancelled else "finished")

    # ---- planning the next iteration

    def _plan(self, *, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        self.state.refresh(now)
        self._drain_overcommitted(decisions, now=now)
        self._put_back(decisions, now=now)
        self._grow(decisions, now=now)
        self._admit_all(decisions, now=now)
        composed = composition.compose(self.state, now=now)
        if composed.is_empty:
            if self.state.total_waiting:
                # An empty machine that admits nobody: whoever waits lost its room after it was accepted.
                decisions.extend(self._refuse_hopeless(now=now))
            return decisions
        self._mark_participants(composed, decisions, now=now)
        order = Compose(
            decode_ids=self.state.ids_of(composed.decodes),
            prefills=composed.prefills,
            predicted_s=composed.predicted_s,
        )
        self.state.in_flight = InFlight(
            composed=order,
            shape=composed.shape,
            started_at=now,
            most_chunk_tokens=self.state.policy.max_chunk_tokens,
        )
        decisions.append(order)
        return decisions

    def _mark_participants(
        self, composed: composition.Composition, decisions: list[Decision], *, now: float
    ) -> None:
        state = self.state
        num_taking_part = len(composed.decodes) + len(composed.prefills)
        if not state.paused and num_taking_part == len(state.holding):
            for record in state.holding.values():
                record.last_served_at = now
            return
        taking_part = {r.request_id for r in composed.decodes} | {c.request_id for c in composed.prefills}
        for record in state.holding.values():
            if record.request_id in taking_part:
                record.last_served_at = now
                if record.state is RequestState.PAUSED:
                    record.state = RequestState.RUNNING
                    del state.paused[record.request_id]
                    decisions.append(Resume(request_id=record.request_id))
            elif record.state is RequestState.RUNNING:
                record.state = RequestState.PAUSED
                state.paused[record.request_id] = record
                record.tell("paused", now=now)
                decisions.append(Pause(request_id=record.request_id))

    def _drain_overcommitted(self, decisions: list[Decision], *, now: float) -> None:
        """Give pages back until the ledger fits a capacity that shrank."""
        while self.state.pages.free < 0 and self.state.holding:
            last = max(self.state.holding.values(), key=lambda r: self.state.order_key(r, now=now))
            self._preempt(last, None, decisions, now=now)

    def _put_back(self, decisions: list[Decision], *, now: float) -> None:
        """Take back the memory of paused classes, and of those who are to give way to another model.

        Where the backend cannot, what runs is let to its end.
        """
        state = self.state
        if not (state.policy.paused_classes or state.is_leaving) or not state.known_capacity.can_release:
            return
        for record in [r for r in state.holding.values() if self._is_to_give_way(r)]:
            self._preempt(record, None, decisions, now=now)

    def _is_to_give_way(self, record: Record) -> bool:
        if record.is_cancelled:
            return False
        puts_back_from = self.state.puts_back_from
        gives_way = puts_back_from is not None and record.flow.urgency >= puts_back_from
        return gives_way or record.class_id in self.state.policy.paused_classes

    def _grow(self, decisions: list[Decision], *, now: float) -> None:
        if not self.state.growing:
            return
        growing = list(self.state.growing.values())
        if len(growing) > 1:
            growing.sort(key=lambda r: self.state.order_key(r, now=now))
        self.state.growing.clear()
        for record in growing:
            if record.holds_pages and not record.is_cancelled:
                self._grow_one(record, decisions, now=now)

    def _grow_one(self, record: Record, decisions: list[Decision], *, now: float) -> None:
        state = self.state
        reserved = min(record.most_tokens, record.length + state.policy.output_slice_tokens)
        more = state.pages_needed(record, reserved) - record.pages
        urgency = state.urgency(record, now=now)
        while not admission.fits(state, more, urgency=urgency):
            victim = preemption.victim_for_growth(state, record, now=now)
            self._preempt(victim, None if victim is record else record, decisions, now=now)
            if victim is record:
                return
        state.pages.reserve(record.request_id, record.resident_id, more)
        record.pages += more
        record.reserved = reserved
        decisions.append(Grow(request_id=record.request_id, reserved_tokens=reserved))

    def _admit_all(self, decisions: list[Decision], *, now: float) -> None:
        """Admit in order until nothing more fits; those over their page cap come last, on loan."""
        if not preemption.can_anybody_run(self.state, now=now):
            return
        passed_over: list[Record] = []
        on_loan: list[Candidate] = []
        stuck_urgency = _NOBODY_STUCK
        order = Order(self.state, now=now)
        while (candidate := order.pop()) is not None:
            if candidate.urgency >= stuck_urgency:
                if candidate.tier is Tier.ORDER:
                    break  # from here on the order is that of urgency
                continue
            if passed_over and self._is_too_far_ahead(candidate, passed_over, now=now):
                continue
            num_before = len(decisions)
            outcome = self._try(candidate, decisions, on_loan, now=now)
            if outcome == "admitted":
                for skipped in passed_over:
                    skipped.skips += 1
                order.put_back(candidate.flow)
                if len(decisions) > num_before + 1 or candidate.record.prepaid:
                    order.rebuild()  # somebody lost its pages and waits, or was charged ahead
            elif outcome == "no_slot":
                return
            elif outcome == "no_sequence":
                # Whoever is no more urgent finds none either: the same holders would have to give way.
                stuck_urgency = min(stuck_urgency, candidate.urgency)
            elif outcome == "no_pages":
                if candidate.record.skips >= self.state.policy.max_skips:
                    return
                passed_over.append(candidate.record)
        if not passed_over:
            self._lend(on_loan, decisions, now=now)

    def _is_too_far_ahead(self, candidate: Candidate, passed_over: list[Record], *, now: float) -> bool:
        """Return whether its resident may not pass those who do not fit: it had its advantage already.

        Skips alone are counted per head; who only sends large requests would fall behind with each of them.
        """
        state = self.state
        if candidate.tier is not Tier.ORDER or state.policy.fairness is not FairnessGoal.SERVICE:
            return False
        rivals = [r for r in passed_over if r.flow.urgency == candidate.urgency]
        if not rivals:
            return False
        least = min(state.served(r.resident_id, now=now) for r in rivals)
        return state.served(candidate.record.resident_id, now=now) - least > admission.pass_allowance(state)

    def _lend(self, on_loan: list[Candidate], decisions: list[Decision], *, now: float) -> None:
        """Let residents borrow beyond their cap what nobody else can use; it is reclaimed by preemption."""
        for candidate in on_loan:
            record = candidate.record
            reserved = self.state.admission_tokens(record)
            need = self.state.pages_needed(record, reserved)
            if (
                self.state.known_capacity.can_release
                and admission.has_prefill_slot(self.state, record, urgency=candidate.urgency, now=now)
                and admission.has_sequence(self.state, urgency=candidate.urgency)
                and admission.fits(self.state, need, urgency=candidate.urgency)
            ):
                self._admit(candidate, reserved, need, decisions, now=now)
                record.is_promised = False  # what is lent is given back, whoever is owed what

    def _try(
        self, candidate: Candidate, decisions: list[Decision], on_loan: list[Candidate], *, now: float
    ) -> str:
        record, state = candidate.record, self.state
        if not admission.has_prefill_slot(state, record, urgency=candidate.urgency, now=now):
            return "no_slot"
        if not admission.may_run_more(state, record):
            return "not_now"
        reserved = state.admission_tokens(record)
        need = state.pages_needed(record, reserved)
        # What is said aloud is bounded by its bucket; a cap must not make a light wait for a summary.
        if candidate.tier is not Tier.SPOKEN and state.is_over_cap(record.resident_id, more_pages=need):
            on_loan.append(candidate)
            return "not_now"
        if not (
            admission.has_sequence(state, urgency=candidate.urgency)
            and admission.fits(state, need, urgency=candidate.urgency)
        ):
            victims = preemption.victims_for(state, candidate, need, now=now)
            if not victims:
                lacks_sequence = not admission.has_sequence(state, urgency=candidate.urgency)
                return "no_sequence" if lacks_sequence and not state.has_borrowers else "no_pages"
            for victim in victims:
                self._preempt(victim, record, decisions, now=now)
        self._admit(candidate, reserved, need, decisions, now=now)
        return "admitted"

    def _admit(
        self, candidate: Candidate, reserved: int, need: int, decisions: list[Decision], *, now: float
    ) -> None:
        record, state = candidate.record, self.state
        state.dequeue(record, now=now)
        state.pages.reserve(record.request_id, record.resident_id, need)
        record.state = RequestState.RUNNING
        record.admitted_at = now
        record.pages, record.reserved = need, reserved
        record.stored = record.stored_at_admission = record.shared
        record.is_new_on_backend = True
        record.was_due = candidate.tier is Tier.DUE
        record.was_in_order = candidate.tier is Tier.ORDER
        record.is_promised = candidate.tier in (Tier.DUE, Tier.RESERVE)
        record.skips = 0
        record.last_served_at = now
        record.tell(f"admitted as {candidate.tier.name.lower()}", now=now)
        state.hold(record)
        if state.policy.predict_output:
            self._charge_forecast(record)
        decisions.append(Admit(request_id=record.request_id, reserved_tokens=reserved))

    def _charge_forecast(self, record: Record) -> None:
        """Charge what the request will probably cost; it is settled as it is computed (VTC, section 4.4).

        Before any answer of the flow was seen, half of what it may be.
        """
        policy = self.state.policy
        if record.request.paid_by_system or policy.unit is not ServiceUnit.TOKENS:
            return
        most = record.request.max_tokens
        expected = self.state.lengths.expected(record.flow.flow_id, most=most)
        output = (most + 1) // 2 if expected is None else expected
        prompt = record.request.prompt_tokens - max(record.charged, record.shared)
        units = max(0, prompt) * policy.prefill_cost + max(0, output - record.output) * policy.decode_cost
        record.prepaid = units
        self.state.counters.prepay(record.resident_id, units)
        self.state.services.pop(record.resident_id, None)

    def _preempt(
        self, victim: Record, beneficiary: Record | None, decisions: list[Decision], *, now: float
    ) -> None:
        self._give_back(victim)
        victim.state = RequestState.WAITING
        victim.stored = 0
        victim.preemptions += 1
        victim.tell(f"preempted for {beneficiary.request_id if beneficiary else 'itself'}", now=now)
        self._count(victim, "preemptions")
        self.state.enqueue(victim, now=now)
        decisions.append(
            Preempt(
                request_id=victim.request_id,
                mode=PreemptionMode.RELEASE,
                beneficiary_id=beneficiary.request_id if beneficiary else None,
            )
        )
