"""What can be turned and pressed, and what is told as it happens: numbers, the button, events, jobs."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry, async_capture_events

from custom_components.fairhearth.const import DOMAIN
from custom_components.fairhearth.engine_client import ChatRequest, JobOrder, Message
from homeassistant.core import Event, EventStateChangedData, HomeAssistant, State, callback
from homeassistant.exceptions import HomeAssistantError
from homeassistant.helpers import entity_registry as er
from tests.ha.conftest import until
from tests.ha.fake_engine import FakeEngine

WEIGHT = "number.alice_weight"
DAILY = "number.alice_tokens_per_day"
JOBS = "sensor.kitchen_engine_jobs"
JOB_ENDED = "event.kitchen_engine_job_ended"
CONNECTED = "binary_sensor.kitchen_engine_connection"


async def set_number(hass: HomeAssistant, entity_id: str, value: float) -> None:
    await hass.services.async_call(
        "number", "set_value", {"entity_id": entity_id, "value": value}, blocking=True
    )
    await hass.async_block_till_done()


def shown(hass: HomeAssistant, entity_id: str) -> State:
    state = hass.states.get(entity_id)
    assert state is not None, entity_id
    return state


async def submit(loaded: MockConfigEntry, title: str, workload_class: str = "background") -> str:
    request = ChatRequest(
        messages=(Message(role="user", content="Sum it up"),),
        resident="house",
        workload_class=workload_class,
        max_tokens=100,
    )
    job = await loaded.runtime_data.client.submit_job(JobOrder(request=request, title=title))
    return job.job_id


@pytest.fixture
async def watching(loaded: MockConfigEntry, engine: FakeEngine) -> MockConfigEntry:
    """The entry, once it follows the jobs too."""
    await until(lambda: engine.num_job_streams == 1)
    return loaded


async def test_the_weight_is_turned_while_everything_runs(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    assert shown(hass, WEIGHT).state == "2"
    coordinator = loaded.runtime_data
    await set_number(hass, WEIGHT, 5)
    assert engine.residents["alice"]["weight"] == 5
    assert engine.residents["alice"]["daily_tokens"] == 200_000
    assert shown(hass, WEIGHT).state == "5"
    assert loaded.runtime_data is coordinator  # no reload: who is being answered is not cut off
    assert engine.num_streams == 1
    (subentry,) = loaded.get_subentries_of_type("resident")
    assert subentry.data["weight"] == 5


async def test_limits_that_only_the_engine_knows_outlive_what_home_assistant_changes(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    engine.residents["alice"] |= {"rolling_tokens": 500, "max_running": 2}
    await set_number(hass, WEIGHT, 5)
    await hass.config_entries.async_reload(loaded.entry_id)
    await until(lambda: engine.num_streams == 1)
    alice = engine.residents["alice"]
    assert (alice["weight"], alice["rolling_tokens"], alice["max_running"]) == (5, 500, 2)


async def test_no_tokens_a_day_is_no_limit(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    assert shown(hass, DAILY).state == "200000"
    await set_number(hass, DAILY, 0)
    assert engine.residents["alice"]["daily_tokens"] is None
    await set_number(hass, DAILY, 1000)
    assert engine.residents["alice"]["daily_tokens"] == 1000
    assert shown(hass, DAILY).state == "1000"


async def test_a_number_the_engine_refuses_is_not_kept(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    engine.tokens = dict.fromkeys(engine.tokens, ("generate",))
    with pytest.raises(HomeAssistantError, match="not allowed to do this"):
        await set_number(hass, WEIGHT, 7)
    assert shown(hass, WEIGHT).state == "2"


async def test_a_change_that_cannot_be_told_is_told_later(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, caplog: pytest.LogCaptureFixture
) -> None:
    """A dialog saves a weight while the token is too weak: it is kept here and said in the log."""
    engine.tokens = dict.fromkeys(engine.tokens, ("generate",))
    (subentry,) = loaded.get_subentries_of_type("resident")
    hass.config_entries.async_update_subentry(loaded, subentry, data={**subentry.data, "weight": 9})
    await hass.async_block_till_done()
    assert "could not be told its residents" in caplog.text
    assert shown(hass, WEIGHT).state == "2"  # written with the next picture of the engine
    await engine.publish(lambda snapshot: snapshot["engine"].update(requests_waiting=1))
    await until(lambda: shown(hass, WEIGHT).state == "9")


async def test_the_connection_is_shown_while_the_engine_is_away(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    assert shown(hass, CONNECTED).state == "on"
    await engine.stop()
    await until(lambda: shown(hass, CONNECTED).state == "off")
    assert shown(hass, WEIGHT).state == "unavailable"
    await engine.start()
    await until(lambda: shown(hass, CONNECTED).state == "on")


async def test_jobs_under_way_are_shown_with_their_progress(
    hass: HomeAssistant, engine: FakeEngine, watching: MockConfigEntry
) -> None:
    assert shown(hass, JOBS).state == "0"
    job_id = await submit(watching, "Summary of Monday")
    await until(lambda: shown(hass, JOBS).state == "1")
    engine.move_job(job_id, "running", text="ten words " * 5)
    await until(lambda: shown(hass, JOBS).attributes["jobs"][0]["state"] == "running")
    (job,) = shown(hass, JOBS).attributes["jobs"]
    assert (job["title"], job["progress"], job["eta_s"]) == ("Summary of Monday", 10, 12.5)
    engine.move_job(job_id, "finished", text="A quiet day.")
    await until(lambda: shown(hass, JOBS).state == "0")


async def test_each_job_that_ends_is_told_once_with_a_second_of_its_own(
    hass: HomeAssistant, engine: FakeEngine, watching: MockConfigEntry
) -> None:
    events = async_capture_events(hass, "fairhearth_job_ended")
    ids = [await submit(watching, f"Job {number}") for number in range(3)]
    await until(lambda: len(watching.runtime_data.jobs.active) == 3)
    told: list[tuple[float, str]] = []

    @callback
    def note(event: Event[EventStateChangedData]) -> None:
        if event.data["entity_id"] == JOB_ENDED and event.data["new_state"] is not None:
            told.append((hass.loop.time(), event.data["new_state"].attributes["title"]))

    hass.bus.async_listen("state_changed", note)
    for job_id, state in zip(ids, ("finished", "failed", "expired"), strict=True):
        engine.move_job(job_id, state, error="out of pages" if state == "failed" else None)
    await until(lambda: len(told) == 3)
    assert [title for _, title in told] == ["Job 0", "Job 1", "Job 2"]
    assert shown(hass, JOB_ENDED).attributes["event_type"] == "expired"
    assert [event.data["state"] for event in events] == ["finished", "failed", "expired"]
    assert events[1].data["error"] == "out of pages"
    times = [moment for moment, _ in told]
    assert all(later - earlier > 0.9 for earlier, later in itertools.pairwise(times))


async def test_a_job_that_ended_while_nobody_listened_is_told_after_the_connection(
    hass: HomeAssistant,
    engine: FakeEngine,
    watching: MockConfigEntry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("custom_components.fairhearth.jobs.RECONNECT_S", 0.1)
    events = async_capture_events(hass, "fairhearth_job_ended")
    kept, lost = await submit(watching, "Kept"), await submit(watching, "Lost")
    await until(lambda: len(watching.runtime_data.jobs.active) == 2)
    await engine.stop()
    engine.move_job(kept, "finished", text="Done.")
    del engine.jobs[lost]
    await engine.start()
    await until(lambda: not watching.runtime_data.jobs.active)
    assert [event.data["title"] for event in events] == ["Kept"]


async def test_an_engine_without_jobs_shows_none(
    hass: HomeAssistant, core: None, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    engine.has_jobs = False
    entry.add_to_hass(hass)
    assert await hass.config_entries.async_setup(entry.entry_id)
    await hass.async_block_till_done()
    assert shown(hass, JOBS).state == "0"
    with pytest.raises(HomeAssistantError):
        await hass.services.async_call(
            "button", "press", {"entity_id": "button.kitchen_engine_cancel_background_jobs"}, blocking=True
        )


async def test_the_button_cancels_what_nobody_waits_for(
    hass: HomeAssistant, engine: FakeEngine, watching: MockConfigEntry
) -> None:
    waiting, running = await submit(watching, "One"), await submit(watching, "Two")
    other, done = await submit(watching, "Agent's", "agent"), await submit(watching, "Done")
    engine.move_job(running, "running", text="so far")
    engine.move_job(done, "finished", text="Done.")
    await hass.services.async_call(
        "button", "press", {"entity_id": "button.kitchen_engine_cancel_background_jobs"}, blocking=True
    )
    engine.jobs_gone_when_cancelled = True
    await submit(watching, "Gone meanwhile")
    await hass.services.async_call(
        "button", "press", {"entity_id": "button.kitchen_engine_cancel_background_jobs"}, blocking=True
    )
    states = {job_id: job["state"] for job_id, job in engine.jobs.items()}
    assert states == {waiting: "cancelled", running: "cancelled", other: "submitted", done: "finished"}


async def test_an_interruption_is_told_with_who_had_to_make_way(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, entity_registry: er.EntityRegistry
) -> None:
    entity_id = entity_registry.async_get_entity_id("event", DOMAIN, f"{loaded.entry_id}_preemption")
    assert entity_id is not None
    assert hass.states.get(entity_id) is None  # too noisy to be there at first
    entity_registry.async_update_entity(entity_id, disabled_by=None)
    await hass.config_entries.async_reload(loaded.entry_id)
    await until(lambda: engine.num_streams == 2)
    await engine.publish(lambda snapshot: snapshot["residents"]["alice"].update(preemptions=2))
    await until(lambda: shown(hass, entity_id).attributes.get("residents") == {"alice": 2})
    at = shown(hass, entity_id).state
    await engine.publish(lambda snapshot: snapshot["residents"]["alice"].update(preemptions=0))  # restarted
    await asyncio.sleep(1.1)
    assert shown(hass, entity_id).state == at
    await engine.publish(lambda snapshot: snapshot["residents"]["alice"].update(preemptions=1))
    await until(lambda: shown(hass, entity_id).attributes["residents"] == {"alice": 1})


async def test_what_the_engine_says_of_a_job_is_read(watching: MockConfigEntry, engine: FakeEngine) -> None:
    client = watching.runtime_data.client
    job_id = await submit(watching, "Long one")
    engine.move_job(job_id, "running", text="Half of")
    job = await client.job(job_id)
    assert (job.state, job.text, job.has_ended, job.progress) == ("running", "Half of", False, 0.02)
    engine.move_job(job_id, "finished", text="All of it.")
    job = await client.job(job_id)
    assert (job.text, job.finish_reason, job.has_ended, job.progress) == ("All of it.", "stop", True, 1.0)
    (listed,) = await client.jobs(state="finished", resident="house", limit=5)
    assert (listed.job_id, listed.text) == (job_id, "")
    assert engine.orders[0]["request"].keys() == {"messages", "fairhearth", "max_tokens"}
