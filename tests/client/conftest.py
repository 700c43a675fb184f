"""A fake engine on loopback and a client of it, without Home Assistant."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp
import pytest

from custom_components.fairhearth.engine_client import EngineClient
from tests.ha.fake_engine import TOKEN, FakeEngine


@pytest.fixture
async def engine(socket_enabled: None) -> AsyncGenerator[FakeEngine]:
    """A fake engine that listens on loopback."""
    fake = FakeEngine()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def session() -> AsyncGenerator[aiohttp.ClientSession]:
    """A session as Home Assistant would lend it."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def client(session: aiohttp.ClientSession, engine: FakeEngine) -> EngineClient:
    """A client with the right token."""
    return EngineClient(session, engine.url, TOKEN)
