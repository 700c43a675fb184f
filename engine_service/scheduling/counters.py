"""Virtual counters: what each resident has received, divided by weight, and where newcomers start.

Knows residents and service units; no requests, no pages, no time.

Source: Virtual Token Counter (Sheng et al., OSDI 2024, algorithm 2) with both branches of the lift.
Differs: charged as computed instead of at dispatch, whole micro-units instead of floats, recompute after
our own preemption is paid by a separate `system` account (the paper has no preemption).

Rules
* A counter never goes down, except that `rebase` subtracts the same amount from all of them, and that
  `repay` takes back what a forecast charged too much.
* A resident that becomes backlogged starts no lower than the least backlogged resident, or, when nobody
  waits, than the last resident that left the queue.
* The order of charges cannot change a sum: service is summed in whole units before it is divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine_service.scheduling.model import MICRO, ResidentId


@dataclass(slots=True, kw_only=True)
class Account:
    """Tokens and events of one resident or class since the start."""

    prefill_tokens: int = 0  #: computed
    cached_tokens: int = 0  #: found in a prefix cache, not computed, not charged
    decode_tokens: int = 0
    service: int = 0  #: service units charged
    finished: int = 0
    cancelled: int = 0
    rejected: int = 0
    preemptions: int = 0

    @property
    def tokens_served(self) -> int:
        """Computed prompt tokens plus output tokens."""
        return self.prefill_tokens + self.decode_tokens


class Counters:
    """One virtual counter per resident, in micro-units."""

    def __init__(self) -> None:
        """Know nobody."""
        self._weights: dict[ResidentId, int] = {}
        self._service: dict[ResidentId, int] = {}
        self._offset: dict[ResidentId, int] = {}
        self._ahead: dict[ResidentId, int] = {}  #: units charged by forecast and not yet computed
        self._last_left = 0
        self.system_service = 0  #: units paid by nobody: recompute, pinned prefixes

    def set_weights(self, weights: Mapping[ResidentId, int]) -> None:
        """Replace the weights (>= 1); counters keep their value, missing residents keep their weight."""
        for resident_id, weight in weights.items():
            before = self.value(resident_id) if resident_id in self._weights else 0
            self._weights[resident_id] = weight
            self._service.setdefault(resident_id, 0)
            units = self._service[resident_id] + self._ahead.get(resident_id, 0)
            self._offset[resident_id] = before - units * MICRO // weight

    def value(self, resident_id: ResidentId) -> int:
        """Return the counter in micro-units (>= 0)."""
        weight = self._weights[resident_id]
        units = self._service[resident_id] + self._ahead.get(resident_id, 0)
        return self._offset[resident_id] + units * MICRO // weight

    def charge(self, resident_id: ResidentId, units: int) -> None:
        """Add units of service (>= 0)."""
        if units < 0:
            raise ValueError(f"a charge must be >= 0, not {units}")
        self._service[resident_id] += units

    def prepay(self, resident_id: ResidentId, units: int) -> None:
        """Charge units (>= 0) of work to come, as forecast."""
        self._ahead[resident_id] = self._ahead.get(resident_id, 0) + units

    def repay(self, resident_id: ResidentId, units: int) -> None:
        """Take units back that were charged ahead: they are charged as computed now, or never come."""
        self._ahead[resident_id] -= units

    def ahead(self, resident_id: ResidentId) -> int:
        """Return the units that are charged ahead."""
        return self._ahead.get(resident_id, 0)

    def charge_system(self, units: int) -> None:
        """Book units that the household pays together."""
        self.system_service += units

    def lift(self, *resident_ids: ResidentId, backlogged: Iterable[ResidentId]) -> None:
        """Raise the counters of residents that had nothing waiting and now have (call before enqueueing).

        Those who begin at once are raised alike: what is between them stays.
        """
        others = [self.value(other) for other in backlogged if other not in resident_ids]
        floor = min(others) if others else self._last_left
        behind = floor - min(self.value(resident_id) for resident_id in resident_ids)
        if behind > 0:
            for resident_id in resident_ids:
                self._offset[resident_id] += behind

    def left_queue(self, resident_id: ResidentId) -> None:
        """Note that this resident has nothing waiting any more."""
        self._last_left = self.value(resident_id)

    def rebase(self) -> None:
        """Subtract the least counter from all, so that they stay small; the order does not change."""
        if not self._weights:
            return
        least = min(self.value(resident_id) for resident_id in self._weights)
        for resident_id in self._offset:
            self._offset[resident_id] -= least
        self._last_left = max(0, self._last_left - least)

    @property
    def resident_ids(self) -> tuple[ResidentId, ...]:
        """Everybody who has a counter, also who was removed since."""
        return tuple(self._weights)

    def weight(self, resident_id: ResidentId) -> int:
        """Return the weight the counter is divided by."""
        return self._weights[resident_id]

    def service(self, resident_id: ResidentId) -> int:
        """Return all units ever charged to the resident."""
        return self._service[resident_id]

    def export(self) -> dict[str, object]:
        """Return everything but what is charged ahead: its requests end with this scheduler."""
        return {
            "weights": dict(self._weights),
            "service": dict(self._service),
            "offset": dict(self._offset),
            "last_left": self._last_left,
            "system": self.system_service,
        }

    def restore(
        self,
        *,
        weights: Mapping[ResidentId, int],
        service: Mapping[ResidentId, int],
        offset: Mapping[ResidentId, int],
        last_left: int,
        system: int,
    ) -> None:
        """Take over what `export` returned; all three maps have the same keys."""
        self._weights, self._service, self._offset = dict(weights), dict(service), dict(offset)
        self._ahead = {}
        self._last_left, self.system_service = last_left, system
