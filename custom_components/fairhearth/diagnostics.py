"""What a bug report needs: the entry, the engine and the live picture, without token, address and prompts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from homeassistant.components.diagnostics import async_redact_data, entity_entry_as_dict
from homeassistant.const import CONF_PROMPT, CONF_TOKEN, CONF_URL
from homeassistant.core import HomeAssistant
from homeassistant.helpers import entity_registry as er

from .const import CONF_USERS
from .coordinator import FairhearthConfigEntry
from .jobs import job_fields

TO_REDACT: Final = frozenset({CONF_TOKEN, CONF_URL, CONF_PROMPT, CONF_USERS})


async def async_get_config_entry_diagnostics(
    hass: HomeAssistant, entry: FairhearthConfigEntry
) -> dict[str, Any]:
    """Return everything about one engine that may leave the house."""
    coordinator = entry.runtime_data
    entities = er.async_entries_for_config_entry(er.async_get(hass), entry.entry_id)
    return {
        "entry": async_redact_data(entry.data, TO_REDACT),
        "subentries": [
            {"type": subentry.subentry_type, "data": async_redact_data(subentry.data, TO_REDACT)}
            for subentry in entry.subentries.values()
        ],
        "engine": {**asdict(coordinator.engine), "scopes": sorted(coordinator.engine.scopes)},
        "is_connected": coordinator.last_update_success,
        "snapshot": asdict(coordinator.data),
        "options": dict(entry.options),
        "policy": None if coordinator.policy is None else asdict(coordinator.policy),
        "prompt_tokens": coordinator.prompt_tokens,
        # What a job is called may tell what it is about.
        "jobs": [{**job_fields(job), "title": None} for job in coordinator.jobs.active.values()],
        "entities": [entity_entry_as_dict(entity) for entity in entities],
    }
