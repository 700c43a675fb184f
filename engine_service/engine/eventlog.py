"""The event log: what the core was told and what it answered, as JSON lines. Lengths and times, no text.

Replaying a log through a fresh scheduler gives the same decisions (`replay`): that is both the bug report
and the proof that the engine decides nothing by itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from engine_service.scheduling import decisions as decision_types, events as event_types, model
from engine_service.scheduling.decisions import Decision
from engine_service.scheduling.events import Event

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


class EventLog:
    """Appends one line per call of `Scheduler.handle`."""

    def __init__(self, path: Path) -> None:
        """Open path for appending; raises OSError if that cannot be."""
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, event: Event, decisions: list[Decision], *, now: float) -> None:
        """Note one turn of the core."""
        line = {"now": now, "event": encode(event), "decisions": [encode(d) for d in decisions]}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Write what is buffered and close."""
        self._file.close()


def read(path: Path) -> Iterator[tuple[float, Event, list[Decision]]]:
    """Yield (now, event, decisions) of every turn."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            turn = json.loads(line)
            yield turn["now"], decode(turn["event"]), [decode(d) for d in turn["decisions"]]
