"""A voice satellite without a microphone: it is told in text what was said, and real from there on.

For the demonstration and the end-to-end tests only. Home Assistant sees an `assist_satellite` entity on a
device in an area; a sentence runs through the Assist pipeline from its intent stage, with the satellite's id,
and without a user, exactly as from real hardware. What speech recognition and speech output would add is left
out. Knows nothing of Fairhearth.
"""

from __future__ import annotations

from typing import Final

from homeassistant.config_entries import ConfigEntry
from homeassistant.const import Platform
from homeassistant.core import HomeAssistant
from homeassistant.helpers import config_validation as cv

DOMAIN: Final = "demo_satellite"
PLATFORMS: Final = (Platform.ASSIST_SATELLITE,)
CONFIG_SCHEMA = cv.config_entry_only_config_schema(DOMAIN)


async def async_setup_entry(hass: HomeAssistant, entry: ConfigEntry[None]) -> None:
    """Set up one satellite."""
    await hass.config_entries.async_forward_entry_setups(entry, PLATFORMS)


async def async_unload_entry(hass: HomeAssistant, entry: ConfigEntry[None]) -> None:
    """Take the satellite away."""
    await hass.config_entries.async_unload_platforms_or_raise(entry, PLATFORMS)
