"""The jobs' file, taken over from an earlier version; what a killed or another engine leaves of a job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_service.errors import StorageUnavailable
from engine_service.jobs.desk import JobDesk
from engine_service.jobs.model import Job, JobState, Json, Output, TellState
from engine_service.jobs.runner import JobRunner
from engine_service.jobs.store import JobStore
from engine_service.protocol import Extension
from engine_service.scheduling.model import ResidentId, WorkloadClass
from engine_service.server.webhooks import teller_for
from tests.server.conftest import Start

VERSION_2 = """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, key TEXT, title TEXT, state TEXT NOT NULL,
    resident TEXT NOT NULL, class TEXT NOT NULL, program TEXT, request TEXT NOT NULL,
    created_at REAL NOT NULL, started_at REAL, ended_at REAL, deadline_at REAL, keep_s REAL NOT NULL,
    attempts INTEGER NOT NULL, token_ids TEXT NOT NULL, text TEXT NOT NULL,
    result TEXT, result_sha256 TEXT, error TEXT,
    webhook TEXT, webhook_state TEXT NOT NULL DEFAULT 'waiting', webhook_tries INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX jobs_by_key ON jobs (owner, key) WHERE key IS NOT NULL;
CREATE INDEX jobs_by_state ON jobs (state, created_at);
PRAGMA user_version = 2;
"""
REQUEST = {"messages": [{"role": "user", "content": "Sum up"}], "max_tokens": 4, "ignore_eos": True}
RESULT = {"model": "old-model", "choices": [{"index": 0, "message": {"content": "A quiet day."}}]}
ENDED = (
    *("job-ended", "Home Assistant", "monday", "Monday", "finished", "alice", "background", "tasks"),
    *(json.dumps(REQUEST), 1000.0, 1001.0, 1002.0, 9000.0, 1e12, 2, "[5,6,7]", "A quiet day."),
    *(json.dumps(RESULT), "9b1d", None),
    *(json.dumps({"url": "http://hub.local/x", "with_result": True}), "delivered", 3),
)
BEGUN = (
    *("job-begun", "admin", None, None, "running", "house", "background", None),
    *(json.dumps(REQUEST), 1003.0, 1004.0, None, None, 1e12, 1, "[10,11]", "xx"),
    *(None, None, None, None, "waiting", 0),
)


@pytest.fixture
def version_2(tmp_path: Path) -> Path:
    """A file as the engine before this one left it, with a job that has ended and one that runs."""
    path = tmp_path / "state" / "jobs.sqlite3"
    path.parent.mkdir()
    with sqlite3.connect(path) as old:
        old.executescript(VERSION_2)
        for row in (ENDED, BEGUN):
            old.execute(f"INSERT INTO jobs VALUES ({', '.join('?' * 23)})", row)
    old.close()
    return path


async def test_a_file_of_the_second_version_is_taken_over_with_all_it_holds(version_2: Path) -> None:
    for _ in range(2):
        store = await JobStore.open(version_2)
        ended, begun = await store.get("job-ended"), await store.get("job-begun")
        await store.close()
        assert ended is not None
        assert begun is not None
        assert ended.who == Extension(
            resident_id=ResidentId("alice"), class_id=WorkloadClass.BACKGROUND, program_id="tasks"
        )
        assert (ended.state, ended.title, ended.idempotency_key) == (JobState.FINISHED, "Monday", "monday")
        assert (ended.created_at, ended.started_at, ended.ended_at) == (1000.0, 1001.0, 1002.0)
        assert (ended.attempts, ended.output) == (2, Output(token_ids=(5, 6, 7), text="A quiet day."))
        assert (ended.result, ended.result_sha256, ended.request) == (RESULT, "9b1d", REQUEST)
        assert ended.webhook is not None
        assert (ended.webhook.url, ended.webhook.with_result) == ("http://hub.local/x", True)
        assert (ended.webhook_state, ended.webhook_tries) == (TellState.DELIVERED, 3)
        assert ended.model == "old-model", "its answer says which model wrote it"
        assert (begun.state, begun.output.text, begun.model) == (JobState.RUNNING, "xx", None)
    with sqlite3.connect(version_2) as now:
        assert now.execute("PRAGMA user_version").fetchone() == (3,)
    now.close()


async def test_jobs_of_the_second_version_are_shown_and_run_to_their_end(
    start: Start, version_2: Path
) -> None:
    async with start() as home:
        ended = (await home.ask("GET", "/v1/jobs/job-ended")).json()
        assert (ended["model"], ended["result"]) == ("old-model", RESULT)
        while (begun := (await home.ask("GET", "/v1/jobs/job-begun")).json())["state"] != "finished":
            await asyncio.sleep(0.02)
        assert (begun["model"], begun["attempts"]) == ("simulated", 2)


async def test_a_step_that_fails_leaves_the_file_as_it_was(version_2: Path) -> None:
    with sqlite3.connect(version_2) as old:
        old.execute("UPDATE jobs SET result = 'no JSON' WHERE id = 'job-ended'")
    old.close()
    with pytest.raises(Exception, match="malformed JSON"):
        await JobStore.open(version_2)
    with sqlite3.connect(version_2) as old:
        assert old.execute("PRAGMA user_version").fetchone() == (2,)
        assert len(old.execute("SELECT * FROM jobs").fetchone()) == 23
    old.close()


UNCLOSED = """
import asyncio, sys
from pathlib import Path
from engine_service.jobs.store import JobStore

