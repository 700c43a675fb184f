"""The button that clears the background: every durable job of that class that has not ended is cancelled."""

from __future__ import annotations

from typing import override

from homeassistant.components.button import ButtonEntity
from homeassistant.core import HomeAssistant
from homeassistant.helpers.entity_platform import AddConfigEntryEntitiesCallback

from .attribution import WorkloadClass
from .coordinator import FairhearthConfigEntry, FairhearthCoordinator
from .engine_client import EngineError, UnknownJob
from .entity import FairhearthEntity, engine_device
from .errors import as_home_assistant_error

PARALLEL_UPDATES = 1


async def async_setup_entry(
    hass: HomeAssistant, entry: FairhearthConfigEntry, async_add_entities: AddConfigEntryEntitiesCallback
) -> None:
    """Add the engine's button."""
    async_add_entities([CancelBackground(entry.runtime_data)])


class CancelBackground(FairhearthEntity, ButtonEntity):
    """Cancels the jobs that nobody waits for."""

    _attr_translation_key = "cancel_background"

    def __init__(self, coordinator: FairhearthCoordinator) -> None:
        """Stand on the engine's device."""
        unique_id = f"{coordinator.config_entry.entry_id}_cancel_background"
        super().__init__(coordinator, unique_id, engine_device(coordinator))

    @override
    async def async_press(self) -> None:
        """Cancel them all; one that ended meanwhile stays as it is."""
        client = self.coordinator.client
        try:
            for job in await client.jobs():
                if job.workload_class == WorkloadClass.BACKGROUND and not job.has_ended:
                    try:
                        await client.cancel_job(job.job_id)
                    except UnknownJob:
                        continue
        except EngineError as err:
            raise as_home_assistant_error(err) from err

    @override
    def _shown(self) -> object:
        return None
