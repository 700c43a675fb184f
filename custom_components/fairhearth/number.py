"""Numbers of a resident that the household may turn without a dialog: weight and tokens per day.

They are the resident's settings themselves: what is set here is what the resident's dialog shows, and the
engine has the last word before anything is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, override

from homeassistant.components.number import NumberEntity, NumberEntityDescription, NumberMode
from homeassistant.config_entries import ConfigSubentry
from homeassistant.const import EntityCategory
from homeassistant.core import HomeAssistant
from homeassistant.helpers.entity_platform import AddConfigEntryEntitiesCallback

from .const import (
    CONF_DAILY_TOKENS,
    CONF_RESIDENT_ID,
    CONF_WEIGHT,
    DEFAULT_WEIGHT,
    MAX_DAILY_TOKENS,
    MAX_WEIGHT,
    SUBENTRY_RESIDENT,
    UNIT_TOKENS,
)
from .coordinator import FairhearthConfigEntry, FairhearthCoordinator
from .engine_client import EngineError
from .entity import FairhearthEntity, subentry_device
from .errors import as_home_assistant_error
from .residents import settings_of_data

PARALLEL_UPDATES = 1


@dataclass(frozen=True, kw_only=True)
class ResidentNumberDescription(NumberEntityDescription):
    """One number: how it looks, and how it is kept in the resident's settings."""

    value_fn: Callable[[Any], int]
    data_fn: Callable[[dict[str, Any], int], None]


def _set_daily_tokens(data: dict[str, Any], value: int) -> None:
    if value:
        data[CONF_DAILY_TOKENS] = value
    else:
        data.pop(CONF_DAILY_TOKENS, None)


def _set_weight(data: dict[str, Any], value: int) -> None:
    data[CONF_WEIGHT] = value


RESIDENT_NUMBERS: Final = (
    ResidentNumberDescription(
        key="weight",
        translation_key="weight",
        native_min_value=1,
        native_max_value=MAX_WEIGHT,
        native_step=1,
        mode=NumberMode.BOX,
        entity_category=EntityCategory.CONFIG,
        value_fn=lambda data: int(data.get(CONF_WEIGHT, DEFAULT_WEIGHT)),
        data_fn=_set_weight,
    ),
    ResidentNumberDescription(
        key="daily_tokens",
        translation_key="daily_tokens",
        native_min_value=0,
        native_max_value=MAX_DAILY_TOKENS,
        native_step=1,
        native_unit_of_measurement=UNIT_TOKENS,
        mode=NumberMode.BOX,
        entity_category=EntityCategory.CONFIG,
        value_fn=lambda data: int(data.get(CONF_DAILY_TOKENS) or 0),
        data_fn=_set_daily_tokens,
    ),
)
"""0 tokens per day stands for no limit."""


async def async_setup_entry(
    hass: HomeAssistant, entry: FairhearthConfigEntry, async_add_entities: AddConfigEntryEntitiesCallback
) -> None:
    """Add the numbers of each resident."""
    for subentry in entry.get_subentries_of_type(SUBENTRY_RESIDENT):
        async_add_entities(
            [ResidentNumber(entry.runtime_data, description, subentry) for description in RESIDENT_NUMBERS],
            config_subentry_id=subentry.subentry_id,
        )


class ResidentNumber(FairhearthEntity, NumberEntity):
    """One setting of one resident."""

    entity_description: ResidentNumberDescription

    def __init__(
        self,
        coordinator: FairhearthCoordinator,
        description: ResidentNumberDescription,
        subentry: ConfigSubentry,
    ) -> None:
        """Show and change one setting, on the resident's device."""
        super().__init__(
            coordinator,
            f"{subentry.subentry_id}_{description.key}",
            subentry_device(coordinator, subentry),
        )
        self.entity_description = description
        self._subentry_id = subentry.subentry_id

    @property
    @override
    def native_value(self) -> int:
        """Return what is set."""
        return self.entity_description.value_fn(self._subentry().data)

    @override
    async def async_set_native_value(self, value: float) -> None:
        """Have the engine take the number, then keep it."""
        subentry = self._subentry()
        data = dict(subentry.data)
        self.entity_description.data_fn(data, int(value))
        client, resident_id = self.coordinator.client, data[CONF_RESIDENT_ID]
        try:
            known = (await client.residents()).get(resident_id)
            await client.put_resident(resident_id, settings_of_data(subentry.title, data, known))
        except EngineError as err:
            raise as_home_assistant_error(err) from err
        self.hass.config_entries.async_update_subentry(
            self.coordinator.config_entry, self._subentry(), data=data
        )
        self.async_write_ha_state()

    def _subentry(self) -> ConfigSubentry:
        return self.coordinator.config_entry.subentries[self._subentry_id]

    @override
    def _shown(self) -> object:
        return self.native_value
