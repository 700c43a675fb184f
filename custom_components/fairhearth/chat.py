"""Translates between Home Assistant's chat log and the engine's messages. Pure: no connection, no entity.

To the engine: the log's content becomes messages, its tools become OpenAI tools, a wanted structure becomes a
JSON schema. From the engine: a stream of events becomes the deltas that the chat log wants. One delta is one
event on the websocket and one piece of speech, so text is passed on word by word, never in fragments of a
word; a tool call starts to run as soon as its delta is seen, so text before it is passed on first.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
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
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCalled,
    ToolSpec,
    Usage,
)

MAX_HELD_CHARACTERS: Final = 24
"""Text without a space is passed on after this many characters: some languages have none."""

type Serializer = Callable[[Any], Any]


def messages_of(contents: Iterable[conversation.Content]) -> tuple[Message, ...]:
    """Return the chat log as the engine's messages, in order."""
    return tuple(_message_of(content) for content in contents)


def _message_of(content: conversation.Content) -> Message:
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
    return Message(role=content.role, content=content.content)


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
    events: AsyncIterator[ChatEvent], on_finished: Callable[[Finished], None]
) -> AsyncGenerator[conversation.AssistantContentDeltaDict]:
    """Yield the chat log's deltas for one answer; report how it ended.

    The first delta names the role as soon as the engine has accepted the request, so that a listener knows
    that it was heard long before the first word.
    """
    held = ""
    async for event in events:
        match event:
            case Accepted():
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
            case Usage():
                pass  # the engine's own measures in Finished say more


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
