"""A caller that leaves while a change is under way: it is carried out whole, on disk and in the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_service.errors import StorageUnavailable
from engine_service.jobs.store import JobStore
from engine_service.scheduling.model import ResidentId
from engine_service.server.changes import Changes
from engine_service.state import StateFolder
from tests.server.conftest import Start
from tests.server.household import Household

LONG = {"messages": [{"role": "user", "content": "Sum up"}], "max_tokens": 100_000, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 3}


class SlowFolder(StateFolder):
    """A state folder on a disk that holds up the first write until it may go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_writing = threading.Event()
        self.may_write = threading.Event()
        self.has_written = threading.Event()

    def keep_policies(self, message: object) -> None:
        is_first = self._hold_up()
        super().keep_policies(message)
        if is_first:
            self.has_written.set()

    def keep_residents(self, residents: Any) -> None:
        is_first = self._hold_up()
        super().keep_residents(residents)
        if is_first:
            self.has_written.set()

    def _hold_up(self) -> bool:
        if self.is_writing.is_set():
            return False
        self.is_writing.set()
        assert self.may_write.wait(60)
        return True


@asynccontextmanager
async def slow(store: JobStore, beginning: str) -> AsyncIterator[tuple[asyncio.Event, threading.Event]]:
    """Hold up the next statement that begins so; yield what says that it waits, and what lets it go on."""
    database: Any = store._db
    execute = database.execute
    waits, may_go_on = asyncio.Event(), threading.Event()

    def held_up(statement: str, *values: Any) -> Any:
        if statement.startswith(beginning) and not waits.is_set():
            database._tx.put_nowait((None, lambda: may_go_on.wait(60)))
            asyncio.get_running_loop().call_soon(waits.set)  # once it stands in the line of the database
        return execute(statement, *values)

    database.execute = held_up
    try:
        yield waits, may_go_on
    finally:
        may_go_on.set()
        database.execute = execute


async def leave(asking: asyncio.Task[Any]) -> None:
    """Let the caller go away; return when the server has heard of it."""
    num_before = num_connections()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    while num_connections() >= num_before:
        await asyncio.sleep(0.005)


def num_connections() -> int:
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return names.count("RequestHandler.start")


async def test_a_policy_whose_caller_left_holds_at_once_as_after_a_restart(start: Start) -> None:
    async with start() as home:
        book = home.service.policies
        book._state = disk = SlowFolder(book._state.path)
        asking = asyncio.create_task(home.ask("PATCH", "/v1/policy", {"policy": {"max_skips": 7}}))
        await asyncio.to_thread(disk.is_writing.wait, 60)
        await leave(asking)
        disk.may_write.set()
        await asyncio.to_thread(disk.has_written.wait, 60)
        body = (await home.ask("PUT", "/v1/policy", {"policy": {"max_skips": 9}})).json()
        assert [entry["revision"] for entry in body["history"]] == [2, 1, 0]
        assert book.find(1).policy.max_skips == 7
        assert home.engine._scheduler.state.policy.max_skips == 9
    async with start() as home:
        body = (await home.ask("GET", "/v1/policy")).json()
        assert (body["revision"], body["policy"]["max_skips"]) == (2, 9)


async def test_of_two_changes_at_the_same_moment_none_is_lost(start: Start) -> None:
    """The later one changes what the earlier one made of the policy, and not what that found."""
    async with start() as home:
        book = home.service.policies
        book._state = disk = SlowFolder(book._state.path)
        first = asyncio.create_task(home.ask("PATCH", "/v1/policy", {"policy": {"max_skips": 7}}))
        await asyncio.to_thread(disk.is_writing.wait, 60)
        second = asyncio.create_task(home.ask("PATCH", "/v1/policy", {"policy": {"prefix_share": 0.1}}))
        while len(home.service.changes._under_way) < 2:
            await asyncio.sleep(0.005)
        disk.may_write.set()
        assert [(await asked).status for asked in (first, second)] == [200, 200]
        policy = home.engine._scheduler.state.policy
        assert (policy.max_skips, policy.prefix_share) == (7, 0.1)


async def test_a_change_under_way_is_in_force_when_the_engine_has_ended(start: Start) -> None:
    async with start() as home:
        book = home.service.policies
        book._state = disk = SlowFolder(book._state.path)
        asking = asyncio.create_task(home.ask("PATCH", "/v1/policy", {"policy": {"max_skips": 7}}))
        await asyncio.to_thread(disk.is_writing.wait, 60)
        await leave(asking)
        disk.may_write.set()
    assert (book.current.number, home.engine._scheduler.state.policy.max_skips) == (1, 7)
    async with start() as home:
        assert (await home.ask("GET", "/v1/policy")).json()["revision"] == 1


