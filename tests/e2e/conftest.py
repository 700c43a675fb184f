"""One household for the whole suite: a real Home Assistant, a real engine process, the embedded model."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/lib"))

from household import dashboard, workload
from household.residence import Household
from household.stage import Stage


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Both programs, running; whoever stops one starts it again. Neither may log an error in the end."""
    async with Stage(tmp_path_factory.mktemp("household"), engine_port=0, home_port=0) as running:
        await running.start()
        await workload.add_automation(running.household)
        await dashboard.create(running.household)
        yield running
    assert running.faults() == []


@pytest_asyncio.fixture(loop_scope="session")
async def home(stage: Stage) -> Household:
    """The household, with an engine that is there and has nothing to do."""
    await stage.engine_api.quiet(timeout_s=60)
    return stage.household
