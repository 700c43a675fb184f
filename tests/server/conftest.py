"""Engines to ask: simulated ones that are ready at once, and one with the embedded model."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import pytest

from engine_service.backends.simulated import SimulatedBackend
from engine_service.server import rehearsal
from tests.server.household import Household, household


class Start(Protocol):
    """Starts an engine; a second one in the same test finds the first one's state."""

    def __call__(
        self, *, max_sequences: int = 16, allow_loopback: bool = False
    ) -> AbstractAsyncContextManager[Household]:
        """Return the running engine as a context manager."""
        ...


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """How to start an engine with a simulated backend."""

    def started(
        *, max_sequences: int = 16, allow_loopback: bool = False
    ) -> AbstractAsyncContextManager[Household]:
        backend = SimulatedBackend(max_sequences=max_sequences)
        return household(tmp_path, backend, allow_loopback=allow_loopback)

    return started


@pytest.fixture
def favoured_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rehearsal have its part of a busy machine: at the lowest priority it may get none for minutes."""
    monkeypatch.setattr(rehearsal, "_NICENESS", os.getpriority(os.PRIO_PROCESS, 0))


@pytest.fixture
async def home(start: Start) -> AsyncIterator[Household]:
    """A simulated engine."""
    async with start() as running:
        yield running


@pytest.fixture
async def crowded_home(start: Start) -> AsyncIterator[Household]:
    """A simulated engine that runs one chat at a time (a second place is kept for speech)."""
    async with start(max_sequences=2) as running:
        yield running
