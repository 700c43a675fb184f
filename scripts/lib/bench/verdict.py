"""From pairs of measurements to a verdict. Pure.

Both servers are measured in turn (A B A B), a ratio is taken pair by pair, and the median of the ratios is
held against the bar: what drifts slowly on a shared machine falls out of a ratio, and one bad pair out of a
median.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What ours divided by the peer's must be."""

    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, ratio: float) -> bool:
        """Return whether a ratio is good enough; the bar itself is."""
        return (self.at_least is None or ratio >= self.at_least) and (
            self.at_most is None or ratio <= self.at_most
        )

    def __str__(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One measurement of each."""

    peer: float
    ours: float

    @property
    def ratio(self) -> float:
        """Ours divided by the peer's."""
        return self.ours / self.peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One figure, measured several times on both; without a bar it is only shown."""

    name: str
    unit: str
    setting: str  #: how the peer ran
    pairs: tuple[Pair, ...]
    bar: Bar | None = None

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(pair.ratio for pair in self.pairs)

    @property
    def passed(self) -> bool:
        """Return whether the bar is met, or none is set."""
        return self.bar is None or self.bar.is_met(self.ratio)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the share-quantile (0 to 1) of at least one value, interpolated between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def table(results: Sequence[Result]) -> str:
    """Return the results as lines of text in columns."""
    rows = [("", "peer", "ours", "ratio", "bar", "", "the peer's setting")]
    for result in results:
        peer = statistics.median(pair.peer for pair in result.pairs)
        ours = statistics.median(pair.ours for pair in result.pairs)
        word = "" if result.bar is None else ("ok" if result.passed else "MISSED")
        figures = (_shown(peer, result.unit), _shown(ours, result.unit), f"{result.ratio:.3f}")
        rows.append((result.name, *figures, str(result.bar or ""), word, result.setting))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 0 < i < 4 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _shown(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}" if value < 10 else f"{value:.1f} {unit}"
