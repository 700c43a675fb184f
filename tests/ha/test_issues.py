"""What only the household can mend is told under Repairs, and taken away when it is mended."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry, async_fire_time_changed
from pytest_homeassistant_custom_component.components.recorder.common import async_wait_recording_done

from custom_components.fairhearth.attribution import ResidentRule
from custom_components.fairhearth.const import DOMAIN
from custom_components.fairhearth.engine_client import ClassReport, FairnessSnapshot
from custom_components.fairhearth.issues import (
    STARVING_AFTER_S,
    StarvationWatch,
    changing_parts,
    claimed_twice,
)
from homeassistant.core import HomeAssistant
from homeassistant.helpers import issue_registry as ir, translation
from homeassistant.setup import async_setup_component
from homeassistant.util import dt as dt_util
from tests.ha.conftest import until
from tests.ha.fake_engine import FakeEngine, golden


def told(hass: HomeAssistant) -> dict[str, ir.IssueEntry]:
    """Return our issues by the key of their text."""
    issues = [issue for (domain, _), issue in ir.async_get(hass).issues.items() if domain == DOMAIN]
    return {issue.translation_key: issue for issue in issues if issue.translation_key}


def change(hass: HomeAssistant, loaded: MockConfigEntry, kind: str, **options: object) -> None:
    (subentry, *_) = loaded.get_subentries_of_type(kind)
    hass.config_entries.async_update_subentry(loaded, subentry, data={**subentry.data, **options})


async def test_nothing_is_told_of_a_household_in_order(hass: HomeAssistant, loaded: MockConfigEntry) -> None:
    assert told(hass) == {}


async def test_an_engine_that_stays_away_is_told_and_forgiven(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await engine.stop()
    await until(lambda: not loaded.runtime_data.last_update_success)
    assert told(hass) == {}  # it may only restart
    async_fire_time_changed(hass, dt_util.utcnow() + timedelta(minutes=11))
    await hass.async_block_till_done()
    assert told(hass)["engine_gone"].translation_placeholders == {
        "engine": "Kitchen engine",
        "url": engine.url,
    }
    await engine.start()
    await until(lambda: told(hass) == {})


async def test_an_engine_that_comes_back_in_time_is_not_told(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await engine.stop()
    await until(lambda: not loaded.runtime_data.last_update_success)
    await engine.start()
    await until(lambda: loaded.runtime_data.last_update_success)
    async_fire_time_changed(hass, dt_util.utcnow() + timedelta(minutes=11))
    await hass.async_block_till_done()
    assert told(hass) == {}


@pytest.mark.parametrize(("version", "key"), [(0, "update_engine"), (2, "update_integration")])
async def test_versions_that_are_apart_say_which_side_to_update(
    hass: HomeAssistant, core: None, engine: FakeEngine, entry: MockConfigEntry, version: int, key: str
) -> None:
    engine.schema_version = version
    entry.add_to_hass(hass)
    assert not await hass.config_entries.async_setup(entry.entry_id)
    assert told(hass).keys() == {key}
    engine.schema_version = 1
    await hass.config_entries.async_reload(entry.entry_id)
    await hass.async_block_till_done()
    assert told(hass) == {}


async def test_a_model_the_engine_does_not_have_is_named_with_those_it_has(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    change(hass, loaded, "ai_task_data", model="Lost-7B")
    await until(lambda: "model_missing" in told(hass))
    placeholders = told(hass)["model_missing"].translation_placeholders
    assert placeholders is not None
    assert (placeholders["agent"], placeholders["model"]) == ("Task", "Lost-7B")
    assert engine.model in placeholders["models"]
    change(hass, loaded, "ai_task_data", model=engine.model)
    await until(lambda: "model_missing" not in told(hass))


async def test_two_residents_who_claim_the_same_are_named(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    change(hass, loaded, "resident", satellites=["assist_satellite.hall"])
    await hass.async_block_till_done()
    result = await hass.config_entries.subentries.async_init(
        (loaded.entry_id, "resident"), context={"source": "user"}
    )
    await hass.config_entries.subentries.async_configure(
        result["flow_id"],
        {"name": "Bob", "weight": 1, "daily_is_hard": False, "satellites": ["assist_satellite.hall"]},
    )
    await until(lambda: "claimed_twice" in told(hass))
    placeholders = told(hass)["claimed_twice"].translation_placeholders
    assert placeholders == {"engine": "Kitchen engine", "residents": "Alice – Bob"}
    change(hass, loaded, "resident", satellites=[])
    await until(lambda: told(hass) == {})


async def test_instructions_that_change_with_each_sentence_are_warned_of(
    hass: HomeAssistant, loaded: MockConfigEntry
) -> None:
    change(hass, loaded, "conversation", prompt="It is {{ now() }}. You talk to {{ user_name }}.")
    await until(lambda: "changing_prompt" in told(hass))
    placeholders = told(hass)["changing_prompt"].translation_placeholders
    assert placeholders == {"engine": "Kitchen engine", "agent": "Agent", "parts": "now, user_name"}
    change(hass, loaded, "conversation", prompt="You live in {{ ha_name }}, now and ever.")
    await until(lambda: told(hass) == {})


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("", []),
        ("You are the butler of now and then.", []),
        ("{{ ha_name }} {# now() #}", []),
        ("{{ now().hour }} {% if user_name %}{{ user_name }}{% endif %}", ["now", "user_name"]),
        ("{% set a = states('sun.sun') %}{{ utcnow() }}", ["states", "utcnow"]),
        ("{{ nowhere }} {{ known() }}", []),
    ],
)
def test_what_changes_in_a_template_is_found(template: str, parts: list[str]) -> None:
    assert changing_parts(template) == parts


def test_overlaps_of_residents_are_found_in_order() -> None:
    alice = ResidentRule(resident_id="alice", user_ids=frozenset({"u"}), area_ids=frozenset({"a"}))
    bob = ResidentRule(resident_id="bob", user_ids=frozenset({"u"}), area_ids=frozenset({"a"}))
    carol = ResidentRule(resident_id="carol", agent_ids=frozenset({"a"}))  # an agent is no area
    assert claimed_twice([alice, bob, carol]) == [("alice", "bob")]
    assert claimed_twice([alice, carol]) == []


def classes(**changes: Any) -> dict[str, ClassReport]:
    report = FairnessSnapshot.from_wire(golden("fairness")).classes["background"]
    return {"background": replace(report, requests_waiting=1, requests_running=0, **changes)}


def test_a_class_starves_when_nothing_of_it_moves_for_long() -> None:
    watch = StarvationWatch()
    assert watch.starving(classes(), 0.0) == set()
    assert watch.starving(classes(), STARVING_AFTER_S - 1) == set()
    assert watch.starving(classes(), STARVING_AFTER_S) == {"background"}
    assert watch.starving(classes(finished=99), STARVING_AFTER_S + 1) == set()


def test_a_class_that_somebody_paused_does_not_starve() -> None:
    watch = StarvationWatch()
    watch.starving(classes(), 0.0)
    assert watch.starving(classes(), STARVING_AFTER_S, paused=("background",)) == set()
    assert watch.starving(classes(), 2 * STARVING_AFTER_S - 1) == set(), "the time begins when it is resumed"


@pytest.mark.parametrize("sign", [{"requests_running": 1}, {"requests_waiting": 0}, {"tokens_served": 10**6}])
def test_a_class_that_shows_a_sign_of_life_does_not_starve(sign: dict[str, int]) -> None:
    watch = StarvationWatch()
    watch.starving(classes(), 0.0)
    (report,) = classes().values()
    watch.starving({"background": replace(report, **sign)}, STARVING_AFTER_S - 1)
    assert watch.starving(classes(), STARVING_AFTER_S + 1) == set()


@pytest.mark.parametrize(("language", "name"), [("en", "background"), ("sv", "bakgrund")])
async def test_a_starving_class_is_told_and_taken_away(
    hass: HomeAssistant,
    engine: FakeEngine,
    loaded: MockConfigEntry,
    monkeypatch: pytest.MonkeyPatch,
    language: str,
    name: str,
) -> None:
    translation.async_setup(hass)  # as Home Assistant begins
    await hass.config.async_update(language=language)
    await translation.async_load_integrations(hass, {DOMAIN})
    monkeypatch.setattr("custom_components.fairhearth.issues.STARVING_AFTER_S", 1.0)
    await engine.publish(lambda snapshot: snapshot["classes"]["background"].update(requests_waiting=3))
    await until(lambda: loaded.runtime_data.data.classes["background"].requests_waiting == 3)
    for waiting in range(4, 10):
        await engine.publish(
            lambda snapshot, n=waiting: snapshot["classes"]["background"].update(requests_waiting=n)
        )
        await until(lambda n=waiting: loaded.runtime_data.data.classes["background"].requests_waiting == n)
        if "class_starving" in told(hass):
            break
    assert told(hass)["class_starving"].translation_placeholders == {
        "engine": "Kitchen engine",
        "class": name,
    }
    await engine.publish(lambda snapshot: snapshot["classes"]["background"].update(requests_waiting=0))
    await until(lambda: told(hass) == {})


async def test_a_removed_entry_takes_its_issues_along(hass: HomeAssistant, loaded: MockConfigEntry) -> None:
    change(hass, loaded, "conversation", prompt="{{ now() }}")
    await until(lambda: "changing_prompt" in told(hass))
    await hass.config_entries.async_remove(loaded.entry_id)
    await hass.async_block_till_done()
    assert told(hass) == {}


@pytest.mark.parametrize(
    ("language", "finished", "failed"),
    [
        ("en", "finished the job “Monday” for Alice", "failed on the job “job-2” for House: no"),
        ("sv", "slutförde jobbet ”Monday” åt Alice", "misslyckades med jobbet ”job-2” åt Huset: no"),
        ("ja", "Alice のジョブ「Monday」を完了しました", "家 のジョブ「job-2」に失敗しました：no"),
    ],
)
async def test_the_logbook_tells_how_a_job_ended_in_the_language_of_the_home(
    recorder_mock: Any,
    hass: HomeAssistant,
    core: None,
    engine: FakeEngine,
    entry: MockConfigEntry,
    hass_client: Any,
    language: str,
    finished: str,
    failed: str,
) -> None:
    translation.async_setup(hass)  # as Home Assistant begins
    await hass.config.async_update(language=language)
    entry.add_to_hass(hass)
    assert await hass.config_entries.async_setup(entry.entry_id)
    assert await async_setup_component(hass, "logbook", {})
    await hass.async_block_till_done()
    await until(lambda: engine.num_job_streams == 1)
    begun = dt_util.utcnow()
    for order in ({"text": "A day.", "title": "Monday", "resident": "alice"}, {"text": "A day."}):
        await hass.services.async_call(DOMAIN, "submit_summary", order, blocking=True)
    await until(lambda: len(entry.runtime_data.jobs.active) == 2)
    engine.move_job("job-1", "finished", text="Quiet.")
    engine.move_job("job-2", "failed", error="no")
    await until(lambda: not entry.runtime_data.jobs.active)
    await async_wait_recording_done(hass)
    client = await hass_client()
    lines = await (await client.get(f"/api/logbook/{begun.isoformat()}".replace("+", "%2B"))).json()
    assert [(line["name"], line["message"]) for line in lines if line.get("domain") == DOMAIN] == [
        ("Kitchen engine", finished),
        ("Kitchen engine", failed),
    ]
