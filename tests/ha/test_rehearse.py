"""A policy is rehearsed by those who may change it, and what cannot be is told."""

from __future__ import annotations

from typing import Any

import probatio
import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

from custom_components.fairhearth.const import DOMAIN
from custom_components.fairhearth.services import MAX_SEEDS
from engine_service.protocol import MAX_REHEARSED_SEEDS
from homeassistant.core import Context, HomeAssistant
from homeassistant.exceptions import ServiceValidationError, Unauthorized
from tests.ha.fake_engine import FakeEngine, golden


async def rehearse(hass: HomeAssistant, context: Context | None = None, **data: Any) -> Any:
    return await hass.services.async_call(
        DOMAIN, "rehearse", data, blocking=True, return_response=True, context=context
    )


def test_as_many_runs_may_be_asked_for_as_the_engine_takes() -> None:
    assert MAX_SEEDS == MAX_REHEARSED_SEEDS


async def test_the_verdict_is_returned(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    verdict = await rehearse(hass, scenario="kitchen_light", policy={"background_reserve": 0.2}, seeds=2)
    assert verdict == golden("rehearsal")
    assert engine.rehearsals == [golden("rehearsal_request")]
    await rehearse(hass, scenario="kitchen_light")
    assert engine.rehearsals[-1] == {"scenario": "kitchen_light", "policy": {}, "seeds": 1}


async def test_a_scenario_that_there_is_not_is_named(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    with pytest.raises(ServiceValidationError, match="no scenario 'nope'"):
        await rehearse(hass, scenario="nope")
    with pytest.raises(probatio.Invalid):
        await rehearse(hass, scenario="kitchen_light", seeds=MAX_SEEDS + 1)
    with pytest.raises(probatio.Invalid, match="cannot be sent"):
        await rehearse(hass, scenario="kitchen_light", policy={"max_skips": {1, 2}})


async def test_only_administrators_and_automations_may(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await hass.auth.async_create_user("Owner", group_ids=["system-admin"])
    user = await hass.auth.async_create_user("Bob", group_ids=["system-users"])
    with pytest.raises(Unauthorized):
        await rehearse(hass, Context(user_id=user.id), scenario="kitchen_light")
    assert engine.rehearsals == []
