"""A conversation that is too long loses its oldest turns, whole, with a word about it, and nothing else."""

from __future__ import annotations

import asyncio

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

from custom_components.fairhearth import chat
from custom_components.fairhearth.context import NOTICE, TURNS_LEFT_OUT_AT_ONCE, TokenScale, fit, length_of
from custom_components.fairhearth.engine_client import Message, ToolCall, ToolSpec
from engine_service import errors as sent
from homeassistant.components import conversation
from homeassistant.components.conversation.chat_log import async_subscribe_chat_logs
from homeassistant.core import Context, HomeAssistant, callback
from homeassistant.helpers import device_registry as dr
from tests.ha.conftest import until
from tests.ha.fake_engine import Answer, FakeEngine, caller_of

SYSTEM = Message(role="system", content="s" * 100)
CALL = ToolCall(call_id="c", name="tool", arguments={})


def turn(number: int) -> list[Message]:
    """One turn of about 100 characters, with a tool call in it."""
    return [
        Message(role="user", content=f"{number:03}" + "u" * 27),
        Message(role="assistant", content="", tool_calls=(CALL,)),
        Message(role="tool", content="r", tool_call_id="c"),
        Message(role="assistant", content="a" * 30),
    ]


def conversation_of(num_turns: int) -> list[Message]:
    return [SYSTEM, *(message for number in range(num_turns) for message in turn(number))]


def test_what_fits_is_left_alone() -> None:
    messages = conversation_of(10)
    fitted = fit(messages, most_characters=length_of(messages, ()))
    assert (fitted.messages, fitted.num_left_out, fitted.num_kept) == (tuple(messages), 0, 10)
    assert fit([SYSTEM], most_characters=0).messages == (SYSTEM,)


@pytest.mark.parametrize("most_characters", [0, 500, 1000, 1500])
def test_whole_turns_are_left_out_from_the_oldest_and_the_model_is_told(most_characters: int) -> None:
    messages = conversation_of(20)
    fitted = fit(messages, most_characters=most_characters)
    assert 0 < fitted.num_left_out < 20
    assert fitted.num_left_out + fitted.num_kept == 20
    assert fitted.messages[0] == SYSTEM
    first = fitted.messages[1]
    assert first.content == f"{NOTICE}\n{turn(fitted.num_left_out)[0].content}"
    assert list(fitted.messages[2:]) == messages[2 + 4 * fitted.num_left_out :]
    fits = length_of(fitted.messages, ()) - len(NOTICE) - 1 <= most_characters
    assert fits or fitted.num_kept == 1


def test_what_is_left_begins_the_same_for_several_turns() -> None:
    """Otherwise the engine would have to read everything anew with each sentence."""
    cuts = [fit(conversation_of(number), most_characters=1500).num_left_out for number in range(1, 41)]
    assert cuts == sorted(cuts)
    assert all(cut % TURNS_LEFT_OUT_AT_ONCE == 0 for cut in cuts)
    assert len(set(cuts)) <= 40 // TURNS_LEFT_OUT_AT_ONCE


def test_the_most_turns_are_kept_to() -> None:
    fitted = fit(conversation_of(20), most_characters=10**6, most_turns=7)
    assert fitted.num_kept <= 7


def test_tokens_are_told_from_characters_as_the_engine_counted() -> None:
    scale = TokenScale()
    scale.learn(4000, 1000)
    assert (scale.tokens_of(400), scale.characters_of(100)) == (100, 400)
    scale.learn(0, 0)
    scale.learn(10**6, 1)
    assert scale.tokens_of(800) == 100


def test_tools_and_calls_have_a_length_too() -> None:
    tool = ToolSpec(name="tool", description="d" * 100, parameters={"type": "object"})
    assert length_of([], [tool]) > 100
    assert length_of(turn(0), ()) > 61


async def say(hass: HomeAssistant, text: str) -> str:
    result = await conversation.async_converse(hass, text, "same", Context(), agent_id="conversation.agent")
    return str(result.response.speech["plain"]["speech"])


def change_agent(hass: HomeAssistant, loaded: MockConfigEntry, **options: object) -> None:
    (subentry,) = loaded.get_subentries_of_type("conversation")
    hass.config_entries.async_update_subentry(loaded, subentry, data={**subentry.data, **options})


