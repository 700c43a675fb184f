"""Each way to the model in a real Home Assistant: who is charged, and as what, by the engine's ledger."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from household import residence, workload
from household.client import Rest, WebSocket
from household.residence import BEDROOM, HALL, KITCHEN, Household
from household.stage import Stage

from tests.e2e.installing import installed
from tests.e2e.ledger import charged
from tests.e2e.phone import Webhook, webhook_of

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

LAMP = "input_boolean.porch_lamp"
SENTENCE = "Say one word."

Way = Callable[[Household], Awaitable[Any]]


def ask(home: Household) -> dict[str, Any]:
    """Return the action that talks to the agent whose answers are short."""
    data = {"text": SENTENCE, "agent_id": home.agent("Voice")}
    return {"action": "conversation.process", "data": data}


def order(home: Household) -> dict[str, Any]:
    """Return the data of an AI task."""
    return {"task_name": "Word", "entity_id": home.task, "instructions": SENTENCE}


async def over_rest(home: Household) -> None:
    await home.bob_rest.post("/api/conversation/process", {"text": SENTENCE, "agent_id": home.agent("Voice")})


async def over_the_websocket(home: Household) -> None:
    await home.bob.call("conversation/process", text=SENTENCE, agent_id=home.agent("Voice"), timeout_s=120)


async def as_an_action(home: Household) -> None:
    action = ask(home)
    await home.bob.act(action["action"], action["data"], timeout_s=120, returns=True)


async def as_a_task(home: Household) -> None:
    await home.bob.act("ai_task.generate_data", order(home), timeout_s=120, returns=True)


@pytest.mark.parametrize(
    ("way", "work"),
    [(over_rest, "chat"), (over_the_websocket, "chat"), (as_an_action, "chat"), (as_a_task, "background")],
    ids=["rest", "websocket", "action", "task"],
)
async def test_what_a_signed_in_user_asks_is_theirs(
    stage: Stage, home: Household, way: Way, work: str
) -> None:
    async with charged(stage) as seen:
        await way(home)
    assert seen == {"bob": 1, work: 1}


async def test_a_script_is_background_of_who_called_it(stage: Stage, home: Household) -> None:
    script = {"alias": "Say a word", "sequence": [ask(home)]}
    async with installed(home, "script", "say_a_word", script), charged(stage) as seen:
        await home.bob.act("script.say_a_word", {}, timeout_s=120)
    assert seen == {"bob": 1, "background": 1}


async def switched(socket: WebSocket) -> None:
    for action in ("turn_off", "turn_on"):
        await socket.act(f"input_boolean.{action}", {"entity_id": LAMP})


async def pressed(home: Household) -> None:
    await home.socket.act("automation.trigger", {"entity_id": "automation.say_a_word"})


async def fired(rest: Rest) -> None:
    await rest.post("/api/events/a_word_please", {})


async def said(home: Household) -> None:
    """Say a sentence that an automation waits for; Home Assistant does not pass the speaker on."""
    run = await home.bob.subscribe(
        "assist_pipeline/run",
        start_stage="intent",
        end_stage="intent",
        input={"text": "a word please"},
        pipeline=home.pipelines["chat"],
    )
    while (await run.next(120))["type"] != "run-end":
        pass
    await run.close()


@pytest.mark.parametrize(
    ("set_off", "resident"),
    [
        (lambda home: switched(home.bob), "bob"),
        (lambda home: switched(home.socket), "alice"),
        (pressed, "alice"),
        (lambda home: fired(home.rest), "house"),
        (said, "house"),
    ],
    ids=["a switch of Bob", "a switch of Alice", "by hand", "by an event", "by a sentence"],
)
async def test_an_automation_is_background_of_who_set_it_off_where_home_assistant_says_who(
    stage: Stage, home: Household, set_off: Way, resident: str
) -> None:
    automation = {
        "alias": "Say a word",
        "triggers": [
            {"trigger": "state", "entity_id": LAMP, "to": "on"},
            {"trigger": "event", "event_type": "a_word_please"},
            {"trigger": "conversation", "command": "a word please"},
        ],
        "actions": [ask(home)],
    }
    async with (
        installed(home, "automation", "say_a_word", automation),
        charged(stage, num_requests=1) as seen,
    ):
        await set_off(home)
    assert seen == {resident: 1, "background": 1}


async def test_what_an_agent_sets_off_is_background_of_who_asked_the_agent(
    stage: Stage, home: Household
) -> None:
    agent = await residence.add_control_agent(home)
    await stage.engine_api.quiet(timeout_s=60)
    await home.socket.act("input_boolean.turn_off", {"entity_id": LAMP})
    automation = {
        "alias": "Say a word",
        "triggers": [{"trigger": "state", "entity_id": LAMP, "to": "on"}],
        "actions": [ask(home)],
    }
    async with (
        installed(home, "automation", "say_a_word", automation),
        charged(stage, num_requests=3) as seen,
    ):
        await home.socket.call(
            "conversation/process", text="Turn on the porch lamp.", agent_id=agent, timeout_s=120
        )
        assert await home.state(LAMP) == "on"
    assert seen == {"alice": 3, "chat": 2, "background": 1}, "the call, the answer after it, the automation"


PhoneWay = Callable[[Household, Webhook], Awaitable[Any]]


async def as_an_action_of_the_app(home: Household, phone: Webhook) -> None:
    domain, _, service = ask(home)["action"].partition(".")
    order = {"domain": domain, "service": service, "service_data": ask(home)["data"]}
    await phone.send("call_service", order)


async def as_a_script_of_the_app(home: Household, phone: Webhook) -> None:
    script = {"alias": "Say a word", "sequence": [ask(home)]}
    async with installed(home, "script", "say_a_word", script):
        await phone.send("call_service", {"domain": "script", "service": "say_a_word"})


@pytest.mark.parametrize(
    ("way", "work"),
    [(as_an_action_of_the_app, "chat"), (as_a_script_of_the_app, "background")],
    ids=["action", "script"],
)
async def test_what_the_companion_app_orders_is_theirs_who_registered_the_phone(
    stage: Stage, home: Household, way: PhoneWay, work: str
) -> None:
    async with webhook_of(home, home.bob_rest) as phone, charged(stage) as seen:
        await way(home, phone)
    assert seen == {"bob": 1, work: 1}


async def test_what_is_said_to_the_app_is_chat_of_who_is_signed_in_whosever_room_the_phone_lies_in(
    stage: Stage, home: Household
) -> None:
    satellite = await home.socket.call("config/entity_registry/get", entity_id=home.satellites[BEDROOM])
    devices = await home.socket.call("config/device_registry/list")
    (of_bob,) = [device["area_id"] for device in devices if device["id"] == satellite["device_id"]]
    assert of_bob
    async with webhook_of(home, home.rest) as phone, charged(stage) as seen:
        await home.socket.call("config/device_registry/update", device_id=phone.device_id, area_id=of_bob)
        run = await home.socket.subscribe(
            "assist_pipeline/run",
            start_stage="intent",
            end_stage="intent",
            input={"text": SENTENCE},
            pipeline=home.pipelines["voice"],
            device_id=phone.device_id,
        )
        while (await run.next(120))["type"] != "run-end":
            pass
        await run.close()
    assert seen == {"alice": 1, "chat": 1}


async def test_what_the_app_says_by_webhook_reaches_the_engine_only_through_an_automation_of_the_house(
    stage: Stage, home: Household
) -> None:
    """The webhook asks Home Assistant's own agent, always, and that passes the speaker to no automation."""
    automation = {
        "alias": "Say a word",
        "triggers": [{"trigger": "conversation", "command": "a word please"}],
        "actions": [ask(home)],
    }
    async with (
        webhook_of(home, home.bob_rest) as phone,
        installed(home, "automation", "say_a_word", automation),
    ):
        async with charged(stage) as seen:
            said = await phone.send("conversation_process", {"text": SENTENCE})
        assert said["response"]["data"]["code"] == "no_intent_match"
        assert not seen

        async with charged(stage, num_requests=1) as seen:
            said = await phone.send("conversation_process", {"text": "a word please"})
        assert said["response"]["response_type"] == "action_done"
        assert seen == {"house": 1, "background": 1}


