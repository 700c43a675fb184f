"""Takes what an iteration gave from the engine thread to the ledger and then to the event loop.

Decides nothing. Between two iterations the device stands still, so the engine thread only leaves a note here
and goes on. Were it to wake the event loop itself, the loop's thread would take Python's lock at once and
keep the engine thread waiting: 0.5 ms of every iteration (measured, two processors). The courier gets the
lock when the engine thread is inside of the backend.

Rule: notes are taken in order, and text leaves only when the ledger has what it cost.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from engine_service.engine.ledger import Ledger

_LOGGER = logging.getLogger(__name__)

Delivery = Callable[[], None]


class Courier:
    """One thread between the engine's and the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ledger: Ledger | None) -> None:
        """Deliver to that loop; nothing runs before `start`. The ledger is written by nobody else."""
        self._loop = loop
        self._ledger = ledger
        self._notes: SimpleQueue[tuple[Any, Delivery | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fairhearth-courier", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def leave(self, snapshot: Any, delivery: Delivery | None) -> None:
        """Let the snapshot be kept (None: nothing), then call delivery in the event loop (any thread)."""
        self._notes.put((snapshot, delivery))

    def stop(self, within_s: float) -> bool:
        """Carry what was left and end; return False if that takes longer than within_s."""
        self._notes.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (note := self._notes.get()) is not None:
            snapshot, delivery = note
            try:
                if snapshot is not None and self._ledger is not None:
                    self._ledger.write(snapshot)
            except Exception:
                _LOGGER.exception("What was served could not be kept")
            if delivery is not None:
                self._deliver(delivery)

    def _deliver(self, delivery: Delivery) -> None:
        try:
            self._loop.call_soon_threadsafe(delivery)
        except RuntimeError:
            _LOGGER.debug("The event loop closed before the last results were delivered")
