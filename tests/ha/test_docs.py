"""What the documentation says is so: its entities exist and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from pytest_homeassistant_custom_component.common import MockConfigEntry, async_mock_service

from custom_components.fairhearth.attribution import WorkloadClass
from custom_components.fairhearth.sensor import ANSWER_SENSORS, CLASS_SENSORS
from homeassistant.core import HomeAssistant
from homeassistant.setup import async_setup_component
from tests.ha.fake_engine import FakeEngine, caller_of
from tests.ha.test_translations import entity_keys

TEXT = (Path(__file__).parents[2] / "docs" / "home-assistant.md").read_text(encoding="utf-8")


def test_every_entity_is_explained() -> None:
    section = TEXT.partition("## What the entities mean")[2].partition("\n## ")[0]
    second_columns = re.findall(r"^\| [^|]* \| ([^|]*) \|", section, re.MULTILINE)
    explained = {key for column in second_columns for key in re.findall(r"`(\w+)`", column)}
    keys = {key for rows in entity_keys().values() for key in rows}
    by_class = {f"{row.key}_{item}" for row in (*CLASS_SENSORS, *ANSWER_SENSORS) for item in WorkloadClass}
    assert keys - by_class <= explained <= keys


async def test_the_example_automation_runs(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    messages = async_mock_service(hass, "notify", "send_message")
    example = re.search(r"```yaml\n(automation:.*?)```", TEXT, re.DOTALL)
    assert example is not None
    assert await async_setup_component(hass, "automation", yaml.safe_load(example[1]))
    target = {"entity_id": "automation.good_night_in_one_sentence"}
    await hass.services.async_call("automation", "trigger", target, blocking=True)
    await hass.async_block_till_done()
    (message,) = messages
    assert message.data["message"] == "Hello from the fake engine."
    assert caller_of(engine.chats[0]).resident_id == "alice"
    await hass.services.async_call("automation", "turn_off", target, blocking=True)  # ends its timer
