"""Runs the jobs of a store: begins them, keeps what they write, ends them once, tells who listens.

Decides when a job is begun, begun again, given up or too late; the scheduler decides when it is served. All
open jobs up to a bound are orders of the engine at the same time, so that classes, ages and shares hold for
them as for everybody. Knows no HTTP: what a job's request means is the `Work`'s affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, replace
from typing import Final, Protocol

from engine_service.errors import (
    EngineError,
    EngineStopping,
    GenerationFailed,
    ModelUnavailable,
    QueueFull,
    QuotaExhausted,
    StorageUnavailable,
    TooManyRequests,
)
from engine_service.jobs.model import Job, JobState, Json, Output, sha256_of
from engine_service.jobs.store import JobStore
from engine_service.jobs.turning import RETRY_S, keep_turning
from engine_service.scheduling.model import ResidentId

_LOGGER = logging.getLogger(__name__)

MAX_OPEN: Final = 1000  #: jobs that have not ended
MAX_RUNNING: Final = 64  #: jobs handed to the engine at once
MAX_ATTEMPTS: Final = 3  #: begins after faults of the engine; restarts are not counted
KEEP_EVERY_S: Final = 1.0  #: what a job writes is on disk this often
_SWEEP_S: Final = 60.0
_MAX_RETRY_S: Final = 60.0
_STOP_S: Final = 10.0

_LATER: Final = (QueueFull, QuotaExhausted, TooManyRequests, EngineStopping)
"""Refusals that say nothing against the job."""


class Run(Protocol):
    """A job that the engine has taken."""

    @property
    def model(self) -> str:
        """The model that writes it."""
        ...

    def outputs(self) -> AsyncIterator[Output]:
        """Yield all that is written so far, whenever there is more; raise the EngineError that ends it."""
        ...

    def result(self) -> Json:
        """Return the whole answer; only after `outputs` was used up."""
        ...

    def wait_s(self) -> float | None:
        """Return the seconds until it probably starts; None if it does not wait, or unknown."""
        ...

    def close(self) -> None:
        """Give it up unless it has ended."""
        ...


class Work(Protocol):
    """Turns jobs into orders of the engine."""

    async def start(self, job: Job) -> Run:
        """Order the job, going on from what it has written; raise EngineError where it is refused."""
        ...


@dataclass(slots=True)
class _Running:
    """A job in the runner's hands."""

    job: Job  #: with the longest it has written, in this run or an earlier one
    task: asyncio.Task[None]
    output: Output  #: of this run, which may begin anew
    run: Run | None = None  #: once the engine has taken it
    first_output_at: float | None = None
    tokens_before: int = 0

    def pace_s(self, now: float) -> float | None:
        """Return the seconds (> 0) an output token took until now, None if that cannot be said yet."""
        fresh = len(self.output.token_ids) - self.tokens_before
        if self.first_output_at is None or fresh <= 1 or now <= self.first_output_at:
            return None
        return (now - self.first_output_at) / fresh


