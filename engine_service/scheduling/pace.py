"""How fast the device serves, and how much one request of a class usually takes: for forecasts only.

Decides nothing. Service is counted per second in which the device computed: an hour in which nobody asked for
anything does not make it slow. Units (micros of service) are those of the policy; where their meaning
changes, everything is measured anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from engine_service.scheduling.counters import Account
from engine_service.scheduling.model import MICRO, WorkloadClass
from engine_service.scheduling.windows import WindowSum

_WINDOW_S: Final = 60.0
_ENOUGH_S: Final = 1.0
"""Seconds of computing in the window from which on it says how fast the device is now."""


class Pace:
    """What was measured since the units of service were last changed."""

    def __init__(self, accounts: Mapping[WorkloadClass, Account]) -> None:
        """Leave out what the accounts hold already."""
        self._before = {c: (account.finished, account.service) for c, account in accounts.items()}
        self._service, self._busy = WindowSum(_WINDOW_S), WindowSum(_WINDOW_S)
        self._all_service = self._all_busy = 0

    def note(self, units: int, *, seconds: float, now: float) -> None:
        """Take over an iteration: what it served (micros, >= 0) and how long it took."""
        micros = max(0, round(seconds * MICRO))
        self._service.add(units, now=now)
        self._busy.add(micros, now=now)
        self._all_service += units
        self._all_busy += micros

    def per_second(self, *, now: float) -> float | None:
        """Return the service (micros) of a second of computing, None while nothing was served."""
        service, busy = self._service.total(now=now), self._busy.total(now=now)
        if busy < _ENOUGH_S * MICRO:
            service, busy = self._all_service, self._all_busy
        return service * MICRO / busy if service and busy else None

    def mean_service(
        self, accounts: Mapping[WorkloadClass, Account], classes: Collection[WorkloadClass]
    ) -> float | None:
        """Return the service (micros) of one request of these classes, None while none has finished."""
        finished = service = 0
        for class_id in classes:
            finished_before, service_before = self._before[class_id]
            finished += accounts[class_id].finished - finished_before
            service += accounts[class_id].service - service_before
        return service / finished if finished > 0 else None
