"""Fairhearth: a home's language model, shared fairly. Sets up, unloads and removes an entry; nothing else."""

from __future__ import annotations

from typing import Final

from homeassistant.const import CONF_TOKEN, CONF_URL, Platform
from homeassistant.core import HomeAssistant
from homeassistant.helpers import config_validation as cv
from homeassistant.helpers.aiohttp_client import async_get_clientsession
from homeassistant.helpers.typing import ConfigType

from .const import DOMAIN, LOGGER
from .coordinator import FairhearthConfigEntry, FairhearthCoordinator
from .engine_client import EngineClient, EngineError
from .frontend import async_setup_frontend
from .issues import async_forget_issues
from .residents import ResidentRegistrar, async_forget
from .services import async_setup_services

PLATFORMS: Final = (
    Platform.AI_TASK,
    Platform.BINARY_SENSOR,
    Platform.BUTTON,
    Platform.CONVERSATION,
    Platform.EVENT,
    Platform.NUMBER,
    Platform.SELECT,
    Platform.SENSOR,
    Platform.SWITCH,
)

CONFIG_SCHEMA = cv.config_entry_only_config_schema(DOMAIN)


async def async_setup(hass: HomeAssistant, config: ConfigType) -> bool:
    """Register the actions and the frontend's modules, which stay even while no engine is set up."""
    async_setup_services(hass)
    await async_setup_frontend(hass)
    return True


async def async_setup_entry(hass: HomeAssistant, entry: FairhearthConfigEntry) -> None:
    """Connect to one engine and set up its entities; raises where it is away or refuses the token."""
    coordinator = FairhearthCoordinator(hass, entry, _client(hass, entry))
    entry.runtime_data = coordinator
    # Before anything is awaited: what changes while this goes on must not be missed.
    entry.async_on_unload(entry.add_update_listener(_async_reload))
    await coordinator.async_config_entry_first_refresh()
    await hass.config_entries.async_forward_entry_setups(entry, PLATFORMS)
    coordinator.async_start()


async def async_unload_entry(hass: HomeAssistant, entry: FairhearthConfigEntry) -> None:
    """Take the entities away; the entry itself cancels the stream."""
    await hass.config_entries.async_unload_platforms_or_raise(entry, PLATFORMS)


async def async_remove_entry(hass: HomeAssistant, entry: FairhearthConfigEntry) -> None:
    """Take the residents off the engine where it still answers, and forget them and their troubles here."""
    try:
        await ResidentRegistrar(hass, entry, _client(hass, entry)).async_remove_all()
    except EngineError as err:
        LOGGER.warning("The residents stay on the engine, it could not be told to remove them: %s", err)
    await async_forget(hass, entry)
    async_forget_issues(hass, entry.entry_id)


async def _async_reload(hass: HomeAssistant, entry: FairhearthConfigEntry) -> None:
    """Apply changed data, options or subentries; what only the engine must hear of needs no reload."""
    if not await entry.runtime_data.async_take_over():
        await hass.config_entries.async_reload(entry.entry_id)


def _client(hass: HomeAssistant, entry: FairhearthConfigEntry) -> EngineClient:
    return EngineClient(async_get_clientsession(hass), entry.data[CONF_URL], entry.data[CONF_TOKEN])
