"""A sentence is answered word by word through the voice pipeline, with tools, and leaves cleanly when nobody
waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

from engine_service import errors as sent
from homeassistant.components import conversation
from homeassistant.components.homeassistant.exposed_entities import async_expose_entity
from homeassistant.config_entries import ConfigEntryState
from homeassistant.const import CONF_LLM_HASS_API
from homeassistant.core import Context, HomeAssistant
from homeassistant.setup import async_setup_component
from tests.ha.conftest import until
from tests.ha.fake_engine import Answer, FakeEngine, caller_of

AGENT = "conversation.agent"
MAX_REQUESTS = 10

Ask = Callable[..., AsyncGenerator[dict[str, Any]]]


@pytest.fixture
async def ask(hass: HomeAssistant, loaded: MockConfigEntry, hass_ws_client: Any) -> Ask:
    """Ask through the voice pipeline over the websocket and yield its events."""
    assert await async_setup_component(hass, "assist_pipeline", {})
    client = await hass_ws_client(hass)
    await client.send_json_auto_id(
        {
            "type": "assist_pipeline/pipeline/create",
            "name": "Fairhearth",
            "language": "en",
            "conversation_engine": AGENT,
            "conversation_language": "en",
            "prefer_local_intents": False,
            "stt_engine": None,
            "stt_language": None,
            "tts_engine": None,
            "tts_language": None,
            "tts_voice": None,
            "wake_word_entity": None,
            "wake_word_id": None,
        }
    )
    pipeline = (await client.receive_json())["result"]["id"]

    async def events_of(text: str, **options: Any) -> AsyncGenerator[dict[str, Any]]:
        await client.send_json_auto_id(
            {
                "type": "assist_pipeline/run",
                "start_stage": "intent",
                "end_stage": "intent",
                "input": {"text": text},
                "pipeline": pipeline,
                **options,
            }
        )
        started = await client.receive_json()
        assert started["success"], started
        while True:
            event = (await client.receive_json())["event"]
            yield {**event, "id": started["id"]}
            if event["type"] == "run-end":
                return

    events_of.client = client  # type: ignore[attr-defined]
    return events_of


async def test_an_answer_streams_through_the_voice_pipeline(ask: Ask, engine: FakeEngine) -> None:
    """The role is there before the first word, each delta is a whole word, and the end holds everything."""
    events = [event async for event in ask("Hello")]
    deltas = [event["data"]["chat_log_delta"] for event in events if event["type"] == "intent-progress"]
    assert deltas[0] == {"role": "assistant"}
    assert [delta["content"] for delta in deltas[1:]] == ["Hello", " from", " the", " fake", " engine."]
    (end,) = [event for event in events if event["type"] == "intent-end"]
    assert not end["data"]["processed_locally"]
    speech = end["data"]["intent_output"]["response"]["speech"]["plain"]["speech"]
    assert speech == "Hello from the fake engine."
    (chat,) = engine.chats
    assert chat.options.max_tokens == 128
    assert caller_of(chat).program_id
    assert chat.messages[-1].content == "Hello"


async def test_the_first_word_comes_before_the_answer_is_complete(ask: Ask, engine: FakeEngine) -> None:
    hold = asyncio.Event()
    engine.answers.append(Answer(pieces=("Well,", " then", "."), hold=hold))
    seen: list[str] = []
    async for event in ask("Hello"):
        seen.append(event["type"])
        if event["type"] == "intent-progress" and not hold.is_set():
            assert "intent-end" not in seen
            hold.set()
    assert seen.count("intent-progress") == 3


async def test_the_model_turns_something_on(
    hass: HomeAssistant, ask: Ask, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    assert await async_setup_component(hass, "input_boolean", {"input_boolean": {"lamp": {"name": "Lamp"}}})
    async_expose_entity(hass, "conversation", "input_boolean.lamp", True)
    engine.answers.append(
        Answer(pieces=("One", " moment."), tool_calls=[("intent__HassTurnOn", {"name": "Lamp"})])
    )
    engine.answers.append(Answer(pieces=("The", " lamp", " is", " on.")))
    events = [event async for event in ask("Lamp on")]
    assert hass.states.get("input_boolean.lamp").state == "on"
    (end,) = [event for event in events if event["type"] == "intent-end"]
    speech = end["data"]["intent_output"]["response"]["speech"]["plain"]["speech"]
    assert speech == "The lamp is on."
    first, second = engine.chats
    assert "Lamp" in first.messages[0].content
    assert [message.role for message in second.messages] == ["system", "user", "assistant", "tool"]
    assert second.messages[2].tool_calls[0].name == "intent__HassTurnOn"
    assert second.messages[3].tool_call_id == second.messages[2].tool_calls[0].call_id
    assert second.tools == first.tools


async def test_the_prompt_of_the_next_turn_begins_as_the_last(ask: Ask, engine: FakeEngine) -> None:
    """What was sent before is sent again byte for byte, so that the engine need not read it twice."""
    async for event in ask("One", conversation_id="same"):
        assert event["type"] != "error"
    async for event in ask("Two", conversation_id="same"):
        assert event["type"] != "error"
    first, second = engine.chats
    assert second.messages[: len(first.messages)] == first.messages
    assert second.tools == first.tools
    assert caller_of(second).program_id == caller_of(first).program_id == "same"


async def test_an_answer_nobody_waits_for_is_cancelled_at_the_engine(ask: Ask, engine: FakeEngine) -> None:
    engine.answers.append(Answer(hold=asyncio.Event()))
    async for event in ask("Tell me a long story"):
        if event["type"] == "intent-progress":
            break
    client = ask.client  # type: ignore[attr-defined]
    await client.send_json_auto_id({"type": "unsubscribe_events", "subscription": event["id"]})
    await until(lambda: len(engine.abandoned) == 1)
    assert engine.abandoned[0].messages[-1].content == "Tell me a long story"


async def converse(hass: HomeAssistant, text: str, **options: Any) -> conversation.ConversationResult:
    return await conversation.async_converse(hass, text, None, Context(), agent_id=AGENT, **options)


@pytest.mark.parametrize(
    ("refusal", "spoken"),
    [
        (sent.QueueFull("500 are waiting"), "Too much is waiting at the engine"),
        (sent.QuotaExhausted("none left"), "The tokens are spent for now: none left"),
        (
            sent.QuotaExhausted("none left", param="daily_tokens", retry_after_s=40_000.0),
            "Today's tokens are spent. Tomorrow there are new ones. (none left)",
        ),
        (
            sent.QuotaExhausted("none left", param="rolling_tokens", retry_after_s=601.0),
            "Minutes until there are some again: 11. (none left)",
        ),
        (sent.PromptTooLong("9000 of 8192"), "The request is too long for the model: 9000 of 8192"),
        (sent.EngineStopping("stopping"), "The engine is starting or stopping"),
        (sent.TooManyRequests("64 wait"), "Too many of this resident's requests are waiting"),
        (sent.UnknownModel("no such model"), "The engine does not have this model"),
        (sent.ModelUnavailable("no room"), "The engine cannot load this model now: no room"),
    ],
    ids=lambda value: f"{value.code} {value.param or ''}" if isinstance(value, sent.EngineError) else "",
)
async def test_a_refusal_is_spoken_with_its_cause(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, refusal: sent.EngineError, spoken: str
) -> None:
    engine.answers.append(Answer(refusal=refusal))
    result = await converse(hass, "Hello")
    assert result.response.response_type.value == "error"
    assert spoken in result.response.speech["plain"]["speech"]


async def test_a_failure_in_the_middle_is_spoken(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    engine.answers.append(Answer(error=sent.GenerationFailed("out of pages")))
    result = await converse(hass, "Hello")
    assert "The engine failed on this request: out of pages" in result.response.speech["plain"]["speech"]
    assert (await converse(hass, "Again")).response.speech["plain"]["speech"] == "Hello from the fake engine."


async def test_a_lost_engine_is_spoken(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await engine.stop()
    result = await converse(hass, "Hello")
    assert "The engine cannot be reached" in result.response.speech["plain"]["speech"]


async def test_an_engine_that_forgot_the_resident_is_told_and_asked_again(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    user = await hass.auth.async_create_user("Alice")
    hass.states.async_set("person.alice", "home", {"user_id": user.id})
    subentry = next(item for item in loaded.subentries.values() if item.subentry_type == "resident")
    hass.config_entries.async_update_subentry(
        loaded, subentry, data={**subentry.data, "person": "person.alice"}
    )
    await hass.async_block_till_done()
    engine.forget()
    result = await conversation.async_converse(hass, "Hi", None, Context(user_id=user.id), agent_id=AGENT)
    assert result.response.speech["plain"]["speech"] == "Hello from the fake engine."
    assert caller_of(engine.chats[-1]).resident_id == "alice"


async def test_a_refused_token_asks_for_a_new_one(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    engine.tokens.clear()
    result = await converse(hass, "Hello")
    assert "does not know the access token" in result.response.speech["plain"]["speech"]
    (flow,) = hass.config_entries.flow.async_progress()
    assert flow["context"]["source"] == "reauth"


async def test_a_model_that_calls_tools_for_ever_is_stopped(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    endless = Answer(pieces=(), tool_calls=[("llm__GetDateTime", {})])
    engine.answers.extend([endless] * 20)
    result = await converse(hass, "Hello")
    assert "used tools 10 times" in result.response.speech["plain"]["speech"]
    assert len(engine.chats) == MAX_REQUESTS


async def test_thoughts_reach_the_dialog_but_not_the_speech(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    engine.answers.append(Answer(reasoning="Let me see.", pieces=("Yes", ".")))
    result = await converse(hass, "Hello")
    assert result.response.speech["plain"]["speech"] == "Yes."


async def test_a_resident_removed_while_speaking_is_answered_and_is_a_guest_from_then_on(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    user = await hass.auth.async_create_user("Alice")
    resident = next(item for item in loaded.subentries.values() if item.subentry_type == "resident")
    hass.config_entries.async_update_subentry(loaded, resident, data={**resident.data, "users": [user.id]})
    await hass.async_block_till_done()

    def say(text: str) -> Any:
        return conversation.async_converse(hass, text, None, Context(user_id=user.id), agent_id=AGENT)

    hold = asyncio.Event()
    engine.answers.append(Answer(hold=hold))
    asked = hass.async_create_task(say("Tell me a story"))
    await until(lambda: len(engine.chats) == 1)
    hass.config_entries.async_remove_subentry(loaded, resident.subentry_id)
    await until(lambda: "alice" not in engine.residents)
    hold.set()
    first = (await asked).response.speech["plain"]["speech"]
    await until(lambda: loaded.state is ConfigEntryState.LOADED and hass.states.get(AGENT) is not None)
    await hass.async_block_till_done()
    second = (await say("Another one")).response.speech["plain"]["speech"]
    assert first == second == "Hello from the fake engine."
    assert [caller_of(chat).resident_id for chat in engine.chats] == ["alice", "guest"]


async def test_a_resident_whom_the_engine_will_not_have_is_named(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    """As when somebody removes it there at the same moment: told again once, then it is said."""
    engine.answers.extend([Answer(refusal=sent.UnknownResident("there is no resident 'alice'"))] * 2)
    spoken = (await converse(hass, "Hello")).response.speech["plain"]["speech"]
    assert spoken == "The engine does not know the resident: there is no resident 'alice'"


@pytest.mark.parametrize(
    ("option", "asked"), [({}, None), ({"thinking": True}, None), ({"thinking": False}, False)]
)
async def test_an_agent_is_asked_to_think_or_not(
    hass: HomeAssistant,
    engine: FakeEngine,
    loaded: MockConfigEntry,
    option: dict[str, bool],
    asked: bool | None,
) -> None:
    """On, it is left to the model; off, prompt and what is pinned of it say so alike."""
    subentry = next(item for item in loaded.subentries.values() if item.subentry_type == "conversation")
    hass.config_entries.async_update_subentry(
        loaded, subentry, data={"prompt": "Hi.", "max_tokens": 8, **option}
    )
    await hass.async_block_till_done()
    await until(lambda: any("Hi." in prefix.messages[0].content for prefix in engine.prefixes))
    await converse(hass, "Hello")
    assert engine.prefixes[-1].thinking is engine.chats[-1].thinking is asked


async def test_an_agent_without_an_api_sends_no_tools(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    subentry = next(item for item in loaded.subentries.values() if item.subentry_type == "conversation")
    hass.config_entries.async_update_subentry(
        loaded, subentry, data={"prompt": "You are {{ ha_name }}.", "max_tokens": 8}
    )
    await hass.async_block_till_done()
    await converse(hass, "Hello")
    assert engine.chats[-1].tools == ()
    assert engine.chats[-1].messages[0].content.startswith("You are test home.")
    assert CONF_LLM_HASS_API not in subentry.data


async def test_a_template_that_fails_is_told(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    subentry = next(item for item in loaded.subentries.values() if item.subentry_type == "conversation")
    hass.config_entries.async_update_subentry(loaded, subentry, data={"prompt": "{{ 1 / 0 }}"})
    await hass.async_block_till_done()
    result = await converse(hass, "Hello")
    assert "problem with my template" in result.response.speech["plain"]["speech"]
    assert engine.chats == []


async def test_starting_to_speak_pins_the_prompt(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    """What is pinned is what the next request begins with, but for the speaker's place."""
    await until(lambda: len(engine.prefixes) == 1)
    await conversation.async_prepare_agent(hass, AGENT, "en")
    await until(lambda: len(engine.prefixes) == 2)
    await converse(hass, "Hello")
    pinned, asked = engine.prefixes[1], engine.chats[0]
    assert pinned.tools == asked.tools
    assert asked.messages[0].content == pinned.messages[0].content


async def test_an_agent_asks_and_pins_for_the_model_that_was_chosen_for_it(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    """Of the several that the engine lists."""
    assert await loaded.runtime_data.client.models() == {engine.model: False, "coder": False}
    assert engine.prefixes[0].model is None
    subentry = next(item for item in loaded.subentries.values() if item.subentry_type == "conversation")
    hass.config_entries.async_update_subentry(loaded, subentry, data={**subentry.data, "model": "coder"})
    await hass.async_block_till_done()
    await until(lambda: engine.prefixes[-1].model == "coder")
    await converse(hass, "Hello")
    assert engine.chats[-1].options.model == "coder"


async def test_a_prompt_that_cannot_be_pinned_stops_nobody(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    engine.tokens = dict.fromkeys(engine.tokens, ("residents",))
    await conversation.async_prepare_agent(hass, AGENT, "en")
    assert hass.states.get(AGENT).state != "unavailable"