async def main():
    store = await JobStore.open(Path(sys.argv[1]))
    await store.open_jobs()
    if sys.argv[2] == "raises":
        raise SystemExit(7)

asyncio.run(main())
"""


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("raises", 7)])
async def test_a_process_ends_though_nobody_closed_the_file(tmp_path: Path, how: str, code: int) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", UNCLOSED, str(tmp_path / "jobs.sqlite3"), how, cwd=Path(__file__).parents[2]
    )
    try:
        async with asyncio.timeout(30):
            assert await process.wait() == code
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_file_that_fails_at_the_start_is_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[JobStore] = []

    async def fails(store: JobStore) -> int:
        opened.append(store)
        raise StorageUnavailable("the disk is gone")

    monkeypatch.setattr(JobStore, "put_all_back", fails)
    desk = JobDesk(tmp_path / "jobs.sqlite3")
    await desk.open(Pen(), teller_for(()))
    with pytest.raises(StorageUnavailable, match="the disk is gone"):
        desk.runner  # noqa: B018  (asking is the test)
    with pytest.raises(ValueError, match=r"[Cc]losed|no active connection"):
        await opened[0].open_jobs()
    await desk.close()


async def test_jobs_that_could_not_be_opened_are_opened_as_soon_as_that_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, aside = tmp_path / "jobs.sqlite3", tmp_path / "aside"
    store = await JobStore.open(path)
    await store.submit(a_job())
    await store.close()
    path.rename(aside)
    path.mkdir()  # stands for a full disk: neither lets SQLite open the file
    desk = JobDesk(path, retry_s=0.02)
    await desk.open(Pen(), teller_for(()))
    await asyncio.sleep(0.2)
    with pytest.raises(StorageUnavailable, match="cannot be opened") as refused:
        desk.runner  # noqa: B018  (asking is the test)
    assert refused.value.retry_after_s == 0.02
    assert len([entry for entry in caplog.records if "No jobs are taken" in entry.message]) == 1
    path.rmdir()
    aside.rename(path)
    job: Job | None = None
    async with asyncio.timeout(30):
        while job is None or job.state is not JobState.RUNNING:
            await asyncio.sleep(0.01)
            with contextlib.suppress(StorageUnavailable):
                job = await desk.runner.get("job-1")
    await desk.close()


async def test_jobs_that_cannot_be_opened_do_not_hold_up_the_end(tmp_path: Path) -> None:
    (path := tmp_path / "jobs.sqlite3").mkdir()
    desk = JobDesk(path, retry_s=0.01)
    await desk.open(Pen(), teller_for(()))
    await desk.close()
    path.rmdir()
    await asyncio.sleep(0.1)
    assert not path.exists()
    with pytest.raises(StorageUnavailable, match="shutting down"):
        desk.runner  # noqa: B018  (asking is the test)


class SlowDisk(JobStore):
    """A store whose disk can be held up."""

    async def submit(self, job: Job) -> tuple[Job, bool]:
        """Keep the job as soon as the test lets the disk go on."""
        self.may_go_on = self.hold_up()
        return await super().submit(job)

    def hold_up(self) -> threading.Event:
        """Let everything asked from now on wait until the returned event is set."""
        may_go_on = threading.Event()
        database: Any = self._db
        database._tx.put_nowait((None, lambda: may_go_on.wait(60)))
        return may_go_on


async def test_a_job_is_begun_though_who_kept_it_went_before_the_disk_had_it(tmp_path: Path) -> None:
    store = await SlowDisk.open(tmp_path / "jobs.sqlite3")
    runner = JobRunner(store, Pen())
    await runner.start()
    await asyncio.sleep(0.1)  # it has looked, and looks again in a minute
    asking = asyncio.create_task(runner.submit(a_job()))
    while not hasattr(store, "may_go_on"):
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait({asking})
    store.may_go_on.set()
    async with asyncio.timeout(30):
        while (job := await runner.get("job-1")) is None or job.state is not JobState.RUNNING:
            await asyncio.sleep(0.01)
    await runner.stop()


async def test_a_disk_that_hangs_does_not_hang_the_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, pen = tmp_path / "jobs.sqlite3", Pen()
    runner = JobRunner(store := await SlowDisk.open(path), pen)
    await runner.start()
    asking = asyncio.create_task(runner.submit(a_job()))
    while not hasattr(store, "may_go_on"):
        await asyncio.sleep(0.01)
    store.may_go_on.set()
    await asking
    await writes(runner, pen, (3,))
    may_go_on = store.hold_up()
    async with asyncio.timeout(30):
        await runner.stop(within_s=0.1)
    assert "The disk does not answer" in caplog.text
    may_go_on.set()
    store = await SlowDisk.open(path)
    await store.put_all_back()
    kept = await store.get("job-1")
    await store.close()
    assert kept is not None
    assert (kept.state, kept.output) == (JobState.SUBMITTED, output(3))


async def test_a_job_that_has_ended_takes_no_longer_though_its_run_is_still_in_hand(tmp_path: Path) -> None:
    runner = await begun(tmp_path / "jobs.sqlite3", pen := Pen())
    await runner.submit(a_job())
    await writes(runner, pen, (1, 2, 3))
    job = await runner.get("job-1")
    assert job is not None
    assert runner.eta_s(job) is not None
    assert runner.eta_s(replace(job, state=JobState.CANCELLED)) is None
    await runner.stop()


# --- what a job has written ---


class Pen:
    """A model that writes what the test tells it to, then waits for more."""

    def __init__(self, model: str = "first") -> None:
        self.model = model
        self.written: asyncio.Queue[Output] = asyncio.Queue()

    async def start(self, job: Job) -> Pen:
        return self

    async def outputs(self) -> AsyncIterator[Output]:
        while True:
            yield await self.written.get()

    def result(self) -> Json:
        raise AssertionError("it never ends")

    def wait_s(self) -> float | None:
        return 0.0

    def close(self) -> None:
        pass


def output(num_tokens: int) -> Output:
    return Output(token_ids=tuple(range(num_tokens)), text="x" * num_tokens)


def a_job() -> Job:
    return Job(job_id="job-1", owner="x", request=REQUEST, who=Extension(), created_at=1.0)


async def begun(path: Path, pen: Pen) -> JobRunner:
    """Return a runner of the file whose pen has the job."""
    runner = JobRunner(await JobStore.open(path), pen, clock=iter(range(10**6)).__next__)
    await runner.start()
    return runner


async def writes(runner: JobRunner, pen: Pen, nums: Sequence[int]) -> list[int]:
    """Let the pen write so many tokens in all, one after the other; return what was told meanwhile."""
    for num in nums:
        pen.written.put_nowait(output(num))
    told: list[int] = []
    for _ in range(50):
        job = await runner.get("job-1")
        assert job is not None
        told.append(len(job.output.token_ids))
        await asyncio.sleep(0.002)
    return told


async def test_progress_never_goes_back_though_the_engine_is_killed_and_writes_less_at_first(
    tmp_path: Path,
) -> None:
    path, pen = tmp_path / "jobs.sqlite3", Pen()
    runner = await begun(path, pen)
    await runner.submit(a_job())
    told = await writes(runner, pen, (1, 2, 5))
    store = await JobStore.open(path)
    kept = await store.get("job-1")
    await store.close()
    assert kept is not None
    assert len(kept.output.token_ids) == told[-1] == 5, "what is told is on disk"
    await runner.stop()
    again = Pen()
    runner = await begun(path, again)
    told += await writes(runner, again, (2, 4, 6))  # the end is computed again, or all of it
    assert told == sorted(told)
    assert told[-1] == 6
    await runner.stop()


async def test_what_another_model_wrote_is_given_up_when_the_job_begins_on_it(tmp_path: Path) -> None:
    path, pen = tmp_path / "jobs.sqlite3", Pen()
    runner = await begun(path, pen)
    await runner.submit(a_job())
    await writes(runner, pen, (5,))
    await runner.stop()
    runner = await begun(path, other := Pen("second"))
    assert (await writes(runner, other, ()))[-1] == 0
    assert (await writes(runner, other, (2,)))[-1] == 2
    job = await runner.get("job-1")
    assert job is not None
    assert job.model == "second"
    await runner.stop()


class Overtaken(SlowDisk):
    """A store whose disk is slow to note that a job is begun, until the job is put back."""

    async def begin(self, job_id: str, *, now: float, model: str) -> bool:
        self.may_begin = self.hold_up()
        return await super().begin(job_id, now=now, model=model)

    async def put_back(self, job_id: str, output: Output) -> bool:
        self.may_begin.set()
        return await super().put_back(job_id, output)


async def test_an_engine_that_stops_while_a_job_begins_on_another_model_mixes_no_texts(
    tmp_path: Path,
) -> None:
    path, pen = tmp_path / "jobs.sqlite3", Pen()
    runner = await begun(path, pen)
    await runner.submit(a_job())
    await writes(runner, pen, (5,))
    await runner.stop()
    runner = JobRunner(store := await Overtaken.open(path), Pen("second"))
    await runner.start()
    while not hasattr(store, "may_begin"):
        await asyncio.sleep(0.01)
    await runner.stop()
    kept = await (store := await JobStore.open(path)).get("job-1")
    await store.close()
    assert kept is not None
    assert (kept.model, kept.output) == ("second", Output())
