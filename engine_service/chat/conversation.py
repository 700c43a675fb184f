"""One model's way of talking: conversations to token ids, grammar and parser.

Decides how tools reach a model (its own template if that knows them, else a short list in the system prompt)
and that nothing inside a message can become a control token. Knows no HTTP and no engine. Thread-safe:
long prompts are prepared outside the event loop.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine_service.backends.base import Constraint, Eye, ModelInfo, PlacedPicture, Tokenizer
from engine_service.chat import structured, tools
from engine_service.chat.parsing import CallStyle, OutputParser
from engine_service.chat.pictures import Album
from engine_service.chat.template import ChatTemplate
from engine_service.errors import InvalidRequest, NotSupported
from engine_service.protocol import ChatRequest, Message, PrefixRequest, Tool

Dict = dict[str, Any]

_MAYBE_CONTROL: Final = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,20}\]")
_JOINER: Final = "\u2060"  #: WORD JOINER: invisible, no width, no break
_DUMMIES: Final = ("A", "7", "\n\nB", " c", "{")
"""User messages with different first tokens: what prompts with each of them share, every prompt has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A chat request in the model's terms."""

    prompt_ids: tuple[int, ...]
    constraint: Constraint | None
    parser: OutputParser
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    pictures: tuple[PlacedPicture, ...] = ()


