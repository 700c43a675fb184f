"""Takes what iterations gave from the engine thread to the ledger and then to the event loop.

Decides when: a first token, an end and an error at once, the tokens between them together with those that
come within some hundredths of a second. Between two iterations the device stands still, so the engine thread
only leaves a parcel here and goes on. Were it to wake the event loop itself, the loop's thread would take
Python's lock at once and keep the engine thread waiting: 0.5 ms of every iteration (measured, two
processors). The courier gets the lock when the engine thread is inside of the backend.

A small model writes a token in less time than it takes to tell of one: were each told by itself, the event
loop would take from the device's own processors what it needs for that. Nobody reads 25 pieces of text in a
second.

Rule: parcels are taken in order, and text leaves only when the ledger has what it cost. Whoever tells a
counter waits for the same (`kept`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from engine_service.engine.ledger import Ledger

_LOGGER = logging.getLogger(__name__)

GATHER_S: Final = 0.08
"""What is not urgent waits at most this long, in seconds, after the delivery before it."""
_MOST_GATHERED: Final = 16
"""Parcels that are taken even sooner: what lies here, the engine's thread has to wait for in the end."""

Parcel = TypeVar("Parcel")


class Courier(Generic[Parcel]):
    """One thread between the engine's and the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[Sequence[Parcel]], None],
        *,
        ledger: Ledger | None = None,
        snapshot: Callable[[], Any] = lambda: None,
        gather_s: float = GATHER_S,
    ) -> None:
        """Call deliver in that loop; nothing runs before `start`.

        The ledger is written by nobody else. snapshot returns all that was served until it is called (any
        thread), None: nothing is to be kept.
        """
        self._loop = loop
        self._deliver = deliver
        self._ledger = ledger
        self._snapshot = snapshot
        self._gather_s = gather_s
        self._wakeup = threading.Condition(threading.Lock())
        self._parcels: list[Parcel] = []
        self._has_served = False
        self._awaited: list[asyncio.Future[None]] = []
        self._is_urgent = False
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="fairhearth-courier", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def leave(self, *parcels: Parcel, has_served: bool = False, is_urgent: bool = True) -> None:
        """Have the parcels delivered (any thread); where something was served, once that is kept."""
        with self._wakeup:
            was_empty = not (self._parcels or self._has_served)
            self._parcels += parcels
            self._has_served |= has_served
            self._is_urgent |= is_urgent or len(self._parcels) >= _MOST_GATHERED
            if was_empty or self._is_urgent:
                self._wakeup.notify()

    async def kept(self) -> None:
        """Wait until all that was served before this call is in the ledger (event loop)."""
        written = self._loop.create_future()
        with self._wakeup:
            self._awaited.append(written)
            self._has_served = self._is_urgent = True
            self._wakeup.notify()
        await written

    def stop(self, within_s: float) -> bool:
        """Carry what was left and end; return False if that takes longer than within_s."""
        with self._wakeup:
            self._is_stopped = True
            self._wakeup.notify()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        not_before = 0.0
        while True:
            with self._wakeup:
                # First the wait for the clock: until then, only what is urgent wakes this thread.
                while not self._is_due and (left_s := not_before - time.monotonic()) > 0:
                    self._wakeup.wait(left_s)
                while not (self._parcels or self._has_served or self._is_stopped):
                    self._wakeup.wait()
                parcels, self._parcels = self._parcels, []
                has_served, self._has_served = self._has_served, False
                awaited, self._awaited = self._awaited, []
                self._is_urgent = False
            if not (parcels or has_served):
                return
            self._carry(parcels, awaited, has_served=has_served)
            not_before = time.monotonic() + self._gather_s

    @property
    def _is_due(self) -> bool:
        return self._is_urgent or self._is_stopped

    def _carry(
        self, parcels: list[Parcel], awaited: Sequence[asyncio.Future[None]], *, has_served: bool
    ) -> None:
        try:
            if has_served and self._ledger is not None and (snapshot := self._snapshot()) is not None:
                self._ledger.write(snapshot)
        except Exception:
            _LOGGER.exception("What was served could not be kept")
        try:
            if parcels:
                self._loop.call_soon_threadsafe(self._deliver, parcels)
            if awaited:
                self._loop.call_soon_threadsafe(_tell, awaited)
        except RuntimeError:
            _LOGGER.debug("The event loop closed before the last results were delivered")


def _tell(awaited: Sequence[asyncio.Future[None]]) -> None:
    """Let those go on who are still there (event loop)."""
    for written in awaited:
        if not written.done():
            written.set_result(None)
