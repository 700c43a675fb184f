"""Translates between Home Assistant's chat log and the engine's messages. Pure: no connection, no entity.

To the engine: the log's content becomes messages, its tools become OpenAI tools, a wanted structure becomes a
JSON schema. From the engine: a stream of events becomes the deltas that the chat log wants. One delta is one
event on the websocket and one piece of speech, so text is passed on word by word, never in fragments of a
word; a tool call starts to run as soon as its delta is seen, so text before it is passed on first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, cast

import probatio

from homeassistant.components import conversation
from homeassistant.helpers import llm
from homeassistant.helpers.json import json_dumps

from .engine_client import (
    Accepted,
    ChatEvent,
    Finished,
    JsonObject,
    Message,
    Picture,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCalled,
    ToolSpec,
    Usage,
    WordOdds,
)

MAX_HELD_CHARACTERS: Final = 24
"""Text without a space is passed on after this many characters: some languages have none."""

WAIT_NOTICE: Final = object()
"""Marks what was said to pass the time; the model never reads it."""

ANNOUNCE_AFTER_S: Final = 5.0
"""How long someone waits in silence before they are told that they wait."""

type Serializer = Callable[[Any], Any]

type Shown = Mapping[int, tuple[Picture, ...]]
"""What someone attached, read from disk: pictures by the place of what they said in the chat log."""


def messages_of(contents: Iterable[conversation.Content], shown: Shown | None = None) -> tuple[Message, ...]:
    """Return the chat log as the engine's messages, in order, without what was only said to pass the time."""
    pictures = shown or {}
    return tuple(
        _message_of(content, pictures.get(place, ()))
        for place, content in enumerate(contents)
        if not is_notice(content)
    )


def is_notice(content: conversation.Content) -> bool:
    """Return whether we said it, not the model."""
    return isinstance(content, conversation.AssistantContent) and content.native is WAIT_NOTICE


def _message_of(content: conversation.Content, pictures: tuple[Picture, ...]) -> Message:
    if isinstance(content, conversation.ToolResultContent):
        return Message(
            role="tool", content=json_dumps(content.result.data), tool_call_id=content.tool_call_id
        )
    if isinstance(content, conversation.AssistantContent):
        return Message(
            role="assistant",
            content=content.content or "",
            tool_calls=tuple(
                ToolCall(call_id=call.id, name=call.tool_name, arguments=call.tool_args)
                for call in content.tool_calls or ()
            ),
        )
    return Message(role=content.role, content=content.content, pictures=pictures)


def tools_of(api: llm.APIInstance | None) -> tuple[ToolSpec, ...]:
    """Return the tools that the model may call, none where no API was chosen."""
    if api is None:
        return ()
    return tuple(
        ToolSpec(
            name=tool.name,
            description=tool.description,
            parameters=schema_of(tool.parameters, api.custom_serializer),
        )
        for tool in api.tools
    )


def schema_of(schema: probatio.Schema, serializer: Serializer | None) -> JsonObject:
    """Return a validation schema as JSON schema."""
    return cast(
        JsonObject,
        probatio.to_openapi(
            schema, custom_serializer=serializer or llm.selector_serializer, openapi_version="3.1.0"
        ),
    )


async def deltas(
    events: AsyncGenerator[ChatEvent],
    on_finished: Callable[[Finished], None],
    *,
    wait_notice: str | None = None,
) -> AsyncGenerator[conversation.AssistantContentDeltaDict]:
    """Yield the chat log's deltas for one answer; report how it ended.

    The first delta names the role as soon as the engine has accepted the request, so that a listener knows
    that it was heard long before the first word. With a wait_notice, which may name `{count}`, someone whose
    turn is long in coming is told so once.
    """
    held = ""
    source: AsyncGenerator[ChatEvent | _Waiting] = events
    if wait_notice is not None:
        source = _with_notice(events, wait_notice)
    async with aclosing(source):
        async for event in source:
            match event:
                case Accepted():
                    yield {"role": "assistant"}
                case _Waiting(notice=notice):
                    yield {"content": notice, "native": WAIT_NOTICE}
                    yield {"role": "assistant"}
                case TextDelta(text=text):
                    ready, held = _whole_words(held + text)
                    if ready:
                        yield {"content": ready}
                case ReasoningDelta(text=text):
                    yield {"thinking_content": text}
                case ToolCalled(call=call):
                    if held:
                        yield {"content": held}
                        held = ""
                    yield {"tool_calls": [_tool_input_of(call)]}
                case Finished():
                    if held:
                        yield {"content": held}
                        held = ""
                    on_finished(event)
                case Usage() | WordOdds():
                    pass  # the engine's own measures in Finished say more


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """Nothing was answered for a while."""

    notice: str


async def _with_notice(
    events: AsyncGenerator[ChatEvent], wait_notice: str
) -> AsyncGenerator[ChatEvent | _Waiting]:
    """Yield the events, and after the first one what to say if the second is long in coming."""
    first = await anext(events, None)
    if first is None:
        return
    yield first
    upcoming = asyncio.ensure_future(anext(events, None))
    try:
        if isinstance(first, Accepted) and first.num_ahead:
            done, _ = await asyncio.wait({upcoming}, timeout=ANNOUNCE_AFTER_S)
            if not done:
                yield _Waiting(notice=wait_notice.format(count=first.num_ahead))
        event = await upcoming
    finally:
        upcoming.cancel()
        # Waited for, so that the stream is not in use when it is closed; what it ends with was raised above.
        await asyncio.gather(upcoming, return_exceptions=True)
    if event is not None:
        yield event
        async for event in events:
            yield event


def _whole_words(text: str) -> tuple[str, str]:
    """Split text into what may be passed on now and what is held until the word is complete.

    A space belongs to the word after it, so a word is complete when the next one has begun.
    """
    if len(text) > MAX_HELD_CHARACTERS:
        return text, ""
    for index in range(len(text) - 1, 0, -1):
        if text[index].isspace():
            return text[:index], text[index:]
    return "", text


def _tool_input_of(call: ToolCall) -> llm.ToolInput:
    return llm.ToolInput(id=call.call_id, tool_name=call.name, tool_args=dict(call.arguments))
