"""Waiting for something another process does: look, pause, look again, and give up with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until(
    look: Callable[[], Awaitable[T]],
    is_it: Callable[[T], object],
    what: str,
    *,
    timeout_s: float,
    every_s: float = 0.2,
) -> T:
    """Return the first value of look that is_it accepts; raise TimeoutError naming what never came."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        seen = await look()
        if is_it(seen):
            return seen
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s; last seen: {str(seen)[:400]}")
        await asyncio.sleep(every_s)
