"""The jobs as the server sees them: running, or the reason why there are none.

Decides that an engine whose jobs cannot be kept still answers everything else.
"""

from __future__ import annotations

import logging
from pathlib import Path

from engine_service.errors import StorageUnavailable
from engine_service.jobs.runner import JobRunner, Work
from engine_service.jobs.store import JobStore
from engine_service.jobs.teller import Tell, Teller

_LOGGER = logging.getLogger(__name__)


class JobDesk:
    """Opens and closes the jobs of one file."""

    def __init__(self, path: Path):
        """Keep the jobs at path; nothing is touched before `open`."""
        self._path = path
        self._runner: JobRunner | None = None
        self._teller: Teller | None = None
        self._reason = "the engine has not opened its jobs yet"

    @property
    def runner(self) -> JobRunner:
        """Return the running jobs; raise StorageUnavailable saying why there are none."""
        if self._runner is None:
            raise StorageUnavailable(self._reason)
        return self._runner

    async def open(self, work: Work, tell: Tell) -> None:
        """Run the jobs of the file by work, tell of their ends by tell.

        Where the file cannot be opened, log that and let `runner` say so.
        """
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
            _LOGGER.error("No jobs are taken: %s", error.message)
            self._reason = error.message
        else:
            self._runner, self._teller = runner, teller
            teller.start()

    async def close(self) -> None:
        """Let running jobs wait for the next start."""
        runner, self._runner = self._runner, None
        self._reason = "the engine is shutting down"
        if self._teller is not None:
            await self._teller.stop()
        if runner is not None:
            await runner.stop()
