"""Each blueprint is one by Home Assistant's own rules, and an automation made from it does what it says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import (
    MockConfigEntry,
    async_mock_service,
)

from custom_components.fairhearth.const import DOMAIN
from homeassistant.components.automation.config import AUTOMATION_BLUEPRINT_SCHEMA
from homeassistant.components.blueprint.models import Blueprint
from homeassistant.core import HomeAssistant, ServiceCall, SupportsResponse
from homeassistant.helpers import entity_registry as er
from homeassistant.setup import async_setup_component
from homeassistant.util.yaml import load_yaml_dict
from tests.ha.conftest import until
from tests.ha.fake_engine import Answer, FakeEngine, caller_of

FOLDER = Path(__file__).parents[2] / "blueprints/automation/fairhearth"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_blueprint_is_valid_and_every_input_is_explained_and_used(path: Path) -> None:
    config = load_yaml_dict(str(path))
    blueprint = Blueprint(
        config, path=path.name, expected_domain="automation", schema=AUTOMATION_BLUEPRINT_SCHEMA
    )
    assert blueprint.validate() is None
    assert blueprint.metadata["source_url"].endswith(f"/blueprints/automation/fairhearth/{path.name}")
    text = path.read_text(encoding="utf-8")
    for name, shown in blueprint.inputs.items():
        assert shown["name"], name
        assert shown["selector"], name
        assert f"!input {name}\n" in text


@pytest.fixture
async def messages(hass: HomeAssistant, loaded: MockConfigEntry) -> list[ServiceCall]:
    """What is sent to the phone."""
    return async_mock_service(hass, "notify", "send_message")


async def add(hass: HomeAssistant, name: str, inputs: dict[str, Any]) -> None:
    """Install a blueprint and make an automation of it."""
    folder = Path(hass.config.path("blueprints/automation/fairhearth"))

    def install() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(FOLDER / f"{name}.yaml", folder)

    await hass.async_add_executor_job(install)
    use = {"path": f"fairhearth/{name}.yaml", "input": {"phone": "notify.phone", **inputs}}
    config = {"automation": [{"id": name, "alias": name, "use_blueprint": use}]}
    assert await async_setup_component(hass, "automation", config)
    await hass.async_block_till_done()
    assert hass.states.get(f"automation.{name}") is not None


async def test_the_day_is_summed_up_and_sent_to_the_phone(
    hass: HomeAssistant, engine: FakeEngine, messages: list[ServiceCall]
) -> None:
    hass.states.async_set("binary_sensor.door", "on", {"friendly_name": "Front door"})
    event = {"start": "2026-11-30T09:00:00", "end": "2026-11-30T10:00:00", "summary": "Dentist"}
    hass.services.async_register(
        "calendar",
        "get_events",
        lambda call: {call.data["entity_id"][0]: {"events": [event]}},
        supports_response=SupportsResponse.ONLY,
    )
    engine.answers.append(Answer(pieces=("A quiet ", "day.")))
    inputs = {
        "task": "ai_task.task",
        "calendars": ["calendar.family"],
        "things": ["binary_sensor.door"],
        "instructions": "Answer in Swedish.",
    }
    await add(hass, "nightly_summary", inputs)
    target = {"entity_id": "automation.nightly_summary"}
    await hass.services.async_call("automation", "trigger", target, blocking=True)
    await until(lambda: bool(messages), timeout_s=90)
    assert messages[0].data == {"entity_id": ["notify.phone"], "title": "Today", "message": "A quiet day."}
    (chat,) = engine.chats
    asked = str(chat.messages)
    for part in ("Answer in Swedish.", "Dentist", "Front door"):
        assert part in asked
    assert caller_of(chat).class_id == "background"
    await hass.services.async_call("automation", "turn_off", target, blocking=True)  # ends its timer


async def test_a_document_becomes_a_job_and_its_summary_is_sent_when_it_has_ended(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, messages: list[ServiceCall]
) -> None:
    inputs = {
        "occasion": [{"trigger": "event", "event_type": "minutes_arrived"}],
        "document": "{{ trigger.event.data.text }}",
        "title": "Minutes",
        "max_tokens": 64,
    }
    await add(hass, "document_summary", inputs)
    hass.bus.async_fire("minutes_arrived", {"text": "They talked for long."})
    await until(lambda: bool(engine.orders))
    (order,) = engine.orders
    assert order["title"] == "Minutes"
    assert "They talked for long." in str(order["request"]["messages"])
    assert order["request"]["max_tokens"] == 64
    jobs = er.async_get(hass).async_get_entity_id("sensor", DOMAIN, f"{loaded.entry_id}_jobs")
    assert jobs is not None
    await until(lambda: hass.states.is_state(jobs, "1"))
    engine.move_job("job-1", "finished", text="Nothing was decided.")
    await until(lambda: bool(messages), timeout_s=90)
    assert messages[0].data["title"] == "Minutes"
    assert messages[0].data["message"] == "Nothing was decided."
    assert len(engine.orders) == 1


async def test_a_violated_policy_is_told_with_its_reasons_and_so_is_its_end(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, messages: list[ServiceCall]
) -> None:
    policy = er.async_get(hass).async_get_entity_id("binary_sensor", DOMAIN, f"{loaded.entry_id}_policy_met")
    assert policy is not None
    await add(hass, "fairness_violated", {"policy": policy, "patience": {"seconds": 0}})

    def turn(is_met: bool) -> Any:
        def change(snapshot: dict[str, Any]) -> None:
            notes = [] if is_met else ["voice requests waited 3.0 s; the policy allows 2.0 s", "another"]
            snapshot["engine"] |= {"policy_met": is_met, "policy_notes": notes}

        return change

    await engine.publish(turn(is_met=False))
    await until(lambda: len(messages) == 1, timeout_s=90)
    assert messages[0].data["message"] == "voice requests waited 3.0 s; the policy allows 2.0 s\nanother"
    await engine.publish(turn(is_met=True))
    await until(lambda: len(messages) == 2, timeout_s=90)
    assert messages[1].data["message"] == "Everyone is served as agreed again."
