"""What leaves the house in a bug report, and what the system health page says."""

from __future__ import annotations

import json
from typing import Any

from pytest_homeassistant_custom_component.common import MockConfigEntry, get_system_health_info
from pytest_homeassistant_custom_component.components.diagnostics import get_diagnostics_for_config_entry

from custom_components.fairhearth.const import DOMAIN
from homeassistant.core import HomeAssistant
from homeassistant.setup import async_setup_component
from tests.ha.conftest import until
from tests.ha.fake_engine import TOKEN, FakeEngine


async def test_a_report_has_the_picture_but_no_secret(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, hass_client: Any
) -> None:
    assert await async_setup_component(hass, "diagnostics", {})
    subentry = next(item for item in loaded.subentries.values() if item.subentry_type == "conversation")
    hass.config_entries.async_update_subentry(
        loaded, subentry, data={**subentry.data, "prompt": "My door code is Swordfish."}
    )
    await hass.async_block_till_done()
    await until(lambda: engine.num_job_streams == 2)
    await hass.services.async_call(
        DOMAIN, "submit_summary", {"text": "My secret diary.", "title": "My secret title"}, blocking=True
    )
    await until(lambda: len(loaded.runtime_data.jobs.active) == 1)
    report = await get_diagnostics_for_config_entry(hass, hass_client, loaded)
    text = json.dumps(report)
    assert TOKEN not in text
    assert engine.url not in text
    assert "Swordfish" not in text
    assert "secret" not in text
    assert [job["state"] for job in report["jobs"]] == ["submitted"]
    assert report["policy"]["table"]["fairness"] == "service"
    assert report["engine"]["model"] == engine.model
    assert report["is_connected"] is True
    assert report["snapshot"]["residents"]["alice"]["weight"] == 2
    assert {item["type"] for item in report["subentries"]} == {"conversation", "ai_task_data", "resident"}
    assert len(report["entities"]) > 20


async def test_system_health_says_whether_the_engine_can_be_reached(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    assert await async_setup_component(hass, "system_health", {})
    await hass.async_block_till_done()
    info = await get_system_health_info(hass, DOMAIN)
    assert await info.pop("reach_engine") == "ok"
    assert info == {"engines": 1, "engine_version": "0.1.0", "model": engine.model, "policy_met": True}


async def test_system_health_without_an_engine_says_so(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    assert await async_setup_component(hass, "system_health", {})
    await hass.config_entries.async_unload(loaded.entry_id)
    assert await get_system_health_info(hass, DOMAIN) == {"engines": 0}
