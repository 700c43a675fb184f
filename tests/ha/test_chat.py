"""The chat log becomes messages, and what the engine streams becomes words, thoughts and tool calls in
order."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import probatio
import pytest

from custom_components.fairhearth.chat import deltas, messages_of, schema_of, tools_of
from custom_components.fairhearth.engine_client import (
    Accepted,
    ChatEvent,
    Finished,
    Message,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCalled,
    Usage,
)
from homeassistant.components import conversation
from homeassistant.helpers import llm, selector

ACCEPTED = Accepted(request_id="r1", resident="alice", workload_class="voice", num_ahead=0)
FINISHED = Finished(
    reason="stop", queue_s=0.0, time_to_first_token_s=0.1, completion_s=0.2, tokens=None, preemptions=0
)
CALL = ToolCalled(call=ToolCall(call_id="c1", name="intent__HassTurnOn", arguments={"name": "Lamp"}))


def texts(*pieces: str) -> list[ChatEvent]:
    return [TextDelta(text=piece) for piece in pieces]


async def deltas_of(*events: ChatEvent) -> tuple[list[Any], list[Finished]]:
    async def source() -> AsyncGenerator[ChatEvent]:
        for event in events:
            yield event

    finished: list[Finished] = []
    return [delta async for delta in deltas(source(), finished.append)], finished


async def test_the_role_comes_before_any_word() -> None:
    assert await deltas_of(ACCEPTED) == ([{"role": "assistant"}], [])


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (("Turn", "ed on", " the", " lights."), ["Turned", " on", " the", " lights."]),
        (tuple("It is on."), ["It", " is", " on."]),
        (("One\n", "Two\n\n", "Three"), ["One", "\nTwo\n", "\nThree"]),
        (("",), []),
        ((" ",), [" "]),
        (("word",), ["word"]),
        (("a b c d",), ["a b c", " d"]),
        (tuple("厨房的灯已经打开了，客厅的灯也已经打开了，请问还有什么可以帮您"), None),
    ],
)
async def test_text_is_passed_on_word_by_word(pieces: tuple[str, ...], words: list[str] | None) -> None:
    result, finished = await deltas_of(*texts(*(piece for piece in pieces if piece)), FINISHED)
    sent = [delta["content"] for delta in result]
    assert "".join(sent) == "".join(pieces)
    assert words is None or sent == words
    assert finished == [FINISHED]


async def test_text_without_spaces_is_not_held_for_ever() -> None:
    result, _ = await deltas_of(*texts(*"灯" * 60))
    assert len(result) == 2


async def test_text_before_a_tool_call_is_passed_on_before_it() -> None:
    result, _ = await deltas_of(*texts("One", " moment"), CALL, FINISHED)
    assert [next(iter(delta)) for delta in result] == ["content", "content", "tool_calls"]
    assert [delta.get("content") for delta in result[:2]] == ["One", " moment"]
    (call,) = result[2]["tool_calls"]
    assert (call.id, call.tool_name, call.tool_args) == ("c1", "intent__HassTurnOn", {"name": "Lamp"})
    assert not call.external


async def test_thoughts_are_not_spoken() -> None:
    result, _ = await deltas_of(ReasoningDelta(text="Hmm"), *texts("Yes"), FINISHED)
    assert result == [{"thinking_content": "Hmm"}, {"content": "Yes"}]


async def test_usage_adds_nothing() -> None:
    result, _ = await deltas_of(Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0))
    assert result == []


def test_a_chat_log_becomes_messages() -> None:
    call = llm.ToolInput(id="c1", tool_name="intent__HassTurnOn", tool_args={"name": "Lamp"})
    log: list[conversation.Content] = [
        conversation.SystemContent(content="Be brief."),
        conversation.UserContent(content="Lamp on"),
        conversation.AssistantContent(agent_id="a", content=None, tool_calls=[call]),
        conversation.ToolResultContent(
            agent_id="a",
            tool_call_id="c1",
            tool_name="intent__HassTurnOn",
            result=llm.ToolResult({"error": "NoMatch", "error_text": "no lamp"}, error=True),
        ),
        conversation.AssistantContent(agent_id="a", content="There is no lamp."),
    ]
    assert messages_of(log) == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Lamp on"),
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(call_id="c1", name="intent__HassTurnOn", arguments={"name": "Lamp"}),),
        ),
        Message(role="tool", content='{"error":"NoMatch","error_text":"no lamp"}', tool_call_id="c1"),
        Message(role="assistant", content="There is no lamp."),
    )


def test_no_api_means_no_tools() -> None:
    assert tools_of(None) == ()


def test_a_structure_becomes_a_json_schema() -> None:
    structure = probatio.Schema(
        {
            probatio.Required("title"): selector.TextSelector(),
            probatio.Optional("count"): selector.NumberSelector({"min": 0, "max": 9}),
        }
    )
    schema = schema_of(structure, None)
    assert schema["type"] == "object"
    assert schema["required"] == ["title"]
    assert schema["properties"]["title"]["type"] == "string"
