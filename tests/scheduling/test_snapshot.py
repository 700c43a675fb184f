"""What outlives the process is exact; what is no snapshot changes nothing."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from engine_service.scheduling.events import CapacityChanged, DayStarted, ResidentsChanged
from engine_service.scheduling.model import Policy, Resident, ResidentId, WorkloadClass
from engine_service.scheduling.scheduler import Scheduler
from engine_service.scheduling.snapshot import SnapshotError
from tests.scheduling.household import CAPACITY, Household

ALICE = Resident(resident_id=ResidentId("alice"), weight=3, daily_tokens=100_000)
BOB = Resident(resident_id=ResidentId("bob"), rolling_tokens=900, rolling_window_s=120.0)


def busy_home() -> Household:
    """Return a household after half a minute of mixed work, with nothing left to do."""
    home = Household(residents=(ALICE, BOB))
    home.tell(DayStarted(day="2026-10-25", ends_at=home.now + 25 * 3600))
    for i in range(40):
        home.ask(("alice", "bob", "guest")[i % 3], list(WorkloadClass)[i % 6], 30 + 11 * i, 5 + i)
        home.run_until(home.now + 0.7)
    home.run_dry()
    return home


def facts(home: Household) -> dict[str, Any]:
    """Return what must survive."""
    state, now = home.scheduler.state, home.now
    return {
        "counters": {r: state.counters.value(r) for r in state.counters.resident_ids},
        "service": {r: state.counters.service(r) for r in state.counters.resident_ids},
        "system": state.counters.system_service,
        "day": state.quota.left(ALICE.resident_id),
        "rolling": state.rolling.left(BOB.resident_id, now=now),
        "spoken": {r: w.total(now=now) for r, w in state.spoken_spent.items()},
        "windows": [w.total(now=now) for w in (state.due_spent, state.all_service, state.lower_service)],
        "accounts": state.accounts,
        "classes": state.class_accounts,
        "recomputed": state.recomputed_tokens,
    }


def test_everything_that_counts_survives_a_restart_to_the_token() -> None:
    home = busy_home()
    before = facts(home)
    home.restart()
    assert facts(home) == before


def test_a_restart_changes_no_later_decision() -> None:
    one, other = busy_home(), busy_home()
    estimator = other.scheduler.state.estimator
    other.restart()
    # Learned again within seconds by a real restart.
    other.scheduler.state.estimator = estimator
    logs = []
    for home in (one, other):
        start = len(home.log)
        for i in range(30):
            home.ask(("alice", "bob", "guest")[i % 3], list(WorkloadClass)[i % 6], 40 + 9 * i, 8 + i)
            home.run_until(home.now + 0.05)
        home.run_dry()
        logs.append([(now, decisions) for now, _, decisions in home.log[start:] if decisions])
    assert logs[0] == logs[1]


def test_windows_age_by_the_time_the_engine_was_away() -> None:
    home = busy_home()
    spent = home.scheduler.state.all_service.total(now=home.now)
    assert spent > 0
    home.restart(elapsed_s=40.0)
    state = home.scheduler.state
    assert 0 < state.all_service.total(now=home.now) < spent
    home.restart(elapsed_s=3600.0)
    assert home.scheduler.state.all_service.total(now=home.now) == 0
    assert home.scheduler.state.rolling.left(BOB.resident_id, now=home.now) == 900


def test_another_clock_does_not_matter() -> None:
    home = busy_home()
    saved, before = home.scheduler.snapshot(now=home.now), facts(home)
    for epoch in (0.0, 3.7, 1e7):
        home.scheduler, home.now = Scheduler(Policy()), epoch
        home.scheduler.restore(saved, now=epoch)
        home.tell(ResidentsChanged(residents=home.residents))
        home.tell(CapacityChanged(capacity=CAPACITY))
        assert facts(home) == before


def put(path: str, value: object) -> Any:
    """Return a mistake: the value at a dotted path replaced (or removed where it is None)."""

    def mistake(saved: dict[str, Any]) -> None:
        *tables, key = path.split(".")
        for name in tables:
            saved = saved[name]
        if value is None:
            del saved[key]
        else:
            saved[key] = value

    return mistake


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (put("version", 2), "version is 2"),
        (put("counters", None), "counters is missing"),
        (put("counters.last_left", -1), "last_left must be a whole number >= 0"),
        (put("counters.weights.alice", 0), "weights must be >= 1"),
        (put("counters.service.nobody", 5), "same residents"),
        (put("counters.service.alice", 1.5), "service.alice must be a whole number"),
        (put("day.day", 20261025), "day must be a text"),
        (put("rolling.bob.window_s", 0), "window_s"),
        (put("service", [[1.0]]), "age in seconds, amount"),
        (put("service", [["old", 5]]), "an age must be a number of seconds"),
        (put("accounts.alice.finished", True), "finished must be a whole number"),
        (put("classes.voice", None), "voice is missing"),
        (put("lengths", [[["shouting", "alice"], [5]]]), "lengths must be"),
        (put("has_changed_cost", 0), "has_changed_cost must be true or false"),
    ],
)
def test_what_is_no_snapshot_is_refused_by_name_and_changes_nothing(mistake: Any, words: str) -> None:
    saved = json.loads(json.dumps(busy_home().scheduler.snapshot(now=200.0)))
    mistake(saved)
    fresh = Scheduler()
    before = copy.deepcopy(fresh.snapshot(now=5.0))
    with pytest.raises(SnapshotError, match=words):
        fresh.restore(saved, now=5.0)
    assert fresh.snapshot(now=5.0) == before


def test_a_snapshot_comes_before_the_first_request() -> None:
    home = busy_home()
    with pytest.raises(SnapshotError, match="before the first request"):
        home.scheduler.restore(home.scheduler.snapshot(now=home.now), now=home.now)
    with pytest.raises(SnapshotError, match="elapsed_s"):
        Scheduler().restore(home.scheduler.snapshot(now=home.now), now=0.0, elapsed_s=-1.0)
