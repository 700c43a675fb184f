"""A grammar's mask, computed while the GPU is busy with the forward pass.

The library starts a filter's `prepare_logit_mask` in a worker as soon as the forward pass is under way.
Decides
nothing: the sampler asks the matcher, and finds the answer ready.
"""

from __future__ import annotations

from typing import Any

from exllamav2.generator.filters import ExLlamaV2Filter

from engine_service.backends.generation import Matcher
from engine_service.backends.sampling import TokenIds


class PreparedMatcher:
    """A matcher whose next answer can be computed ahead. One thread at a time."""

    __slots__ = ("_allowed", "_matcher")

    def __init__(self, matcher: Matcher) -> None:
        """Wrap a matcher at the beginning of an output."""
        self._matcher = matcher
        self._allowed: TokenIds | Exception | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow any more."""
        return self._matcher.is_complete

    def prepare(self) -> None:
        """Compute what may come next. Never raises: a failure is told to the one who asks."""
        try:
            self._allowed = self._matcher.allowed_ids()
        except Exception as error:
            self._allowed = error

    def allows(self, token_id: int) -> bool:
        """Return whether this one token may come next."""
        return self._matcher.allows(token_id)

    def allowed_ids(self) -> TokenIds:
        """Return every token that may come next, ascending."""
        if self._allowed is None:
            self.prepare()
        allowed = self._allowed
        if isinstance(allowed, Exception):
            raise allowed
        assert allowed is not None
        return allowed

    def accept(self, token_id: int) -> None:
        """Advance by a token; raise ValueError if the grammar does not allow it."""
        self._allowed = None
        self._matcher.accept(token_id)


class MaskFilter(ExLlamaV2Filter):  # type: ignore[misc]
    """Tells the library when to prepare a matcher. Never raises, and filters nothing by itself."""

    def __init__(self, model: Any, tokenizer: Any, matcher: PreparedMatcher) -> None:
        """Prepare that matcher."""
        super().__init__(model, tokenizer)
        self._matcher = matcher

    def begin(self, prefix_str: str) -> None:
        """Do nothing: the matcher begins with its request."""

    def feed(self, token: Any) -> None:
        """Do nothing: the matcher has accepted the token when it was chosen."""

    def use_background_worker(self) -> bool:
        """Return that preparing is worth a worker."""
        return True

    def can_mask_logits(self) -> bool:
        """Return that a mask is prepared, not a list of tokens."""
        return True

    def prepare_logit_mask(self) -> bool:
        """Compute what may come next."""
        self._matcher.prepare()
        return True
