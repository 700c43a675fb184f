"""Whether the engine serves the household as agreed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, override

from homeassistant.components.binary_sensor import BinarySensorDeviceClass, BinarySensorEntity
from homeassistant.const import EntityCategory
from homeassistant.core import HomeAssistant
from homeassistant.helpers.entity_platform import AddConfigEntryEntitiesCallback

from .coordinator import FairhearthConfigEntry, FairhearthCoordinator
from .entity import FairhearthEntity, engine_device

PARALLEL_UPDATES = 0


async def async_setup_entry(
    hass: HomeAssistant, entry: FairhearthConfigEntry, async_add_entities: AddConfigEntryEntitiesCallback
) -> None:
    """Add what is true or not of the engine."""
    async_add_entities([PolicyMet(entry.runtime_data), Connected(entry.runtime_data)])


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


class Connected(FairhearthEntity, BinarySensorEntity):
    """On while the engine tells what it does; the one entity that is there when the engine is not."""

    _attr_translation_key = "connected"
    _attr_device_class = BinarySensorDeviceClass.CONNECTIVITY
    _attr_entity_category = EntityCategory.DIAGNOSTIC

    def __init__(self, coordinator: FairhearthCoordinator) -> None:
        """Show the connection, on the engine's device."""
        unique_id = f"{coordinator.config_entry.entry_id}_connected"
        super().__init__(coordinator, unique_id, engine_device(coordinator))

    @property
    @override
    def available(self) -> bool:
        """Return that this is always known."""
        return True

    @property
    @override
    def is_on(self) -> bool:
        """Return whether the engine is there."""
        return self.coordinator.last_update_success

    @override
    def _shown(self) -> object:
        return self.is_on
