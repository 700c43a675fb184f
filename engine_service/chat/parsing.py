"""From the text a model writes to what the caller gets: reasoning, text, tool calls.

Decides as early as possible: text goes out as it comes, a call when it is complete. Pure; fed piece by piece,
it gives the same result for every way the text is cut. Knows four ways of writing a call:

* bare: the whole answer is `{"name": …, "arguments": {…}}` (our own format; the grammar allows nothing else
  that begins with a brace, except an answer that is JSON itself);
* tagged: `<tool_call>{…}</tool_call>`, any number, anywhere (Hermes and Qwen; models trained for it);
* parameters: the whole answer is `{"name": …, "parameters": {…}}`, or several with `;` between (Llama 3);
* listed: the whole answer is `[{"name": …, "arguments": {…}}, …]`, or `name{…}` (Mistral).

The last two are announced by control tokens, which have no text on most backends: `<|python_tag|>`,
`[TOOL_CALLS]` and `[ARGS]` may be there or not.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from engine_service.protocol import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Part of the answer."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """Part of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One complete tool call."""

    call: ToolCall


Piece = Text | Reasoning | Call


class CallStyle(Enum):
    """How the model writes a call."""

    NONE = auto()  #: no tools: a brace is a brace
    BARE = auto()
    TAGGED = auto()
    PARAMETERS = auto()
    LISTED = auto()


class _State(Enum):
    START = auto()
    REASONING = auto()
    ANSWER = auto()  #: after reasoning, nothing of the answer seen yet
    TEXT = auto()
    CALLS = auto()  #: the whole answer is one call or more, complete when the model stops
    TAGGED = auto()


_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_BEGINNING: Final = re.compile(r'\s*\[?\s*\{\s*("name"\s*:.*|"n?a?m?e?)?\s*\Z', re.DOTALL)
_MARKERS: Final = {CallStyle.PARAMETERS: "<|python_tag|>", CallStyle.LISTED: "[TOOL_CALLS]"}
_ARGUMENTS_FOLLOW: Final = "[ARGS]"
_BETWEEN: Final = " \t\r\n;"
_LIST_OF_CALLS: Final = re.compile(r"\[\s*\{")
_MAYBE_LIST: Final = re.compile(r"\[\s*")
_DECODER: Final = json.JSONDecoder()
_MORE_KEYS: Final = {"id", "type"}  #: that models trained for calls add


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class OutputParser:
    """Takes the text of one answer apart."""

    def __init__(
        self,
        *,
        style: CallStyle = CallStyle.NONE,
        starts_in_reasoning: bool = False,
        tool_names: Collection[str] = (),
        new_call_id: Callable[[], str] = _new_call_id,
    ):
        """Start before the first character; starts_in_reasoning if the prompt itself opened `<think>`.

        tool_names are those that may be called; only the style LISTED needs them.
        """
        self._style = style
        self._tool_names = sorted(tool_names, key=len, reverse=True)  # one may begin with another
        self._new_call_id = new_call_id
        self._state = _State.REASONING if starts_in_reasoning else _State.START
        self._held = ""  #: text not yet decided about
        self.num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        """Return what can be told apart now that text has come."""
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Return what is left at the end. A call cut off in the middle is dropped: half a call is nothing."""
        held, self._held = self._held, ""
        match self._state:
            case _State.REASONING:
                return self._some(Reasoning, held)
            case _State.CALLS:
                return self._all_calls(held)
            case _State.TAGGED:
                call = self._read_call(held)
                return [call] if call else []
            case _State.ANSWER:
                return self._some(Text, held.lstrip())
            case _:
                return self._some(Text, held)

    def _some(self, kind: type[Text] | type[Reasoning], text: str) -> list[Piece]:
        return [kind(text=text)] if text else []

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take one decision if the held text allows one; return whether another may follow."""
        match self._state:
            case _State.START:
                return self._begin(may_think=True)
            case _State.ANSWER:
                return self._begin(may_think=False)
            case _State.REASONING:
                return self._until(_END_THINK, _State.ANSWER, pieces, Reasoning)
            case _State.TEXT:
                return self._in_text(pieces)
            case _State.TAGGED:
                return self._in_tagged(pieces)
            case _State.CALLS:
                return False  # complete when the model stops: a grammar ends with the last brace

    def _begin(self, *, may_think: bool) -> bool:
        begun = self._held.lstrip()
        if not begun:
            return False
        if may_think and _THINK.startswith(begun[: len(_THINK)]):
            if len(begun) < len(_THINK):
                return False
            self._state, self._held = _State.REASONING, begun[len(_THINK) :]
        elif (is_call := self._begins_call(begun)) is None:
            return False
        elif is_call:
            self._state = _State.CALLS
        else:
            # White space before the answer belongs to it, except what only separates it from the reasoning.
            self._state, self._held = _State.TEXT, self._held if may_think else begun
        return True

    def _begins_call(self, begun: str) -> bool | None:
        """Return whether the answer is one call or more; None where more of it is needed to say."""
        marker = _MARKERS.get(self._style, "")
        if marker and marker.startswith(begun[: len(marker)]):
            return True if len(begun) >= len(marker) else None
        if self._style in (CallStyle.BARE, CallStyle.PARAMETERS):
            return begun[0] == "{"
        if self._style is not CallStyle.LISTED:
            return False
        if _LIST_OF_CALLS.match(begun) or self._called(begun):
            return True
        may_follow = [f"{name}{_ARGUMENTS_FOLLOW}" for name in self._tool_names]
        is_open = _MAYBE_LIST.fullmatch(begun) or any(name.startswith(begun) for name in may_follow)
        return None if is_open else False

    def _called(self, text: str) -> str | None:
        """Return the tool whose name and arguments the text begins with."""
        for name in self._tool_names:
            if text.startswith((f"{name}{{", f"{name}{_ARGUMENTS_FOLLOW}{{")):
                return name
        return None

    def _until(
        self, marker: str, then: _State, pieces: list[Piece], kind: type[Text] | type[Reasoning]
    ) -> bool:
        """Give out everything before the marker, keeping back what may become one."""
        before, found, after = self._held.partition(marker)
        if found:
            pieces += self._some(kind, before)
            self._state, self._held = then, after
            return True
        keep = _overlap(self._held, marker)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        pieces += self._some(kind, shown)
        return False

    def _in_text(self, pieces: list[Piece]) -> bool:
        if self._style is CallStyle.TAGGED:
            return self._until(_CALL, _State.TAGGED, pieces, Text)
        pieces += self._some(Text, self._held)
        self._held = ""
        return False

    def _in_tagged(self, pieces: list[Piece]) -> bool:
        inside, found, after = self._held.partition(_END_CALL)
        if not found:
            return False
        # What a model wrongly wrote between the tags is shown, not swallowed: the caller sees the fault.
        pieces.append(self._read_call(inside) or Text(text=inside.strip()))
        self._state, self._held = _State.TEXT, after
        return True

    def _all_calls(self, text: str) -> list[Piece]:
        """Return the calls of an answer that is nothing else; as text what is none, nothing if it was cut."""
        if self._style is CallStyle.BARE:
            call = self._read_call(text)
            return [call] if call else [] if _BEGINNING.match(text) else self._some(Text, text)
        values = self._values(text)
        calls = None if values is None else [found for value in values if (found := self._call_of(value))]
        if values and calls is not None and len(calls) == len(values):
            self.num_calls += len(calls)
            return [*calls]
        begun = text.lstrip().removeprefix(_MARKERS[self._style])
        was_cut = values is None and (_BEGINNING.match(begun) or self._called(begun))
        return [] if was_cut else self._some(Text, text)

    def _values(self, text: str) -> list[Any] | None:
        """Return the JSON values of a row, lists taken apart, names before arguments joined to them.

        None where it is something else, or cut.
        """
        values: list[Any] = []
        rest = text.lstrip(_BETWEEN)
        while rest:
            rest = rest.removeprefix(_MARKERS[self._style]).lstrip(_BETWEEN)
            name = self._called(rest)
            if name is not None:
                rest = rest[len(name) :].removeprefix(_ARGUMENTS_FOLLOW)
            try:
                value, end = _DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                return None
            if name is not None:
                values.append({"name": name, "arguments": value})
            else:
                values += value if isinstance(value, list) else [value]
            rest = rest[end:].lstrip(_BETWEEN)
        return values

    def _read_call(self, text: str) -> Call | None:
        try:
            call = self._call_of(json.loads(text))
        except (ValueError, RecursionError):
            return None
        self.num_calls += 1 if call else 0
        return call

    def _call_of(self, value: Any) -> Call | None:
        """Return the call that a value spells; None for anything else."""
        is_native = self._style in _MARKERS
        keys = value.keys() - (_MORE_KEYS if is_native else set()) if isinstance(value, dict) else set()
        (key,) = keys - {"name"} if len(keys) == 2 and "name" in keys else ("",)
        if key != "arguments" and not (is_native and key == "parameters"):
            return None
        name, arguments = value["name"], value[key]
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False)
        return Call(call=ToolCall(call_id=self._new_call_id(), name=name, arguments=written))


def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of text could be the beginning of marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
