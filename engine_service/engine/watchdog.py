"""When a backend counts as hanging. Decides only that; knows no thread and no backend."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

GRACE_S: Final = 5.0
"""How long an iteration that was told to stop may take to do so."""


class Alarm(StrEnum):
    """What to do about a turn that does not end."""

    ABORT = "abort"  #: it takes too long: tell it to stop
    GIVE_UP = "give_up"  #: it was told and did not: nothing will come of it any more


class Watchdog:
    """Counts how long the same turn has lasted.

    Between two looks at most twice the usual time is counted, so that a machine that stood still (asleep, a
    stopped process) is not taken for a backend that hangs.
    """

    def __init__(self, patience_s: float, *, look_every_s: float) -> None:
        """Let a turn last patience_s (> 0); `look` is called about every look_every_s."""
        self._patience_s = patience_s
        self._grace_s = min(GRACE_S, patience_s)
        self._most_s = 2 * look_every_s
        self._turn: int | None = None
        self._lasted_s = 0.0
        self._looked_at: float | None = None
        self._told: Alarm | None = None

    def look(self, turn: int | None, *, now: float) -> Alarm | None:
        """Return what to do about the turn under way (None: there is none); each alarm is given once."""
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, self._most_s)
        self._looked_at = now
        if turn is None or turn != self._turn:
            self._turn, self._lasted_s, self._told = turn, 0.0, None
            return None
        self._lasted_s += max(0.0, passed_s)
        if self._told is None and self._lasted_s >= self._patience_s:
            self._told = Alarm.ABORT
            return Alarm.ABORT
        if self._told is Alarm.ABORT and self._lasted_s >= self._patience_s + self._grace_s:
            self._told = Alarm.GIVE_UP
            return Alarm.GIVE_UP
        return None
