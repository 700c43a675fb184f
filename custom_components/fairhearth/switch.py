"""The switch that keeps the background waiting, as for a film or a game: nothing of it is lost."""

from __future__ import annotations

from typing import Any, override

from homeassistant.components.switch import SwitchEntity
from homeassistant.core import HomeAssistant
from homeassistant.helpers.entity_platform import AddConfigEntryEntitiesCallback

from .attribution import WorkloadClass
from .coordinator import FairhearthConfigEntry, FairhearthCoordinator
from .engine_client import EngineError, JsonObject
from .entity import FairhearthEntity, engine_device
from .errors import as_home_assistant_error

PARALLEL_UPDATES = 1


async def async_setup_entry(
    hass: HomeAssistant, entry: FairhearthConfigEntry, async_add_entities: AddConfigEntryEntitiesCallback
) -> None:
    """Add the engine's switch."""
    async_add_entities([BackgroundPaused(entry.runtime_data)])


class BackgroundPaused(FairhearthEntity, SwitchEntity):
    """On while requests of the background wait for it to be turned off."""

    _attr_translation_key = "background_paused"

    def __init__(self, coordinator: FairhearthCoordinator) -> None:
        """Stand on the engine's device."""
        unique_id = f"{coordinator.config_entry.entry_id}_background_paused"
        super().__init__(coordinator, unique_id, engine_device(coordinator))

    @property
    def _paused(self) -> tuple[str, ...] | None:
        return self.coordinator.data.engine.paused_classes

    @property
    @override
    def available(self) -> bool:
        """Return whether the engine is there, can pause classes, and lets its policy be changed."""
        return super().available and self._paused is not None and self.coordinator.policy is not None

    @property
    @override
    def is_on(self) -> bool:
        """Return whether the background waits."""
        return WorkloadClass.BACKGROUND in (self._paused or ())

    @override
    async def async_turn_on(self, **kwargs: Any) -> None:
        """Keep the background waiting from now on."""
        await self._async_pause({*(self._paused or ()), WorkloadClass.BACKGROUND})

    @override
    async def async_turn_off(self, **kwargs: Any) -> None:
        """Let it go on where it stopped."""
        await self._async_pause({*(self._paused or ())} - {WorkloadClass.BACKGROUND})

    async def _async_pause(self, classes: set[str]) -> None:
        changes: JsonObject = {"paused_classes": [*sorted(classes)]}
        try:
            await self.coordinator.async_change_policy(changes, note="switched in Home Assistant")
        except EngineError as err:
            raise as_home_assistant_error(err) from err

    @override
    def _shown(self) -> object:
        return self.is_on
