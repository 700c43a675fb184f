"""Notices when the machine itself stands still: a virtual one that is paused or throttled, or overloaded.

No policy can answer while nothing runs, so figures measured then say nothing about any. They are not
corrected for it; the reader is told.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final, Self

_NAP_S: Final = 0.02
_STALL_S: Final = 0.15
"""A thread that slept for _NAP_S and ran again only after this much longer did not get the processor."""


class StallWatch:
    """Adds up, for the length of a block, the time in which a waiting thread was not run."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.stalled_s = 0.0
        self.longest_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_NAP_S):
            now = time.monotonic()
            late_s = now - last - _NAP_S
            if late_s > _STALL_S:
                self.stalled_s += late_s
                self.longest_s = max(self.longest_s, late_s)
            last = now
