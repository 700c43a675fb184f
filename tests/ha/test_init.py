"""An entry sets up, unloads, reloads, is removed, and outlives an engine that goes away and comes back."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

from custom_components.fairhearth.const import DOMAIN
from homeassistant.config_entries import ConfigEntryState
from homeassistant.core import HomeAssistant
from homeassistant.helpers import device_registry as dr
from tests.ha.conftest import until
from tests.ha.fake_engine import FakeEngine

ALICE_TOKENS = "sensor.alice_tokens_used"


async def test_an_entry_sets_up_and_unloads(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, device_registry: dr.DeviceRegistry
) -> None:
    assert loaded.state is ConfigEntryState.LOADED
    assert engine.residents["alice"]["weight"] == 2
    assert hass.states.get(ALICE_TOKENS).state == "0"
    device = device_registry.async_get_device_by_identifier((DOMAIN, loaded.entry_id), loaded.entry_id)
    assert (device.name, device.model, device.sw_version) == ("Kitchen engine", engine.model, "0.1.0")
    assert await hass.config_entries.async_unload(loaded.entry_id)
    assert loaded.state is ConfigEntryState.NOT_LOADED
    assert hass.states.get(ALICE_TOKENS).state == "unavailable"


async def test_an_entry_reloads(hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry) -> None:
    assert await hass.config_entries.async_reload(loaded.entry_id)
    await until(lambda: engine.num_streams == 2)
    assert hass.states.get(ALICE_TOKENS).state == "0"


async def test_what_is_changed_while_an_entry_sets_up_is_not_missed(
    hass: HomeAssistant, core: None, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    engine.hold_models = asyncio.Event()
    entry.add_to_hass(hass)
    setup = hass.async_create_task(hass.config_entries.async_setup(entry.entry_id))
    await until(lambda: "alice" in engine.puts)
    (subentry,) = entry.get_subentries_of_type("resident")
    hass.config_entries.async_update_subentry(entry, subentry, title="Alice B.")
    engine.hold_models.set()
    await setup
    await until(lambda: engine.residents["alice"]["name"] == "Alice B.")
    await until(lambda: hass.states.get("conversation.agent") is not None)


async def test_a_removed_entry_takes_its_residents_along(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, hass_storage: dict[str, Any]
) -> None:
    engine.put("carol", {"name": "Carol", "weight": 1})  # one that Home Assistant does not know
    await hass.config_entries.async_remove(loaded.entry_id)
    await hass.async_block_till_done()
    assert engine.residents.keys() == {"guest", "house", "carol"}
    assert f"{DOMAIN}.{loaded.entry_id}" not in hass_storage


async def test_an_entry_is_removed_even_when_the_engine_is_away(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.stop()
    await hass.config_entries.async_remove(loaded.entry_id)
    await hass.async_block_till_done()
    assert not hass.config_entries.async_entries(DOMAIN)
    assert "The residents stay on the engine" in caplog.text


async def test_home_assistant_started_before_the_engine_waits_for_it(
    hass: HomeAssistant, core: None, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    await engine.stop()
    entry.add_to_hass(hass)
    assert not await hass.config_entries.async_setup(entry.entry_id)
    assert entry.state is ConfigEntryState.SETUP_RETRY
    assert "no engine answers at" in entry.reason
    await engine.start()
    await hass.config_entries.async_reload(entry.entry_id)
    await hass.async_block_till_done()
    assert entry.state is ConfigEntryState.LOADED


async def test_another_engine_at_the_address_is_not_taken_for_this_one(
    hass: HomeAssistant, core: None, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    engine.engine_id = "another"
    entry.add_to_hass(hass)
    assert not await hass.config_entries.async_setup(entry.entry_id)
    assert entry.state is ConfigEntryState.SETUP_RETRY
    assert "another engine answers" in entry.reason
    assert "alice" not in engine.residents


async def test_an_engine_of_another_version_is_not_used(
    hass: HomeAssistant, core: None, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    engine.schema_version = 2
    entry.add_to_hass(hass)
    assert not await hass.config_entries.async_setup(entry.entry_id)
    assert "update the Fairhearth integration" in entry.reason


async def test_a_token_that_may_not_manage_residents_says_so(
    hass: HomeAssistant, core: None, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    engine.tokens = dict.fromkeys(engine.tokens, ("generate",))
    entry.add_to_hass(hass)
    assert not await hass.config_entries.async_setup(entry.entry_id)
    assert "lacks the scope residents" in entry.reason


async def test_an_engine_restarted_under_it_is_followed_again_without_a_reload(
    hass: HomeAssistant,
    engine: FakeEngine,
    loaded: MockConfigEntry,
    device_registry: dr.DeviceRegistry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Residents are told again, sensors come back, and each turn is logged once."""
    caplog.set_level(logging.INFO, logger="custom_components.fairhearth")
    coordinator = loaded.runtime_data
    await engine.stop()
    await until(lambda: hass.states.get(ALICE_TOKENS).state == "unavailable")
    assert hass.states.get("conversation.agent").state == "unavailable"
    assert hass.states.get("ai_task.task").state == "unavailable"
    await until(lambda: "no engine answers" in str(coordinator.last_exception))  # it was tried again
    engine.forget()
    engine.version = "0.2.0"
    await engine.start()
    await until(lambda: hass.states.get(ALICE_TOKENS).state == "0")
    assert engine.residents["alice"]["weight"] == 2
    assert hass.states.get("conversation.agent").state != "unavailable"
    assert loaded.runtime_data is coordinator
    device = device_registry.async_get_device_by_identifier((DOMAIN, loaded.entry_id), loaded.entry_id)
    assert device.sw_version == "0.2.0"
    assert caplog.text.count("Kitchen engine is not available") == 1
    assert caplog.text.count("Kitchen engine is back") == 1


async def test_another_engine_started_in_its_place_is_not_followed(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await engine.stop()
    engine.engine_id = "another"
    engine.forget()
    await engine.start()
    await until(lambda: hass.states.get(ALICE_TOKENS).state == "unavailable")
    await until(lambda: "another engine answers" in str(loaded.runtime_data.last_exception))
    assert "alice" not in engine.residents


async def test_the_prompt_is_pinned_at_the_start_and_after_a_restart(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await until(lambda: len(engine.prefixes) == 1)
    (message,) = engine.prefixes[0].messages
    assert message.role == "system"
    assert "intent__HassTurnOn" in [tool.name for tool in engine.prefixes[0].tools]
    await engine.stop()
    await until(lambda: hass.states.get(ALICE_TOKENS).state == "unavailable")
    await engine.start()
    await until(lambda: len(engine.prefixes) == 2)
    assert engine.prefixes[1] == engine.prefixes[0]
