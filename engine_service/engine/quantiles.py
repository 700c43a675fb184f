"""Quantiles and the maximum over a sliding window of time.

Decides nothing. The window is a ring of DDSketch sketches (Masson, Rim, Lee, VLDB 2019; relative error
1 %), one per slot; a value leaves the window at most one slot late. Sketches merge exactly, so a window is
the merge of its slots.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from ddsketch import DDSketch

_RELATIVE_ERROR = 0.01
_SLOTS = 6
_MOST_NEW = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """What a window says; None where nothing was measured."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None
    last: float | None

    def as_dict(self) -> dict[str, float | int | None]:
        """Return the wire form (docs/wire.md)."""
        return {"count": self.count, "p50": self.p50, "p95": self.p95, "p99": self.p99, "last": self.last}


class WindowedQuantiles:
    """Durations (seconds, >= 0) of the last window_s seconds."""

    def __init__(self, window_s: float) -> None:
        """Start empty; window_s > 0."""
        self._slot_s = window_s / _SLOTS
        self._slots: deque[tuple[int, DDSketch]] = deque()
        self._new: deque[tuple[float, float]] = deque()  #: (value, when), not in a sketch yet
        self._lock = threading.Lock()
        self._last: float | None = None

    def add(self, value_s: float, *, now: float) -> None:
        """Add one measured duration. Costs next to nothing: the device stands still meanwhile."""
        self._new.append((value_s, now))
        self._last = value_s
        if len(self._new) >= _MOST_NEW:
            self._take_in()

    def _take_in(self) -> None:
        with self._lock:  # a reader and the engine's thread may come at once
            while self._new:
                value_s, now = self._new.popleft()
                slot = int(now / self._slot_s)
                if not self._slots or self._slots[-1][0] < slot:
                    self._slots.append((slot, DDSketch(_RELATIVE_ERROR)))
                self._slots[-1][1].add(max(0.0, value_s))

    def read(self, *, now: float) -> Quantiles:
        """Return the quantiles of the window."""
        self._take_in()
        oldest = int(now / self._slot_s) - _SLOTS
        while self._slots and self._slots[0][0] <= oldest:
            self._slots.popleft()
        if not self._slots:
            return Quantiles(count=0, p50=None, p95=None, p99=None, last=self._last)
        merged = DDSketch(_RELATIVE_ERROR)
        for _, sketch in self._slots:
            merged.merge(sketch)
        return Quantiles(
            count=int(merged.count),
            p50=_rounded(merged, 0.5),
            p95=_rounded(merged, 0.95),
            p99=_rounded(merged, 0.99),
            last=self._last,
        )


class WindowedMaximum:
    """The longest of the durations (seconds, >= 0) of the last window_s seconds."""

    def __init__(self, window_s: float) -> None:
        """Start empty; window_s > 0."""
        self._slot_s = window_s / _SLOTS
        self._slots: deque[tuple[int, float]] = deque()

    def add(self, value_s: float, *, now: float) -> None:
        """Add one measured duration."""
        slot = int(now / self._slot_s)
        if self._slots and self._slots[-1][0] >= slot:
            last, longest = self._slots.pop()
            self._slots.append((last, max(longest, value_s)))
        else:
            self._slots.append((slot, value_s))

    def read(self, *, now: float) -> float | None:
        """Return the longest of the window, None where nothing was measured."""
        oldest = int(now / self._slot_s) - _SLOTS
        while self._slots and self._slots[0][0] <= oldest:
            self._slots.popleft()
        return max((longest for _, longest in self._slots), default=None)


def _rounded(sketch: DDSketch, quantile: float) -> float | None:
    value = sketch.get_quantile_value(quantile)
    return None if value is None else round(float(value), 6)
