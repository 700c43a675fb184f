"""The event log: what the core was told and what it answered, as JSON lines. Lengths and times, no text.

Replaying a log through a fresh scheduler gives the same decisions (`replay`): that is both the bug report
and the proof that the engine decides nothing by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from engine_service.scheduling import decisions as decision_types, events as event_types, model
from engine_service.scheduling.decisions import Decision
from engine_service.scheduling.events import Event

_LOGGER = logging.getLogger(__name__)

_TYPES = {
    cls.__name__: cls
    for module in (event_types, decision_types, model)
    for cls in vars(module).values()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls)
}
_ENUMS = {
    "class_id": model.WorkloadClass,
    "mode": model.PreemptionMode,
    "reason": model.RejectReason,
    "fairness": model.FairnessGoal,
    "unit": model.ServiceUnit,
}


def encode(value: Any) -> Any:
    """Return a JSON value for an event, a decision or a part of one."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {encode(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def decode(value: Any, name: str = "") -> Any:
    """Return what `encode` was given."""
    if isinstance(value, dict) and "type" in value:
        cls = _TYPES[value["type"]]
        return cls(**{key: decode(item, key) for key, item in value.items() if key != "type"})
    if isinstance(value, dict):
        keyed = {model.WorkloadClass(key): decode(item) for key, item in value.items()}
        return MappingProxyType(keyed)
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if isinstance(value, str) and name in _ENUMS:
        return _ENUMS[name](value)
    return value


_STANDING = (
    event_types.PolicyChanged,
    event_types.ResidentsChanged,
    event_types.CapacityChanged,
    event_types.DayStarted,
)
"""What holds until it is told anew: every file of a rotated log begins with the last of each."""


class EventLog:
    """Appends one line per call of `Scheduler.handle`; full files are kept as FILE.1 (the newest), FILE.2 ...

    A log that cannot be written any more (the disk is full) is given up with one line in the program's log:
    serving goes on.
    """

    def __init__(self, path: Path, *, max_bytes: int = 64 * 2**20, num_kept: int = 3) -> None:
        """Open path for appending; raises OSError if that cannot be.

        A file is full at max_bytes (> 0); num_kept (>= 1) full ones are kept beside the one being written.
        """
        if max_bytes < 1 or num_kept < 1:
            raise ValueError(f"max_bytes and num_kept must be >= 1, not {max_bytes} and {num_kept}")
        self._path = path
        self._max_bytes = max_bytes
        self._num_kept = num_kept
        self._standing: dict[type[Event], str] = {}
        self._file: TextIO | None = path.open("a", encoding="utf-8")
        self._num_bytes = path.stat().st_size

    def write(self, event: Event, decisions: list[Decision], *, now: float) -> None:
        """Note one turn of the core."""
        if self._file is None:
            return
        turn = {"now": now, "event": encode(event), "decisions": [encode(d) for d in decisions]}
        try:
            if self._num_bytes >= self._max_bytes:
                self._file = self._rotate(self._file)
            self._append(self._file, json.dumps(turn, separators=(",", ":")))
        except OSError as error:
            _LOGGER.error("%s: %s; nothing more is recorded", self._path, error.strerror)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
            return
        if isinstance(event, _STANDING):
            again = {"now": now, "event": turn["event"], "decisions": [], "again": True}
            self._standing[type(event)] = json.dumps(again, separators=(",", ":"))

    def _append(self, file: TextIO, line: str) -> None:
        file.write(line + "\n")
        self._num_bytes += len(line) + 1  # all of it is ASCII

    def _rotate(self, file: TextIO) -> TextIO:
        file.close()
        for age in range(self._num_kept - 1, 0, -1):
            older = _rotated(self._path, age)
            if older.exists():
                older.replace(_rotated(self._path, age + 1))
        self._path.replace(_rotated(self._path, 1))
        fresh = self._path.open("w", encoding="utf-8")
        self._num_bytes = 0
        for kind in _STANDING:
            if kind in self._standing:
                self._append(fresh, self._standing[kind])
        return fresh

    def close(self) -> None:
        """Write what is buffered and close."""
        if self._file is not None:
            self._file.close()


def _rotated(path: Path, age: int) -> Path:
    return path.with_name(f"{path.name}.{age}")


def files(path: Path) -> list[Path]:
    """Return the files of a log, oldest first: the full ones that are kept beside it, and the log itself."""
    full = []
    for age in itertools.count(1):
        if not _rotated(path, age).exists():
            break
        full.append(_rotated(path, age))
    return [*reversed(full), path]


def read(path: Path) -> Iterator[tuple[float, Event, list[Decision]]]:
    """Yield (now, event, decisions) of every turn that is kept, over all files of a rotated log.

    Where its beginning is kept no longer, it starts with what held then: policy, residents, capacity, day.
    """
    for i, part in enumerate(files(path)):
        with part.open(encoding="utf-8") as file:
            for line in file:
                turn = json.loads(line)
                if i == 0 or "again" not in turn:
                    yield turn["now"], decode(turn["event"]), [decode(d) for d in turn["decisions"]]
