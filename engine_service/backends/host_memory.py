"""How much memory this machine, or the container that this runs in, could still give to a model."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_GROUP: Final = Path("/sys/fs/cgroup")


def available_bytes(*, proc: Path = _PROC, group: Path = _GROUP) -> int | None:
    """Return what could be taken without swapping, at most what a container may; None where nobody says.

    Linux's own estimate where there is one (proc(5), MemAvailable), and the limit of control group v2, less
    what is used there but for cached files that would make room (as Kubernetes counts a working set).
    """
    available = _available(proc)
    with suppress(OSError, ValueError):  # no control group, or "max"
        left = int((group / "memory.max").read_text(encoding="ascii")) - _used(group)
        available = left if available is None else min(available, left)
    return available if available is None else max(0, available)


def whole_bytes(*, proc: Path = _PROC, group: Path = _GROUP) -> int | None:
    """Return all that this machine, or the container, could ever give, swap included; None where nobody says.

    What takes more than that does not work whatever else is ended or swapped out.
    """
    there = _in_all(proc)
    with suppress(OSError, ValueError):  # no control group, or "max" of one of them
        limits = ("memory.max", "memory.swap.max")
        most = sum(int((group / name).read_text(encoding="ascii")) for name in limits)
        there = most if there is None else min(there, most)
    return there


def _in_all(proc: Path) -> int | None:
    try:
        entries = dict(
            line.split(":", maxsplit=1)
            for line in (proc / "meminfo").read_text(encoding="ascii").splitlines()
            if ":" in line
        )
        return sum(int(entries[key].split()[0]) * 1024 for key in ("MemTotal", "SwapTotal"))
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _used(group: Path) -> int:
    used = int((group / "memory.current").read_text(encoding="ascii"))
    for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
        if line.startswith("inactive_file "):
            return used - int(line.split()[1])
    return used


def _available(proc: Path) -> int | None:
    try:
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
