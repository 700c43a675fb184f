"""Token quotas by local day.

Knows days by the name the shell gives them; never computes a date, so days of 23 and 25 hours and jumps
of the wall clock are the shell's business and cannot free or lock anyone here.

Rules
* Spending is counted in tokens (computed prompt plus output), as they are computed.
* A day that was already seen resets nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_service.scheduling.model import Resident, ResidentId


class DailyQuota:
    """What each resident may still spend today."""

    def __init__(self) -> None:
        """Start before the first day."""
        self._limits: dict[ResidentId, tuple[int, bool]] = {}
        self._spent: dict[ResidentId, int] = {}
        self._day = ""
        self._ends_at: float | None = None

    def set_residents(self, residents: Iterable[Resident]) -> None:
        """Replace the limits; what was spent today stays spent."""
        self._limits = {
            r.resident_id: (r.daily_tokens, r.daily_is_hard) for r in residents if r.daily_tokens is not None
        }

    def start_day(self, day: str, *, ends_at: float) -> None:
        """Begin the local day (ISO date), expected to end at monotonic ends_at."""
        self._ends_at = ends_at
        if day > self._day:
            self._day = day
            self._spent.clear()

    def spend(self, resident_id: ResidentId, tokens: int) -> None:
        """Count tokens (>= 0) against today."""
        self._spent[resident_id] = self._spent.get(resident_id, 0) + tokens

    def left(self, resident_id: ResidentId) -> int | None:
        """Return the tokens left today (>= 0), None without a quota."""
        limit = self._limits.get(resident_id)
        return None if limit is None else max(0, limit[0] - self._spent.get(resident_id, 0))

    def is_spent(self, resident_id: ResidentId) -> bool:
        """Return whether nothing is left today."""
        return self.left(resident_id) == 0

    def exhausted(self) -> frozenset[ResidentId]:
        """Return who has nothing left today."""
        return frozenset([resident_id for resident_id in self._limits if self.is_spent(resident_id)])

    def is_hard(self, resident_id: ResidentId) -> bool:
        """Return whether an exhausted quota rejects instead of demoting."""
        limit = self._limits.get(resident_id)
        return limit is not None and limit[1]

    def resets_in_s(self, *, now: float) -> float | None:
        """Return the seconds until the day ends, None if no day began yet."""
        return None if self._ends_at is None else max(0.0, self._ends_at - now)
