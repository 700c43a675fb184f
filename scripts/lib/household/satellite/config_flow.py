"""Asks for the name of a simulated satellite."""

from __future__ import annotations

from typing import Any

import probatio

from homeassistant.config_entries import ConfigFlow, ConfigFlowResult
from homeassistant.const import CONF_NAME


class DemoSatelliteFlow(ConfigFlow, domain="demo_satellite"):
    """Adds a satellite."""

    VERSION = 1

    async def async_step_user(self, user_input: dict[str, Any] | None = None) -> ConfigFlowResult:
        """Ask for the name."""
        if user_input is not None:
            await self.async_set_unique_id(user_input[CONF_NAME].casefold())
            self._abort_if_unique_id_configured()
            return self.async_create_entry(title=user_input[CONF_NAME], data={})
        return self.async_show_form(
            step_id="user", data_schema=probatio.Schema({probatio.Required(CONF_NAME): str})
        )
