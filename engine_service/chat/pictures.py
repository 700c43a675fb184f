"""Pictures in a conversation: a mark in a message's text for each, and its tokens where the mark came out.

Decides nothing about what a template does with text. The marks cannot be written by a caller: they hold a
number that nobody knows beforehand.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine_service.backends.base import Eye, InvalidPicture, Picture, PlacedPicture, Tokenizer
from engine_service.errors import InvalidRequest
from engine_service.protocol import Message


class Album:
    """The pictures of one conversation, looked at."""

    def __init__(self, messages: Sequence[Message], eye: Eye) -> None:
        """Look at every picture; raise InvalidRequest naming the message of one that cannot be read."""
        self._eye = eye
        self._secret = secrets.token_hex(8)
        self._pictures: list[Picture] = []
        self.messages = tuple(self._marked(index, message) for index, message in enumerate(messages))
        """The messages with marks in place of their pictures."""

    def _marked(self, index: int, message: Message) -> Message:
        content, pieces, end = message.content or "", [], 0
        for number, sent in enumerate(message.pictures, start=1):
            try:
                picture = self._eye.look(sent.file)
            except InvalidPicture as error:
                param = f"messages[{index}].content"
                raise InvalidRequest(
                    f"{param}: picture {number} cannot be used: {error}", param=param
                ) from None
            pieces += [content[end : sent.place], f"\ue000{self._secret}.{len(self._pictures)}\ue001"]
            self._pictures.append(picture)
            end = sent.place
        return replace(message, content="".join([*pieces, content[end:]]), pictures=()) if pieces else message

    def encode(self, prompt: str, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
        """Return the tokens of a prompt with marks, and which pictures stand where in them.

        Raises InvalidRequest where the template that made the prompt left a picture out.
        """
        ids: list[int] = []
        placed: list[PlacedPicture] = []
        seen: set[int] = set()
        for text, number in self._pieces(prompt):
            ids += tokenizer.encode(text, parse_special=True)
            if number is not None:
                picture = self._pictures[number]
                placed.append(PlacedPicture(start=len(ids), picture=picture))
                ids += [self._eye.placeholder_id] * picture.num_tokens
                seen.add(number)
        if len(seen) < len(self._pictures):
            raise InvalidRequest(
                "the model's chat template leaves a picture of these messages out", param="messages"
            )
        return tuple(ids), tuple(placed)

    def _pieces(self, prompt: str) -> Iterator[tuple[str, int | None]]:
        """Yield each text with the number of the picture behind it; None behind the last."""
        parts = re.split(f"\ue000{self._secret}\\.([0-9]+)\ue001", prompt)
        for text, number in zip(parts[::2], [*parts[1::2], None], strict=True):
            yield text, None if number is None else int(number)
