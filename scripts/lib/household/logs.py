"""What counts as an error in the logs of the two programs, and which lines are known and harmless.

Both logs are records that begin with a time; lines without one (a traceback) belong to the record before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_RECORD: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+\S* (?P<level>[A-Z]+) ")
_LOOSE_FAULT: Final = re.compile(r"Traceback |Segmentation fault|Fatal Python error|Exception ignored|Killed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """A record that says nothing about the programs under test."""

    pattern: re.Pattern[str]
    reason: str


ALLOWED: Final = (
    Allowed(
        pattern=re.compile(r"ERROR \(MainThread\) \[haffmpeg\.core\] FFmpeg fails .*'ffmpeg'$"),
        reason="this system has no ffmpeg; nothing here plays sound",
    ),
    Allowed(
        pattern=re.compile(r"\[homeassistant\.components\.camera\.img_util\] Error loading libturbojpeg;"),
        reason="this system has no libturbojpeg; there is no camera",
    ),
)


def faults(path: Path) -> list[str]:
    """Return the first line of every record that tells of an error, those that are allowed left out."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        return list(_faults(file))


def _faults(lines: Iterable[str]) -> Iterator[str]:
    is_in_record = False
    for line in lines:
        if record := _RECORD.match(line):
            is_in_record = True
            is_fault = record["level"] in ("ERROR", "CRITICAL", "FATAL")
            if is_fault and not any(allowed.pattern.search(line.rstrip()) for allowed in ALLOWED):
                yield line.rstrip()
        elif not is_in_record and _LOOSE_FAULT.match(line):
            yield line.rstrip()
