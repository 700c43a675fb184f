"""Days, clocks that jump, readiness: what the engine makes of time."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from engine_service.engine import eventlog
from engine_service.engine.days import local_day
from engine_service.engine.sessions import Delta
from engine_service.errors import QuotaExhausted
from engine_service.scheduling.decisions import Cancel
from engine_service.scheduling.events import Cancelled, DayStarted, IterationDone
from engine_service.scheduling.invariants import check
from engine_service.scheduling.model import Resident, ResidentId
from tests.engine.conftest import Clock, ask, order, read, until
from tests.engine.wild import Builder, wild_engine

BERLIN = ZoneInfo("Europe/Berlin")
DAY_S = 86_400.0
MISER = Resident(resident_id=ResidentId("miser"), daily_tokens=5, daily_is_hard=True)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


@pytest.mark.parametrize(
    ("instant", "day", "hours"),
    [
        ("2026-06-01 00:00", "2026-06-01", 24),
        ("2026-03-29 00:00", "2026-03-29", 23),
        ("2026-10-25 00:00", "2026-10-25", 25),
        ("2026-03-29 03:30", "2026-03-29", 20.5),
        ("2026-12-31 23:00", "2026-12-31", 1),
    ],
)
def test_a_local_day_ends_at_local_midnight_also_when_the_clocks_change(
    instant: str, day: str, hours: float
) -> None:
    assert local_day(at(instant), BERLIN) == (day, hours * 3600)


def test_the_systems_own_zone_serves_where_none_is_set() -> None:
    day, left_s = local_day(time.time(), None)
    assert day == time.strftime("%Y-%m-%d")
    assert 0 <= left_s <= 25 * 3600


async def test_a_new_day_by_the_wall_clock_renews_quotas_and_a_jump_back_does_not() -> None:
    wall = Clock(time.time)
    async with wild_engine(Builder(), residents=[MISER], wall_clock=wall, patience_s=0.4) as engine:

        async def is_refused() -> bool:
            try:
                await ask(engine, "miser", "chat", "a warm winter morning in the garden", 6)
            except QuotaExhausted as refused:
                return 0 < (refused.retry_after_s or 0) <= 25 * 3600
            return False

        assert not await is_refused()
        assert await is_refused()
        wall.ahead_s += DAY_S
        async with asyncio.timeout(30):
            while await is_refused():
                await asyncio.sleep(0.05)
        wall.ahead_s -= DAY_S
        await asyncio.sleep(0.3)
        assert await is_refused(), "a day that was seen already gives nothing again"
        check(engine._scheduler)


async def test_the_core_hears_of_a_day_once_and_of_a_clock_that_was_set(tmp_path: Path) -> None:
    wall, log = Clock(time.time), tmp_path / "log"
    async with wild_engine(Builder(), wall_clock=wall, patience_s=0.2, event_log=log, zone=BERLIN):
        await asyncio.sleep(0.4)
        wall.ahead_s += DAY_S
        await asyncio.sleep(0.4)
    days = [event for _, event, _ in eventlog.read(log) if isinstance(event, DayStarted)]
    assert len(days) == 2
    assert days[0].day < days[1].day


@pytest.mark.parametrize("jump_s", [DAY_S, 30 * DAY_S])
async def test_time_that_leaps_ahead_while_requests_run_breaks_no_promise(jump_s: float) -> None:
    clock = Clock()
    async with wild_engine(Builder(), clock=clock, patience_s=30) as engine:
        sessions = [
            await engine.submit(order(engine, name, class_id, "the rain " * 60, 60))
            for name in ("alice", "bob")
            for class_id in ("voice", "chat", "background")
        ]
        events = sessions[1].events()
        while not isinstance(await anext(events), Delta):
            pass
        clock.ahead_s += jump_s
        for session in (sessions[0], *sessions[2:]):
            assert len((await read(session))[0]) == 60
        async for _ in events:
            pass
        check(engine._scheduler)
        assert engine.is_ready


async def test_ready_means_that_an_iteration_completed_lately_while_work_exists() -> None:
    clock, builder = Clock(), Builder()
    async with wild_engine(builder, clock=clock, patience_s=3600) as engine:
        clock.ahead_s += 3600
        assert engine.is_ready, "an idle engine is ready however long it was idle"
        builder.latest.is_hanging = True
        session = await engine.submit(order(engine, "alice", "chat", "the bell rings", 5))
        assert engine.is_ready, "work that has just come is no reason for alarm"
        clock.ahead_s += 61
        assert not engine.is_ready
        builder.latest.is_hanging = False
        builder.latest.let_go.set()
        await read(session)
        assert engine.is_ready


async def test_who_goes_away_has_given_its_pages_back_when_the_iteration_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with wild_engine(Builder(), event_log=log) as engine:
        sessions = [
            await engine.submit(order(engine, "alice", "chat", "the rain sings " * 40, 400)) for _ in range(4)
        ]
        for session in sessions:
            events = session.events()
            while not isinstance(await anext(events), Delta):
                pass
            session.cancel()
        await until(lambda: engine.snapshot().engine["kv_pages_used"] == 0, engine)
    gone: set[str] = set()
    for _, event, decisions in eventlog.read(log):
        freed = {decision.request_id for decision in decisions if isinstance(decision, Cancel)}
        if isinstance(event, Cancelled):
            gone.add(event.request_id)
        elif isinstance(event, IterationDone):
            assert gone <= freed, "pages are held longer than the iteration that was under way"
        gone -= freed
    assert not gone


async def test_an_event_loop_that_falls_behind_holds_the_engine_up_instead_of_being_buried() -> None:
    async with wild_engine(Builder()) as engine:
        session = await engine.submit(order(engine, "alice", "chat", "the clock rings", 2000))
        events = session.events()
        while not isinstance(await anext(events), Delta):
            pass
        before = engine.snapshot().engine["iterations"]
        time.sleep(0.8)  # noqa: ASYNC251  nothing is delivered meanwhile
        ahead = engine.snapshot().engine["iterations"] - before
        assert ahead <= 70, "iterations pile up in front of the event loop"
        session.cancel()
