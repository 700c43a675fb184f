"""Tells ExLlamaV3 when to prepare a grammar's mask.

The library starts a filter's `get_next_logit_mask` in a worker just before the forward pass.
"""

from __future__ import annotations

from exllamav3 import Filter

from engine_service.backends.exllama.masks import PreparedMatcher


class MaskFilter(Filter):  # type: ignore[misc]
    """Prepares a matcher when the library asks for a mask. Never raises, and filters nothing by itself."""

    def __init__(self, matcher: PreparedMatcher) -> None:
        """Prepare that matcher."""
        super().__init__(None, trigger_token=None, prefix_str=None, eos_after_completed=False)
        self._matcher = matcher

    def use_background_worker(self) -> bool:
        """Return that preparing is worth a worker."""
        return True

    def get_next_logit_mask(self) -> None:
        """Compute what may come next; the sampler asks the matcher for it."""
        self._matcher.prepare()

    def reset(self) -> None:
        """Do nothing: the matcher begins with its request."""

    def accept_token(self, token: int) -> None:
        """Do nothing: the matcher has accepted the token when it was chosen."""

    def is_completed(self) -> bool:
        """Return that this filter ends nothing."""
        return False
