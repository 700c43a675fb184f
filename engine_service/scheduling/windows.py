"""Sums over a sliding window of time, in whole units.

Decides nothing. The window is cut into slots, so that a sum costs a bounded amount of work and memory
however many charges fell into it; a charge leaves the window at most one slot late.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

_SLOTS = 24


class WindowSum:
    """Whole units added over the last window_s seconds (monotonic time, never going back)."""

    def __init__(self, window_s: float) -> None:
        """Start empty; window_s > 0."""
        self._slot_s = window_s / _SLOTS
        self._slots: deque[tuple[int, int]] = deque()
        self._total = 0

    def add(self, amount: int, *, now: float) -> None:
        """Add amount (>= 0) at now."""
        if amount <= 0:
            return
        self._expire(now)
        self._put(math.floor(now / self._slot_s), amount)

    def total(self, *, now: float) -> int:
        """Return the sum of what was added in (now - window_s, now]."""
        self._expire(now)
        return self._total

    def below_in_s(self, amount: int, *, now: float) -> float:
        """Return the seconds (>= 0) until `total` is less than amount if nothing is added."""
        left = self.total(now=now)
        for slot, held in self._slots:
            if left < amount:
                break
            left -= held
            freed_at = (slot + _SLOTS) * self._slot_s
            if left < amount:
                return max(0.0, freed_at - now)
        return 0.0

    def export(self, *, now: float) -> list[list[float | int]]:
        """Return (age in seconds, amount) of every slot, for `restore` on another clock."""
        self._expire(now)
        # The middle of a slot: rounding cannot push it into its neighbour.
        return [[now - (slot + 0.5) * self._slot_s, held] for slot, held in self._slots]

    def restore(self, slots: Iterable[tuple[float, int]], *, now: float) -> None:
        """Take over what `export` returned, oldest first; now belongs to this window's clock."""
        self._slots.clear()
        self._total = 0
        for age_s, amount in slots:
            self._put(math.floor((now - age_s) / self._slot_s), amount)
        self._expire(now)

    def has_reached(self, amount: int, *, now: float) -> bool:
        """Return whether `total` is at least amount; cheap as long as that is out of reach."""
        return self._total >= amount and self.total(now=now) >= amount

    def _put(self, slot: int, amount: int) -> None:
        if self._slots and self._slots[-1][0] >= slot:
            last, held = self._slots.pop()
            self._slots.append((last, held + amount))
        else:
            self._slots.append((slot, amount))
        self._total += amount

    def _expire(self, now: float) -> None:
        oldest = math.floor(now / self._slot_s) - _SLOTS
        while self._slots and self._slots[0][0] <= oldest:
            self._total -= self._slots.popleft()[1]
