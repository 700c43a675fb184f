"""A Home Assistant in the test's process, a fake engine on loopback, and an entry that connects them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

import custom_components  # noqa: F401  (before hass exists, or the loader takes another folder of that name)
from custom_components.fairhearth.const import DOMAIN
from homeassistant.const import CONF_LLM_HASS_API, CONF_TOKEN, CONF_URL
from homeassistant.core import HomeAssistant
from homeassistant.setup import async_setup_component
from tests.ha.fake_engine import ENGINE_ID, TOKEN, FakeEngine

ALICE = {"resident_id": "alice", "weight": 2, "daily_tokens": 200_000, "daily_is_hard": False}


@pytest.fixture(autouse=True)
def _enable_custom_integrations(request: pytest.FixtureRequest) -> None:
    """Let the loader see custom_components; a recorder must be there before Home Assistant is."""
    if "recorder_mock" in request.fixturenames:
        request.getfixturevalue("recorder_mock")
    request.getfixturevalue("enable_custom_integrations")


@pytest.fixture
async def engine(socket_enabled: None) -> AsyncGenerator[FakeEngine]:
    """A fake engine that listens on loopback."""
    fake = FakeEngine()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def entry(engine: FakeEngine) -> MockConfigEntry:
    """An entry for the fake engine with an agent, an AI task and one resident; not set up yet."""
    return MockConfigEntry(
        domain=DOMAIN,
        unique_id=ENGINE_ID,
        title="Kitchen engine",
        data={CONF_URL: engine.url, CONF_TOKEN: TOKEN},
        subentries_data=[
            _subentry("conversation", "Agent", {CONF_LLM_HASS_API: ["assist"], "max_tokens": 128}),
            _subentry("ai_task_data", "Task", {"max_tokens": 256, "temperature": 0.1}),
            _subentry("resident", "Alice", ALICE, unique_id="alice"),
        ],
    )


def _subentry(kind: str, title: str, data: dict[str, Any], unique_id: str | None = None) -> dict[str, Any]:
    return {"subentry_type": kind, "title": title, "unique_id": unique_id, "data": data}


@pytest.fixture
async def core(hass: HomeAssistant) -> None:
    """The parts of Home Assistant that an agent with tools needs."""
    assert await async_setup_component(hass, "homeassistant", {})
    assert await async_setup_component(hass, "conversation", {})


@pytest.fixture
async def loaded(
    hass: HomeAssistant, core: None, engine: FakeEngine, entry: MockConfigEntry
) -> MockConfigEntry:
    """The entry, set up."""
    entry.add_to_hass(hass)
    assert await hass.config_entries.async_setup(entry.entry_id)
    await hass.async_block_till_done()
    await until(lambda: engine.num_streams == 1)
    return entry


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for something that real sockets need real time for; fail when it does not come."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
