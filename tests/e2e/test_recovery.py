from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from household import flows, workload
from household.client import CommandFailed
from household.residence import KITCHEN, Household
from household.stage import Stage
from household.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def engine_is_back(stage: Stage) -> AsyncIterator[None]:
    """Leave the engine running with its own token, whatever the test did."""
    token = stage.engine.token
    yield
    if stage.engine.token != token or not stage.engine.is_running:
        stage.engine.token = token
        await stage.engine.stop()
        await stage.engine.start()
        await stage.until_back()


async def tokens_served(home: Household) -> str:
    return await home.state(home.resident_sensor("alice", "tokens_served"))


async def test_sensors_recover_when_the_engine_is_restarted_under_home_assistant(
    stage: Stage, home: Household
) -> None:
    await stage.engine.stop()
    await until(lambda: tokens_served(home), lambda s: s == "unavailable", "the sensor goes", timeout_s=30)
    with pytest.raises(CommandFailed):
        await workload.type_in(home, "Is anybody there?")

    await stage.engine.start()
    await until(lambda: tokens_served(home), str.isdecimal, "the sensor comes back", timeout_s=60)
    await stage.until_back()
    before = (await stage.engine_api.fairness())["residents"]["alice"]  # counters outlive the engine
    answered = await workload.speak(home, KITCHEN, "How long do I boil pasta?")
    assert answered.text
    after = (await stage.engine_api.fairness())["residents"]["alice"]
    assert after["name"] == "Alice"
    assert after["finished"] == before["finished"] + 1


async def test_an_engine_stopped_in_the_middle_of_an_answer_is_told_and_leaves_no_half_conversation(
    stage: Stage, home: Household
) -> None:
    run = await home.bob.subscribe(
        "assist_pipeline/run",
        start_stage="intent",
        end_stage="intent",
        input={"text": "Tell me a long story about a fox."},
        pipeline=home.pipelines["chat"],
        conversation_id="cut-short",
    )
    while not ((await run.next(60))["data"] or {}).get("chat_log_delta", {}).get("content"):
        pass  # until the answer has begun
    await stage.engine.kill()
    while (event := await run.next(30))["type"] != "intent-end":
        assert event["type"] != "error", event
    response = event["data"]["intent_output"]["response"]
    assert response["response_type"] == "error"
    assert "The engine" in response["speech"]["plain"]["speech"]
    await run.close()

    await stage.engine.start()
    await stage.until_back()
    answered = await home.bob.call(
        "conversation/process",
        text="Go on.",
        agent_id=home.agent("Chat"),
        conversation_id="cut-short",
        timeout_s=120,
    )
    assert answered["response"]["response_type"] == "action_done"


async def test_a_summary_that_was_ordered_arrives_though_the_engine_is_killed_meanwhile(
    stage: Stage, home: Household
) -> None:
    order = {
        "text": "The fence is broken. The neighbours want a new one. It costs much. " * 10,
        "title": "Fence",
        "max_tokens": 160,
    }
    async with home.socket.events("subscribe_events", event_type="fairhearth_job_ended") as told:
        job = await home.socket.act("fairhearth.submit_summary", order, returns=True)
        assert job["state"] in ("submitted", "running")
        path = f"/v1/jobs/{job['job_id']}"
        begun = await until(
            lambda: stage.engine_api.get(path),
            lambda one: one["state"] == "running" and one["partial"],
            "the summary is begun",
            timeout_s=60,
            every_s=0.05,
        )
        await stage.engine.kill()
        await stage.engine.start()
        ended = (await told.next(240))["data"]
    assert (ended["job_id"], ended["state"], ended["title"]) == (job["job_id"], "finished", "Fence")
    await stage.until_back()
    whole = await home.socket.act("fairhearth.get_job", {"job_id": job["job_id"]}, returns=True)
    assert whole["state"] == "finished"
    assert len(whole["text"]) > len(begun["partial"]) > 0
    event = await home.state(home.engine_entity("event", "job"))
    assert event not in ("unknown", "unavailable")


async def test_home_assistant_may_start_before_the_engine(stage: Stage, home: Household) -> None:
    await stage.engine.stop()
    await stage.restart_home(expect_engine=False)
    home = stage.household
    assert (await flows.entry(home.rest, "fairhearth"))["state"] == "setup_retry"

    await stage.engine.start()
    await flows.until_entry(home.rest, "fairhearth")
    await stage.until_back()
    assert (await workload.speak(home, KITCHEN, "How long do I boil pasta?")).text


async def test_a_refused_token_asks_for_a_new_one_and_takes_it(stage: Stage, home: Household) -> None:
    old = stage.engine.token
    await stage.engine.stop()
    stage.engine.token = "another-token-9876543210"
    await stage.engine.start()

    async def dialogs() -> list[dict[str, Any]]:
        shown = await home.socket.call("config_entries/flow/progress")
        return [flow for flow in shown if flow["context"]["source"] == "reauth"]

    (flow,) = await until(dialogs, bool, "Home Assistant asks for a new token", timeout_s=60)
    path = f"/api/config/config_entries/flow/{flow['flow_id']}"
    refused = await home.rest.post(path, {"token": old})
    assert refused["errors"], "the old token is still refused"
    taken = await home.rest.post(path, {"token": stage.engine.token})
    assert taken["reason"] == "reauth_successful"
    await stage.until_back()
    assert await dialogs() == []

    # And back again, for whoever comes next.
    await stage.engine.stop()
    stage.engine.token = old
    await stage.engine.start()
    (flow,) = await until(dialogs, bool, "Home Assistant asks again", timeout_s=60)
    await home.rest.post(f"/api/config/config_entries/flow/{flow['flow_id']}", {"token": old})
    await stage.until_back()


async def test_an_engine_that_lost_its_residents_is_told_them_again(stage: Stage, home: Household) -> None:
    await stage.engine.stop()
    stage.engine.forget_residents()
    await stage.engine.start()
    await stage.until_back()
    residents = (await stage.engine_api.fairness())["residents"]
    assert {"alice", "bob"} <= residents.keys()


async def test_a_wrong_token_is_named_when_an_engine_is_added(stage: Stage, home: Household) -> None:
    answers = {"url": stage.engine.url, "token": "not-the-token-0123456789"}
    with pytest.raises(flows.DialogRefused, match="'token': 'invalid_token'"):
        await flows.add_entry(home.rest, "fairhearth", answers)


async def test_an_address_where_nobody_answers_is_named_when_an_engine_is_added(home: Household) -> None:
    with pytest.raises(flows.DialogRefused, match="cannot_connect"):
        await flows.add_entry(home.rest, "fairhearth", {"url": "http://127.0.0.1:9", "token": "x" * 20})
