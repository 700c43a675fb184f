"""The jobs as the server sees them: running, or the reason why there are none.

Decides that an engine whose jobs cannot be kept still answers everything else.
"""

from __future__ import annotations

import logging
from pathlib import Path

from engine_service.errors import StorageUnavailable
from engine_service.jobs.runner import JobRunner, Work
from engine_service.jobs.store import JobStore

_LOGGER = logging.getLogger(__name__)


class JobDesk:
    """Opens and closes the jobs of one file."""

    def __init__(self, path: Path):
        """Keep the jobs at path; nothing is touched before `open`."""
        self._path = path
        self._runner: JobRunner | None = None
        self._reason = "the engine has not opened its jobs yet"

    @property
    def runner(self) -> JobRunner:
        """Return the running jobs; raise StorageUnavailable saying why there are none."""
        if self._runner is None:
            raise StorageUnavailable(self._reason)
        return self._runner

    async def open(self, work: Work) -> None:
        """Run the jobs of the file by work; where it cannot be opened, log that and let `runner` say so."""
        try:
            runner = JobRunner(await JobStore.open(self._path), work)
            await runner.start()
        except StorageUnavailable as error:
            _LOGGER.error("No jobs are taken: %s", error.message)
            self._reason = error.message
        else:
            self._runner = runner

    async def close(self) -> None:
        """Let running jobs wait for the next start."""
        runner, self._runner = self._runner, None
        self._reason = "the engine is shutting down"
        if runner is not None:
            await runner.stop()
