"""The policy is shown, chosen, changed and taken back while the engine runs, by those who may."""

from __future__ import annotations

from datetime import date
from typing import Any

import probatio
import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

from custom_components.fairhearth.const import DOMAIN
from custom_components.fairhearth.engine_client import ProtocolError
from custom_components.fairhearth.engine_client.policy import table_from_wire
from custom_components.fairhearth.select import FAIRNESS_GOALS
from engine_service.scheduling.model import FairnessGoal
from homeassistant.core import Context, HomeAssistant
from homeassistant.exceptions import HomeAssistantError, ServiceValidationError, Unauthorized
from tests.ha.conftest import until
from tests.ha.fake_engine import FakeEngine

FAIRNESS = "select.kitchen_engine_fairness"
PAUSED = "switch.kitchen_engine_pause_background"


async def set_policy(hass: HomeAssistant, context: Context | None = None, **data: Any) -> Any:
    return await hass.services.async_call(
        DOMAIN, "set_policy", data, blocking=True, return_response=True, context=context
    )


async def choose(hass: HomeAssistant, option: str) -> None:
    await hass.services.async_call(
        "select", "select_option", {"entity_id": FAIRNESS, "option": option}, blocking=True
    )


def test_the_goals_are_the_engines() -> None:
    assert set(FAIRNESS_GOALS) == {goal.value for goal in FairnessGoal}


async def test_the_goal_is_shown_and_chosen(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    assert hass.states.get(FAIRNESS).state == "service"
    await choose(hass, "waiting")
    assert hass.states.get(FAIRNESS).state == "waiting"
    assert engine.policies[-1]["fairness"] == "waiting"


async def test_a_policy_is_changed_tried_and_taken_back(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    changes = {"fairness": "completions", "classes": {"voice": {"max_wait_s": 1.0}}}
    tried = await set_policy(hass, policy=changes, dry_run=True)
    assert tried["policy"]["classes"]["voice"]["max_wait_s"] == 1.0
    assert len(engine.policies) == 1
    result = await set_policy(hass, policy=changes, note="Exams")
    assert (result["revision"], result["note"]) == (1, "Exams")
    assert result["policy"]["fairness"] == "completions"
    assert hass.states.get(FAIRNESS).state == "completions"
    result = await set_policy(hass, policy={"max_skips": 2}, from_defaults=True)
    assert result["policy"]["fairness"] == "service"
    result = await set_policy(hass, revision=1)
    assert result["policy"]["fairness"] == hass.states.get(FAIRNESS).state == "completions"


async def test_what_the_engine_does_not_know_is_named(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    with pytest.raises(ServiceValidationError, match="fairnes"):
        await set_policy(hass, policy={"fairnes": "waiting"})
    with pytest.raises(ServiceValidationError, match="no revision 7"):
        await set_policy(hass, revision=7)
    assert len(engine.policies) == 1


@pytest.mark.parametrize("data", [{"revision": 0}, {"policy": {"max_skips": 2}, "from_defaults": True}])
async def test_nothing_is_changed_by_trying_what_cannot_be_tried(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, data: dict[str, Any]
) -> None:
    with pytest.raises(ServiceValidationError, match="Only changes of the current policy can be tried"):
        await set_policy(hass, dry_run=True, **data)
    assert len(engine.policies) == 1


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"policy": {}, "revision": 0},
        {"revision": -1},
        {"policy": "waiting"},
        {"policy": {"fairness": date(2026, 11, 30)}},
        {"policy": {"classes": {"voice": {"max_wait_s": float("nan")}}}},
    ],
)
async def test_what_cannot_be_is_refused(
    hass: HomeAssistant, loaded: MockConfigEntry, data: dict[str, Any]
) -> None:
    with pytest.raises(probatio.Invalid):
        await set_policy(hass, **data)


async def test_only_administrators_and_automations_may(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await hass.auth.async_create_user("Owner", group_ids=["system-admin"])
    user = await hass.auth.async_create_user("Bob", group_ids=["system-users"])
    with pytest.raises(Unauthorized):
        await set_policy(hass, Context(user_id=user.id), policy={"fairness": "waiting"})
    assert len(engine.policies) == 1


async def test_a_token_that_may_not_change_the_policy_shows_none(
    hass: HomeAssistant, core: None, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    engine.tokens = dict.fromkeys(engine.tokens, ("generate", "residents"))
    entry.add_to_hass(hass)
    assert await hass.config_entries.async_setup(entry.entry_id)
    await hass.async_block_till_done()
    assert hass.states.get(FAIRNESS).state == "unavailable"
    with pytest.raises(HomeAssistantError, match="not allowed to do this"):
        await set_policy(hass, policy={"fairness": "waiting"})


async def test_an_engine_without_changeable_policy_shows_none(
    hass: HomeAssistant, core: None, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    engine.has_policy = False
    entry.add_to_hass(hass)
    assert await hass.config_entries.async_setup(entry.entry_id)
    await hass.async_block_till_done()
    assert hass.states.get(FAIRNESS).state == "unavailable"


async def test_a_choice_the_engine_refuses_is_told(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await engine.stop()
    with pytest.raises(HomeAssistantError, match="cannot be reached"):
        await choose(hass, "waiting")


def test_an_answer_without_a_policy_is_named() -> None:
    with pytest.raises(ProtocolError, match="should be an object"):
        table_from_wire({"policy": None})


async def test_the_background_is_paused_and_resumed(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    """Another class that somebody paused by the API stays as it is."""
    assert hass.states.get(PAUSED).state == "off"
    await set_policy(hass, policy={"paused_classes": ["embedding"]})
    await until(lambda: loaded.runtime_data.data.engine.paused_classes == ("embedding",))
    assert hass.states.get(PAUSED).state == "off"
    await hass.services.async_call("switch", "turn_on", {"entity_id": PAUSED}, blocking=True)
    assert engine.policies[-1]["paused_classes"] == ["background", "embedding"]
    await until(lambda: hass.states.get(PAUSED).state == "on")
    await hass.services.async_call("switch", "turn_off", {"entity_id": PAUSED}, blocking=True)
    assert engine.policies[-1]["paused_classes"] == ["embedding"]
    await until(lambda: hass.states.get(PAUSED).state == "off")


async def test_a_pause_the_engine_refuses_is_told(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await engine.stop()
    with pytest.raises(HomeAssistantError, match="cannot be reached"):
        await hass.services.async_call("switch", "turn_on", {"entity_id": PAUSED}, blocking=True)


async def test_an_engine_that_cannot_pause_has_no_switch(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await engine.publish(lambda snapshot: snapshot["engine"].pop("paused_classes"))
    await until(lambda: hass.states.get(PAUSED).state == "unavailable")
