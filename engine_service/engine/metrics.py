"""What was observed: times, tokens and shares, per resident and per class.

Decides nothing. Token counts are the core's own ledger, never counted a second time; times are measured
by the engine thread. `Snapshot.as_dict` is the wire form of docs/wire.md.

Definitions
* queue time: arrival to first admission. Time to first token: arrival to first output token.
* inter-token latency: gap between output tokens of one request. Completion time: arrival to finish.
* service share: part of the service units charged in the window. Entitled share: part of the weights of
  the residents with demand in the window.
* bound used: the widest difference in service between two who wait in the same class, as part of what the
  core allows (`invariants.bound_used`). Longest iteration: of the window.
* pictures, picture_s: pictures of admitted requests, ever, and the seconds in which their admission kept all
  others waiting; what is still at hand from an earlier request takes none.
* SLO attainment: part of the answers of the window that kept their class's targets (`scheduling.targets`).
  What failed did not, nor did what was given up after the first token was due.
* switch_s: seconds, ever, in which nobody could be served because another model was to serve.
* starvation age: how long the request of a class that has waited longest has got nothing.
* fairness index: Jain's index of service per weight over residents who had to wait in the window (those
  who ask for less than their share would only distort it); 1.0 where fewer than two had to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_service.engine.memory import longest_conversation
from engine_service.engine.quantiles import WindowedMaximum, WindowedQuantiles
from engine_service.scheduling.counters import Account
from engine_service.scheduling.invariants import InvariantBroken, TooFarAhead, bound_used, check
from engine_service.scheduling.model import MICRO, RequestState, ResidentId, WorkloadClass
from engine_service.scheduling.scheduler import Scheduler
from engine_service.scheduling.windows import WindowSum

_RATE_WINDOW_S = 10.0
_WAITED_NOTICEABLY_MS = 1_000


class Timers:
    """The four durations, of one resident or class."""

    def __init__(self, window_s: float) -> None:
        """Start empty."""
        self.queue = WindowedQuantiles(window_s)
        self.first_token = WindowedQuantiles(window_s)
        self.inter_token = WindowedQuantiles(window_s)
        self.completion = WindowedQuantiles(window_s)

    def as_dict(self, *, now: float) -> dict[str, Any]:
        """Return the wire form."""
        return {
            "queue_time_s": self.queue.read(now=now).as_dict(),
            "time_to_first_token_s": self.first_token.read(now=now).as_dict(),
            "inter_token_latency_s": self.inter_token.read(now=now).as_dict(),
            "completion_time_s": self.completion.read(now=now).as_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One look at the engine; plain values, safe to keep."""

    version: int
    uptime_s: float
    window_s: float
    engine: Mapping[str, Any]
    residents: Mapping[str, Mapping[str, Any]]
    classes: Mapping[str, Mapping[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Return the part of the wire message that the engine knows (docs/wire.md)."""
        return {
            "uptime_s": round(self.uptime_s, 3),
            "window_s": self.window_s,
            "engine": dict(self.engine),
            "residents": {name: dict(value) for name, value in self.residents.items()},
            "classes": {name: dict(value) for name, value in self.classes.items()},
        }


@dataclass(slots=True)
class _Share:
    service: WindowSum
    waited_ms: WindowSum
    last_service: int = 0


@dataclass(slots=True)
class _Answers:
    all: WindowSum
    good: WindowSum


@dataclass(slots=True)
class Observer:
    """Collects durations while the engine runs and reads the rest off the scheduler."""

    window_s: float
    started_at: float
    _residents: dict[ResidentId, Timers] = field(default_factory=dict)
    _classes: dict[WorkloadClass, Timers] = field(default_factory=dict)
    _shares: dict[ResidentId, _Share] = field(default_factory=dict)
    _answers: dict[WorkloadClass, _Answers] = field(default_factory=dict)
    _tokens: WindowSum = field(init=False)
    _iterations: WindowedMaximum = field(init=False)
    _last_tokens: int = 0
    _num_pictures: int = 0
    _picture_s: float = 0.0

    def __post_init__(self) -> None:
        """Open the windows."""
        self._tokens = WindowSum(_RATE_WINDOW_S)
        self._iterations = WindowedMaximum(self.window_s)

    def timers(self, resident_id: ResidentId, class_id: WorkloadClass) -> tuple[Timers, Timers]:
        """Return the timers that a request of this resident and class feeds."""
        by_resident = self._residents.get(resident_id)
        if by_resident is None:
            by_resident = self._residents[resident_id] = Timers(self.window_s)
        by_class = self._classes.get(class_id)
        if by_class is None:
            by_class = self._classes[class_id] = Timers(self.window_s)
        return by_resident, by_class

    def waited(self, resident_id: ResidentId, seconds: float, *, now: float) -> None:
        """Note the time a request of the resident spent waiting before it was admitted."""
        self._share(resident_id).waited_ms.add(int(seconds * 1000), now=now)

    def saw(self, num_pictures: int, *, seconds: float) -> None:
        """Note an admission of a request with pictures, and how long it took."""
        self._num_pictures += num_pictures
        self._picture_s += seconds

    def answered(self, class_id: WorkloadClass, *, is_met: bool, now: float) -> None:
        """Note whether a request of a class with targets kept them (the caller holds the observer still)."""
        answers = self._answers.get(class_id)
        if answers is None:
            answers = self._answers[class_id] = _Answers(WindowSum(self.window_s), WindowSum(self.window_s))
        answers.all.add(1, now=now)
        answers.good.add(int(is_met), now=now)

    def begin_from(self, scheduler: Scheduler) -> None:
        """Take what an earlier engine served as known, so that it is no sudden service now."""
        accounts = scheduler.state.accounts
        for resident_id, account in accounts.items():
            self._share(resident_id).last_service = account.service
        self._last_tokens = sum(account.tokens_served for account in accounts.values())

    def iteration_done(self, scheduler: Scheduler, *, seconds: float, now: float) -> None:
        """Take over what the core's ledger gained in the last iteration, and how long that took."""
        self._iterations.add(seconds, now=now)
        total = 0
        for resident_id, account in scheduler.state.accounts.items():
            share = self._share(resident_id)
            share.service.add(account.service - share.last_service, now=now)
            share.last_service = account.service
            total += account.tokens_served
        self._tokens.add(total - self._last_tokens, now=now)
        self._last_tokens = total

    def _share(self, resident_id: ResidentId) -> _Share:
        share = self._shares.get(resident_id)
        if share is None:
            share = self._shares[resident_id] = _Share(WindowSum(self.window_s), WindowSum(self.window_s))
        return share

    # ---- reading

    def snapshot(
        self, scheduler: Scheduler, names: Mapping[ResidentId, str], *, version: int, now: float
    ) -> Snapshot:
        """Return everything the household may see (the caller holds the scheduler still)."""
        shares = self._service_shares(scheduler, now=now)
        notes = self._policy_notes(scheduler, names, now=now)
        counts = _Counts(scheduler)
        residents: dict[str, Mapping[str, Any]] = {
            resident_id: self._resident(scheduler, counts, resident_id, names, shares, now=now)
            for resident_id in scheduler.residents
        }
        classes = {
            class_id.value: self._class(scheduler, counts, class_id, now=now) for class_id in WorkloadClass
        }
        return Snapshot(
            version=version,
            uptime_s=now - self.started_at,
            window_s=self.window_s,
            engine=self._engine(scheduler, counts, notes, now=now),
            residents=residents,
            classes=classes,
        )

    def _engine(
        self, scheduler: Scheduler, counts: _Counts, notes: list[str], *, now: float
    ) -> dict[str, Any]:
        state = scheduler.state
        return {
            "kv_pages_total": state.pages.total,
            "kv_pages_used": state.pages.num_held + state.pages.num_pinned,
            "kv_pages_pinned": state.pages.num_pinned,
            "page_tokens": state.capacity.page_tokens if state.capacity else 0,
            "max_context_tokens": longest_conversation(state),
            "requests_running": sum(counts.running.values()),
            "requests_waiting": sum(counts.waiting.values()),
            "requests_paused": counts.paused,
            "iterations": state.num_iterations,
            "tokens_served": sum(a.tokens_served for a in state.class_accounts.values()),
            "recomputed_tokens": state.recomputed_tokens,
            "switch_s": round(state.switch_micros / MICRO, 3),
            "pictures": self._num_pictures,
            "picture_s": round(self._picture_s, 3),
            "paused_classes": list(state.policy.paused_classes),
            "policy_met": not notes,
            "policy_notes": notes,
            "tokens_per_second": round(self._tokens.total(now=now) / _RATE_WINDOW_S, 2),
            "fairness_index": round(self._jain(scheduler, now=now), 4),
            "bound_used": _rounded(bound_used(state), 4),
            "longest_iteration_s": _rounded(self._iterations.read(now=now), 4),
        }

    def _resident(
        self,
        scheduler: Scheduler,
        counts: _Counts,
        resident_id: ResidentId,
        names: Mapping[ResidentId, str],
        shares: Mapping[ResidentId, tuple[float, float]],
        *,
        now: float,
    ) -> dict[str, Any]:
        state = scheduler.state
        served, entitled = shares.get(resident_id, (0.0, 0.0))
        timers = self._residents.get(resident_id) or Timers(self.window_s)
        return {
            "name": names.get(resident_id, resident_id),
            "weight": state.weight(resident_id),
            **_account(state.account(resident_id)),
            "service_share": round(served, 4),
            "entitled_share": round(entitled, 4),
            "requests_running": counts.running.get(resident_id, 0),
            "requests_waiting": counts.waiting.get(resident_id, 0),
            "kv_pages_used": state.pages.held_by(resident_id),
            "tokens_left_today": state.quota.left(resident_id),
            **timers.as_dict(now=now),
        }

    def _class(
        self, scheduler: Scheduler, counts: _Counts, class_id: WorkloadClass, *, now: float
    ) -> dict[str, Any]:
        timers = self._classes.get(class_id) or Timers(self.window_s)
        return {
            "requests_running": counts.running_by_class.get(class_id, 0),
            "requests_waiting": counts.waiting_by_class.get(class_id, 0),
            **_account(scheduler.state.class_accounts[class_id]),
            "slo_attainment": self._attainment(class_id, now=now),
            "starvation_age_s": round(now - counts.starved_since.get(class_id, now), 1),
            **timers.as_dict(now=now),
        }

    def _attainment(self, class_id: WorkloadClass, *, now: float) -> float | None:
        answers = self._answers.get(class_id)
        num_answers = answers.all.total(now=now) if answers else 0
        return round(answers.good.total(now=now) / num_answers, 4) if answers and num_answers else None

    def _service_shares(self, scheduler: Scheduler, *, now: float) -> dict[ResidentId, tuple[float, float]]:
        """Return (service share, entitled share) of residents with demand in the window."""
        service = {r: self._share(r).service.total(now=now) for r in scheduler.residents}
        live = {record.resident_id for record in scheduler.state.records.values()}
        weights = {r: scheduler.state.weight(r) for r, units in service.items() if units or r in live}
        all_service, all_weight = sum(service.values()), sum(weights.values())
        return {
            r: (service[r] / all_service if all_service else 0.0, weight / all_weight)
            for r, weight in weights.items()
        }

    def _jain(self, scheduler: Scheduler, *, now: float) -> float:
        per_weight = [
            share.service.total(now=now) / scheduler.state.weight(resident_id)
            for resident_id, share in self._shares.items()
            if resident_id in scheduler.residents and share.waited_ms.total(now=now) >= _WAITED_NOTICEABLY_MS
        ]
        squares = sum(x * x for x in per_weight)
        if len(per_weight) < 2 or not squares:
            return 1.0
        return sum(per_weight) ** 2 / (len(per_weight) * squares)

    def _policy_notes(
        self, scheduler: Scheduler, names: Mapping[ResidentId, str], *, now: float
    ) -> list[str]:
        """Say in plain words what was not as the household chose."""
        notes = []
        try:
            check(scheduler)
        except TooFarAhead as unfair:
            notes.append(_told(unfair, names))
        except InvariantBroken as broken:
            notes.append(f"internal accounting is wrong ({broken.promise}); please report it")
        for class_id in (WorkloadClass.VOICE, WorkloadClass.ACCESSIBILITY):
            timers = self._classes.get(class_id)
            limit = scheduler.state.policy.classes[class_id].max_wait_s
            p95 = timers.queue.read(now=now).p95 if timers else None
            if p95 is not None and p95 > limit:
                notes.append(f"{class_id.value} requests waited {p95:.1f} s; the policy allows {limit:.1f} s")
        return notes


class _Counts:
    """How many requests wait and run, in one pass."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.running: dict[ResidentId, int] = {}
        self.waiting: dict[ResidentId, int] = {}
        self.running_by_class: dict[WorkloadClass, int] = {}
        self.waiting_by_class: dict[WorkloadClass, int] = {}
        self.starved_since: dict[WorkloadClass, float] = {}
        self.paused = 0
        for record in scheduler.state.records.values():
            is_waiting = record.state is RequestState.WAITING
            by_resident = self.waiting if is_waiting else self.running
            by_class = self.waiting_by_class if is_waiting else self.running_by_class
            by_resident[record.resident_id] = by_resident.get(record.resident_id, 0) + 1
            by_class[record.class_id] = by_class.get(record.class_id, 0) + 1
            self.paused += record.state is RequestState.PAUSED
            if is_waiting:
                since = self.starved_since.get(record.class_id, record.last_served_at)
                self.starved_since[record.class_id] = min(since, record.last_served_at)


def _told(unfair: TooFarAhead, names: Mapping[ResidentId, str]) -> str:
    ahead, behind = names.get(unfair.ahead, unfair.ahead), names.get(unfair.behind, unfair.behind)
    gained, allowed = unfair.gained // MICRO, unfair.allowed // MICRO
    got = f"{ahead} was served {gained} tokens more than {behind} while both waited"
    return f"{got}; the policy allows {allowed}"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _account(account: Account) -> dict[str, Any]:
    return {
        "tokens": {
            "prefill": account.prefill_tokens,
            "cached": account.cached_tokens,
            "decode": account.decode_tokens,
        },
        "tokens_served": account.tokens_served,
        "finished": account.finished,
        "cancelled": account.cancelled,
        "preemptions": account.preemptions,
        "rejected": account.rejected,
    }
