"""Serves the card and the dashboard strategy, and has every page of the frontend load them.

They are plain modules in the folder `frontend`. The address holds a digest of what is in them, so that a
browser may keep them for long and still gets those of an update.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from homeassistant.components.frontend import add_extra_js_url
from homeassistant.components.http import StaticPathConfig
from homeassistant.core import HomeAssistant

from .const import DOMAIN

FOLDER: Final = Path(__file__).parent / "frontend"
MODULE: Final = "fairhearth.js"


async def async_setup_frontend(hass: HomeAssistant) -> None:
    """Serve the modules; without Home Assistant's frontend nobody would load them."""
    if "frontend" not in hass.config.components:
        return
    digest = await hass.async_add_executor_job(_digest)
    address = f"/{DOMAIN}_frontend/{digest}"
    await hass.http.async_register_static_paths([StaticPathConfig(address, str(FOLDER), cache_headers=True)])
    add_extra_js_url(hass, f"{address}/{MODULE}")


def _digest() -> str:
    """Return a short text that changes with any of the modules."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.rglob("*.js")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
