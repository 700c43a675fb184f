"""Whether the engine serves the household as agreed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, override

from homeassistant.components.binary_sensor import BinarySensorEntity
from homeassistant.core import HomeAssistant
from homeassistant.helpers.entity_platform import AddConfigEntryEntitiesCallback

from .coordinator import FairhearthConfigEntry, FairhearthCoordinator
from .entity import FairhearthEntity, engine_device

PARALLEL_UPDATES = 0


async def async_setup_entry(
    hass: HomeAssistant, entry: FairhearthConfigEntry, async_add_entities: AddConfigEntryEntitiesCallback
) -> None:
    """Add the engine's only binary sensor."""
    async_add_entities([PolicyMet(entry.runtime_data)])


class PolicyMet(FairhearthEntity, BinarySensorEntity):
    """On while everyone is served as the household agreed; says in words what was not.

    It has no device class on purpose: "problem" would show its state turned round, and no other class fits.
    The translated states say it instead.
    """

    _attr_translation_key = "policy_met"
    _unrecorded_attributes = frozenset({"notes"})

    def __init__(self, coordinator: FairhearthCoordinator) -> None:
        """Show whether the policy is met, on the engine's device."""
        unique_id = f"{coordinator.config_entry.entry_id}_policy_met"
        super().__init__(coordinator, unique_id, engine_device(coordinator))

    @property
    @override
    def is_on(self) -> bool:
        """Return whether what was observed is what the policy chose."""
        return self.coordinator.data.engine.policy_met

    @property
    @override
    def extra_state_attributes(self) -> Mapping[str, Any]:
        """Return the engine's notes on what was not as agreed."""
        return {"notes": list(self.coordinator.data.engine.policy_notes)}

    @override
    def _shown(self) -> object:
        engine = self.coordinator.data.engine
        return engine.policy_met, engine.policy_notes
