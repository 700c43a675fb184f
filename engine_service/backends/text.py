"""From token bytes to text that may be shown: whole characters only, and nothing of a stop string.

Decides how much of what was generated can be shown now. Knows neither tokens nor requests. Shared by every
backend, so that streams behave alike.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextAssembler:
    """Turns the bytes of one output, piece by piece, into showable text.

    A character whose bytes are not complete is held back; so is text that could be the beginning of a stop
    string. Bytes that can never be UTF-8 become U+FFFD.
    """

    __slots__ = ("_decoder", "_held", "_stops", "is_stopped")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Watch for the stop strings (each not empty; ValueError otherwise)."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.is_stopped = False  #: a stop string was found; nothing more is ever shown

    def push(self, piece: bytes) -> str:
        """Add the bytes of the next token; return the text that became showable."""
        if self.is_stopped:
            return ""
        text = self._decoder.decode(piece)
        if not self._stops:
            return text
        return self._cut(self._held + text)

    def finish(self) -> str:
        """Return what was held back for a stop string that never came; half a character is dropped."""
        if self.is_stopped:
            return ""
        text, self._held = self._held, ""
        return text

    def _cut(self, text: str) -> str:
        # The one that is complete first, as if characters came singly: then it does not matter how the text
        # was cut into tokens.
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            return text[: min(found)[1]]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


class BannedStrings:
    """Tells which piece would complete a string that must never come out.

    Looks at bytes, ASCII letters in either case alike; so nothing that was generated ever has to be taken
    back, and a request can be preempted at any token.
    """

    __slots__ = ("_banned", "_longest", "_tail")

    def __init__(self, banned: Sequence[str]) -> None:
        """Watch for these (each not empty; ValueError otherwise)."""
        if any(not text for text in banned):
            raise ValueError("a banned string must not be empty")
        self._banned = tuple(text.encode("utf-8", "replace").lower() for text in banned)
        self._longest = max(map(len, self._banned), default=0)
        self._tail = b""

    def completes(self, piece: bytes) -> bool:
        """Return whether one of the strings would be there after these bytes."""
        text = self._tail + piece.lower()
        return any(banned in text for banned in self._banned)

    def push(self, piece: bytes) -> None:
        """Add the bytes of the next token."""
        text = self._tail + piece.lower()
        self._tail = text[len(text) - self._longest + 1 :] if len(text) >= self._longest else text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of text that begins the stop string, the whole one excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
