"""What was served, kept on disk: counters, quotas and totals as they were told to anybody.

Decides nothing. The engine writes after every iteration and before its text leaves, so that whoever saw an
answer finds it counted after a kill. Two files are written in turn, each with its number, length and
checksum: a write cut short leaves the one before. Nothing waits for the disk itself; a power cut may take
back what the system had not written yet, a kill takes nothing. Knows no scheduler: a snapshot is a JSON
value.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_LOGGER = logging.getLogger(__name__)

_HEAD_BYTES: Final = 48  #: number, length, checksum, each 15 digits and a blank or line end


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What an earlier engine left."""

    snapshot: Any
    elapsed_s: float  #: wall-clock seconds since it was written, >= 0


class Ledger:
    """The two files of one state folder. Not thread-safe: once the engine runs, its courier alone writes."""

    def __init__(self, folder: Path, *, wall_clock: Callable[[], float] = time.time):
        """Keep the ledger in folder; nothing is touched before `load`. wall_clock: seconds since 1970."""
        self._paths = (folder / "ledger.0", folder / "ledger.1")
        self._wall_clock = wall_clock
        self._files: list[int] = []
        self._number = 0
        self._is_failing = False

    def load(self) -> Kept | None:
        """Open the files and return what was kept last, None if nothing; what is damaged is set aside."""
        found = [entry for path in self._paths if (entry := self._read(path)) is not None]
        has_content = any(path.exists() and path.stat().st_size for path in self._paths)
        if has_content and not found:
            self.set_aside("both files are damaged")
        self._open()
        if not found:
            return None
        self._number, message = max(found, key=lambda entry: entry[0])
        return Kept(snapshot=message["snapshot"], elapsed_s=max(0.0, self._wall_clock() - message["at"]))

    def set_aside(self, reason: str) -> None:
        """Move the files away, and say so: what was served counts from zero."""
        suffix = f".damaged-{time.strftime('%Y%m%dT%H%M%S')}"
        for path in self._paths:
            if path.exists():
                path.replace(path.with_name(path.name + suffix))
        _LOGGER.error(
            "What was served so far cannot be read (%s). It is set aside as %s%s, and counting begins anew.",
            reason,
            self._paths[0],
            suffix,
        )
        if self._files:
            self.close()
            self._open()

    def write(self, snapshot: Any) -> None:
        """Keep a snapshot. A disk that does not take it is logged once; serving goes on."""
        if not self._files:
            return
        number = self._number + 1
        message = {"at": self._wall_clock(), "snapshot": snapshot}
        body = json.dumps(message, separators=(",", ":")).encode()
        content = b"%15d %15d %15d\n" % (number, len(body), zlib.crc32(body)) + body
        try:
            if os.pwrite(self._files[number % 2], content, 0) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._is_failing:
                _LOGGER.error("What is served cannot be kept: %s", error.strerror)
            self._is_failing = True
        else:
            # Only now: what could not be written is written to the same file again, the other stays whole.
            self._number = number
            self._is_failing = False

    def close(self) -> None:
        """Bring what was written to the disk itself and close."""
        for file in self._files:
            os.fsync(file)
            os.close(file)
        self._files = []

    def _open(self) -> None:
        files: list[int] = []
        try:
            for path in self._paths:
                files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._files = files
        except OSError as error:
            for file in files:
                os.close(file)
            _LOGGER.error("What is served cannot be kept in %s: %s", self._paths[0].parent, error.strerror)

    def _read(self, path: Path) -> tuple[int, dict[str, Any]] | None:
        """Return number and message of a file, None for one that is missing or was cut short."""
        try:
            content = path.read_bytes()
            number, length, checksum = (int(part) for part in content[:_HEAD_BYTES].split())
            body = content[_HEAD_BYTES : _HEAD_BYTES + length]
            if len(body) != length or zlib.crc32(body) != checksum:
                return None
            message = json.loads(body)
            if not isinstance(message, dict) or not {"at", "snapshot"} <= message.keys():
                return None
        except (OSError, ValueError):
            return None
        return number, message
