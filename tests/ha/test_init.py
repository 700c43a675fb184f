"""An entry sets up, unloads, reloads, and outlives an engine that is away."""

from __future__ import annotations

from pytest_homeassistant_custom_component.common import MockConfigEntry

from homeassistant.config_entries import ConfigEntryState
from homeassistant.core import HomeAssistant
from tests.ha.fake_engine import FakeEngine


async def test_an_entry_sets_up_and_unloads(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    assert loaded.state is ConfigEntryState.LOADED
    assert engine.residents["alice"]["weight"] == 2
    assert hass.states.get("sensor.alice_tokens_used").state == "0"
    assert await hass.config_entries.async_unload(loaded.entry_id)
    assert loaded.state is ConfigEntryState.NOT_LOADED