def begin(home: Household, room: str, question: str) -> dict[str, Any]:
    """Return the action that has a satellite speak first; a recording is named, as nothing can read out."""
    data = {
        "entity_id": home.satellites[room],
        "start_message": question,
        "start_media_id": "http://127.0.0.1/question.wav",
        "preannounce": False,
    }
    return {"action": "assist_satellite.start_conversation", "data": data}


@pytest.mark.parametrize(("room", "resident"), [(KITCHEN, "alice"), (BEDROOM, "bob"), (HALL, "guest")])
async def test_the_reply_to_a_satellite_that_spoke_first_is_voice_of_whom_it_belongs_to(
    stage: Stage, home: Household, room: str, resident: str
) -> None:
    """Whoever had it speak is charged nothing: Alice in the bedroom, Bob in the other rooms."""
    caller = home.socket if room == BEDROOM else home.bob
    question, reply = f"Shall I warm up the {room.lower()}?", "Yes, please, I am cold."
    action = begin(home, room, question)
    async with charged(stage) as seen:
        await caller.act(action["action"], action["data"])
        answered = await workload.speak(home, room, reply)
    assert seen == {resident: 1, "voice": 1}
    assert await turns_after(home, question) == [("user", reply), ("assistant", answered.text)]


async def test_a_reply_while_the_script_that_had_the_satellite_speak_still_runs_is_voice_all_the_same(
    stage: Stage, home: Household
) -> None:
    question, reply = "Is it too dark in the kitchen?", "Yes, it is."
    say = {
        "action": "demo_satellite.say",
        "data": {"entity_id": home.satellites[KITCHEN], "text": reply},
        "response_variable": "answered",
    }
    script = {"alias": "Ask", "sequence": [begin(home, KITCHEN, question), say]}
    async with installed(home, "script", "ask", script), charged(stage) as seen:
        await home.bob.act("script.ask", {}, timeout_s=120)
    assert seen == {"alice": 1, "voice": 1}
    assert [role for role, _ in await turns_after(home, question)] == ["user", "assistant"]


async def turns_after(home: Household, question: str) -> list[tuple[str, str]]:
    """Return what was said, by role, in the conversation that began with a question."""
    async with home.socket.events("conversation/chat_log/subscribe_index") as index:
        logs = (await index.next(30))["data"]
    for log in logs:
        # An answer that is only calls of tools, or none, has no content.
        turns = [(turn["role"], turn.get("content", "")) for turn in log["content"]]
        if ("assistant", question) in turns:
            return turns[turns.index(("assistant", question)) + 1 :]
    return []
