"""The jobs as the server sees them: running, or the reason why there are none.

Decides that an engine whose jobs cannot be kept still answers everything else, and goes on trying to open
them: a disk that was full at the start has room again some day.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from engine_service.errors import StorageUnavailable
from engine_service.jobs.runner import JobRunner, Work
from engine_service.jobs.store import JobStore
from engine_service.jobs.teller import Tell, Teller
from engine_service.jobs.turning import RETRY_S

_LOGGER = logging.getLogger(__name__)

_STOP_S: Final = 10.0  #: a disk that hangs while it is opened is waited for this long at the end


class JobDesk:
    """Opens and closes the jobs of one file."""

    def __init__(self, path: Path, *, retry_s: float = RETRY_S):
        """Keep the jobs at path; nothing is touched before `open`, which is tried again every retry_s."""
        self._path = path
        self._retry_s = retry_s
        self._runner: JobRunner | None = None
        self._teller: Teller | None = None
        self._opening: asyncio.Task[None] | None = None
        self._reason = StorageUnavailable("the engine has not opened its jobs yet")

    @property
    def runner(self) -> JobRunner:
        """Return the running jobs; raise StorageUnavailable saying why there are none."""
        if self._runner is None:
            raise StorageUnavailable(self._reason.message, retry_after_s=self._reason.retry_after_s)
        return self._runner

    async def open(self, work: Work, tell: Tell) -> None:
        """Run the jobs of the file by work, tell of their ends by tell.

        Where the file cannot be opened, log that, let `runner` say so, and go on trying until `close`.
        """
        if not await self._try(work, tell):
            self._opening = asyncio.create_task(self._keep_trying(work, tell), name="open the jobs")

    async def _keep_trying(self, work: Work, tell: Tell) -> None:
        is_open = False
        while not is_open:
            await asyncio.sleep(self._retry_s)
            try:
                is_open = await self._try(work, tell)
            except Exception:  # nobody else would open them
                _LOGGER.exception("Opening the jobs failed; next try in %g s", self._retry_s)
        _LOGGER.warning("The jobs could be opened: they go on, and new ones are taken again")

    async def _try(self, work: Work, tell: Tell) -> bool:
        """Open the file; return whether that worked."""
        try:
            store = await JobStore.open(self._path)
            teller = Teller(store, tell)
            runner = JobRunner(store, work, on_end=teller.wake)
            try:
                await runner.start()
            except BaseException:
                await store.close()
                raise
        except StorageUnavailable as error:
            if error.message != self._reason.message:  # the same again and again would only fill the log
                _LOGGER.error("No jobs are taken: %s; tried again every %g s", error.message, self._retry_s)
            self._reason = StorageUnavailable(error.message, retry_after_s=self._retry_s)
            return False
        self._runner, self._teller = runner, teller
        teller.start()
        return True

    async def close(self) -> None:
        """Let running jobs wait for the next start."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening}, timeout=_STOP_S)
        runner, self._runner = self._runner, None
        self._reason = StorageUnavailable("the engine is shutting down")
        if self._teller is not None:
            await self._teller.stop()
        if runner is not None:
            await runner.stop()
