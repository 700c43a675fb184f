"""What the system health page says about the engines."""

from __future__ import annotations

from typing import Any

from homeassistant.components import system_health
from homeassistant.const import CONF_URL
from homeassistant.core import HomeAssistant, callback

from .const import DOMAIN
from .coordinator import FairhearthConfigEntry


@callback
def async_register(hass: HomeAssistant, register: system_health.SystemHealthRegistration) -> None:
    """Register the page's part."""
    register.async_register_info(_async_info)


async def _async_info(hass: HomeAssistant) -> dict[str, Any]:
    entries: list[FairhearthConfigEntry] = hass.config_entries.async_loaded_entries(DOMAIN)
    info: dict[str, Any] = {"engines": len(entries)}
    if entries:
        entry = entries[0]
        info["reach_engine"] = system_health.async_check_can_reach_url(hass, f"{entry.data[CONF_URL]}/health")
        info["engine_version"] = entry.runtime_data.engine.version
        info["model"] = entry.runtime_data.engine.model
        info["policy_met"] = entry.runtime_data.data.engine.policy_met
    return info
