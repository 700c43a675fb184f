"""The loop that looks at the jobs: whatever happens in a turn, there is a next one."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from engine_service.errors import StorageUnavailable
from engine_service.jobs.turning import keep_turning


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("nobody thought of this"), "nobody thought of this"),
        (StorageUnavailable("the disk is gone"), ""),  # told by the store already
    ],
)
async def test_a_turn_that_fails_is_followed_by_another(
    caplog: pytest.LogCaptureFixture, error: Exception, words: str
) -> None:
    wake, has_turned_again = asyncio.Event(), asyncio.Event()
    num_turns = 0

    async def turn() -> float:
        nonlocal num_turns
        num_turns += 1
        if num_turns == 1:
            wake.set()
            raise error
        has_turned_again.set()
        return 60.0

    turning = asyncio.create_task(keep_turning(turn, wake))
    heard = asyncio.create_task(has_turned_again.wait())
    await asyncio.wait({turning, heard}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    heard.cancel()
    assert has_turned_again.is_set()
    assert bool(caplog.records) == bool(words)
    assert words in caplog.text
    turning.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await turning
