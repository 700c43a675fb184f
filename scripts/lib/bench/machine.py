"""How busy the machine is, and with whose work. Linux only: reads /proc.

Decides when a measurement may begin and how much of it was disturbed; never what is measured.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_WINDOW_S: Final = 0.25
_WINDOWS: Final = 3
_BEAT_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    busy_s: float  # of all processors together, stolen time included
    own_s: float  # of the watched processes and this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What others did to a measurement."""

    foreign_share: float  #: part of all processors that other processes took, 0 to 1
    standstill_s: float  #: longest time in which this process itself did not run

    @property
    def is_slight(self) -> bool:
        """Return whether the measurement may count without a second look."""
        return self.foreign_share <= 0.1 and not self.is_void

    @property
    def is_void(self) -> bool:
        """Return whether the machine stood still (a paused virtual machine, a stopped process)."""
        return self.standstill_s > 1.0


def busy_seconds(stat: str) -> float:
    """Return the processor seconds that were not idle, from the text of /proc/stat.

    Fields: user nice system idle iowait irq softirq steal; guest time is contained in user time.
    """
    fields = [int(field) for field in stat.split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS_PER_S


def process_seconds(stat: str) -> float:
    """Return user plus system seconds of a process, from the text of /proc/PID/stat.

    The command's name may hold blanks and brackets: counted from the last one, the times are fields 12, 13.
    """
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _read(pids: Sequence[int]) -> _Reading:
    own = sum(process_seconds(Path(f"/proc/{pid}/stat").read_text()) for pid in (os.getpid(), *pids))
    return _Reading(time.monotonic(), busy_seconds(Path("/proc/stat").read_text()), own)


class Watch:
    """Observes the machine while a measurement runs. Use as an asynchronous context manager."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        """Count the work of these processes, and of this one, as our own."""
        self._pids = tuple(pids)
        self._longest_s = 0.0

    async def __aenter__(self) -> Self:
        """Begin."""
        self._start = _read(self._pids)
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End; `disturbance` is known from now on."""
        self._beating.cancel()
        self._end = _read(self._pids)

    async def _beat(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_BEAT_S)
            self._longest_s = max(self._longest_s, time.monotonic() - before - _BEAT_S)

    @property
    def disturbance(self) -> Disturbance:
        """What others did between beginning and end."""
        start, end = self._start, self._end
        whole_s = (end.at - start.at) * (os.cpu_count() or 1)
        foreign_s = (end.busy_s - start.busy_s) - (end.own_s - start.own_s)
        share = min(1.0, max(0.0, foreign_s / whole_s)) if whole_s > 0 else 0.0
        return Disturbance(foreign_share=share, standstill_s=self._longest_s)


async def idle_window(*, most_busy: float = 0.1, max_wait_s: float) -> bool:
    """Wait, at most max_wait_s, until the machine has been idle for a moment; return whether it was."""
    deadline = time.monotonic() + max_wait_s
    num_quiet = 0
    while num_quiet < _WINDOWS:
        if time.monotonic() >= deadline:
            return False
        async with Watch() as watch:
            await asyncio.sleep(_WINDOW_S)
        num_quiet = num_quiet + 1 if watch.disturbance.foreign_share <= most_busy else 0
    return True