class Conversation:
    """Prepares chat requests for one model."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, eye: Eye | None = None):
        """Compile the model's template; raise ModelError if that is not one."""
        self._info = info
        self._eye = eye
        self._template = ChatTemplate(info.chat_template, bos_text=info.bos_text, eos_text=info.eos_text)
        self._tokenizer = tokenizer

    def prepare(self, request: ChatRequest) -> Prepared:
        """Return prompt, grammar and parser; raise InvalidRequest naming what the model cannot take."""
        offered = () if request.tool_choice == "none" else request.tools
        album = self._album(request.messages)
        text = self._render(album.messages if album else request.messages, offered, request.thinking)
        prompt_ids, pictures = album.encode(text, self._tokenizer) if album else (self.text_ids(text), ())
        return Prepared(
            prompt_ids=prompt_ids,
            pictures=pictures,
            constraint=self._constraint(request, offered),
            parser=OutputParser(
                style=self._style(request, offered),
                starts_in_reasoning=text.rstrip().endswith("<think>"),
                tool_names=[tool.name for tool in offered],
            ),
            logit_bias=self._bias(request, offered),
        )

    def _album(self, messages: Sequence[Message]) -> Album | None:
        """Return the pictures of the messages, None without; raise NotSupported where nobody sees them."""
        if not any(message.pictures for message in messages):
            return None
        if self._eye is None:
            raise NotSupported(
                f"the model {self._info.name!r} cannot look at pictures on the backend "
                f"{self._info.backend!r}; GET /v1/engine says `can_see`",
                param="messages",
            )
        return Album(messages, self._eye)

    def prefix_ids(self, request: PrefixRequest) -> tuple[int, ...]:
        """Return the tokens with which every later prompt of these messages and tools begins."""
        prompts = [
            self._tokenizer.encode(
                self._render(
                    (*request.messages, Message(role="user", content=dummy)), request.tools, request.thinking
                ),
                parse_special=True,
            )
            for dummy in _DUMMIES
        ]
        shared = _common_prefix(prompts)
        if not shared:
            raise InvalidRequest("prompts of these messages share no beginning", param="messages")
        return tuple(shared)

    def prefix_constraint(self, request: PrefixRequest) -> Constraint | None:
        """Return the grammar that later prompts with these tools will need, None if they need none."""
        if not request.tools or self._template.call_style is not None:
            return None
        return tools.constraint_for(request.tools, must_call=False, answer=None)

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a raw prompt; the caller may write control tokens there."""
        return tuple(self._tokenizer.encode(text, parse_special=True))

    # --- what is asked of the model ---

    def _style(self, request: ChatRequest, offered: Sequence[Tool]) -> CallStyle:
        """Return how calls will be written: as the model was trained to only where no grammar is needed."""
        if not offered:
            return CallStyle.NONE
        needs_grammar = _must_call(request) or structured.schema_for(request.response_format) is not None
        return CallStyle.BARE if needs_grammar else self._template.call_style or CallStyle.BARE

    def _constraint(self, request: ChatRequest, offered: Sequence[Tool]) -> Constraint | None:
        if not offered:
            return structured.constraint_for(request.response_format)
        if self._style(request, offered) is not CallStyle.BARE:
            # Trained to call: it may mix text and calls, which a grammar would forbid.
            tools.calls_schema(offered)
            return None
        allowed = [tool for tool in offered if request.named_tool in (None, tool.name)]
        answer = structured.schema_for(request.response_format)
        return tools.constraint_for(allowed, must_call=_must_call(request), answer=answer)

    def _bias(self, request: ChatRequest, offered: Sequence[Tool]) -> dict[int, float]:
        """Return what helps an untrained model to call, and to report once it has a result."""
        is_free = self._style(request, offered) is CallStyle.BARE and not _must_call(request)
        if not is_free:
            return {}
        bias = -tools.REPORT_BIAS if request.messages[-1].role == "tool" else tools.CALL_BIAS
        spellings = ("{", '{"', '{"name')  # whichever of them the vocabulary has as one token
        return {self._tokenizer.encode(spelling)[0]: bias for spelling in spellings}

    # --- messages in the template's terms ---

    def _render(self, messages: Sequence[Message], offered: Sequence[Tool], thinking: bool | None) -> str:
        tools.check(offered)
        if offered and self._template.call_style is not None:
            plain = [self._native(message) for message in messages]
            return self._template.render(plain, tools=[tool.as_wire() for tool in offered], thinking=thinking)
        names = {call.call_id: call.name for message in messages for call in message.tool_calls}
        plain = [self._spelled_out(message, names) for message in messages]
        if offered:
            said = plain[0]["content"] if plain[0]["role"] == "system" else ""
            plain = _with_system(plain, tools.describe(offered, said))
        if not self._template.takes_system:
            plain = _without_system(plain)
        return self._template.render(
            [self._defused(message) for message in _merged(plain)], thinking=thinking
        )

    def _native(self, message: Message) -> Dict:
        """Return the message for a template that knows tools; it expects arguments as objects."""
        native: Dict = {"role": _role(message), "content": self._defuse(message.content or "")}
        if message.name is not None:
            native["name"] = message.name
        if message.reasoning_content is not None:
            native["reasoning_content"] = self._defuse(message.reasoning_content)
        if message.tool_calls:
            native["tool_calls"] = [
                _native_call(call.as_wire(), self._native_id(call.call_id)) for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            native["tool_call_id"] = self._native_id(message.tool_call_id)
        return native

    def _native_id(self, call_id: str) -> str:
        """Return the id in the template's terms: Mistral's refuses all but nine letters and digits."""
        if self._template.call_style is not CallStyle.LISTED:
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    def _spelled_out(self, message: Message, names: dict[str, str]) -> Dict:
        """Return the message for a template of system, user and assistant only."""
        if message.role == "tool":
            name = names.get(message.tool_call_id or "", message.name or "the tool")
            return {"role": "user", "content": f"Result of {name}: {message.content}", "is_result": True}
        parts = [message.content] if message.content else []
        parts += [tools.written_call(call) for call in message.tool_calls]
        return {"role": _role(message), "content": "\n".join(parts)}

    def _defused(self, message: Dict) -> Dict:
        return {"role": message["role"], "content": self._defuse(message["content"])}

    def _defuse(self, text: str) -> str:
        """Return the text with every control token's spelling broken by an invisible character.

        Otherwise a document could end its own message and speak as the system.
        """
        return _MAYBE_CONTROL.sub(lambda found: self._broken_if_control(found.group()), text)

    def _broken_if_control(self, spelling: str) -> str:
        as_text = self._tokenizer.encode(spelling, parse_special=False)
        is_control = self._tokenizer.encode(spelling, parse_special=True) != as_text
        return spelling[0] + _JOINER + spelling[1:] if is_control else spelling


def _must_call(request: ChatRequest) -> bool:
    return request.named_tool is not None or request.tool_choice == "required"


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _native_call(call: Dict, call_id: str) -> Dict:
    function = call["function"]
    return {**call, "id": call_id, "function": {**function, "arguments": json.loads(function["arguments"])}}


def _with_system(messages: list[Dict], addition: str) -> list[Dict]:
    """Append to the first system message, or begin with one."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": addition}, *messages]
    first = {"role": "system", "content": f"{messages[0]['content']}\n\n{addition}"}
    return [first, *messages[1:]]


def _without_system(messages: list[Dict]) -> list[Dict]:
    """Put what the system says before the first thing the user says: some templates know no system."""
    said = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    rest = [m for m in messages if m["role"] != "system"]
    if not said:
        return rest
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": said}, *rest]
    return [{"role": "user", "content": f"{said}\n\n{rest[0]['content']}"}, *rest[1:]]


def _merged(messages: list[Dict]) -> list[Dict]:
    """Join tool results to the user messages beside them: many templates want the roles to alternate."""
    merged: list[Dict] = []
    for message in messages:
        last = merged[-1] if merged else {}
        has_result = last.get("is_result") or message.get("is_result")
        if has_result and last.get("role") == message["role"] == "user":
            merged[-1] = {**last, "content": f"{last['content']}\n{message['content']}", "is_result": True}
        else:
            merged.append(message)
    return merged


def _common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    shared: list[int] = []
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return shared
