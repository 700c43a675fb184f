"""Schedulers with one mistake each: the ten of the contract and one for each rule that came later.

Tests that let one live are not tests.

Each mutant is the smallest subclass that makes the mistake; `BREAKS` says which promise must notice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from engine_service.scheduling import admission
from engine_service.scheduling.admission import Candidate, Tier
from engine_service.scheduling.counters import Counters
from engine_service.scheduling.decisions import Cancel, Decision
from engine_service.scheduling.flows import Bill
from engine_service.scheduling.model import Policy, ResidentId
from engine_service.scheduling.quota import DailyQuota
from engine_service.scheduling.records import Record
from engine_service.scheduling.scheduler import Scheduler
from engine_service.scheduling.state import State


class _NoLiftCounters(Counters):
    def lift(self, resident_id: ResidentId, *, backlogged: Iterable[ResidentId]) -> None:
        pass


class _ArtifactLiftCounters(Counters):
    """The public artifact's rule: lift only if somebody else is queued."""

    def lift(self, resident_id: ResidentId, *, backlogged: Iterable[ResidentId]) -> None:
        others = [other for other in backlogged if other != resident_id]
        if others:
            super().lift(resident_id, backlogged=others)


class _Replaced(Scheduler):
    """A scheduler with one part exchanged before anybody is introduced."""

    counters: type[Counters] = Counters
    quota: type[DailyQuota] = DailyQuota
    state_type: type[State] = State

    def __init__(self, policy: Policy | None = None) -> None:
        self.state = self.state_type(policy or Policy(), counters=self.counters(), quota=self.quota())
        self._set_residents(())


class NoLift(_Replaced):
    """A resident saves up credit while away."""

    counters = _NoLiftCounters


class ArtifactLift(_Replaced):
    """Only the first branch of the lift."""

    counters = _ArtifactLiftCounters


class _AgeingState(State):
    def refresh(self, now: float) -> None:
        super().refresh(now)
        for record in self.records.values():
            if now >= record.due_at:
                self._set_urgency(record.flow, 0)


class AgeingChangesClass(_Replaced):
    """Who waited long enough is treated as voice."""

    state_type = _AgeingState


class ChargesDecodeOnly(Scheduler):
    """Prompts are free."""

    def __init__(self, policy: Policy | None = None) -> None:
        super().__init__(dataclasses.replace(policy or Policy(), prefill_cost=0))


class _PerRequestCounters(Counters):
    def charge(self, resident_id: ResidentId, units: int) -> None:
        """Count requests: the scheduler below charges 1 at admission and nothing afterwards."""


class ChargesRequests(_Replaced):
    """Every request costs the same, however long."""

    counters = _PerRequestCounters

    def _admit(
        self, candidate: Candidate, reserved: int, need: int, decisions: list[Decision], *, now: float
    ) -> None:
        super()._admit(candidate, reserved, need, decisions, now=now)
        Counters.charge(self.state.counters, candidate.record.resident_id, 1)


class ReserveIgnoresVoice(Scheduler):
    """The reserve is spent while somebody speaks."""

    def _admit_all(self, decisions: list[Decision], *, now: float) -> None:
        super()._admit_all(decisions, now=now)
        state = self.state
        lower = [(f, r) for f, r in state.heads() if r.class_id.urgency >= 2]
        for _, record in lower:
            reserved = state.admission_tokens(record)
            need = state.pages_needed(record, reserved)
            if admission.has_sequence(state, urgency=4) and admission.fits(state, need, urgency=4):
                candidate = Candidate(record.flow, record, Tier.RESERVE, 4)
                self._admit(candidate, reserved, need, decisions, now=now)


class CapsAreNotLendable(Scheduler):
    """Beyond its cap nobody gets anything, whatever is free."""

    def _lend(self, on_loan: list[Candidate], decisions: list[Decision], *, now: float) -> None:
        pass


class CancelKeepsPages(Scheduler):
    """A cancelled running request leaves its pages behind."""

    def _drop_cancelled(self) -> list[Decision]:
        decisions: list[Decision] = []
        for record in [r for r in self.state.holding.values() if r.is_cancelled]:
            self.state.let_go(record)
            self._settle(record)
            decisions.append(Cancel(request_id=record.request_id))
        return decisions


class VictimPaysRecompute(Scheduler):
    """Recomputation after a preemption is charged to the resident who lost its memory."""

    def _charge(self, bill: Bill, units: int, system_units: int) -> None:
        super()._charge(bill, units + system_units, 0)


class _FixedDayQuota(DailyQuota):
    _next_reset: float | None = None

    def start_day(self, day: str, *, ends_at: float) -> None:
        """Reset 24 hours after the last reset, whatever day it is."""
        begins = ends_at - 24 * 3600
        if self._next_reset is None or begins >= self._next_reset:
            self._next_reset = ends_at if self._next_reset is None else begins + 24 * 3600
            self._next_reset += 3600 * (self._day == "")
            super().start_day(day, ends_at=ends_at)


class QuotaResetsAfter24Hours(_Replaced):
    """A day always has 24 hours."""

    quota = _FixedDayQuota


class _NeverRepaidCounters(Counters):
    def repay(self, resident_id: ResidentId, units: int) -> None:
        """Keep what a forecast charged."""


class ForecastIsKept(_Replaced):
    """What was charged ahead is charged again as it is computed."""

    counters = _NeverRepaidCounters


class RestartForgets(Scheduler):
    """Counters and windows start anew with the process."""

    def restore(self, saved: object, *, now: float, elapsed_s: float = 0.0) -> None:
        pass


class AgentRunsIgnoreAge(_Replaced):
    """Inside a flow only the program's attained service counts, however long a call waited."""

    class _State(State):
        def enqueue(self, record: Record, *, now: float) -> None:
            super().enqueue(record, now=now)
            record.flow.by_age.clear()

    state_type = _State


class PassesWithoutEnd(Scheduler):
    """A head that does not fit is passed as often as skips allow, whoever passes it."""

    def _is_too_far_ahead(self, candidate: Candidate, passed_over: list[Record], *, now: float) -> bool:
        return False


BREAKS: Final[dict[type[Scheduler], str]] = {
    NoLift: "returning_gets_no_credit",
    ArtifactLift: "empty_queue_gives_no_credit",
    AgeingChangesClass: "waiting_never_becomes_urgency",
    ChargesDecodeOnly: "prompts_are_charged_too",
    ChargesRequests: "prompts_are_charged_too",
    ReserveIgnoresVoice: "speech_comes_before_the_reserve",
    CapsAreNotLendable: "caps_lend_what_nobody_uses",
    CancelKeepsPages: "cancelling_gives_everything_back",
    VictimPaysRecompute: "victims_do_not_pay_for_preemption",
    QuotaResetsAfter24Hours: "a_day_is_a_local_day",
    ForecastIsKept: "forecasts_are_settled",
    RestartForgets: "a_restart_forgets_nothing",
    AgentRunsIgnoreAge: "a_due_call_goes_before_new_agent_runs",
    PassesWithoutEnd: "large_requests_keep_their_share",
}
