"""Durable jobs by action: ordered, followed, read and cancelled, and by whom."""

from __future__ import annotations

from typing import Any

import probatio
import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry, async_capture_events

from custom_components.fairhearth.const import DOMAIN, EVENT_JOB_ENDED
from custom_components.fairhearth.services import SUMMARY_INSTRUCTIONS
from homeassistant.auth.models import User
from homeassistant.core import Context, HomeAssistant
from homeassistant.exceptions import ServiceValidationError, Unauthorized
from homeassistant.setup import async_setup_component
from tests.ha.conftest import until
from tests.ha.fake_engine import FakeEngine

pytestmark = pytest.mark.usefixtures("loaded")


async def call(hass: HomeAssistant, action: str, context: Context | None = None, **data: Any) -> Any:
    return await hass.services.async_call(
        DOMAIN, action, data, blocking=True, return_response=True, context=context
    )


@pytest.fixture
async def alice(hass: HomeAssistant, loaded: MockConfigEntry) -> User:
    """A resident who is no administrator."""
    await hass.auth.async_create_user("Owner", group_ids=["system-admin"])  # the first one may do everything
    user = await hass.auth.async_create_user("Alice", group_ids=["system-users"])
    hass.states.async_set("person.alice", "home", {"user_id": user.id})
    (subentry,) = loaded.get_subentries_of_type("resident")
    hass.config_entries.async_update_subentry(
        loaded, subentry, data={**subentry.data, "person": "person.alice"}
    )
    await hass.async_block_till_done()
    return user


async def test_a_summary_is_ordered_and_its_job_returned_at_once(
    hass: HomeAssistant, engine: FakeEngine
) -> None:
    job = await call(
        hass,
        "submit_summary",
        text="A long day.",
        title="Monday",
        idempotency_key="monday",
        max_tokens=64,
        deadline={"hours": 6},
        keep={"days": 3},
    )
    assert (job["job_id"], job["state"], job["resident"]) == ("job-1", "submitted", "house")
    (order,) = engine.orders
    assert order["deadline_s"] == 6 * 3600
    assert order["keep_s"] == 3 * 86400
    assert order["request"]["fairhearth"] == {"resident": "house", "workload_class": "background"}
    assert [message["content"] for message in order["request"]["messages"]] == [
        SUMMARY_INSTRUCTIONS,
        "A long day.",
    ]
    again = await call(
        hass, "submit_summary", text="A long day.", title="Monday", idempotency_key="monday", max_tokens=64
    )
    assert again["job_id"] == "job-1"


async def test_a_job_is_followed_read_and_listed(hass: HomeAssistant, engine: FakeEngine) -> None:
    await call(hass, "submit_summary", text="A long day.", title="Monday")
    engine.move_job("job-1", "running", text="It was")
    job = await call(hass, "get_job", job_id="job-1")
    assert (job["state"], job["text"], job["eta_s"], job["finish_reason"]) == (
        "running",
        "It was",
        12.5,
        None,
    )
    engine.move_job("job-1", "finished", text="It was long.")
    job = await call(hass, "get_job", job_id="job-1")
    assert (job["state"], job["text"], job["progress"]) == ("finished", "It was long.", 100)
    await call(hass, "submit_summary", text="Another day.", resident="alice")
    jobs = (await call(hass, "list_jobs"))["jobs"]
    assert [(row["job_id"], row["resident"]) for row in jobs] == [("job-2", "alice"), ("job-1", "house")]
    assert len((await call(hass, "list_jobs", state="finished"))["jobs"]) == 1
    assert len((await call(hass, "list_jobs", limit=1))["jobs"]) == 1


async def test_a_job_is_cancelled(hass: HomeAssistant, engine: FakeEngine) -> None:
    await call(hass, "submit_summary", text="A long day.")
    assert (await call(hass, "cancel_job", job_id="job-1"))["state"] == "cancelled"
    with pytest.raises(ServiceValidationError, match="no such job"):
        await call(hass, "cancel_job", job_id="job-9")


async def test_an_automation_takes_a_result_up_when_its_job_ends(
    hass: HomeAssistant, engine: FakeEngine
) -> None:
    await until(lambda: engine.num_job_streams == 1)
    assert await async_setup_component(hass, "input_text", {"input_text": {"summary": {"max": 255}}})
    automation = {
        "alias": "Take up",
        "triggers": [{"trigger": "event", "event_type": "fairhearth_job_ended"}],
        "actions": [
            {
                "action": "fairhearth.get_job",
                "data": {"job_id": "{{ trigger.event.data.job_id }}"},
                "response_variable": "job",
            },
            {
                "action": "input_text.set_value",
                "target": {"entity_id": "input_text.summary"},
                "data": {"value": "{{ job.text }}"},
            },
        ],
    }
    assert await async_setup_component(hass, "automation", {"automation": [automation]})
    await call(hass, "submit_summary", text="A long day.")
    await until(lambda: hass.states.get("sensor.kitchen_engine_jobs").state == "1")
    engine.move_job("job-1", "finished", text="It was long.")
    await until(lambda: hass.states.get("input_text.summary").state == "It was long.")


