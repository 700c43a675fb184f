"""Which device stands for whom: the engine, a resident, or one of the engine's own residents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from homeassistant.config_entries import ConfigEntry
from homeassistant.core import HomeAssistant, callback
from homeassistant.helpers import device_registry as dr

from .attribution import ACCOUNTS
from .const import CONF_RESIDENT_ID, DOMAIN, SUBENTRY_RESIDENT


def account_key(entry_id: str, account: str) -> str:
    """Return what the unique ids of one of the engine's own residents begin with."""
    return f"{entry_id}_{account}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOwner:
    """Whom a device stands for."""

    entry_id: str
    resident_id: str | None  #: None: the engine itself


@callback
def async_owner_of_device(hass: HomeAssistant, device_id: str) -> DeviceOwner | None:
    """Return whom a device stands for; None for that of an agent or an AI task, and for another's."""
    device, entry = dr.async_get_device_and_config_entry_for_domain(hass, device_id, domain=DOMAIN)
    if device is None or entry is None:
        return None
    owners = {(DOMAIN, entry.entry_id): None, **_residents(entry)}
    for identifier in device.identifiers & owners.keys():
        return DeviceOwner(entry_id=entry.entry_id, resident_id=owners[identifier])
    return None


@callback
def async_name_of_resident(hass: HomeAssistant, entry: ConfigEntry[Any], resident_id: str) -> str:
    """Return what the household calls a resident; its id where it has no device here."""
    registry = dr.async_get(hass)
    for identifier, owner in _residents(entry).items():
        device = registry.async_get_device_by_identifier(identifier, entry.entry_id)
        if owner == resident_id and device is not None:
            return device.name_by_user or device.name or resident_id
    return resident_id


def _residents(entry: ConfigEntry[Any]) -> dict[tuple[str, str], str]:
    """Return the id of each resident by the identifier of its device."""
    residents = {
        (DOMAIN, subentry.subentry_id): str(subentry.data[CONF_RESIDENT_ID])
        for subentry in entry.get_subentries_of_type(SUBENTRY_RESIDENT)
    }
    return {**residents, **{(DOMAIN, account_key(entry.entry_id, account)): account for account in ACCOUNTS}}
