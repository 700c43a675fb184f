"""The messages a caller sends: what is accepted, and the frozen objects they become.

Decides which field is legal and says what would be right. Knows no engine, no chat template and no HTTP;
what the engine answers is written by `engine_service/server/replies.py`. Source: docs/wire.md; the golden
files under tests/contract hold both sides of the wire together.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from ipaddress import ip_address
from typing import Any, Final, NoReturn, TypeVar

import voluptuous as vol

from engine_service.checks import (
    boolean,
    described,
    line,
    list_of,
    mapping,
    member,
    number,
    one_of,
    or_none,
    path_and_message,
    schema_of,
    shown,
    table,
    text,
    whole_number,
)
from engine_service.errors import InvalidRequest
from engine_service.scheduling.model import GUEST, SYSTEM, Resident, ResidentId, WorkloadClass

SCHEMA_VERSION: Final = 1

Json = Mapping[str, Any]
T = TypeVar("T")

MAX_STOPS: Final = 16
MAX_TOOLS: Final = 128
MAX_TOP_LOGPROBS: Final = 20
MAX_PICTURES: Final = 8
MAX_PICTURE_BYTES: Final = 8 * 2**20
PICTURE_TYPES: Final = ("image/png", "image/jpeg", "image/webp", "image/gif")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Who is charged for a request, and how urgent it is."""

    resident_id: ResidentId = GUEST
    class_id: WorkloadClass = WorkloadClass.CHAT
    program_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The `fairhearth` object of a request: who and how, as far as the caller said; the token decides."""

    resident_id: ResidentId | None = None
    class_id: WorkloadClass | None = None
    program_id: str | None = None

    def as_wire(self) -> dict[str, Any]:
        """Return the object as it is sent."""
        class_id = None if self.class_id is None else self.class_id.value
        return _without_none(
            {"resident": self.resident_id, "workload_class": class_id, "program": self.program_id}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call an earlier assistant message made."""

    call_id: str
    name: str
    arguments: str  #: JSON of an object

    def as_wire(self) -> dict[str, Any]:
        """Return the call as it is sent, in requests and answers alike."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFile:
    """A picture as it was sent, and where it stands in the text of its message."""

    media_type: str
    file: bytes = field(repr=False)
    place: int  #: characters of the text before it

    def as_wire(self) -> dict[str, Any]:
        """Return the part of a message as it is sent."""
        url = f"data:{self.media_type};base64,{base64.b64encode(self.file).decode('ascii')}"
        return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One entry of the conversation."""

    role: str
    content: str | None = None
    pictures: tuple[PictureFile, ...] = ()  #: in their order; of a user only
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def as_wire(self) -> dict[str, Any]:
        """Return the message as it is sent; only an assistant that calls may have null content."""
        optional = {
            "name": self.name,
            "tool_calls": [call.as_wire() for call in self.tool_calls] or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        return {"role": self.role, "content": self._content_as_wire()} | _without_none(optional)

    def _content_as_wire(self) -> str | list[dict[str, Any]] | None:
        if not self.pictures:
            return self.content
        content, parts, end = self.content or "", [], 0
        for picture in self.pictures:
            if picture.place > end:
                parts.append({"type": "text", "text": content[end : picture.place]})
                end = picture.place
            parts.append(picture.as_wire())
        return parts if end == len(content) else [*parts, {"type": "text", "text": content[end:]}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call. parameters is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def as_wire(self) -> dict[str, Any]:
        """Return the tool as it is sent."""
        optional = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        return {"type": "function", "function": {"name": self.name} | _without_none(optional)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """What the text must be: `text`, `json_object` or `json_schema`."""

    kind: str
    name: str | None = None
    schema: Json | None = None
    strict: bool | None = None

    def as_wire(self) -> dict[str, Any]:
        """Return the format as it is sent."""
        inner = _without_none({"name": self.name, "strict": self.strict, "schema": self.schema})
        return {"type": self.kind} | ({"json_schema": inner} if inner else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to generate, common to chat and text completion. None: the engine's own default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    banned_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    num_logprobs: int | None = None
    asked: Asked | None = None
    user: str | None = None  #: OpenAI's name for who asks; settings may map it to a resident

    def as_wire(self) -> dict[str, Any]:
        """Return the fields as they are sent, those left at their default left out."""
        sent: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN_OPTIONS}
        sent["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()} or None
        sent["stop"] = list(self.stop) or None
        sent["banned_strings"] = list(self.banned_strings) or None
        sent["ignore_eos"] = self.ignore_eos or None
        sent["stream"] = self.stream or None
        sent["stream_options"] = {"include_usage": True} if self.include_usage else None
        sent["fairhearth"] = self.asked.as_wire() if self.asked else None
        return _without_none(sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """POST /v1/chat/completions."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str | None = None  #: auto, none, required
    named_tool: str | None = None  #: the one tool that must be called
    response_format: ResponseFormat | None = None
    thinking: bool | None = None  #: whether the model may think first, where its template has a switch
    options: Options = field(default_factory=Options)

    def as_wire(self) -> dict[str, Any]:
        """Return the request as it is sent."""
        sent: dict[str, Any] = {
            "messages": [message.as_wire() for message in self.messages],
            "tools": [tool.as_wire() for tool in self.tools] or None,
            "tool_choice": self._choice_as_wire(),
            "response_format": self.response_format.as_wire() if self.response_format else None,
            "chat_template_kwargs": _switches_as_wire(self.thinking),
        }
        if self.options.num_logprobs is not None:
            sent |= {"logprobs": True, "top_logprobs": self.options.num_logprobs}
        return _without_none(sent) | self.options.as_wire()

    def _choice_as_wire(self) -> Any:
        named = {"type": "function", "function": {"name": self.named_tool}}
        return named if self.named_tool else self.tool_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """POST /v1/completions."""

    prompt: str | tuple[int, ...]
    token_healing: bool = False  #: choose the prompt's last token anew
    options: Options = field(default_factory=Options)

    def as_wire(self) -> dict[str, Any]:
        """Return the request as it is sent."""
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        return (
            {"prompt": prompt}
            | _without_none(
                {"logprobs": self.options.num_logprobs, "token_healing": self.token_healing or None}
            )
            | self.options.as_wire()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRequest:
    """POST /v1/prefix."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None  #: as in the chat requests that are to come
    model: str | None = None

    def as_wire(self) -> dict[str, Any]:
        """Return the request as it is sent."""
        optional = {
            "tools": [tool.as_wire() for tool in self.tools] or None,
            "chat_template_kwargs": _switches_as_wire(self.thinking),
            "model": self.model,
        }
        return {"messages": [message.as_wire() for message in self.messages]} | _without_none(optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRequest:
    """PUT /v1/residents/{id}: a name and what the scheduler's `Resident` holds, with its defaults."""

    name: str | None = None
    weight: int = 1
    daily_tokens: int | None = None
    daily_is_hard: bool = False
    rolling_tokens: int | None = None
    rolling_window_s: float = 3600.0
    rolling_is_hard: bool = False
    page_cap: int | None = None
    max_running: int | None = None
    max_waiting: int = 64

    @classmethod
    def of(cls, resident: Resident, *, name: str) -> ResidentRequest:
        """Return the request that would make this resident."""
        values = asdict(resident)
        del values["resident_id"]
        return cls(name=name, **values)

    def as_wire(self) -> dict[str, Any]:
        """Return the request as it is sent."""
        return asdict(self)

    def resident(self, resident_id: ResidentId) -> Resident:
        """Return the scheduler's view of the resident."""
        values = asdict(self)
        del values["name"]
        return Resident(resident_id=resident_id, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """Whom to tell when a job has ended."""

    url: str  #: passed `web_address`
    with_result: bool = False  #: with what the job wrote

    @property
    def address(self) -> tuple[str, int]:
        """Return host (in small letters) and port."""
        return web_address(self.url)

    def goes_to(self, hosts: Collection[str]) -> bool:
        """Return whether it goes to one of these, each a host or host:port."""
        host, port = self.address
        return host in hosts or f"{host}:{port}" in hosts

    def as_wire(self) -> dict[str, Any]:
        """Return the object as it is sent."""
        return {"url": self.url, "with_result": self.with_result}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """POST /v1/jobs."""

    request: Json  #: as it was sent; `chat` is what it says
    chat: ChatRequest
    title: str | None = None
    idempotency_key: str | None = None
    deadline_s: float | None = None
    keep_s: float | None = None
    webhook: Webhook | None = None

    def as_wire(self) -> dict[str, Any]:
        """Return the request as it is sent."""
        return {"request": dict(self.request)} | _without_none(
            {
                "title": self.title,
                "idempotency_key": self.idempotency_key,
                "deadline_s": self.deadline_s,
                "keep_s": self.keep_s,
                "webhook": None if self.webhook is None else self.webhook.as_wire(),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalRequest:
    """POST /v1/rehearse."""

    scenario: str
    policy: Json  #: changes of what holds
    seeds: int

    def as_wire(self) -> dict[str, Any]:
        """Return the request as it is sent."""
        return {"scenario": self.scenario, "policy": dict(self.policy), "seeds": self.seeds}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """PUT and PATCH /v1/policy, POST /v1/policy/validate. What the keys mean is the settings' affair."""

    policy: Json
    note: str | None = None

    def as_wire(self) -> dict[str, Any]:
        """Return the request as it is sent."""
        return {"policy": dict(self.policy)} | _without_none({"note": self.note})


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsRequest:
    """POST /v1/embeddings."""

    texts: tuple[str | tuple[int, ...], ...]
    model: str | None = None
    dimensions: int | None = None
    encoding: str = "float"  #: or base64
    asked: Asked | None = None
    user: str | None = None

    def as_wire(self) -> dict[str, Any]:
        """Return the request as it is sent."""
        sent: dict[str, Any] = {
            "input": [text if isinstance(text, str) else list(text) for text in self.texts],
            "model": self.model,
            "dimensions": self.dimensions,
            "encoding_format": self.encoding,
            "user": self.user,
            "fairhearth": self.asked.as_wire() if self.asked else None,
        }
        return _without_none(sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRequest:
    """POST /v1/pair."""

    code: str = field(repr=False)
    name: str

    def as_wire(self) -> dict[str, Any]:
        """Return the request as it is sent."""
        return {"code": self.code, "name": self.name}


def _switches_as_wire(thinking: bool | None) -> dict[str, bool] | None:
    return None if thinking is None else {"enable_thinking": thinking}


def _without_none(sent: Json) -> dict[str, Any]:
    return {key: value for key, value in sent.items() if value is not None}


# --- what is accepted ---


def _unused(_: Any) -> None:
    """Accept anything: an OpenAI field that changes nothing here."""


described(_unused, lambda: {"description": "accepted and unused"})


def _exactly_one(value: Any) -> int:
    if value is not None and (value != 1 or isinstance(value, bool)):
        raise vol.Invalid(f"must be 1 (ask again for another answer), not {shown(value)}")
    return 1


described(_exactly_one, lambda: {"enum": [1, None]})


def _text_only(value: Any) -> None:
    if value is not None and value != ["text"]:
        raise vol.Invalid(f'must be ["text"]: this engine hears and draws nothing, not {shown(value)}')


described(_text_only, lambda: {"enum": [["text"], None]})


_STOP: Final = text(at_least=1, at_most=256)
_STOPS: Final = list_of(_STOP, at_most=MAX_STOPS)


def _stops(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str | list):
        raise vol.Invalid(f"must be a string or a list of strings, not {shown(value)}")
    return (_STOP(value),) if isinstance(value, str) else tuple(_STOPS(value))


described(_stops, lambda: {"anyOf": [schema_of(_STOP), schema_of(_STOPS)]})


_BIAS: Final = number(-100, 100)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise vol.Invalid(f"must be an object of token id to number, not {shown(value)}")
    if len(value) > 1024:
        raise vol.Invalid(f"must have at most 1024 entries, not {len(value)}")
    bias = {}
    for key, weight in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise vol.Invalid(f"must have token ids as keys, not {shown(key)}")
        bias[int(key)] = _BIAS(weight)
    return bias


described(
    _logit_bias,
    lambda: {
        "type": "object",
        "maxProperties": 1024,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": schema_of(_BIAS),
    },
)


_TEXT_PART: Final = table({vol.Required("type"): one_of(["text"]), vol.Required("text"): text()})


def _picture_url(value: Any) -> PictureFile:
    """Return the picture in a data: URL. No message repeats any of it."""
    url: str = text()(value)
    head, comma, data = url.partition(",")
    scheme, _, described_as = head.partition(":")
    if scheme.lower() != "data" or not comma:
        raise vol.Invalid(
            "must hold the picture itself (data:image/jpeg;base64,…): this engine fetches nothing, "
            "so it takes no http: or https: address"
        )
    media_type, *parameters = described_as.lower().split(";")
    if media_type not in PICTURE_TYPES or parameters[-1:] != ["base64"]:
        known = ", ".join(PICTURE_TYPES)
        raise vol.Invalid(f"must be data:TYPE;base64,… with one of the types {known}")
    if len(data) * 3 // 4 > MAX_PICTURE_BYTES:
        raise vol.Invalid(f"must be a picture of at most {MAX_PICTURE_BYTES} bytes")
    try:
        file = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise vol.Invalid("must have base64 after the comma, without blanks or line breaks") from None
    if not file:
        raise vol.Invalid("must have a picture after the comma; there is nothing")
    return PictureFile(media_type=media_type, file=file, place=0)


described(
    _picture_url,
    lambda: {"type": "string", "pattern": f"^data:({'|'.join(PICTURE_TYPES)});base64,[A-Za-z0-9+/]+=*$"},
)

_PICTURE_PART: Final = table(
    {
        vol.Required("type"): one_of(["image_url"]),
        vol.Required("image_url"): table(
            {
                vol.Required("url"): _picture_url,
                vol.Optional("detail"): or_none(one_of(["auto", "low", "high"])),
            }
        ),
    }
)


@dataclass(frozen=True, slots=True)
class _Content:
    """What a message says and shows."""

    text: str
    pictures: tuple[PictureFile, ...] = ()


def _content(value: Any) -> _Content:
    if isinstance(value, str):
        return _Content(str(text()(value)))
    if not isinstance(value, list):
        raise vol.Invalid(f"must be a string or a list of parts, not {shown(value)}")
    said, pictures = "", []
    for part in list_of(_part)(value):
        if isinstance(part, PictureFile):
            pictures.append(replace(part, place=len(said)))
        else:
            said += part
    return _Content(said, tuple(pictures))


described(_content, lambda: {"anyOf": [{"type": "string"}, {"type": "array", "items": schema_of(_part)}]})


def _part(value: Any) -> str | PictureFile:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return str(_TEXT_PART(value)["text"])
    if kind == "image_url":
        picture: PictureFile = _PICTURE_PART(value)["image_url"]["url"]
        return picture
    # What the part holds is not repeated: it may be a picture under another name.
    raise vol.Invalid(
        'must be {"type": "text", "text": …} or {"type": "image_url", "image_url": {"url": "data:…"}}, '
        f"not of the type {shown(kind)}"
    )


described(_part, lambda: {"anyOf": [schema_of(_TEXT_PART), schema_of(_PICTURE_PART)]})


def _arguments(value: Any) -> str:
    checked: str = text()(value)
    try:
        is_object = isinstance(_loads(checked or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise vol.Invalid(f"must be the JSON text of an object, not {shown(value)}")
    return checked or "{}"


described(_arguments, lambda: {"type": "string", "contentMediaType": "application/json"})


_NAME: Final = text(at_least=1, at_most=256)


def _tool_name(value: Any) -> str:
    name: str = text(at_least=1, at_most=128)(value)
    if not all(c.isascii() and (c.isalnum() or c in "_-.") for c in name):
        raise vol.Invalid(f"must consist of letters, digits, '_', '-' and '.', not {shown(value)}")
    return name


described(_tool_name, lambda: {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"})


_TOOL_CALL: Final = table(
    {
        vol.Required("id"): _NAME,
        vol.Required("type", default="function"): one_of(["function"]),
        vol.Required("function"): table(
            {vol.Required("name"): _tool_name, vol.Required("arguments"): _arguments}
        ),
        vol.Optional("index"): _unused,
    }
)

_MESSAGE: Final = table(
    {
        vol.Required("role"): one_of(["system", "developer", "user", "assistant", "tool"]),
        vol.Optional("content"): or_none(_content),
        vol.Optional("name"): or_none(_NAME),
        vol.Optional("tool_calls"): or_none(list_of(_TOOL_CALL, at_most=MAX_TOOLS)),
        vol.Optional("tool_call_id"): or_none(_NAME),
        vol.Optional("reasoning_content"): or_none(text()),
        vol.Optional("refusal"): _unused,
        vol.Optional("annotations"): _unused,
        vol.Optional("audio"): _unused,
    }
)


def _message(value: Any) -> Message:
    raw = _MESSAGE(value)
    role, calls, content = raw["role"], raw.get("tool_calls") or [], raw.get("content")
    if role == "tool" and raw.get("tool_call_id") is None:
        raise vol.Invalid("is missing: a tool message names the call it answers", path=["tool_call_id"])
    if calls and role != "assistant":
        raise vol.Invalid("belongs to messages of the role assistant only", path=["tool_calls"])
    if content is None and not calls:
        raise vol.Invalid("is missing", path=["content"])
    if content is not None and content.pictures and role != "user":
        raise vol.Invalid("may have pictures in messages of the role user only", path=["content"])
    return Message(
        role=role,
        content=None if content is None else content.text,
        pictures=() if content is None else content.pictures,
        name=raw.get("name"),
        tool_calls=tuple(
            ToolCall(call_id=c["id"], name=c["function"]["name"], arguments=c["function"]["arguments"])
            for c in calls
        ),
        tool_call_id=raw.get("tool_call_id"),
        reasoning_content=raw.get("reasoning_content"),
    )


described(_message, lambda: schema_of(_MESSAGE))


def _schema_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise vol.Invalid(f"must be a JSON schema (an object), not {shown(value)}")
    return value


described(_schema_object, lambda: {"type": "object"})


_TOOL: Final = table(
    {
        vol.Required("type"): one_of(["function"]),
        vol.Required("function"): table(
            {
                vol.Required("name"): _tool_name,
                vol.Optional("description"): or_none(text()),
                vol.Optional("parameters"): or_none(_schema_object),
                vol.Optional("strict"): or_none(boolean),
            }
        ),
    }
)


def _tool(value: Any) -> Tool:
    return Tool(**_TOOL(value)["function"])


described(_tool, lambda: schema_of(_TOOL))


def _tools(value: Any) -> tuple[Tool, ...]:
    tools: list[Tool] = list_of(_tool, at_most=MAX_TOOLS)(value)
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise vol.Invalid(f"is named {name!r} like an earlier tool; names must differ", path=[index])
    return tuple(tools)


described(_tools, lambda: {"type": "array", "items": schema_of(_tool), "maxItems": MAX_TOOLS})


_NAMED_TOOL: Final = table(
    {
        vol.Required("type"): one_of(["function"]),
        vol.Required("function"): table({vol.Required("name"): _tool_name}),
    }
)


def _tool_choice(value: Any) -> str | tuple[str]:
    """Return auto, none or required; a 1-tuple holds the name of the one tool."""
    if isinstance(value, dict):
        return (_NAMED_TOOL(value)["function"]["name"],)
    if value not in ("auto", "none", "required"):
        raise vol.Invalid(
            'must be auto, none, required or {"type": "function", "function": {"name": …}}, '
            f"not {shown(value)}"
        )
    return str(value)


described(_tool_choice, lambda: {"anyOf": [{"enum": ["auto", "none", "required"]}, schema_of(_NAMED_TOOL)]})


_JSON_SCHEMA: Final = table(
    {
        vol.Required("name"): _NAME,
        vol.Required("schema"): _schema_object,
        vol.Optional("strict"): or_none(boolean),
        vol.Optional("description"): _unused,
    }
)
_RESPONSE_FORMAT: Final = table(
    {
        vol.Required("type"): one_of(["text", "json_object", "json_schema"]),
        vol.Optional("json_schema"): _JSON_SCHEMA,
    }
)


def _response_format(value: Any) -> ResponseFormat:
    raw = _RESPONSE_FORMAT(value)
    if (raw["type"] == "json_schema") != ("json_schema" in raw):
        wanted = "is missing" if raw["type"] == "json_schema" else "belongs to the type json_schema only"
        raise vol.Invalid(wanted, path=["json_schema"])
    inner = raw.get("json_schema", {})
    return ResponseFormat(
        kind=raw["type"], name=inner.get("name"), schema=inner.get("schema"), strict=inner.get("strict")
    )


described(_response_format, lambda: schema_of(_RESPONSE_FORMAT))


_CLASS: Final = member(WorkloadClass)
_ASKED: Final = table(
    {
        vol.Optional("resident"): or_none(text(at_least=1, at_most=64)),
        vol.Optional("workload_class"): or_none(_CLASS),
        vol.Optional("program"): or_none(_NAME),
    }
)


def _asked(value: Any) -> Asked:
    raw = _ASKED(value)
    resident = raw.get("resident")
    return Asked(
        resident_id=None if resident is None else ResidentId(resident),
        class_id=raw.get("workload_class"),
        program_id=raw.get("program"),
    )


described(_asked, lambda: schema_of(_ASKED))


_OPTIONS: Final[Mapping[Any, Any]] = {
    vol.Optional("model"): or_none(text(at_most=256)),
    vol.Optional("max_tokens"): or_none(whole_number(1)),
    vol.Optional("temperature"): or_none(number(0, 100)),
    vol.Optional("top_p"): or_none(number(maximum=1, above=0)),
    vol.Optional("top_k"): or_none(whole_number(0, 2**31 - 1)),
    vol.Optional("min_p"): or_none(number(0, 1)),
    vol.Optional("repetition_penalty"): or_none(number(0.01, 100)),
    vol.Optional("presence_penalty"): or_none(number(-2, 2)),
    vol.Optional("frequency_penalty"): or_none(number(-2, 2)),
    vol.Optional("seed"): or_none(whole_number(-(2**63), 2**64 - 1)),
    vol.Optional("logit_bias"): or_none(_logit_bias),
    vol.Optional("stop"): or_none(_stops),
    vol.Optional("banned_strings"): or_none(_STOPS),
    vol.Optional("ignore_eos"): or_none(boolean),
    vol.Optional("stream"): or_none(boolean),
    vol.Optional("stream_options"): or_none(
        table({vol.Optional("include_usage"): or_none(boolean), vol.Optional("include_obfuscation"): _unused})
    ),
    vol.Optional("fairhearth"): or_none(_asked),
    vol.Optional("user"): or_none(text(at_most=512)),
    vol.Optional("n"): _exactly_one,
}

UNUSED: Final = (
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "reasoning_effort",
    "verbosity",
    "provider",  # OpenRouter's, which Home Assistant's own integration of that name sends with every request
)
"""OpenAI fields (and one of OpenRouter) accepted and ignored, whatever they hold."""

_UNUSED_FIELDS: Final = {vol.Optional(name): _unused for name in UNUSED}

_SWITCHES: Final = table({vol.Optional("enable_thinking"): or_none(boolean)})


def _template_kwargs(value: Any) -> bool | None:
    """Return whether the model may think first; None leaves it to its template."""
    switched: bool | None = _SWITCHES(value).get("enable_thinking")
    return switched


described(_template_kwargs, lambda: schema_of(_SWITCHES))

_CHAT: Final = table(
    {
        **_OPTIONS,
        **_UNUSED_FIELDS,
        vol.Required("messages"): list_of(_message, at_least=1, at_most=10_000),
        vol.Optional("tools"): or_none(_tools),
        vol.Optional("tool_choice"): or_none(_tool_choice),
        vol.Optional("response_format"): or_none(_response_format),
        vol.Optional("max_completion_tokens"): or_none(whole_number(1)),
        vol.Optional("logprobs"): or_none(boolean),
        vol.Optional("top_logprobs"): or_none(whole_number(0, MAX_TOP_LOGPROBS)),
        vol.Optional("modalities"): _text_only,
        vol.Optional("chat_template_kwargs"): or_none(_template_kwargs),
    }
)


_ONE_TEXT: Final = text(at_least=1)
_TOKEN_IDS: Final = list_of(whole_number(0), at_least=1)


def _text_or_ids() -> list[dict[str, Any]]:
    return [schema_of(_ONE_TEXT), schema_of(_TOKEN_IDS)]


def _several(kinds: list[dict[str, Any]], at_most: int) -> dict[str, Any]:
    return {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, "maxItems": at_most}


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a batch of one, as some clients send it
    if isinstance(value, str):
        return str(_ONE_TEXT(value))
    if not isinstance(value, list) or any(isinstance(entry, str | list) for entry in value):
        raise vol.Invalid(f"must be one string or one list of token ids, not {shown(value)}")
    return tuple(_TOKEN_IDS(value))


described(_prompt, lambda: {"anyOf": [*_text_or_ids(), _several(_text_or_ids(), 1)]})


def _not_supported(neutral: object) -> Callable[[Any], Any]:
    """Accept only the value that asks for nothing."""

    def check(value: Any) -> None:
        if value != neutral:
            raise vol.Invalid(f"is not supported here: leave it out, do not send {shown(value)}")

    return described(check, lambda: {"enum": [neutral]})


_COMPLETION: Final = table(
    {
        **_OPTIONS,
        **_UNUSED_FIELDS,
        vol.Required("prompt"): _prompt,
        vol.Optional("token_healing"): or_none(boolean),
        vol.Optional("logprobs"): or_none(whole_number(0, MAX_TOP_LOGPROBS)),
        vol.Optional("best_of"): _exactly_one,
        vol.Optional("echo"): or_none(_not_supported(False)),
        vol.Optional("suffix"): or_none(_not_supported("")),
    }
)


_PREFIX: Final = table(
    {
        vol.Optional("model"): or_none(text(at_most=256)),
        vol.Required("messages"): list_of(_message, at_least=1, at_most=10_000),
        vol.Optional("tools"): or_none(_tools),
        vol.Optional("chat_template_kwargs"): or_none(_template_kwargs),
    }
)

MAX_ROLLING_WINDOW_S: Final = 31 * 86_400
MAX_QUOTA_TOKENS: Final = 10**12  #: more than any engine writes in a window; above it a slip, not a limit

_RESIDENT: Final = table(
    {
        vol.Optional("name"): or_none(line(at_least=1, at_most=128)),
        vol.Optional("weight"): whole_number(1, 1_000_000),
        vol.Optional("daily_tokens"): or_none(whole_number(1, MAX_QUOTA_TOKENS)),
        vol.Optional("daily_is_hard"): boolean,
        vol.Optional("rolling_tokens"): or_none(whole_number(1, MAX_QUOTA_TOKENS)),
        vol.Optional("rolling_window_s"): number(1, MAX_ROLLING_WINDOW_S),
        vol.Optional("rolling_is_hard"): boolean,
        vol.Optional("page_cap"): or_none(whole_number(1)),
        vol.Optional("max_running"): or_none(whole_number(1)),
        vol.Optional("max_waiting"): whole_number(1),
    }
)

MAX_EMBEDDED: Final = 2048


def _input(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Accept one text or one list of token ids, or a list of those."""
    if not isinstance(value, str | list):
        raise vol.Invalid(f"must be a text, a list of token ids, or a list of those, not {shown(value)}")
    is_one = isinstance(value, str) or (value and isinstance(value[0], int))
    entries = [value] if is_one else value
    return tuple(list_of(_embedded, at_least=1, at_most=MAX_EMBEDDED)(entries))


described(_input, lambda: {"anyOf": [*_text_or_ids(), _several(_text_or_ids(), MAX_EMBEDDED)]})


def _embedded(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list):
        return tuple(_TOKEN_IDS(value))
    return str(_ONE_TEXT(value))


_EMBEDDINGS: Final = table(
    {
        vol.Required("input"): _input,
        vol.Optional("model"): or_none(text(at_most=256)),
        vol.Optional("dimensions"): or_none(whole_number(1)),
        vol.Optional("encoding_format"): or_none(one_of(["float", "base64"])),
        vol.Optional("user"): or_none(text(at_most=512)),
        vol.Optional("fairhearth"): or_none(_asked),
    }
)

_POLICY: Final = table({vol.Required("policy"): mapping, vol.Optional("note"): or_none(line(at_most=256))})
MAX_REHEARSED_SEEDS: Final = 5


def _scenario(value: Any) -> str:
    name: str = text(at_least=1, at_most=64)(value)
    if not (name.isascii() and name.replace("_", "0").isalnum()):
        raise vol.Invalid("must be the name of a scenario, as `fairhearth simulate --list` shows them")
    return name


described(_scenario, lambda: {"type": "string", "pattern": "^[A-Za-z0-9_]{1,64}$"})

_REHEARSAL: Final = table(
    {
        vol.Required("scenario"): _scenario,
        vol.Optional("policy"): or_none(mapping),
        vol.Optional("seeds"): or_none(whole_number(1, MAX_REHEARSED_SEEDS)),
    }
)
_ROLLBACK: Final = table({vol.Required("revision"): whole_number(0)})

_YEAR_S: Final = 366 * 86_400


def _job_request(value: Any) -> dict[str, Any]:
    return mapping(value)  # what it says is checked by `parse_chat_request`


_HOST: Final = r"(?P<host>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?"
_HOST_AND_PORT: Final = re.compile(_HOST)
# So strict that no two readers of addresses can take it for different hosts: no user, no blank, no backslash.
_WEB_ADDRESS: Final = re.compile(rf"(?P<scheme>https?)://{_HOST}(?:[/?][!\"$-\[\]-~]*)?")
_MAX_URL: Final = 2048


def web_address(url: str) -> tuple[str, int]:
    """Return host (in small letters) and port of an http(s) address; raise ValueError if it is none."""
    found = _WEB_ADDRESS.fullmatch(url)
    if found is None or len(url) > _MAX_URL:
        raise ValueError("no address")
    default = 443 if found["scheme"] == "https" else 80
    return _host(found["host"]), _port(found["port"]) or default


def parse_host(value: str) -> str:
    """Return `host` or `host:port` in small letters; raise ValueError if it is neither."""
    found = _HOST_AND_PORT.fullmatch(value)
    if found is None:
        raise ValueError("no host")
    port = _port(found["port"])
    return _host(found["host"]) + (f":{port}" if port else "")


def _host(host: str) -> str:
    if host.startswith("["):
        ip_address(host[1:-1])
    return host.lower()


def _port(port: str | None) -> int:
    """Return the port, 0 for none; raise ValueError."""
    if port is not None and not 1 <= int(port) <= 65535:
        raise ValueError("no port")
    return int(port or 0)


def _url(value: Any) -> str:
    url: str = text(at_most=_MAX_URL)(value)
    try:
        web_address(url)
    except ValueError:
        raise vol.Invalid(
            "must be an address like http://homeassistant.local:8123/api/webhook/…, in ASCII, "
            "without user or fragment"
        ) from None
    return url


described(_url, lambda: {"type": "string", "format": "uri", "pattern": "^https?://", "maxLength": _MAX_URL})

_WEBHOOK: Final = table({vol.Required("url"): _url, vol.Optional("with_result"): boolean})

_JOB: Final = table(
    {
        vol.Required("request"): described(_job_request, lambda: schema_of(_CHAT)),
        vol.Optional("title"): or_none(line(at_least=1, at_most=256)),
        vol.Optional("idempotency_key"): or_none(text(at_least=1, at_most=128)),
        vol.Optional("deadline_s"): or_none(number(maximum=_YEAR_S, above=0)),
        vol.Optional("keep_s"): or_none(number(0, _YEAR_S)),
        vol.Optional("webhook"): or_none(_WEBHOOK),
    }
)


def _code(value: Any) -> str:
    code: str = text()(value)
    digits = code.replace(" ", "").replace("-", "")
    if len(digits) != 6 or not (digits.isascii() and digits.isdigit()):
        raise vol.Invalid("must be the six digits that the engine shows, like 123456")
    return digits


described(_code, lambda: {"type": "string", "pattern": "^([ -]*[0-9]){6}[ -]*$"})


_PAIR: Final = table({vol.Required("code"): _code, vol.Required("name"): line(at_least=1, at_most=64)})

SCHEMAS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "ChatRequest": _CHAT,
    "CompletionRequest": _COMPLETION,
    "EmbeddingsRequest": _EMBEDDINGS,
    "JobRequest": _JOB,
    "PairRequest": _PAIR,
    "PolicyRequest": _POLICY,
    "PrefixRequest": _PREFIX,
    "ResidentRequest": _RESIDENT,
    "RehearsalRequest": _REHEARSAL,
    "RollbackRequest": _ROLLBACK,
}
"""What each message may hold, for a document of the API."""


# --- from bytes to messages ---


def parse_json(body: bytes, *, what: str = "the body") -> Any:
    """Return the JSON value of a request body; raise InvalidRequest naming what is wrong with it.

    what says what a message calls it: a file of JSON is no body.
    """
    try:
        content = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{what} is not UTF-8: byte {error.start} cannot be read") from None
    try:
        value = _loads(content)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"{what} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except _NoNumber as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from None
    except ValueError:  # Python's bound on the digits of a number
        raise InvalidRequest(f"{what} holds a number of more than 4300 digits") from None
    except RecursionError:
        raise InvalidRequest(f"{what} is nested too deeply") from None
    if "\\u" in content:
        _refuse_half_characters(value, what)
    return value


def _refuse_half_characters(value: Any, what: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{what} holds half of a surrogate pair (\\ud800 to \\udfff alone), which is no character"
        ) from None


def _loads(content: str) -> Any:
    return json.loads(content, parse_constant=_refuse_constant)


class _NoNumber(ValueError):
    """NaN or Infinity, which JSON does not have."""


def _refuse_constant(name: str) -> NoReturn:
    raise _NoNumber(f"{name} is not a JSON number")


def _checked(check: Callable[[Any], T], value: Any, *, what: str = "the body") -> T:
    try:
        return check(value)
    except vol.Invalid as error:
        path, message = path_and_message(error)
        raise InvalidRequest(f"{path or what} {message}", param=path or None) from None


def parse_chat_request(value: Any) -> ChatRequest:
    """Return the message of POST /v1/chat/completions; raise InvalidRequest naming the field."""
    raw = _checked(_CHAT, value)
    choice = raw.get("tool_choice")
    named = choice[0] if isinstance(choice, tuple) else None
    tools = raw.get("tools") or ()
    _check_choice(choice, named, tools)
    if raw.get("top_logprobs") is not None and not raw.get("logprobs"):
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    num_pictures = sum(len(message.pictures) for message in raw["messages"])
    if num_pictures > MAX_PICTURES:
        raise InvalidRequest(
            f"messages must have at most {MAX_PICTURES} pictures in all, not {num_pictures}", param="messages"
        )
    raw["max_tokens"] = raw.get("max_completion_tokens") or raw.get("max_tokens")
    return ChatRequest(
        messages=tuple(raw["messages"]),
        tools=tools,
        tool_choice=None if named else choice,
        named_tool=named,
        response_format=raw.get("response_format"),
        thinking=raw.get("chat_template_kwargs"),
        options=_options(raw, num_logprobs=(raw.get("top_logprobs") or 0) if raw.get("logprobs") else None),
    )


def _check_choice(choice: Any, named: str | None, tools: tuple[Tool, ...]) -> None:
    if choice not in (None, "none", "auto") and not tools:
        raise InvalidRequest("tool_choice asks for a call, but tools is empty", param="tool_choice")
    if named and named not in [tool.name for tool in tools]:
        known = ", ".join(tool.name for tool in tools)
        raise InvalidRequest(
            f"tool_choice.function.name must be one of {known}, not {named!r}",
            param="tool_choice.function.name",
        )


def parse_completion_request(value: Any) -> CompletionRequest:
    """Return the message of POST /v1/completions; raise InvalidRequest naming the field."""
    raw = _checked(_COMPLETION, value)
    return CompletionRequest(
        prompt=raw["prompt"],
        token_healing=bool(raw.get("token_healing")),
        options=_options(raw, num_logprobs=raw.get("logprobs")),
    )


def _options(raw: Json, *, num_logprobs: int | None) -> Options:
    return Options(
        **{name: raw.get(name) for name in _PLAIN_OPTIONS},
        logit_bias=raw.get("logit_bias") or {},
        stop=raw.get("stop") or (),
        banned_strings=tuple(raw.get("banned_strings") or ()),
        ignore_eos=bool(raw.get("ignore_eos")),
        stream=bool(raw.get("stream")),
        include_usage=bool((raw.get("stream_options") or {}).get("include_usage")),
        num_logprobs=num_logprobs,
        asked=raw.get("fairhearth"),
    )


_PLAIN_OPTIONS: Final = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "user",
)


def parse_prefix_request(value: Any) -> PrefixRequest:
    """Return the message of POST /v1/prefix; raise InvalidRequest naming the field."""
    raw = _checked(_PREFIX, value)
    if any(message.pictures for message in raw["messages"]):
        raise InvalidRequest("messages must have no pictures: a prefix is text", param="messages")
    return PrefixRequest(
        messages=tuple(raw["messages"]),
        tools=raw.get("tools") or (),
        thinking=raw.get("chat_template_kwargs"),
        model=raw.get("model"),
    )


def parse_job_request(value: Any) -> JobRequest:
    """Return the message of POST /v1/jobs; raise InvalidRequest naming the field."""
    raw = _checked(_JOB, value)
    try:
        chat = parse_chat_request(raw["request"])
    except InvalidRequest as error:
        param = f"request.{error.param}" if error.param else "request"
        raise InvalidRequest(f"request: {error.message}", param=param) from None
    if chat.options.stream:
        raise InvalidRequest("request.stream must be left out: a job is not a stream", param="request.stream")
    webhook = raw.pop("webhook", None)
    return JobRequest(**raw, chat=chat, webhook=None if webhook is None else Webhook(**webhook))


def parse_policy_request(value: Any) -> PolicyRequest:
    """Return the message of PUT and PATCH /v1/policy; raise InvalidRequest naming the field."""
    return PolicyRequest(**_checked(_POLICY, value))


def parse_rehearsal_request(value: Any) -> RehearsalRequest:
    """Return the message of POST /v1/rehearse; raise InvalidRequest naming the field."""
    raw = _checked(_REHEARSAL, value)
    return RehearsalRequest(
        scenario=raw["scenario"], policy=raw.get("policy") or {}, seeds=raw.get("seeds") or 1
    )


def parse_rollback_request(value: Any) -> int:
    """Return the revision that POST /v1/policy/rollback names; raise InvalidRequest naming the field."""
    revision: int = _checked(_ROLLBACK, value)["revision"]
    return revision


def parse_embeddings_request(value: Any) -> EmbeddingsRequest:
    """Return the message of POST /v1/embeddings; raise InvalidRequest naming the field."""
    raw = _checked(_EMBEDDINGS, value)
    return EmbeddingsRequest(
        texts=raw["input"],
        model=raw.get("model"),
        dimensions=raw.get("dimensions"),
        encoding=raw.get("encoding_format") or "float",
        asked=raw.get("fairhearth"),
        user=raw.get("user"),
    )


def parse_pair_request(value: Any) -> PairRequest:
    """Return the message of POST /v1/pair; raise InvalidRequest naming the field."""
    return PairRequest(**_checked(_PAIR, value))


def parse_resident_request(value: Any, *, what: str = "the body") -> ResidentRequest:
    """Return the message of PUT /v1/residents/{id}; raise InvalidRequest naming the field, or what it is."""
    return ResidentRequest(**_checked(_RESIDENT, value, what=what))


def parse_resident_id(value: str) -> ResidentId:
    """Return a legal resident id; raise InvalidRequest saying what one looks like."""
    is_legal = 1 <= len(value) <= 64 and all(c in "abcdefghijklmnopqrstuvwxyz0123456789_-." for c in value)
    if not is_legal:
        raise InvalidRequest(
            f"a resident id is 1 to 64 of a-z, 0-9, '_', '-', '.'; {shown(value)} is not", param="resident"
        )
    if value in (".", ".."):
        raise InvalidRequest(
            f"a resident id stands in an address, where {shown(value)} means another one; choose another id",
            param="resident",
        )
    if value == SYSTEM:
        raise InvalidRequest("'system' is the engine's own account; choose another id", param="resident")
    return ResidentId(value)
