"""How the logbook tells of durable jobs that ended, in the language of the home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from homeassistant.components.logbook import LOGBOOK_ENTRY_MESSAGE, LOGBOOK_ENTRY_NAME
from homeassistant.core import Event, HomeAssistant, callback

from .const import DOMAIN, EVENT_JOB_ENDED
from .errors import cached_text


@callback
def async_describe_events(
    hass: HomeAssistant,
    async_describe_event: Callable[[str, str, Callable[[Event[Any]], dict[str, str]]], None],
) -> None:
    """Register how our events are told."""

    def describe(event: Event[Any]) -> dict[str, str]:
        """Return the line of one job; any thread. Home Assistant does not say who reads it."""
        data = event.data
        told = cached_text(hass, f"logbook_{data['state']}").format(
            job=data["title"] or data["job_id"], resident=data["resident_name"], error=data["error"]
        )
        return {LOGBOOK_ENTRY_NAME: data["engine"], LOGBOOK_ENTRY_MESSAGE: told}

    async_describe_event(DOMAIN, EVENT_JOB_ENDED, describe)
