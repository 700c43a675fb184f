"""Tells ExLlamaV2 when to prepare a grammar's mask.

The library starts a filter's `prepare_logit_mask` in a worker as soon as the forward pass is under way.
"""

from __future__ import annotations

from typing import Any

from exllamav2.generator.filters import ExLlamaV2Filter

from engine_service.backends.exllama.masks import PreparedMatcher


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
