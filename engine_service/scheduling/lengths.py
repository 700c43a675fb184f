"""How long an answer will probably be: the mean of the last answers of the same class and resident.

Knows flows and token counts; no requests, no time. Nothing depends on it being right: a forecast decides how
much memory is set aside at admission, and what was set aside too little is added slice by slice.

Source: the length prediction of Virtual Token Counter (Sheng et al., OSDI 2024, section 4.4). Differs: per
class and resident, because one resident's summaries say nothing about the same resident's chats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

_REMEMBERED = 5


class OutputLengths:
    """Forecasts the output tokens of a flow's next request."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._seen: dict[Hashable, deque[int]] = {}
        self._mean: dict[Hashable, int] = {}

    def note(self, flow_id: Hashable, output: int) -> None:
        """Remember a finished answer's tokens (>= 0)."""
        seen = self._seen.setdefault(flow_id, deque(maxlen=_REMEMBERED))
        seen.append(output)
        self._mean[flow_id] = -(-sum(seen) // len(seen))

    def expected(self, flow_id: Hashable, *, most: int) -> int | None:
        """Return the output to expect, at most `most`; None before any answer was seen."""
        mean = self._mean.get(flow_id)
        return None if mean is None else min(most, mean)

    def export(self) -> list[tuple[Hashable, list[int]]]:
        """Return what is remembered, oldest answer first."""
        return [(flow_id, list(seen)) for flow_id, seen in self._seen.items()]

    def restore(self, seen: Iterable[tuple[Hashable, list[int]]]) -> None:
        """Take over what `export` returned."""
        self._seen, self._mean = {}, {}
        for flow_id, outputs in seen:
            for output in outputs:
                self.note(flow_id, output)
