"""Quantiles of what was measured: exact for lists, within a percent for streams of gaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_LOG_STEP: Final = math.log(1.01)
_LEAST: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """What a distribution looks like; None where nothing was measured. Seconds, unless said otherwise."""

    n: int
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


def of_values(values: Sequence[float]) -> Quantiles:
    """Return the exact quantiles (nearest rank)."""
    if not values:
        return Quantiles(n=0)
    ordered = sorted(values)

    def rank(q: float) -> float:
        return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]

    return Quantiles(
        n=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=rank(0.5),
        p95=rank(0.95),
        p99=rank(0.99),
        max=ordered[-1],
    )


class Histogram:
    """Counts of values in buckets that grow by 1 %: a quantile is at most that much too large."""

    __slots__ = ("_counts", "_max", "_sum", "num")

    def __init__(self) -> None:
        """Count nothing yet."""
        self._counts: dict[int, int] = {}
        self._sum = 0.0
        self._max = 0.0
        self.num = 0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value (>= 0) count times."""
        bucket = math.ceil(math.log(value / _LEAST) / _LOG_STEP) if value > _LEAST else 0
        self._counts[bucket] = self._counts.get(bucket, 0) + count
        self._sum += value * count
        self.num += count
        if value > self._max:
            self._max = value

    def merge(self, other: Histogram) -> None:
        """Count what the other counted."""
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self._sum += other._sum
        self.num += other.num
        self._max = max(self._max, other._max)

    def quantiles(self) -> Quantiles:
        """Return the quantiles of what was counted."""
        if not self.num:
            return Quantiles(n=0)
        return Quantiles(
            n=self.num,
            mean=self._sum / self.num,
            p50=self._quantile(0.5),
            p95=self._quantile(0.95),
            p99=self._quantile(0.99),
            max=self._max,
        )

    def _quantile(self, q: float) -> float:
        left = math.ceil(q * self.num)
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return min(self._max, _LEAST * math.exp(bucket * _LOG_STEP))
        return self._max
