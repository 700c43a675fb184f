"""The tokenizer of whatever backend the engine has at the moment. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine_service.backends.base import BackendError, Tokenizer
from engine_service.errors import EngineStopping

AGAIN_S = 10.0
"""When to try again while a model is loaded anew (seconds)."""


class CurrentTokenizer:
    """A tokenizer that outlives backends: callers keep it while a lost one is replaced."""

    def __init__(self, current: Callable[[], Tokenizer]) -> None:
        """Ask current for the tokenizer at every use."""
        self._current = current

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return token ids; raise EngineStopping while there is no model."""
        try:
            return self._current().encode(text, parse_special=parse_special)
        except BackendError as error:
            raise being_loaded() from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text; raise EngineStopping while there is no model."""
        try:
            return self._current().decode(token_ids)
        except BackendError as error:
            raise being_loaded() from error


def being_loaded() -> EngineStopping:
    """Return the refusal for what comes while the model is loaded anew."""
    return EngineStopping("the engine lost its model and is loading it again", retry_after_s=AGAIN_S)
