"""What the household set up about its residents: read from the subentries, told to the engine.

The household's word counts, so residents are told again after each connection. Ids told once are kept in a
small store: a resident deleted while the engine was away is still removed there when it comes back. Residents
that the engine has from elsewhere are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from homeassistant.config_entries import ConfigEntry, ConfigSubentry
from homeassistant.core import HomeAssistant
from homeassistant.helpers.storage import Store

from .attribution import ClassRule, ResidentRule, WorkloadClass
from .const import (
    CONF_ACCESSIBILITY_SATELLITES,
    CONF_AGENTS,
    CONF_AREAS,
    CONF_CHAT_CLASS,
    CONF_DAILY_IS_HARD,
    CONF_DAILY_TOKENS,
    CONF_PAGE_CAP,
    CONF_PERSON,
    CONF_RESIDENT_ID,
    CONF_SATELLITES,
    CONF_TASK_CLASS,
    CONF_USERS,
    CONF_VOICE_CLASS,
    CONF_WEIGHT,
    DEFAULT_WEIGHT,
    DOMAIN,
    SUBENTRY_RESIDENT,
)
from .engine_client import EngineClient, NotFound, ResidentSettings, UnknownResident

if TYPE_CHECKING:
    from .coordinator import FairhearthConfigEntry

STORAGE_VERSION: Final = 1


def settings_of(subentry: ConfigSubentry, known: ResidentSettings | None) -> ResidentSettings:
    """Return what the engine is told about a resident; known is what it has, None for a new one."""
    return settings_of_data(subentry.title, subentry.data, known)


def settings_of_data(name: str, data: Mapping[str, Any], known: ResidentSettings | None) -> ResidentSettings:
    """Return what the engine is told about a resident with this name and these options.

    Limits that no dialog of Home Assistant shows stay what the engine's own settings made them.
    """
    daily_tokens, page_cap = data.get(CONF_DAILY_TOKENS), data.get(CONF_PAGE_CAP)
    return replace(
        known or ResidentSettings(name=name),
        name=name,
        weight=int(data.get(CONF_WEIGHT, DEFAULT_WEIGHT)),
        daily_tokens=None if daily_tokens is None else int(daily_tokens),
        daily_is_hard=bool(data.get(CONF_DAILY_IS_HARD, False)),
        page_cap=None if page_cap is None else int(page_cap),
    )


def rules_of(hass: HomeAssistant, entry: FairhearthConfigEntry) -> list[ResidentRule]:
    """Return how each resident is recognised now; a person's user may be linked or changed at any time."""
    return [_rule_of(hass, subentry.data) for subentry in entry.get_subentries_of_type(SUBENTRY_RESIDENT)]


def _rule_of(hass: HomeAssistant, data: Any) -> ResidentRule:
    user_ids = set(data.get(CONF_USERS, ()))
    if (person := data.get(CONF_PERSON)) and (state := hass.states.get(person)):
        user_ids.add(state.attributes.get("user_id"))
    return ResidentRule(
        resident_id=data[CONF_RESIDENT_ID],
        user_ids=frozenset(user_id for user_id in user_ids if user_id),
        satellite_ids=frozenset(data.get(CONF_SATELLITES, ())),
        area_ids=frozenset(data.get(CONF_AREAS, ())),
        agent_ids=frozenset(data.get(CONF_AGENTS, ())),
    )


def classes_of(entry: FairhearthConfigEntry, subentry: ConfigSubentry) -> ClassRule:
    """Return what work of an agent or a task counts as."""
    data, usual = subentry.data, ClassRule()
    return ClassRule(
        voice=WorkloadClass(data.get(CONF_VOICE_CLASS, usual.voice)),
        chat=WorkloadClass(data.get(CONF_CHAT_CLASS, usual.chat)),
        task=WorkloadClass(data.get(CONF_TASK_CLASS, usual.task)),
        accessibility_satellite_ids=frozenset(entry.options.get(CONF_ACCESSIBILITY_SATELLITES, ())),
    )


def structure_of(entry: ConfigEntry[Any]) -> object:
    """Return all of an entry but the residents' numbers, which may change while everything runs."""
    parts = {
        subentry_id: (
            subentry.title,
            {
                key: value
                for key, value in subentry.data.items()
                if key not in (CONF_WEIGHT, CONF_DAILY_TOKENS)
            },
        )
        for subentry_id, subentry in entry.subentries.items()
    }
    return entry.title, dict(entry.data), dict(entry.options), parts


class ResidentRegistrar:
    """Keeps the engine's residents equal to the subentries."""

    def __init__(self, hass: HomeAssistant, entry: FairhearthConfigEntry, client: EngineClient) -> None:
        """Tell residents of this entry to this engine."""
        self._entry = entry
        self._client = client
        self._store = _store(hass, entry)

    async def async_sync(self) -> None:
        """Create, replace and remove residents on the engine; raise EngineError where it refuses."""
        known = await self._client.residents()
        wanted = {
            subentry.data[CONF_RESIDENT_ID]: settings_of(subentry, known.get(subentry.data[CONF_RESIDENT_ID]))
            for subentry in self._entry.get_subentries_of_type(SUBENTRY_RESIDENT)
        }
        told = set((await self._store.async_load() or {}).get("told", ()))
        for resident_id in sorted(told - wanted.keys()):
            await self._async_remove(resident_id)
        for resident_id, settings in wanted.items():
            await self._client.put_resident(resident_id, settings)
        if told != wanted.keys():
            await self._store.async_save({"told": sorted(wanted)})

    async def async_remove_all(self) -> None:
        """Take every resident of this entry off the engine, as when the entry is deleted."""
        for resident_id in (await self._store.async_load() or {}).get("told", ()):
            await self._async_remove(resident_id)

    async def _async_remove(self, resident_id: str) -> None:
        try:
            await self._client.delete_resident(resident_id)
        except UnknownResident, NotFound:
            return  # it is gone, which is what was wanted


async def async_forget(hass: HomeAssistant, entry: FairhearthConfigEntry) -> None:
    """Delete what is stored about an entry's residents."""
    await _store(hass, entry).async_remove()


def _store(hass: HomeAssistant, entry: ConfigEntry[Any]) -> Store[dict[str, list[str]]]:
    return Store(hass, STORAGE_VERSION, f"{DOMAIN}.{entry.entry_id}")
