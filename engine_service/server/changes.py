"""Changes that are carried out whole although whoever asked for them leaves.

A caller that goes away ends its handler at whatever that waits for. A change that was begun must not end
there: half of it may be on disk, and nobody would do the rest. Decides nothing about what is changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from engine_service.errors import EngineError

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)


class Changes:
    """The changes under way."""

    def __init__(self) -> None:
        """Begin with none."""
        self._under_way: set[asyncio.Task[Any]] = set()  # the event loop itself forgets tasks nobody keeps

    async def carry_out(self, change: Coroutine[Any, Any, T]) -> T:
        """Return what the change comes to; if the caller is cancelled meanwhile, it goes on to its end."""
        task = asyncio.create_task(change)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise
        return task.result()

    async def settled(self, *, within_s: float) -> None:
        """Wait until no change is under way, at most within_s seconds: however long a disk hangs."""
        try:
            async with asyncio.timeout(within_s):
                while self._under_way:
                    await asyncio.wait(self._under_way)
        except TimeoutError:
            _LOGGER.error("Changes under way have not come to their end: %d", len(self._under_way))


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Say why a change failed that nobody waits for any more."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    if isinstance(error, EngineError):
        _LOGGER.warning("A change whose caller had left was refused: %s", error.message)
    else:
        _LOGGER.error("A change whose caller had left failed", exc_info=error)