class Feed:
    """What one listener has not heard yet: the latest of each job, so that a slow one holds up nobody."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._news: dict[str, Job] = {}
        self._has_news = asyncio.Event()

    def put(self, job: Job) -> None:
        """Note the latest of a job."""
        self._news[job.job_id] = job
        self._has_news.set()

    async def next(self) -> list[Job]:
        """Wait for news and return it."""
        await self._has_news.wait()
        self._has_news.clear()
        news, self._news = list(self._news.values()), {}
        return news


class JobRunner:
    """The jobs of one engine."""

    def __init__(
        self,
        store: JobStore,
        work: Work,
        *,
        clock: Callable[[], float] = time.time,
        max_running: int = MAX_RUNNING,
        on_end: Callable[[], None] = lambda: None,
    ):
        """Run the jobs of store by work; clock gives seconds since 1970; on_end hears of every end."""
        self._store = store
        self._work = work
        self._clock = clock
        self._max_running = max_running
        self._on_end = on_end
        self._running: dict[str, _Running] = {}
        self._not_before: dict[str, float] = {}
        self._faults: dict[str, int] = {}
        self._last_pace_s: float | None = None
        self._feeds: set[Feed] = set()
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    # --- life ---

    async def start(self) -> None:
        """Go on with what an earlier engine left; raise StorageUnavailable."""
        count = await self._store.put_all_back()
        if count:
            said = "1 job was running when the engine ended; it goes on"
            many = f"{count} jobs were running when the engine ended; they go on"
            _LOGGER.warning(said if count == 1 else many)
        self._loop = asyncio.create_task(keep_turning(self._turn, self._wake))

    async def stop(self, *, within_s: float = _STOP_S) -> None:
        """Let running jobs wait for the next start, with what they have written, and close the store.

        A disk that hangs is waited for within_s seconds; the next start goes on from what it has taken.
        """
        until = asyncio.get_running_loop().time() + within_s
        if self._loop is not None:
            self._loop.cancel()
            await _ended({self._loop}, until=until)
        tasks = {entry.task for entry in self._running.values()}
        for task in tasks:
            task.cancel()
        await _ended(tasks, until=until)
        closing = asyncio.create_task(self._store.close())
        if await _ended({closing}, until=until):
            closing.result()
        else:
            _LOGGER.error("The disk does not answer: what jobs wrote last may be computed again")

    # --- what the server asks ---

    async def submit(self, job: Job) -> tuple[Job, bool]:
        """Keep a job and run it; return it and whether it is new. Raises QueueFull, IdempotencyConflict."""
        if len(await self._store.open_jobs()) >= MAX_OPEN:
            raise QueueFull(f"{MAX_OPEN} jobs are open already", retry_after_s=60)
        try:
            kept, is_new = await self._store.submit(job)
        finally:
            self._wake.set()  # it may be on disk though nobody is left to hear that it is
        if is_new:
            self._tell(kept)
        return kept, is_new

    async def get(self, job_id: str) -> Job | None:
        """Return the job with what is on disk of it, so that no kill takes back what was told."""
        return await self._store.get(job_id)

    async def newest(
        self, *, state: JobState | None = None, resident_id: ResidentId | None = None, limit: int
    ) -> list[Job]:
        """Return at most limit jobs as `get` does, newest first, all states and residents unless named."""
        return await self._store.newest(state=state, resident_id=resident_id, limit=limit)

    async def cancel(self, job_id: str) -> None:
        """End the job unless it has ended."""
        entry = self._running.get(job_id)
        await self._end(job_id, JobState.CANCELLED, output=entry.job.output if entry else None)
        if entry is not None:
            entry.task.cancel()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Feed]:
        """Yield a feed that begins with every open job."""
        feed = Feed()
        self._feeds.add(feed)
        try:
            for entry in await self._store.open_jobs():
                if (job := await self.get(entry.job_id)) is not None:
                    feed.put(job)
            yield feed
        finally:
            self._feeds.discard(feed)

    def eta_s(self, job: Job) -> float | None:
        """Return about how long the job takes yet (seconds), None if that cannot be said.

        One that waits for its turn is expected to be written as fast as those that are, or as the last one.
        """
        entry, most, now = self._running.get(job.job_id), job.max_tokens, self._clock()
        if entry is None or most is None or job.state.is_final:
            return None  # one that has ended may still be in hand for a moment
        if entry.first_output_at is None:
            wait_s = None if entry.run is None else entry.run.wait_s()
            pace_s = None if wait_s is None else self._usual_pace_s(now)
        else:
            wait_s, pace_s = 0.0, entry.pace_s(now)
        if wait_s is None or pace_s is None:
            return None
        return wait_s + max(0, most - len(entry.output.token_ids)) * pace_s

    def _usual_pace_s(self, now: float) -> float | None:
        paces = [pace for entry in self._running.values() if (pace := entry.pace_s(now)) is not None]
        return sum(paces) / len(paces) if paces else self._last_pace_s

    def _tell(self, job: Job) -> None:
        for feed in self._feeds:
            feed.put(job)

    # --- the loop ---

    async def _turn(self) -> float:
        """Begin and expire what is due; return after how many seconds to look again."""
        now = self._clock()
        await self._store.forget_old(now=now)
        next_at = now + _SWEEP_S
        waiting = [job for job in await self._store.open_jobs() if job.job_id not in self._running]
        for job in sorted(waiting, key=lambda job: (job.class_id.urgency, job.created_at, job.job_id)):
            not_before = self._not_before.get(job.job_id, 0.0)
            if job.deadline_at is not None and job.deadline_at <= now:
                await self._end(job.job_id, JobState.EXPIRED)
            elif not_before <= now and len(self._running) < self._max_running:
                await self._begin(job.job_id)
            else:
                later = [at for at in (job.deadline_at, not_before) if at is not None and at > now]
                next_at = min([next_at, *later])
        return next_at - now

    async def _begin(self, job_id: str) -> None:
        job = await self._store.get(job_id)
        if job is None or job.state.is_final:
            return
        task = asyncio.create_task(self._run(job), name=f"job {job.job_id}")
        self._running[job.job_id] = _Running(job, task, job.output, tokens_before=len(job.output.token_ids))
        task.add_done_callback(lambda _: self._done(job_id))

    def _done(self, job_id: str) -> None:
        self._running.pop(job_id, None)
        self._wake.set()

    # --- one job ---

    async def _run(self, job: Job) -> None:
        """Carry a job to its end, or back to where it waits."""
        left_s = None if job.deadline_at is None else max(0.0, job.deadline_at - self._clock())
        try:
            async with asyncio.timeout(left_s):
                result = await self._answer(job)
            await self._end_surely(job.job_id, JobState.FINISHED, result=result)
        except TimeoutError:
            await self._end_surely(job.job_id, JobState.EXPIRED)
        except _LATER as error:
            await self._put_back(job.job_id, after_s=error.retry_after_s or RETRY_S)
        except StorageUnavailable:
            self._not_before[job.job_id] = self._clock() + RETRY_S
        except (GenerationFailed, ModelUnavailable) as error:
            self._faults[job.job_id] = self._faults.get(job.job_id, 0) + 1
            may_pass = isinstance(error, GenerationFailed) or error.retry_after_s is not None
            if may_pass and self._faults[job.job_id] < MAX_ATTEMPTS:
                await self._put_back(job.job_id, after_s=error.retry_after_s or 1.0)
            else:
                await self._end_surely(job.job_id, JobState.FAILED, error=error)
        except EngineError as error:
            await self._end_surely(job.job_id, JobState.FAILED, error=error)
        except asyncio.CancelledError:
            # Cancelled by its owner it has ended already, and this changes nothing.
            await self._put_back(job.job_id)
            raise
        except Exception as error:
            _LOGGER.exception("Job %s failed", job.job_id)
            mistake = GenerationFailed(f"the engine made a mistake with this job: {type(error).__name__}")
            await self._end_surely(job.job_id, JobState.FAILED, error=mistake)

    async def _answer(self, job: Job) -> Json:
        """Order the job and follow it; return the answer."""
        run = await self._work.start(job)
        entry = self._running[job.job_id]
        entry.run = run
        try:
            if job.model not in (None, run.model):
                # Before the disk knows the new model: a stop in between must not put the old one's text back
                # under its name.
                entry.job, entry.output = replace(job, output=Output()), Output()
            if not await self._store.begin(job.job_id, now=self._clock(), model=run.model):
                raise asyncio.CancelledError  # it ended while it was ordered
            await self._tell_from_store(job.job_id)
            kept_at: float | None = None
            async for output in run.outputs():
                now = self._clock()
                self._note(job.job_id, output, now)
                if kept_at is None or not 0 <= now - kept_at < KEEP_EVERY_S:
                    kept_at = now
                    await self._keep(job.job_id)
            return run.result()
        finally:
            self._last_pace_s = entry.pace_s(self._clock()) or self._last_pace_s
            run.close()

    def _note(self, job_id: str, output: Output, now: float) -> None:
        entry = self._running[job_id]
        if entry.first_output_at is None:
            entry.first_output_at, entry.tokens_before = now, len(output.token_ids)
        entry.output = output
        if len(output.token_ids) >= len(entry.job.output.token_ids):  # else progress would go back
            entry.job = replace(entry.job, output=output)

    async def _keep(self, job_id: str) -> None:
        with contextlib.suppress(StorageUnavailable):  # logged; what is missing is computed again
            await self._store.keep(job_id, self._running[job_id].job.output)
        await self._tell_from_store(job_id)

    async def _put_back(self, job_id: str, *, after_s: float = 0.0) -> None:
        self._not_before[job_id] = self._clock() + min(after_s, _MAX_RETRY_S)
        with contextlib.suppress(StorageUnavailable):  # logged; the next start puts it back
            await self._store.put_back(job_id, self._running[job_id].job.output)
        await self._tell_from_store(job_id)

    async def _end_surely(
        self, job_id: str, state: JobState, *, result: Json | None = None, error: EngineError | None = None
    ) -> None:
        """End the job, however long the disk takes: what was computed must not be lost to a full one."""
        entry = self._running[job_id]
        output = entry.output if state is JobState.FINISHED else entry.job.output
        while True:
            try:
                return await self._end(job_id, state, output=output, result=result, error=error)
            except StorageUnavailable:
                await asyncio.sleep(RETRY_S)

    async def _end(
        self,
        job_id: str,
        state: JobState,
        *,
        output: Output | None = None,
        result: Json | None = None,
        error: EngineError | None = None,
    ) -> None:
        digest = None if result is None else sha256_of(result["choices"])
        has_ended = await self._store.end(
            job_id,
            state,
            now=self._clock(),
            output=output,
            result=result,
            result_sha256=digest,
            error=None if error is None else error.as_wire(),
        )
        self._not_before.pop(job_id, None)
        self._faults.pop(job_id, None)
        if has_ended:
            _LOGGER.info("Job %s %s", job_id, state.value)
            self._on_end()
            await self._tell_from_store(job_id)

    async def _tell_from_store(self, job_id: str) -> None:
        with contextlib.suppress(StorageUnavailable):  # logged; listeners hear of the next change
            if self._feeds and (job := await self.get(job_id)) is not None:
                self._tell(job)


async def _ended(tasks: Collection[asyncio.Task[None]], *, until: float) -> bool:
    """Wait for tasks until then, on the event loop's clock; return whether all have ended.

    Those that have not are cancelled until they have.
    """
    late = set(tasks)
    if late:
        _, late = await asyncio.wait(late, timeout=max(0.0, until - asyncio.get_running_loop().time()))
    is_whole = not late
    while late:
        for task in late:
            task.cancel()  # again: one that was cancelled may wait anew while it tidies up
        _, late = await asyncio.wait(late, timeout=0)
    return is_whole
