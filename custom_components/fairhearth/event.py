"""What happens once rather than lasts: a job has ended, a request had to make way."""

from __future__ import annotations

from collections import deque
from typing import Final, override

from homeassistant.components.event import EventEntity
from homeassistant.core import HomeAssistant, callback
from homeassistant.helpers.entity_platform import AddConfigEntryEntitiesCallback

from .coordinator import FairhearthConfigEntry, FairhearthCoordinator
from .engine_client import FINAL_STATES, Job
from .entity import FairhearthEntity, engine_device
from .jobs import job_fields
from .moments import Moment, MomentKind, async_on_moment
from .pace import Pace

PARALLEL_UPDATES = 0

MAX_HELD_JOBS: Final = 256
"""Most jobs whose end is told later because many end at once; the oldest are left out."""


async def async_setup_entry(
    hass: HomeAssistant, entry: FairhearthConfigEntry, async_add_entities: AddConfigEntryEntitiesCallback
) -> None:
    """Add the engine's events."""
    async_add_entities([JobEnded(entry.runtime_data), Preempted(entry.runtime_data)])


class JobEnded(FairhearthEntity, EventEntity):
    """A durable job has ended; its text is fetched with the action `get_job`."""

    _attr_translation_key = "job"
    _attr_event_types = sorted(FINAL_STATES)

    def __init__(self, coordinator: FairhearthCoordinator) -> None:
        """Tell of jobs on the engine's device."""
        unique_id = f"{coordinator.config_entry.entry_id}_job"
        super().__init__(coordinator, unique_id, engine_device(coordinator))
        self._held: deque[Job] = deque(maxlen=MAX_HELD_JOBS)

    @override
    async def async_added_to_hass(self) -> None:
        """Listen for jobs that end."""
        await super().async_added_to_hass()
        self._pace = Pace(self.hass, self._async_tell_next)
        self.async_on_remove(self._pace.async_drop)
        self.async_on_remove(self.coordinator.jobs.async_on_ended(self._async_job_ended))

    @callback
    def _async_job_ended(self, job: Job) -> None:
        self._held.append(job)
        self._pace.async_ask()

    @callback
    def _async_tell_next(self) -> None:
        """Tell of one job; the others follow, each with a second of its own."""
        job = self._held.popleft()
        self._trigger_event(
            job.state, {key: value for key, value in job_fields(job).items() if value is not None}
        )
        self.async_write_ha_state()
        if self._held:
            self._pace.async_ask()

    @override
    def _shown(self) -> object:
        return None


class Preempted(FairhearthEntity, EventEntity):
    """Requests had to make way for others; they go on later."""

    _attr_translation_key = "preemption"
    _attr_entity_registry_enabled_default = False

    def __init__(self, coordinator: FairhearthCoordinator) -> None:
        """Tell of interruptions on the engine's device."""
        unique_id = f"{coordinator.config_entry.entry_id}_preemption"
        super().__init__(coordinator, unique_id, engine_device(coordinator))
        self._attr_event_types = [MomentKind.PREEMPTED]

    @override
    async def async_added_to_hass(self) -> None:
        """Listen for requests that make way."""
        await super().async_added_to_hass()
        entry_id = self.coordinator.config_entry.entry_id
        self.async_on_remove(async_on_moment(self.hass, entry_id, self._async_tell))

    @callback
    def _async_tell(self, moment: Moment) -> None:
        if moment.kind is MomentKind.PREEMPTED:
            self._trigger_event(moment.kind, dict(moment.details))
            self.async_write_ha_state()

    @override
    def _shown(self) -> object:
        return None
