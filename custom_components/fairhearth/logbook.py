"""How the logbook tells of durable jobs that ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from homeassistant.components.logbook import LOGBOOK_ENTRY_MESSAGE, LOGBOOK_ENTRY_NAME
from homeassistant.core import Event, HomeAssistant, callback

from .const import DOMAIN, EVENT_JOB_ENDED

_MESSAGES: Final = {
    "finished": "finished {job} for {resident}",
    "failed": "failed on {job} for {resident}: {error}",
    "cancelled": "cancelled {job} for {resident}",
    "expired": "let {job} for {resident} expire",
}


@callback
def async_describe_events(
    hass: HomeAssistant,
    async_describe_event: Callable[[str, str, Callable[[Event[Any]], dict[str, str]]], None],
) -> None:
    """Register how our events are told."""

    @callback
    def describe(event: Event[Any]) -> dict[str, str]:
        """Return the line of one job. The logbook's own words are English, in every language."""
        data = event.data
        message = _MESSAGES[data["state"]].format(
            job=f"the job “{data['title']}”" if data["title"] else "a job",
            resident=data["resident"],
            error=data["error"],
        )
        return {LOGBOOK_ENTRY_NAME: data["engine"], LOGBOOK_ENTRY_MESSAGE: message}

    async_describe_event(DOMAIN, EVENT_JOB_ENDED, describe)
