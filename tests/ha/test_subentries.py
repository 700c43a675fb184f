"""Agents, AI tasks and residents are added, changed and removed, and the engine hears of residents."""

from __future__ import annotations

from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

from custom_components.fairhearth.const import DOMAIN
from homeassistant.config_entries import SOURCE_USER
from homeassistant.const import CONF_LLM_HASS_API, CONF_NAME, CONF_PROMPT
from homeassistant.core import HomeAssistant
from homeassistant.data_entry_flow import FlowResultType
from homeassistant.helpers import device_registry as dr
from tests.ha.conftest import until
from tests.ha.fake_engine import FakeEngine, golden

USUAL = {"voice_class": "voice", "chat_class": "chat", "thinking": True, "announce_wait": False}
RESIDENT = {CONF_NAME: "Bob", "weight": 1, "daily_is_hard": False}


def subentry_of(entry: MockConfigEntry, kind: str) -> Any:
    return next(item for item in entry.subentries.values() if item.subentry_type == kind)


async def add(hass: HomeAssistant, entry: MockConfigEntry, kind: str, data: dict[str, Any]) -> Any:
    result = await hass.config_entries.subentries.async_init(
        (entry.entry_id, kind), context={"source": SOURCE_USER}
    )
    assert result["type"] is FlowResultType.FORM
    result = await hass.config_entries.subentries.async_configure(result["flow_id"], data)
    await hass.async_block_till_done()
    return result


async def change(hass: HomeAssistant, entry: MockConfigEntry, kind: str, data: dict[str, Any]) -> Any:
    result = await entry.start_subentry_reconfigure_flow(hass, subentry_of(entry, kind).subentry_id)
    assert result["type"] is FlowResultType.FORM
    result = await hass.config_entries.subentries.async_configure(result["flow_id"], data)
    await hass.async_block_till_done()
    return result


async def test_an_agent_is_added_with_its_options(hass: HomeAssistant, loaded: MockConfigEntry) -> None:
    options = {
        CONF_PROMPT: "Be brief.",
        CONF_LLM_HASS_API: ["assist"],
        "max_tokens": 64.0,
        "temperature": 0.5,
        "top_p": 0.9,
        "model": "SmolLM2-135M-Instruct",
        "voice_class": "accessibility",
        "chat_class": "agent",
        "context_tokens": 2048.0,
        "thinking": False,
        "announce_wait": True,
    }
    result = await add(hass, loaded, "conversation", {CONF_NAME: "Butler", "max_tokens": 64.0, **options})
    assert result["type"] is FlowResultType.CREATE_ENTRY
    (subentry,) = [item for item in loaded.subentries.values() if item.title == "Butler"]
    assert subentry.data == {**options, "max_tokens": 64, "context_tokens": 2048}
    assert hass.states.get("conversation.butler").attributes["supported_features"] == 1


async def test_an_agent_without_tools_can_only_talk(hass: HomeAssistant, loaded: MockConfigEntry) -> None:
    await add(hass, loaded, "conversation", {CONF_NAME: "Poet", "max_tokens": 64})
    assert hass.states.get("conversation.poet").attributes["supported_features"] == 0


async def test_an_agent_is_renamed_and_changed(hass: HomeAssistant, loaded: MockConfigEntry) -> None:
    result = await change(hass, loaded, "conversation", {CONF_NAME: "Butler", "max_tokens": 32})
    assert (result["type"], result["reason"]) == (FlowResultType.ABORT, "reconfigure_successful")
    subentry = subentry_of(loaded, "conversation")
    assert (subentry.title, subentry.data) == ("Butler", {"max_tokens": 32, **USUAL})


async def test_an_ai_task_is_added_and_changed(hass: HomeAssistant, loaded: MockConfigEntry) -> None:
    result = await add(hass, loaded, "ai_task_data", {CONF_NAME: "Night work", "max_tokens": 2000})
    assert result["type"] is FlowResultType.CREATE_ENTRY
    assert hass.states.get("ai_task.night_work") is not None
    await change(hass, loaded, "ai_task_data", {CONF_NAME: "Task", "max_tokens": 1, "temperature": 0})
    assert subentry_of(loaded, "ai_task_data").data == {
        "max_tokens": 1,
        "temperature": 0,
        "workload_class": "background",
    }


async def test_nothing_can_be_added_to_an_engine_that_is_not_connected(
    hass: HomeAssistant, loaded: MockConfigEntry
) -> None:
    await hass.config_entries.async_unload(loaded.entry_id)
    for kind in ("conversation", "ai_task_data"):
        result = await hass.config_entries.subentries.async_init(
            (loaded.entry_id, kind), context={"source": SOURCE_USER}
        )
        assert (result["type"], result["reason"]) == (FlowResultType.ABORT, "entry_not_loaded")


