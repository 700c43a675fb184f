"""Decides how much of a conversation the model is given to read. Pure: counts characters, knows no engine.

Rules:
* The system prompt and the last turn are always given; what is left out are whole turns, the oldest first. A
  turn is what someone said with all that followed, so no tool result stands without its call.
* Turns go several at a time, so that the beginning of the prompt stays the same for a while and need not be
  read anew with each sentence.
* The model is told that something is missing.
* Nobody but the engine can count tokens. Characters are turned into tokens by what the engine counted last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from .engine_client import Message, ToolSpec

TURNS_LEFT_OUT_AT_ONCE: Final = 4

NOTICE: Final = "[Earlier parts of this conversation were left out.]"
"""For the model, before the first turn that is left."""

MOST_CHARACTERS_PER_TOKEN: Final = 8.0


class TokenScale:
    """How many characters a token has, as the engine's last counts say. Cautious before the first one."""

    def __init__(self) -> None:
        """Begin with what is short for most languages."""
        self._characters_per_token = 2.5

    def tokens_of(self, characters: int) -> int:
        """Return about how many tokens a text of this length has."""
        return round(characters / self._characters_per_token)

    def characters_of(self, tokens: int) -> int:
        """Return about how many characters so many tokens have."""
        return int(tokens * self._characters_per_token)

    def learn(self, characters: int, tokens: int) -> None:
        """Take over what the engine counted."""
        if tokens > 0 and characters > 0:
            self._characters_per_token = min(MOST_CHARACTERS_PER_TOKEN, characters / tokens)


def length_of(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> int:
    """Return how many characters a prompt has, as far as its texts go."""
    return sum(map(_length, messages)) + sum(len(json.dumps(tool.as_wire())) for tool in tools)


def _length(message: Message) -> int:
    calls = sum(len(json.dumps(call.as_wire())) for call in message.tool_calls)
    return len(message.content) + calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What is given to the model of a conversation."""

    messages: tuple[Message, ...]
    num_left_out: int  #: turns
    num_kept: int  #: turns


def fit(messages: Sequence[Message], *, most_characters: int, most_turns: int | None = None) -> Fitted:
    """Return the conversation without the oldest turns that are too much; the last one always stays."""
    starts = [index for index, message in enumerate(messages) if message.role == "user"]
    if not starts:
        return Fitted(messages=tuple(messages), num_left_out=0, num_kept=0)
    head, lengths = messages[: starts[0]], list(map(_length, messages))
    num_left_out = 0
    while num_left_out < len(starts) - 1:
        size = sum(lengths[: starts[0]]) + sum(lengths[starts[num_left_out] :])
        is_few = most_turns is None or len(starts) - num_left_out <= most_turns
        if size <= most_characters and is_few:
            break
        num_left_out = min(num_left_out + TURNS_LEFT_OUT_AT_ONCE, len(starts) - 1)
    kept = list(messages[starts[num_left_out] :])
    if num_left_out:
        kept[0] = replace(kept[0], content=f"{NOTICE}\n{kept[0].content}")
    return Fitted(messages=(*head, *kept), num_left_out=num_left_out, num_kept=len(starts) - num_left_out)
