"""Tells the webhooks of jobs that have ended: at least once each, again and again where nobody listens.

Decides when to try and when to give up; how a job is told is the `Tell`'s affair. What is not told yet is on
disk, so that a restart loses nothing. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from engine_service.jobs.model import Job, TellState
from engine_service.jobs.store import JobStore
from engine_service.jobs.turning import keep_turning

_LOGGER = logging.getLogger(__name__)

DELAYS_S: Final = (1.0, 5.0, 30.0, 120.0, 600.0, 3600.0, 10_800.0, 21_600.0, 43_200.0)
"""Pauses after failed tries; after one more it is given up, about a day after the job ended."""
_AT_ONCE: Final = 8
_SWEEP_S: Final = 60.0


class NotToldError(Exception):
    """Nobody took the message; worth another try."""


class MayNotTellError(Exception):
    """The message must not go there; no other try would change that."""


Tell = Callable[[Job], Awaitable[None]]
"""Tells whom a job's webhook names; raises NotToldError or MayNotTellError."""


class Teller:
    """Tells what became of the jobs of a store."""

    def __init__(self, store: JobStore, tell: Tell, *, delays_s: Sequence[float] | None = None):
        """Tell by tell; nothing runs before `start`."""
        self._store = store
        self._tell = tell
        self._delays_s = DELAYS_S if delays_s is None else delays_s
        self._not_before: dict[str, float] = {}  # on the event loop's clock
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with what an earlier engine left untold."""
        self._task = asyncio.create_task(keep_turning(self._turn, self._wake))

    async def stop(self) -> None:
        """End; what is under way is told again at the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def wake(self) -> None:
        """Look for a job that has just ended."""
        self._wake.set()

    async def _turn(self) -> float:
        """Tell what is due; return after how many seconds to look again."""
        now = asyncio.get_running_loop().time()
        untold = await self._store.untold()
        self._not_before = {job_id: self._not_before.get(job_id, now) for job_id in untold}
        due = [job_id for job_id in untold if self._not_before[job_id] <= now]
        await asyncio.gather(*[self._try(job_id) for job_id in due[:_AT_ONCE]])
        later = [at for at in self._not_before.values() if at > now]
        return 0.0 if len(due) > _AT_ONCE else min([_SWEEP_S, *[at - now for at in later]])

    async def _try(self, job_id: str) -> None:
        job = await self._store.get(job_id)
        if job is None or job.webhook is None:
            return
        tries = job.webhook_tries + 1
        host, _ = job.webhook.address
        is_last = tries > len(self._delays_s)
        state = TellState.GIVEN_UP if is_last else TellState.WAITING
        try:
            await self._tell(job)
            state = TellState.DELIVERED
        except MayNotTellError as reason:
            _LOGGER.warning("Job %s is not told to %s: %s", job_id, host, reason)
            state = TellState.GIVEN_UP
        except NotToldError as reason:
            _LOGGER.warning("Job %s was not told to %s (try %d): %s", job_id, host, tries, reason)
        except Exception:
            _LOGGER.exception("Job %s was not told to %s (try %d)", job_id, host, tries)
        if state is TellState.WAITING:
            self._not_before[job_id] = asyncio.get_running_loop().time() + self._delays_s[tries - 1]
        await self._store.note_told(job_id, state, tries=tries)
