"""Holds an action back so that it happens at most once in a while. Knows neither engine nor entity."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from homeassistant.core import HomeAssistant, callback

PUBLISH_INTERVAL_S: Final = 1.0
"""Least seconds between two writes of one entity."""


class Pace:
    """Runs an action at once, or as soon as the last run is old enough; asked twice, it still runs once."""

    def __init__(
        self, hass: HomeAssistant, action: Callable[[], None], interval_s: float = PUBLISH_INTERVAL_S
    ) -> None:
        """Run the action at most once in interval_s seconds."""
        self._loop = hass.loop
        self._action = action
        self._interval_s = interval_s
        self._ran_at: float | None = None
        self._pending: asyncio.TimerHandle | None = None

    @callback
    def async_ask(self, *, at_once: bool = False) -> None:
        """Run the action soon; at once however recent the last run is, where that is asked."""
        due = None if self._ran_at is None or at_once else self._ran_at + self._interval_s
        if due is None or due <= self._loop.time():
            self.async_drop()
            self._run()
        elif self._pending is None:
            self._pending = self._loop.call_at(due, self._run)

    @callback
    def async_drop(self) -> None:
        """Forget a run that has not happened yet."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None

    def _run(self) -> None:
        self._pending = None
        self._ran_at = self._loop.time()
        self._action()
