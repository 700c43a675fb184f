"""The event log: what the core was told and what it answered, as JSON lines. Lengths and times, no text.

Replaying a log through a fresh scheduler gives the same decisions (`replay`): that is both the bug report
and the proof that the engine decides nothing by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO, cast

from engine_service.errors import SettingsError
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
        """Open path for appending; raise SettingsError if that cannot be, or another engine writes there.

        A file is full at max_bytes (> 0); num_kept (>= 1) full ones are kept beside the one being written.
        """
        if max_bytes < 1 or num_kept < 1:
            raise ValueError(f"max_bytes and num_kept must be >= 1, not {max_bytes} and {num_kept}")
        self._path = path
        self._max_bytes = max_bytes
        self._num_kept = num_kept
        self._standing: dict[type[Event], str] = {}
        try:
            self._file: TextIO | None = _opened(path, "a")
            self._num_bytes = path.stat().st_size
            self._end_cut_line(self._file)
        except BlockingIOError:
            raise SettingsError(f"{path}: another engine writes its event log there") from None
        except OSError as error:
            raise SettingsError(f"{path}: the event log cannot be written: {error.strerror}") from None

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

    def _end_cut_line(self, file: TextIO) -> None:
        """Begin a new line where the last one was cut by the end of its engine."""
        if self._num_bytes:
            with self._path.open("rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read(1) != b"\n":
                    self._append(file, "")

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
        fresh = _opened(self._path, "w")
        self._num_bytes = 0
        for kind in _STANDING:
            if kind in self._standing:
                self._append(fresh, self._standing[kind])
        return fresh

    def close(self) -> None:
        """Write what is buffered and close."""
        if self._file is not None:
            self._file.close()


def _opened(path: Path, mode: str) -> TextIO:
    """Open a file of the log and keep other engines from writing there, too; raise OSError."""
    file = cast(TextIO, path.open(mode, encoding="utf-8"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


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


class BrokenLog(ValueError):
    """A line that is none of an event log; the message says which and why."""


Turn = tuple[float, Event, list[Decision]]


def read(path: Path) -> Iterator[Turn]:
    """Yield (now, event, decisions) of every turn that is kept, over all files of a rotated log.

    Where its beginning is kept no longer, it starts with what held then: policy, residents, capacity, day. A
    line that was cut by the end of its engine is left out. Raises OSError, BrokenLog.
    """
    for i, part in enumerate(files(path)):
        with part.open(encoding="utf-8") as file:
            for turn, is_again in _turns(file, part):
                if i == 0 or not is_again:
                    yield turn


def _broken(number: int, error: Exception) -> BrokenLog:
    if isinstance(error, json.JSONDecodeError):  # which knows of one line only
        return BrokenLog(f"line {number}, column {error.colno}: {error.msg}")
    return BrokenLog(f"line {number}: {type(error).__name__}: {error}")


def _turns(file: TextIO, path: Path) -> Iterator[tuple[Turn, bool]]:
    """Yield the turns of one file and whether each only says again what held at its beginning."""
    broken: BrokenLog | None = None
    num_whole = 0
    for number, line in enumerate(file, start=1):
        try:
            raw = json.loads(line)
            turn = float(raw["now"]), decode(raw["event"]), [decode(d) for d in raw["decisions"]]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if broken is not None or not num_whole:
                raise _broken(number, error) from None
            broken = _broken(number, error)
            continue
        # An engine begins by telling the policy; what was cut before is the end of another one's log.
        if broken is not None and not isinstance(turn[1], event_types.PolicyChanged):
            raise broken
        broken, num_whole = None, num_whole + 1
        yield turn, "again" in raw
    if broken is not None:
        _LOGGER.warning("%s: %s: the last line was cut and is left out", path, broken)
