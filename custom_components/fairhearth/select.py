"""What the household means by equal: the policy's fairness goal, to choose."""

from __future__ import annotations

from typing import Final, override

from homeassistant.components.select import SelectEntity
from homeassistant.const import EntityCategory
from homeassistant.core import HomeAssistant
from homeassistant.helpers.entity_platform import AddConfigEntryEntitiesCallback

from .coordinator import FairhearthConfigEntry, FairhearthCoordinator
from .engine_client import EngineError
from .entity import FairhearthEntity, engine_device
from .errors import as_home_assistant_error

PARALLEL_UPDATES = 1

FAIRNESS_GOALS: Final = ("service", "waiting", "completions", "class_only")


async def async_setup_entry(
    hass: HomeAssistant, entry: FairhearthConfigEntry, async_add_entities: AddConfigEntryEntitiesCallback
) -> None:
    """Add the engine's choice."""
    async_add_entities([FairnessGoal(entry.runtime_data)])


class FairnessGoal(FairhearthEntity, SelectEntity):
    """Service, waiting, completions, or only the kind of work."""

    _attr_translation_key = "fairness"
    _attr_entity_category = EntityCategory.CONFIG

    def __init__(self, coordinator: FairhearthCoordinator) -> None:
        """Stand on the engine's device."""
        unique_id = f"{coordinator.config_entry.entry_id}_fairness"
        super().__init__(coordinator, unique_id, engine_device(coordinator))
        self._attr_options = list(FAIRNESS_GOALS)

    @property
    @override
    def available(self) -> bool:
        """Return whether the engine is there and lets its policy be changed."""
        return super().available and self.coordinator.policy is not None

    @property
    @override
    def current_option(self) -> str | None:
        """Return what holds."""
        goal = None if self.coordinator.policy is None else self.coordinator.policy.fairness
        return goal if goal in FAIRNESS_GOALS else None

    @override
    async def async_select_option(self, option: str) -> None:
        """Make it hold from now on."""
        try:
            await self.coordinator.async_change_policy({"fairness": option}, note="chosen in Home Assistant")
        except EngineError as err:
            raise as_home_assistant_error(err) from err

    @override
    def _shown(self) -> object:
        return self.current_option
