import asyncio
from typing import Any

import pytest
from household import flows, residence, workload
from household.client import CommandFailed, Subscription, WebSocket
from household.residence import BEDROOM, HALL, KITCHEN, Household
from household.stage import Stage
from household.waiting import until

from tests.e2e.ledger import charged

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


async def test_an_answer_streams_word_by_word_through_the_pipeline(home: Household) -> None:
    run = await home.bob.subscribe(
        "assist_pipeline/run",
        start_stage="intent",
        end_stage="intent",
        input={"text": "Describe a walk through an old town in winter."},
        pipeline=home.pipelines["chat"],
    )
    kinds, pieces, answer = [], [], ""
    while (event := await run.next(120))["type"] != "run-end":
        kinds.append(event["type"])
        if event["type"] == "intent-progress":
            pieces.append((event["data"]["chat_log_delta"] or {}).get("content") or "")
        if event["type"] == "intent-end":
            answer = event["data"]["intent_output"]["response"]["speech"]["plain"]["speech"]
    await run.close()

    assert "error" not in kinds
    words = [piece for piece in pieces if piece]
    assert len(words) > 20
    assert "".join(words).strip() == answer.strip()
    assert kinds.index("intent-progress") < kinds.index("intent-end")


async def test_a_typed_sentence_is_chat_of_the_user_who_signed_in(stage: Stage, home: Household) -> None:
    async with charged(stage) as seen:
        await workload.type_in(home, "Name three birds.")
    assert seen == {"bob": 1, "chat": 1}


@pytest.mark.parametrize(("room", "resident"), [(KITCHEN, "alice"), (BEDROOM, "bob"), (HALL, "guest")])
async def test_a_spoken_sentence_is_voice_of_whom_the_satellite_belongs_to(
    stage: Stage, home: Household, room: str, resident: str
) -> None:
    async with charged(stage) as seen:
        answered = await workload.speak(home, room, "How long do I boil pasta?")
    assert seen == {resident: 1, "voice": 1}
    assert answered.text
    assert answered.first_word_s is not None
    assert answered.first_word_s <= answered.answered_s


async def test_a_tool_call_turns_on_an_input_boolean(stage: Stage, home: Household) -> None:
    lamp = "input_boolean.kitchen_lamp"
    agent = await residence.add_control_agent(home)
    await stage.engine_api.quiet(timeout_s=60)
    await home.socket.act("input_boolean.turn_off", {"entity_id": lamp})

    async with charged(stage) as seen:
        answer = await home.socket.call(
            "conversation/process", text="Turn on the kitchen lamp.", agent_id=agent, timeout_s=120
        )

    assert await home.state(lamp) == "on"
    assert answer["response"]["response_type"] == "action_done"
    assert seen["alice"] >= 2, "the call, and the answer after its result"


async def test_a_run_given_up_frees_the_engine(stage: Stage, home: Household) -> None:
    before = await stage.engine_api.quiet(timeout_s=60)
    run = await home.bob.subscribe(
        "assist_pipeline/run",
        start_stage="intent",
        end_stage="intent",
        input={"text": "Tell me a story about a lighthouse keeper who could not sleep."},
        pipeline=home.pipelines["chat"],
    )
    while not _content(await run.next(60)):
        pass  # until the answer has begun
    await run.close()

    after = await stage.engine_api.quiet(timeout_s=30)
    assert after["residents"]["bob"]["finished"] == before["residents"]["bob"]["finished"]
    assert after["residents"]["bob"]["kv_pages_used"] == 0
    assert after["engine"]["policy_met"]


def _content(event: dict[str, Any]) -> str | None:
    data = event["data"] or {}
    return (data.get("chat_log_delta") or {}).get("content")


async def test_a_rest_client_gone_in_the_middle_frees_the_engine(stage: Stage, home: Household) -> None:
    before = await stage.engine_api.quiet(timeout_s=60)
    sentence = {"text": "Tell me a long story about a fox.", "agent_id": home.agent("Chat")}
    asking = asyncio.create_task(home.rest.post("/api/conversation/process", sentence))
    await until(
        stage.engine_api.fairness,
        lambda snapshot: snapshot["residents"]["alice"]["requests_running"],
        "the engine serves Alice",
        timeout_s=30,
        every_s=0.05,
    )
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    after = await stage.engine_api.quiet(timeout_s=30)
    assert after["residents"]["alice"]["finished"] == before["residents"]["alice"]["finished"]


async def test_a_conversation_is_that_of_who_began_it_and_takes_one_sentence_at_a_time(
    stage: Stage, home: Household
) -> None:
    """Alice reads on undisturbed, whoever knows the name of her conversation."""

    async def begin(socket: WebSocket, text: str) -> Subscription:
        return await socket.subscribe(
            "assist_pipeline/run",
            start_stage="intent",
            end_stage="intent",
            input={"text": text},
            pipeline=home.pipelines["chat"],
            conversation_id="of-alice",
        )

    hers = await begin(home.socket, "Tell me a long story about a fox.")
    while not _content(await hers.next(60)):
        pass  # until the answer has begun
    codes = []
    for socket in (home.bob, home.socket):
        other = await begin(socket, "And about a hen?")
        while (event := await other.next(60))["type"] != "error":
            assert event["type"] != "intent-end"
        codes.append(event["data"]["code"])
        await other.close()
    assert codes == ["intent-unauthorized", "intent-busy"]
    while (event := await hers.next(120))["type"] != "intent-end":
        assert event["type"] != "error"
    assert event["data"]["intent_output"]["response"]["response_type"] == "action_done"
    await hers.close()
    await stage.engine_api.quiet(timeout_s=30)


async def test_a_sentence_too_long_for_the_model_says_so(home: Household) -> None:
    with pytest.raises(CommandFailed, match="tokens"):
        await workload.type_in(home, "word " * 12_000)


async def test_a_resident_is_not_asked_twice_for_one_name(home: Household) -> None:
    with pytest.raises(flows.DialogRefused, match="name_taken"):
        await flows.add_subentry(home.rest, home.entry_id, "resident", {"name": "alice", "weight": 1})
