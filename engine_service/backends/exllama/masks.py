"""A grammar's answer, asked for while the GPU is busy with the forward pass.

Decides nothing: the sampler asks the matcher, and finds the answer ready. The libraries' filters, which start
the preparation, are beside their jobs.
"""

from __future__ import annotations

from engine_service.backends.generation import Generation, Matcher
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


def matcher_to_prepare(generation: Generation) -> PreparedMatcher | None:
    """Return the request's matcher if its answer is worth preparing.

    A greedy output asks for the best token only, which needs no mask.
    """
    matcher = generation.matcher
    if isinstance(matcher, PreparedMatcher) and generation.order.sampling.temperature > 0:
        return matcher
    return None