async def test_a_long_conversation_goes_on_within_what_the_model_reads(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, caplog: pytest.LogCaptureFixture
) -> None:
    change_agent(hass, loaded, llm_hass_api=[], context_tokens=1000)
    await hass.async_block_till_done()
    caplog.set_level("INFO", logger="custom_components.fairhearth")
    for number in range(12):
        assert await say(hass, f"{number:02} " + "word " * 100) == "Hello from the fake engine."
    last = engine.chats[-1].messages
    assert last[0].role == "system"
    assert last[1].content.startswith(NOTICE)
    assert last[-1].content.startswith("11 ")
    assert len(last) < 2 * 12
    assert "turns of a conversation are left out" in caplog.text


async def num_turns_read(hass: HomeAssistant, engine: FakeEngine) -> int:
    await say(hass, "word " * 100)
    return len([message for message in engine.chats[-1].messages if message.role == "user"])


async def test_a_conversation_keeps_to_what_the_model_reads_at_present(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    """Another policy, or a backend begun anew with less memory, is told on the stream."""
    for number in range(1, 8):
        assert await num_turns_read(hass, engine) == number
    coordinator = loaded.runtime_data
    await engine.publish(lambda snapshot: snapshot["engine"].update(max_context_tokens=1200))
    await until(lambda: coordinator.max_context_tokens == 1200)
    assert await num_turns_read(hass, engine) < 8


async def test_another_model_after_a_restart_is_read_by_what_it_takes(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, device_registry: dr.DeviceRegistry
) -> None:
    for number in range(1, 8):
        assert await num_turns_read(hass, engine) == number
    await engine.stop()
    engine.model, engine.context_tokens = "Smaller", 1200
    engine.snapshot["engine"]["max_context_tokens"] = None  # not known yet
    await engine.start()
    await until(lambda: loaded.runtime_data.max_context_tokens == 1200)
    await until(lambda: loaded.runtime_data.last_update_success)
    assert await num_turns_read(hass, engine) < 8
    devices = dr.async_entries_for_config_entry(device_registry, loaded.entry_id)
    assert {device.model for device in devices} == {"Smaller"}
    assert len(devices) > 3


async def test_turns_are_left_out_until_the_engine_takes_the_prompt(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    for number in range(9):
        await say(hass, f"Sentence {number}")
    engine.answers.extend([Answer(refusal=sent.PromptTooLong("9000 of 8192"))] * 2)
    assert await say(hass, "The last one") == "Hello from the fake engine."
    tried = [len([m for m in chat.messages if m.role == "user"]) for chat in engine.chats[-3:]]
    assert tried[0] == 10
    assert tried[0] > tried[1] > tried[2] >= 1
    engine.answers.extend([Answer(refusal=sent.PromptTooLong("9000 of 8192"))] * 10)
    assert "too long for the model" in await say(hass, "Never")
    assert [m.content for m in engine.chats[-1].messages[1:]] == [f"{NOTICE}\nNever"]


async def test_many_calls_make_a_typed_conversation_an_agent(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    engine.answers.extend([Answer(pieces=(), tool_calls=[("llm__GetDateTime", {})])] * 4)
    await say(hass, "Do it all")
    assert [caller_of(chat).class_id for chat in engine.chats] == ["chat"] * 3 + ["agent"] * 2


async def test_someone_who_waits_long_is_told_so_once_and_the_model_never_hears_of_it(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "ANNOUNCE_AFTER_S", 0.05)
    change_agent(hass, loaded, announce_wait=True)
    await hass.async_block_till_done()
    hold = asyncio.Event()
    told: list[str] = []

    @callback
    def note(_conversation_id: str, _event: object, data: dict[str, object]) -> None:
        told.append(str(data))

    unsubscribe = async_subscribe_chat_logs(hass, note)
    engine.answers.append(Answer(hold=hold, hold_first=True))
    asked = hass.async_create_task(say(hass, "Hello"))
    async with asyncio.timeout(20):
        while not any("Requests that come before yours: 2." in text for text in told):
            await asyncio.sleep(0.01)
    hold.set()
    assert await asked == "Hello from the fake engine."
    await say(hass, "Again")
    assert [m.content for m in engine.chats[-1].messages[1:]] == [
        "Hello",
        "Hello from the fake engine.",
        "Again",
    ]
    unsubscribe()


async def test_whoever_leaves_while_waiting_leaves_the_engine_too(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    change_agent(hass, loaded, announce_wait=True)
    await hass.async_block_till_done()
    engine.answers.append(Answer(hold=asyncio.Event(), hold_first=True))
    asked = hass.async_create_task(say(hass, "Hello"))
    async with asyncio.timeout(20):
        while not engine.chats:
            await asyncio.sleep(0.01)
        asked.cancel()
        while not engine.abandoned:
            await asyncio.sleep(0.01)