async def test_the_end_of_a_job_is_told_though_the_stream_was_away_all_the_while(
    hass: HomeAssistant, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordered and finished between two connections."""
    told = async_capture_events(hass, EVENT_JOB_ENDED)
    await until(lambda: engine.num_job_streams == 1)
    monkeypatch.setattr("custom_components.fairhearth.jobs.RECONNECT_S", 1)
    await engine.stop()
    await engine.start()
    await call(hass, "submit_summary", text="A long day.", title="Monday")
    engine.move_job("job-1", "finished", text="It was long.")
    assert engine.num_job_streams == 1, "nobody listens"
    await until(lambda: len(told) == 1)
    assert (told[0].data["job_id"], told[0].data["state"]) == ("job-1", "finished")
    await until(lambda: engine.num_job_streams == 2)
    await engine.stop()
    await engine.start()
    await until(lambda: engine.num_job_streams == 3)
    assert len(told) == 1, "once"


async def test_a_resident_sees_and_cancels_only_their_own_jobs(
    hass: HomeAssistant, engine: FakeEngine, alice: User
) -> None:
    hers, house = Context(user_id=alice.id), Context()
    await call(hass, "submit_summary", hers, text="Her day.")
    await call(hass, "submit_summary", house, text="The house's day.")
    assert [job["resident"] for job in engine.jobs.values()] == ["alice", "house"]
    assert [job["job_id"] for job in (await call(hass, "list_jobs", hers))["jobs"]] == ["job-1"]
    assert len((await call(hass, "list_jobs", hers, resident="alice"))["jobs"]) == 1
    assert (await call(hass, "get_job", hers, job_id="job-1"))["resident"] == "alice"
    for action, data in (
        ("get_job", {"job_id": "job-2"}),
        ("cancel_job", {"job_id": "job-2"}),
        ("list_jobs", {"resident": "house"}),
        ("submit_summary", {"text": "x", "resident": "house"}),
    ):
        with pytest.raises(Unauthorized):
            await call(hass, action, hers, **data)
    assert engine.jobs["job-2"]["state"] == "submitted"


@pytest.mark.parametrize(
    ("action", "data"),
    [
        ("submit_summary", {}),
        ("submit_summary", {"text": ""}),
        ("submit_summary", {"text": "x", "deadline": "soon"}),
        ("submit_summary", {"text": "x", "deadline": -1}),
        ("submit_summary", {"text": "x", "title": "x" * 129}),
        ("submit_summary", {"text": "x", "workload_class": "chat"}),
        ("get_job", {}),
        ("list_jobs", {"state": "lost"}),
        ("list_jobs", {"limit": 0}),
    ],
)
async def test_what_cannot_be_is_refused_before_the_engine_hears_of_it(
    hass: HomeAssistant, engine: FakeEngine, action: str, data: dict[str, Any]
) -> None:
    with pytest.raises(probatio.Invalid):
        await call(hass, action, **data)
    assert engine.orders == []


async def test_an_engine_that_forgot_the_residents_is_told_and_the_job_ordered_again(
    hass: HomeAssistant, engine: FakeEngine
) -> None:
    engine.residents.pop("alice")
    assert (await call(hass, "submit_summary", text="x", resident="alice"))["resident"] == "alice"


async def test_an_engine_without_jobs_says_so(hass: HomeAssistant, engine: FakeEngine) -> None:
    engine.has_jobs = False
    for action, data in (
        ("submit_summary", {"text": "x"}),
        ("list_jobs", {}),
        ("get_job", {"job_id": "job-1"}),
    ):
        with pytest.raises(ServiceValidationError, match="does not offer that"):
            await call(hass, action, **data)


@pytest.mark.parametrize("job_id", ["job-99", "stream", "", "..", "a/b", "job 1", "x" * 5000])
@pytest.mark.parametrize("action", ["get_job", "cancel_job"])
async def test_whatever_is_given_for_a_job_that_there_is_not(
    hass: HomeAssistant, action: str, job_id: str
) -> None:
    with pytest.raises(ServiceValidationError, match="no such job"):
        await call(hass, action, job_id=job_id)


@pytest.mark.parametrize(("action", "data"), [("submit_summary", {"text": "x"}), ("list_jobs", {})])
async def test_a_resident_who_is_not_set_up_is_named_with_those_who_are(
    hass: HomeAssistant, engine: FakeEngine, action: str, data: dict[str, Any]
) -> None:
    with pytest.raises(ServiceValidationError, match=r"no resident zoe\. Set up are: alice, guest, house"):
        await call(hass, action, resident="zoe", **data)
    assert (await call(hass, "list_jobs", resident="alice")) == {"jobs": []}


async def test_the_jobs_of_a_resident_who_was_removed_are_listed(
    hass: HomeAssistant, engine: FakeEngine
) -> None:
    await call(hass, "submit_summary", text="x", resident="alice")
    engine.jobs["job-1"]["resident"] = "zoe"
    (job,) = (await call(hass, "list_jobs", resident="zoe"))["jobs"]
    assert job["job_id"] == "job-1"
