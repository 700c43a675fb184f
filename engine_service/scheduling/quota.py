"""Token quotas: by local day, and over any window of time.

Knows days by the name the shell gives them; never computes a date, so days of 23 and 25 hours and jumps
of the wall clock are the shell's business and cannot free or lock anyone here.

Rules
* Spending is counted in tokens (computed prompt plus output), as they are computed.
* A day that was already seen resets nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine_service.scheduling.model import Resident, ResidentId
from engine_service.scheduling.windows import WindowSum


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

    def export(self) -> dict[str, object]:
        """Return the day and what was spent on it."""
        return {"day": self._day, "spent": dict(self._spent)}

    def restore(self, day: str, spent: Mapping[ResidentId, int]) -> None:
        """Take over what `export` returned; the limits stay."""
        self._day, self._spent = day, dict(spent)


class RollingQuota:
    """What each resident may still spend in the window that ends now (monotonic seconds)."""

    def __init__(self) -> None:
        """Limit nobody."""
        self._limits: dict[ResidentId, tuple[int, bool]] = {}
        self._lengths: dict[ResidentId, float] = {}
        self._spent: dict[ResidentId, WindowSum] = {}

    def set_residents(self, residents: Iterable[Resident]) -> None:
        """Replace the limits; what was spent stays spent, unless the window's length changes."""
        limited = {r.resident_id: r for r in residents if r.rolling_tokens is not None}
        self._limits = {i: (r.rolling_tokens or 0, r.rolling_is_hard) for i, r in limited.items()}
        for resident_id, resident in limited.items():
            if self._lengths.get(resident_id) != resident.rolling_window_s:
                self._lengths[resident_id] = resident.rolling_window_s
                self._spent[resident_id] = WindowSum(resident.rolling_window_s)

    def spend(self, resident_id: ResidentId, tokens: int, *, now: float) -> None:
        """Count tokens (>= 0) if the resident has such a quota."""
        spent = self._spent.get(resident_id)
        if spent is not None:
            spent.add(tokens, now=now)

    def left(self, resident_id: ResidentId, *, now: float) -> int | None:
        """Return the tokens left in the window (>= 0), None without a quota."""
        limit = self._limits.get(resident_id)
        return None if limit is None else max(0, limit[0] - self._spent[resident_id].total(now=now))

    def exhausted(self, *, now: float) -> frozenset[ResidentId]:
        """Return who has nothing left."""
        limits = self._limits.items()
        return frozenset([r for r, (most, _) in limits if self._spent[r].has_reached(most, now=now)])

    def refused_for_s(self, resident_id: ResidentId, *, now: float) -> float | None:
        """Return the seconds until a hard quota accepts again, None if it accepts now or is soft."""
        most, is_hard = self._limits.get(resident_id, (0, False))
        if not is_hard or not self._spent[resident_id].has_reached(most, now=now):
            return None
        return self._spent[resident_id].below_in_s(most, now=now)

    def export(self, *, now: float) -> dict[str, object]:
        """Return every window with its length."""
        return {
            r: {"window_s": self._lengths[r], "slots": spent.export(now=now)}
            for r, spent in self._spent.items()
        }

    def restore(
        self, windows: Mapping[ResidentId, tuple[float, list[tuple[float, int]]]], *, now: float
    ) -> None:
        """Take over what `export` returned, for everybody; limits come with the residents."""
        self._lengths = {resident_id: window_s for resident_id, (window_s, _) in windows.items()}
        self._spent = {}
        for resident_id, (window_s, slots) in windows.items():
            self._spent[resident_id] = WindowSum(window_s)
            self._spent[resident_id].restore(slots, now=now)
        self._limits = {}