async def test_a_resident_is_added_and_the_engine_told(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, device_registry: dr.DeviceRegistry
) -> None:
    user = await hass.auth.async_create_user("Bob")
    hass.states.async_set("person.bob", "home", {"user_id": user.id})
    result = await add(
        hass,
        loaded,
        "resident",
        {
            **RESIDENT,
            "person": "person.bob",
            "users": [user.id],
            "satellites": ["assist_satellite.kitchen"],
            "areas": ["kitchen"],
            "agents": ["conversation.agent"],
            "page_cap": 16.0,
            "weight": 3.0,
            "daily_tokens": 1000.0,
            "daily_is_hard": True,
        },
    )
    assert result["type"] is FlowResultType.CREATE_ENTRY
    (subentry,) = [item for item in loaded.subentries.values() if item.title == "Bob"]
    assert (subentry.unique_id, subentry.data["resident_id"]) == ("bob", "bob")
    await until(lambda: "bob" in engine.residents)
    assert engine.residents["bob"] == {
        "id": "bob",
        "name": "Bob",
        "weight": 3,
        "daily_tokens": 1000,
        "daily_is_hard": True,
        "rolling_tokens": None,
        "rolling_window_s": 3600.0,
        "rolling_is_hard": False,
        "page_cap": 16,
        "max_running": None,
        "max_waiting": 64,
    }
    assert hass.states.get("sensor.bob_tokens_used").state == "0"
    assert hass.states.get("sensor.bob_tokens_left_today").state == "1000"
    device = device_registry.async_get_device_by_identifier((DOMAIN, subentry.subentry_id), loaded.entry_id)
    assert device.config_subentry_id == subentry.subentry_id
    engine_device = device_registry.async_get_device_by_identifier((DOMAIN, loaded.entry_id), loaded.entry_id)
    assert device.via_device_id == engine_device.id


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("   ", "name_missing"),
        ("!!!", "name_missing"),
        ("Guest", "name_reserved"),
        ("HOUSE", "name_reserved"),
        ("System", "name_reserved"),
        ("alice", "name_taken"),
        ("x" * 129, "name_too_long"),
    ],
)
async def test_a_name_that_cannot_be_is_refused_and_can_be_mended(
    hass: HomeAssistant, loaded: MockConfigEntry, name: str, error: str
) -> None:
    result = await add(hass, loaded, "resident", {**RESIDENT, CONF_NAME: name})
    assert (result["type"], result["errors"]) == (FlowResultType.FORM, {CONF_NAME: error})
    result = await hass.config_entries.subentries.async_configure(result["flow_id"], RESIDENT)
    assert result["type"] is FlowResultType.CREATE_ENTRY
    await hass.async_block_till_done()


async def test_a_name_in_any_script_gets_an_id_that_the_engine_takes(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    for name in ("Zoë Müller-Lüdenscheidt", "Олег", "陈", "x" * 128):
        result = await add(hass, loaded, "resident", {**RESIDENT, CONF_NAME: name})
        assert result["type"] is FlowResultType.CREATE_ENTRY, name
    assert {"zoe_muller_ludenscheidt", "oleg", "chen", "x" * 64} <= engine.residents.keys()


async def test_a_renamed_resident_keeps_its_id_and_its_tokens(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    result = await change(hass, loaded, "resident", {**RESIDENT, CONF_NAME: "Alice B.", "weight": 5})
    assert (result["type"], result["reason"]) == (FlowResultType.ABORT, "reconfigure_successful")
    assert subentry_of(loaded, "resident").title == "Alice B."
    assert engine.residents["alice"]["name"] == "Alice B."
    assert engine.residents["alice"]["weight"] == 5
    assert engine.residents["alice"]["daily_tokens"] is None


async def test_a_renamed_resident_still_needs_a_name(hass: HomeAssistant, loaded: MockConfigEntry) -> None:
    result = await change(hass, loaded, "resident", {**RESIDENT, CONF_NAME: " "})
    assert result["errors"] == {CONF_NAME: "name_missing"}


async def test_a_removed_resident_leaves_the_engine_and_the_registries(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, device_registry: dr.DeviceRegistry
) -> None:
    subentry_id = subentry_of(loaded, "resident").subentry_id
    hass.config_entries.async_remove_subentry(loaded, subentry_id)
    await hass.async_block_till_done()
    assert "alice" not in engine.residents
    assert {"guest", "house"} <= engine.residents.keys()
    assert hass.states.get("sensor.alice_tokens_used") is None
    assert device_registry.async_get_device_by_identifier((DOMAIN, subentry_id), loaded.entry_id) is None


async def test_a_resident_removed_while_the_engine_is_away_is_removed_when_it_is_back(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await engine.stop()
    hass.config_entries.async_remove_subentry(loaded, subentry_of(loaded, "resident").subentry_id)
    await hass.async_block_till_done()
    assert "alice" in engine.residents
    await engine.start()
    await hass.config_entries.async_reload(loaded.entry_id)
    await hass.async_block_till_done()
    assert "alice" not in engine.residents


async def test_the_dialog_says_how_much_of_the_model_the_agents_prompt_takes(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await until(lambda: len(engine.prefixes) == 1)
    await hass.async_block_till_done()
    subentry_id = subentry_of(loaded, "conversation").subentry_id
    await until(lambda: subentry_id in loaded.runtime_data.prompt_tokens)
    result = await loaded.start_subentry_reconfigure_flow(hass, subentry_id)
    taken = str(golden("prefix_response")["prefix_tokens"])
    assert result["description_placeholders"] == {"context_tokens": "8192", "prompt_tokens": taken}


async def test_a_chosen_model_stays_to_choose_while_the_engine_does_not_have_it(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await change(hass, loaded, "ai_task_data", {CONF_NAME: "Task", "max_tokens": 1})
    subentry = subentry_of(loaded, "ai_task_data")
    hass.config_entries.async_update_subentry(loaded, subentry, data={**subentry.data, "model": "gone"})
    await hass.async_block_till_done()
    data = {CONF_NAME: "Task", "max_tokens": 1, "model": "gone"}
    result = await change(hass, loaded, "ai_task_data", data)
    assert result["reason"] == "reconfigure_successful"
    await engine.stop()
    result = await change(hass, loaded, "ai_task_data", data)
    assert result["reason"] == "reconfigure_successful"
