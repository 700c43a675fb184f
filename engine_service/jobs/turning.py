"""A loop that looks at the jobs: when it is woken, when something is due, when the disk is back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from engine_service.errors import StorageUnavailable

_LOGGER = logging.getLogger(__name__)

RETRY_S: Final = 5.0  #: until a turn that failed is tried again


async def keep_turning(turn: Callable[[], Awaitable[float]], wake: asyncio.Event) -> None:
    """Call turn for ever; it returns after how many seconds it wants to be called if nobody wakes it.

    A turn that fails, for whatever reason, is logged and tried again: nobody else would begin the jobs.
    """
    while True:
        wake.clear()
        try:
            wait_s = await turn()
        except StorageUnavailable:
            wait_s = RETRY_S  # the store has logged why
        except Exception:
            _LOGGER.exception("Looking at the jobs failed; next try in %g s", RETRY_S)
            wait_s = RETRY_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wake.wait(), wait_s)