async def test_no_resident_is_lost_to_a_slower_write_whose_caller_left(start: Start) -> None:
    async with start() as home:
        book = home.service.residents
        book._state = disk = SlowFolder(book._state.path)
        bob = asyncio.create_task(home.ask("PUT", "/v1/residents/bob", {}))
        await asyncio.to_thread(disk.is_writing.wait, 60)
        await leave(bob)
        carol = asyncio.create_task(home.ask("PUT", "/v1/residents/carol", {}))
        await asyncio.wait({carol}, timeout=0.5)  # without a line, the later write would be the first to end
        disk.may_write.set()
        await asyncio.to_thread(disk.has_written.wait, 60)
        assert (await carol).status == 200
    async with start() as home:
        told = (await home.ask("GET", "/v1/residents")).json()["residents"]
        assert [entry["id"] for entry in told] == ["alice", "bob", "carol", "guest", "house"]


async def test_a_resident_whose_remover_left_is_gone_from_the_figures_too(
    home: Household, monkeypatch: pytest.MonkeyPatch
) -> None:
    await home.ask("PUT", "/v1/residents/bob", {})
    await home.chat(max_tokens=1, fairhearth={"resident": "bob"})
    book = home.service.residents
    forgotten: list[ResidentId] = []
    book._state = disk = SlowFolder(book._state.path)
    forget = home.service.meters.forget

    def noted(resident_id: ResidentId) -> None:
        forgotten.append(resident_id)
        forget(resident_id)

    monkeypatch.setattr(home.service.meters, "forget", noted)
    asking = asyncio.create_task(home.ask("DELETE", "/v1/residents/bob"))
    await asyncio.to_thread(disk.is_writing.wait, 60)
    await leave(asking)
    disk.may_write.set()
    await home.ask("PUT", "/v1/residents/carol", {})  # behind the other in the line
    assert forgotten == ["bob"]


async def test_a_job_whose_caller_left_is_begun_at_once(home: Household) -> None:
    async with slow(home.service.jobs.runner._store, "INSERT") as (waits, _):
        asking = asyncio.create_task(home.ask("POST", "/v1/jobs", {"request": SHORT, "idempotency_key": "k"}))
        await waits.wait()
        await leave(asking)
    async with asyncio.timeout(30):  # half of what passes until the jobs are looked at anyway
        while not [job for job in await jobs(home) if job["state"] == "finished"]:
            await asyncio.sleep(0.02)
    again = await home.ask("POST", "/v1/jobs", {"request": SHORT, "idempotency_key": "k"})
    assert (again.status, again.json()["state"]) == (200, "finished")


async def jobs(home: Household) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = (await home.ask("GET", "/v1/jobs")).json()["jobs"]
    return told


async def test_a_job_whose_canceller_left_is_computed_no_more(home: Household) -> None:
    job = (await home.ask("POST", "/v1/jobs", {"request": LONG})).json()
    while not (await jobs(home))[0]["progress"]["output_tokens"]:
        await asyncio.sleep(0.02)
    async with slow(home.service.jobs.runner._store, "UPDATE jobs SET state = ?, ended_at") as (waits, _):
        asking = asyncio.create_task(home.ask("DELETE", f"/v1/jobs/{job['id']}"))
        await waits.wait()
        await leave(asking)
    async with asyncio.timeout(30):  # computed to its end it would take a quarter of an hour
        await home.until_idle()
    told = (await home.ask("GET", f"/v1/jobs/{job['id']}")).json()
    assert (told["state"], told["eta_s"]) == ("cancelled", None)


# --- what carries them out ---


async def test_who_stays_hears_what_the_change_comes_to() -> None:
    async def seven() -> int:
        return 7

    async def refused() -> int:
        raise StorageUnavailable("the disk is full")

    changes = Changes()
    assert await changes.carry_out(seven()) == 7
    with pytest.raises(StorageUnavailable, match="the disk is full"):
        await changes.carry_out(refused())
    await changes.settled(within_s=60)


@pytest.mark.parametrize(
    ("error", "level", "words"),
    [
        (StorageUnavailable("the disk is full"), "WARNING", "was refused: the disk is full"),
        (KeyError("alice"), "ERROR", "had left failed"),
    ],
)
async def test_what_fails_after_its_caller_left_is_logged(
    caplog: pytest.LogCaptureFixture, error: Exception, level: str, words: str
) -> None:
    may_fail = asyncio.Event()

    async def fails() -> None:
        await may_fail.wait()
        raise error

    changes = Changes()
    asking = asyncio.create_task(changes.carry_out(fails()))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    may_fail.set()
    await changes.settled(within_s=60)
    await asyncio.sleep(0)
    assert [(record.levelname, words in record.message) for record in caplog.records] == [(level, True)]


async def test_a_change_that_never_ends_is_waited_for_no_longer_than_allowed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hanging = asyncio.Event()
    changes = Changes()
    asking = asyncio.create_task(changes.carry_out(hanging.wait()))
    await asyncio.sleep(0)
    await changes.settled(within_s=0.05)
    assert "have not come to their end: 1" in caplog.text
    hanging.set()
    await asking
