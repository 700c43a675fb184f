"""What happens once rather than lasts: a job ends, a request makes way, the policy is met or is no longer.

Noticed in one place, however many listen: an entity, a device's triggers. Told by entry, so that automations
keep hearing of it when the entry is set up anew. Knows no entity and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from homeassistant.core import CALLBACK_TYPE, HomeAssistant, callback
from homeassistant.helpers.dispatcher import async_dispatcher_connect, async_dispatcher_send
from homeassistant.util.signal_type import SignalTypeFormat

from .engine_client import FairnessSnapshot, Job, JsonObject
from .jobs import job_fields

if TYPE_CHECKING:
    from .coordinator import FairhearthCoordinator


class MomentKind(StrEnum):
    """What may happen; a job's end is named by its state."""

    JOB_FINISHED = "job_finished"
    JOB_FAILED = "job_failed"
    JOB_CANCELLED = "job_cancelled"
    JOB_EXPIRED = "job_expired"
    PREEMPTED = "preempted"
    POLICY_VIOLATED = "policy_violated"
    POLICY_MET = "policy_met"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One thing that happened."""

    kind: MomentKind
    residents: Collection[str]  #: whom it happened to; nobody where it concerns the whole engine
    details: JsonObject


_SIGNAL: Final = SignalTypeFormat[Moment]("fairhearth_moment_{}")


@callback
def async_on_moment(hass: HomeAssistant, entry_id: str, action: Callable[[Moment], None]) -> CALLBACK_TYPE:
    """Call for each moment of an entry's engine, over reloads too; return what ends that."""
    return async_dispatcher_connect(hass, _SIGNAL.format(entry_id), action)


class MomentTeller:
    """Compares each picture of one engine with the one before."""

    def __init__(self, hass: HomeAssistant, coordinator: FairhearthCoordinator) -> None:
        """Tell what happens on one engine."""
        self._hass = hass
        self._coordinator = coordinator

    @callback
    def async_start(self) -> None:
        """Begin with the picture as it is; ends when the entry is unloaded."""
        coordinator = self._coordinator
        self._preemptions = _preemptions(coordinator.data)
        self._was_met = coordinator.data.engine.policy_met
        coordinator.config_entry.async_on_unload(coordinator.async_add_listener(self._async_compare))
        coordinator.config_entry.async_on_unload(coordinator.jobs.async_on_ended(self._async_job_ended))

    @callback
    def _async_compare(self) -> None:
        """Tell what came since the last picture; counters that fell belong to an engine set up anew."""
        snapshot = self._coordinator.data
        before, self._preemptions = self._preemptions, _preemptions(snapshot)
        new = {key: count - before.get(key, 0) for key, count in self._preemptions.items()}
        if made_way := {key: count for key, count in new.items() if count > 0}:
            details: JsonObject = {"residents": dict(made_way), "count": sum(made_way.values())}
            self._tell(Moment(kind=MomentKind.PREEMPTED, residents=made_way.keys(), details=details))
        was_met, self._was_met = self._was_met, snapshot.engine.policy_met
        if self._was_met != was_met:
            kind = MomentKind.POLICY_MET if self._was_met else MomentKind.POLICY_VIOLATED
            notes: JsonObject = {"notes": list(snapshot.engine.policy_notes)}
            self._tell(Moment(kind=kind, residents=(), details=notes))

    @callback
    def _async_job_ended(self, job: Job) -> None:
        kind = MomentKind(f"job_{job.state}")
        self._tell(Moment(kind=kind, residents=(job.resident,), details=job_fields(job)))

    def _tell(self, moment: Moment) -> None:
        async_dispatcher_send(self._hass, _SIGNAL.format(self._coordinator.config_entry.entry_id), moment)


def _preemptions(snapshot: FairnessSnapshot) -> dict[str, int]:
    return {key: report.preemptions for key, report in snapshot.residents.items()}
