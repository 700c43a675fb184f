"""Automations begin when something happens to the engine or to a resident, also after a reload."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry, async_get_device_automations

from custom_components.fairhearth.const import DOMAIN
from homeassistant.components.device_automation import DeviceAutomationType
from homeassistant.core import HomeAssistant, ServiceCall
from homeassistant.helpers import device_registry as dr
from homeassistant.setup import async_setup_component
from tests.ha.conftest import until
from tests.ha.fake_engine import FakeEngine

OF_RESIDENTS = {"job_finished", "job_failed", "job_cancelled", "job_expired", "preempted"}
OF_THE_ENGINE = OF_RESIDENTS | {"policy_violated", "policy_met"}


def device_id(hass: HomeAssistant, entry: MockConfigEntry, name: str) -> str:
    """Return the id of a device by its name."""
    devices = dr.async_entries_for_config_entry(dr.async_get(hass), entry.entry_id)
    return next(device.id for device in devices if device.name == name)


def trigger(hass: HomeAssistant, entry: MockConfigEntry, name: str, kind: str) -> dict[str, str]:
    """Return a trigger as the automation editor writes it."""
    device = device_id(hass, entry, name)
    return {"trigger": "device", "domain": DOMAIN, "device_id": device, "type": kind}


@pytest.fixture
async def begun(hass: HomeAssistant) -> list[dict[str, Any]]:
    """What the automations of a test passed on, in order."""
    calls: list[dict[str, Any]] = []

    async def note(call: ServiceCall) -> None:
        calls.append(dict(call.data))

    hass.services.async_register("test", "note", note)
    return calls


async def automate(hass: HomeAssistant, *automations: tuple[dict[str, str], str]) -> None:
    """Pass a text on for each trigger."""
    config = [
        {
            "alias": f"Number {number}",
            "triggers": [one],
            "actions": [{"action": "test.note", "data": {"type": "{{ trigger.type }}", "text": text}}],
        }
        for number, (one, text) in enumerate(automations)
    ]
    assert await async_setup_component(hass, "automation", {"automation": config})
    await hass.async_block_till_done()


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Kitchen engine", OF_THE_ENGINE),
        ("Alice", OF_RESIDENTS),
        ("House", OF_RESIDENTS),
        ("Guests", OF_RESIDENTS),
        ("Agent", set()),
        ("Task", set()),
    ],
)
async def test_a_device_offers_what_can_happen_to_it(
    hass: HomeAssistant, loaded: MockConfigEntry, name: str, kinds: set[str]
) -> None:
    offered = await async_get_device_automations(
        hass, DeviceAutomationType.TRIGGER, device_id(hass, loaded, name)
    )
    assert {row["type"] for row in offered if row["domain"] == DOMAIN} == kinds


async def test_a_job_that_ends_is_told_to_the_engine_and_to_whose_it_was(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, begun: list[dict[str, Any]]
) -> None:
    await until(lambda: engine.num_job_streams == 1)
    text = "{{ trigger.title }} of {{ trigger.resident }} by {{ trigger.job_id }}"
    await automate(
        hass,
        (trigger(hass, loaded, "Kitchen engine", "job_finished"), text),
        (trigger(hass, loaded, "Alice", "job_finished"), f"her {text}"),
        (trigger(hass, loaded, "Alice", "job_failed"), "her failure"),
    )
    for number, resident in enumerate(("house", "alice"), start=1):
        order = {"text": "A day.", "title": "Day", "resident": resident}
        await hass.services.async_call(DOMAIN, "submit_summary", order, blocking=True)
        await until(lambda: hass.states.get("sensor.kitchen_engine_jobs").state == "1")
        engine.move_job(f"job-{number}", "finished", text="It was long.")
        await until(lambda number=number: len(begun) == 2 * number - 1)  # type: ignore[misc]
    assert begun[0] == {"type": "job_finished", "text": "Day of house by job-1"}
    assert sorted(row["text"] for row in begun[1:]) == ["Day of alice by job-2", "her Day of alice by job-2"]


async def test_making_way_is_told_to_the_engine_and_to_who_made_it(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, begun: list[dict[str, Any]]
) -> None:
    await automate(
        hass,
        (trigger(hass, loaded, "Kitchen engine", "preempted"), "{{ trigger.count }} in all"),
        (trigger(hass, loaded, "Alice", "preempted"), "hers"),
        (trigger(hass, loaded, "House", "preempted"), "of the house"),
    )
    await engine.publish(lambda snapshot: snapshot["residents"]["alice"].update(preemptions=2))
    await until(lambda: len(begun) == 2)
    await engine.publish(lambda snapshot: snapshot["residents"]["alice"].update(preemptions=0))  # set up anew
    await asyncio.sleep(1.1)
    assert sorted(row["text"] for row in begun) == ["2 in all", "hers"]


async def test_a_policy_that_is_not_met_is_told_once_and_so_is_its_end(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, begun: list[dict[str, Any]]
) -> None:
    notes = ["voice requests waited 9.0 s; the policy allows 2.0 s"]
    await automate(
        hass,
        (trigger(hass, loaded, "Kitchen engine", "policy_violated"), "{{ trigger.notes[0] }}"),
        (trigger(hass, loaded, "Kitchen engine", "policy_met"), "again"),
    )
    violated = {"policy_met": False, "policy_notes": notes}
    await engine.publish(lambda snapshot: snapshot["engine"].update(violated))
    await until(lambda: len(begun) == 1)
    await engine.publish(lambda snapshot: snapshot["engine"].update(requests_waiting=9))
    await until(lambda: loaded.runtime_data.data.engine.requests_waiting == 9)
    await engine.publish(lambda snapshot: snapshot["engine"].update(policy_met=True, policy_notes=[]))
    await until(lambda: len(begun) == 2)
    assert [row["text"] for row in begun] == [notes[0], "again"]


async def test_an_automation_hears_of_an_engine_that_was_set_up_anew(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, begun: list[dict[str, Any]]
) -> None:
    await automate(hass, (trigger(hass, loaded, "Alice", "preempted"), "hers"))
    await hass.config_entries.async_reload(loaded.entry_id)
    await until(lambda: engine.num_streams == 2)
    await engine.publish(lambda snapshot: snapshot["residents"]["alice"].update(preemptions=1))
    await until(lambda: len(begun) == 1)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("Alice", "policy_met", "does not tell of policy_met"),
        ("Agent", "preempted", "does not tell of preempted"),
        ("Alice", "sleeps", "value must be one of"),
    ],
)
async def test_what_a_device_does_not_tell_is_refused(
    hass: HomeAssistant,
    loaded: MockConfigEntry,
    caplog: pytest.LogCaptureFixture,
    name: str,
    kind: str,
    words: str,
) -> None:
    await automate(hass, (trigger(hass, loaded, name, kind), "never"))
    assert words in caplog.text
    assert hass.states.get("automation.number_0").state == "unavailable"
