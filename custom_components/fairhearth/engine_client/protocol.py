"""The messages of docs/wire.md as the client sees them: what it sends and what it reads.

Reading tolerates fields it does not know and names the place of a field that is missing or of the wrong kind
(`ProtocolError`). Writing sends only fields the contract lists. Knows no connection and no Home Assistant.
Durations are seconds, counts are tokens or requests, shares are fractions in [0, 1].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, Self

from .errors import ProtocolError, error_from_wire
from .reading import JsonObject, JsonValue, Reader, kind_of, loads

SCHEMA_VERSION: Final = 1
"""The version of the contract this client speaks; the engine sends its own."""

PICTURE_TYPES: Final = ("image/png", "image/jpeg", "image/webp", "image/gif")
"""What the engine reads."""

MAX_PICTURE_BYTES: Final = 8 * 2**20
"""The engine takes no larger picture; its `max_body_bytes` bounds all of a request together."""


# --- who is there ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What `/health` tells without a token."""

    engine_id: str
    version: str
    schema_version: int
    model: str

    @classmethod
    def from_wire(cls, body: object) -> Self:
        """Read the answer of `/health`."""
        reader = Reader(body, "health")
        return cls(
            engine_id=reader.text("engine_id"),
            version=reader.text("version"),
            schema_version=reader.integer("schema_version"),
            model=reader.text("model"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine is and what this token may do there."""

    engine_id: str
    name: str
    version: str
    schema_version: int
    backend: str
    model: str
    max_context_tokens: int
    policy: str
    scopes: frozenset[str]
    can_see: bool = False  #: its first model can be shown pictures; older engines say nothing of it

    @classmethod
    def from_wire(cls, body: object) -> Self:
        """Read the answer of `/v1/engine`."""
        reader = Reader(body, "engine")
        return cls(
            engine_id=reader.text("engine_id"),
            name=reader.text("name"),
            version=reader.text("version"),
            schema_version=reader.integer("schema_version"),
            backend=reader.text("backend"),
            model=reader.text("model"),
            max_context_tokens=reader.integer("max_context_tokens"),
            policy=reader.text("policy"),
            scopes=frozenset(reader.texts("scopes")),
            can_see=reader.has("can_see") and reader.flag("can_see"),
        )

    def may(self, scope: str) -> bool:
        """Return whether the token has the scope; admin implies all."""
        return scope in self.scopes or "admin" in self.scopes


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """What a six-digit code was traded for."""

    token: str
    engine_id: str

    @classmethod
    def from_wire(cls, body: object) -> Self:
        """Read the answer of POST `/v1/pair`."""
        reader = Reader(body, "pairing")
        return cls(token=reader.text("token"), engine_id=reader.text("engine_id"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentSettings:
    """What the household decided about one resident."""

    name: str
    weight: int = 1  #: whole number >= 1
    daily_tokens: int | None = None  #: >= 1; None is unlimited
    daily_is_hard: bool = False  #: over quota: True refuses, False falls to background
    rolling_tokens: int | None = None  #: in any `rolling_window_s`; >= 1; None is unlimited
    rolling_window_s: float = 3600.0
    rolling_is_hard: bool = False  #: as `daily_is_hard`
    page_cap: int | None = None  #: most KV pages while others wait; None is no cap
    max_running: int | None = None  #: most requests running at once; None is no limit
    max_waiting: int = 64  #: most requests waiting at once

    @classmethod
    def from_reader(cls, reader: Reader) -> Self:
        """Read a Resident but for its id."""
        return cls(
            name=reader.text("name"),
            weight=reader.integer("weight"),
            daily_tokens=reader.integer_or_none("daily_tokens"),
            daily_is_hard=reader.flag("daily_is_hard"),
            rolling_tokens=reader.integer_or_none("rolling_tokens"),
            rolling_window_s=reader.number("rolling_window_s"),
            rolling_is_hard=reader.flag("rolling_is_hard"),
            page_cap=reader.integer_or_none("page_cap"),
            max_running=reader.integer_or_none("max_running"),
            max_waiting=reader.integer("max_waiting"),
        )

    def as_wire(self) -> JsonObject:
        """Return the body of a PUT."""
        return asdict(self)


def resident_from_wire(body: object) -> tuple[str, ResidentSettings]:
    """Read one Resident: its id and its settings."""
    reader = Reader(body, "resident")
    return reader.text("id"), ResidentSettings.from_reader(reader)


def residents_from_wire(body: object) -> dict[str, ResidentSettings]:
    """Read the answer of GET `/v1/residents`: settings by id."""
    rows = Reader(body, "residents").readers("residents")
    return {row.text("id"): ResidentSettings.from_reader(row) for row in rows}


def models_from_wire(body: object) -> dict[str, bool]:
    """Read the answer of `/v1/models`: the names served, and whether each can be shown pictures."""
    return {row.text("id"): _sees(row) for row in Reader(body, "models").readers("data")}


def _sees(row: Reader) -> bool:
    if not row.has("fairhearth"):
        return False
    told = row.reader("fairhearth")
    return told.has("can_see") and told.flag("can_see")


# --- what is asked ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One complete call of a tool by the model."""

    call_id: str
    name: str
    arguments: JsonObject

    def as_wire(self) -> JsonObject:
        """Return the call as part of an assistant message."""
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """One tool the model may call; parameters are a JSON schema."""

    name: str
    description: str | None
    parameters: JsonObject

    def as_wire(self) -> JsonObject:
        """Return the tool as OpenAI writes it."""
        function: JsonObject = {"name": self.name, "parameters": self.parameters}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture that is shown to the model."""

    media_type: str  #: one of PICTURE_TYPES
    data: str = field(repr=False)  #: the file in base64

    def as_wire(self) -> JsonObject:
        """Return the picture as OpenAI writes it."""
        url = f"data:{self.media_type};base64,{self.data}"
        return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of the conversation so far."""

    role: str  #: system, user, assistant or tool
    content: str
    pictures: tuple[Picture, ...] = ()  #: of a user's message, before its text
    tool_calls: tuple[ToolCall, ...] = ()  #: of an assistant message
    tool_call_id: str | None = None  #: of a tool message: the call it answers

    def as_wire(self) -> JsonObject:
        """Return the message as OpenAI writes it."""
        body: JsonObject = {"role": self.role, "content": self.content}
        if self.pictures:
            text: JsonObject = {"type": "text", "text": self.content}
            body["content"] = [*(picture.as_wire() for picture in self.pictures), text]
        if self.tool_calls and not self.content:
            body["content"] = None
        if self.tool_calls:
            body["tool_calls"] = [call.as_wire() for call in self.tool_calls]
        if self.tool_call_id is not None:
            body["tool_call_id"] = self.tool_call_id
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One order for an answer, with who is charged and what the work is."""

    messages: tuple[Message, ...]
    resident: str
    workload_class: str
    tools: tuple[ToolSpec, ...] = ()
    program: str | None = None  #: id of the conversation or agent the request belongs to
    model: str | None = None  #: None is the engine's default
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    num_odds: int | None = None  #: tell how likely so many words were at each place, at most 20
    json_schema_name: str | None = None
    json_schema: JsonObject | None = None  #: the answer must be JSON of this schema
    thinking: bool | None = None  #: whether the model may think first; None leaves it to the model

    def as_wire(self) -> JsonObject:
        """Return the body of a streamed chat completion."""
        extension: JsonObject = {"resident": self.resident, "workload_class": self.workload_class}
        if self.program is not None:
            extension["program"] = self.program
        body: JsonObject = {
            "messages": [message.as_wire() for message in self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "fairhearth": extension,
        }
        if self.tools:
            body["tools"] = [tool.as_wire() for tool in self.tools]
        if self.num_odds is not None:
            body["logprobs"] = True
            body["top_logprobs"] = self.num_odds
        if self.json_schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {
                    "name": self.json_schema_name or "answer",
                    "strict": True,
                    "schema": self.json_schema,
                },
            }
        options: Mapping[str, JsonValue] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "chat_template_kwargs": template_switches(self.thinking),
        }
        body.update({key: value for key, value in options.items() if value is not None})
        return body


def template_switches(thinking: bool | None) -> JsonObject | None:
    """Return what is said to the model's template, None where nothing is."""
    return None if thinking is None else {"enable_thinking": thinking}


# --- what is answered ---


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens by how they were had."""

    prefill: int  #: prompt tokens computed
    cached: int  #: prompt tokens taken from the prefix cache
    decode: int  #: tokens written
    recomputed: int = 0  #: computed again after a preemption, charged to nobody

    @classmethod
    def from_reader(cls, reader: Reader) -> Self:
        """Read `tokens`."""
        return cls(
            prefill=reader.integer("prefill"),
            cached=reader.integer("cached"),
            decode=reader.integer("decode"),
            recomputed=reader.integer_or_none("recomputed") or 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The engine took the request; it may still wait."""

    request_id: str
    resident: str
    workload_class: str
    num_ahead: int  #: requests before it


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Some more text of the answer, never empty."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WordOdds:
    """How likely the likeliest words were at one place of the answer."""

    words: tuple[tuple[str, float], ...]  #: token and the logarithm of its probability


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """Some more of what the model thinks before it answers, never empty; not meant to be spoken."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalled:
    """The model called a tool; the call is complete."""

    call: ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The answer ended, with what was measured."""

    reason: str  #: stop, length or tool_calls
    queue_s: float | None
    time_to_first_token_s: float | None
    completion_s: float | None
    tokens: TokenCounts | None
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens as OpenAI counts them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


type ChatEvent = Accepted | WordOdds | TextDelta | ReasoningDelta | ToolCalled | Finished | Usage


def chat_events(body: object) -> list[ChatEvent]:
    """Read one chunk of a streamed answer; raise what it says went wrong.

    A chunk may carry several things at once; they come back in the order in which they happened.
    """
    reader = Reader(body, "chunk")
    if reader.has("error"):
        raise error_from_wire(body)
    events: list[ChatEvent] = []
    for choice in reader.readers("choices"):
        delta = choice.reader("delta")
        if delta.has("role") and reader.has("fairhearth"):
            events.append(_accepted(reader.reader("fairhearth")))
        if delta.has("reasoning_content") and (thought := delta.text("reasoning_content")):
            events.append(ReasoningDelta(text=thought))
        if delta.has("content") and (text := delta.text("content")):
            events.append(TextDelta(text=text))
        if choice.has("logprobs"):
            events.extend(map(_odds, choice.reader("logprobs").readers("content")))
        if delta.has("tool_calls"):
            events.extend(ToolCalled(call=_tool_call(call)) for call in delta.readers("tool_calls"))
        if choice.has("finish_reason"):
            events.append(_finished(choice.text("finish_reason"), reader))
    if reader.has("usage"):
        events.append(_usage(reader.reader("usage")))
    return events


def _odds(place: Reader) -> WordOdds:
    top = place.readers("top_logprobs")
    return WordOdds(words=tuple((word.text("token"), word.number("logprob")) for word in top))


def _accepted(reader: Reader) -> Accepted:
    return Accepted(
        request_id=reader.text("request_id"),
        resident=reader.text("resident"),
        workload_class=reader.text("workload_class"),
        num_ahead=reader.integer("num_ahead"),
    )


def _tool_call(reader: Reader) -> ToolCall:
    function = reader.reader("function")
    name = function.text("name")
    arguments = loads(function.text("arguments") or "{}", where=f"arguments of the call of {name}")
    if not isinstance(arguments, dict):
        raise ProtocolError(f"arguments of the call of {name} should be an object, got {kind_of(arguments)}")
    return ToolCall(call_id=reader.text("id"), name=name, arguments=arguments)


def _finished(reason: str, chunk: Reader) -> Finished:
    if not chunk.has("fairhearth"):
        return Finished(
            reason=reason,
            queue_s=None,
            time_to_first_token_s=None,
            completion_s=None,
            tokens=None,
            preemptions=0,
        )
    measured = chunk.reader("fairhearth")
    return Finished(
        reason=reason,
        queue_s=measured.number_or_none("queue_s"),
        time_to_first_token_s=measured.number_or_none("time_to_first_token_s"),
        completion_s=measured.number_or_none("completion_s"),
        tokens=TokenCounts.from_reader(measured.reader("tokens")) if measured.has("tokens") else None,
        preemptions=measured.integer_or_none("preemptions") or 0,
    )


def _usage(reader: Reader) -> Usage:
    details = reader.reader("prompt_tokens_details") if reader.has("prompt_tokens_details") else None
    return Usage(
        prompt_tokens=reader.integer("prompt_tokens"),
        completion_tokens=reader.integer("completion_tokens"),
        cached_tokens=(details.integer_or_none("cached_tokens") or 0) if details else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPin:
    """What pinning a prompt's shared beginning cost."""

    prefix_tokens: int
    computed_tokens: int

    @classmethod
    def from_wire(cls, body: object) -> Self:
        """Read the answer of `/v1/prefix`."""
        reader = Reader(body, "prefix")
        return cls(
            prefix_tokens=reader.integer("prefix_tokens"), computed_tokens=reader.integer("computed_tokens")
        )


def check_schema_version(schema_version: int) -> None:
    """Raise ProtocolError that says which side to update, unless the engine speaks this client's version."""
    if schema_version < SCHEMA_VERSION:
        raise ProtocolError(
            f"the engine speaks version {schema_version} of the contract, this client {SCHEMA_VERSION}: "
            "update the engine"
        )
    if schema_version > SCHEMA_VERSION:
        raise ProtocolError(
            f"the engine speaks version {schema_version} of the contract, this client {SCHEMA_VERSION}: "
            "update the Fairhearth integration"
        )
