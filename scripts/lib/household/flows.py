"""Home Assistant's dialogs, filled in as a person would, and when what they changed has taken effect."""

from __future__ import annotations

from typing import Any, Final

from household.client import Rest, WebSocket
from household.waiting import until

TIMEOUT_S: Final = 60.0

_ENTRIES: Final = "/api/config/config_entries/flow"
_SUBENTRIES: Final = "/api/config/config_entries/subentries/flow"


class DialogRefused(RuntimeError):
    """A dialog did not end as it should; the message holds what it showed instead."""


async def add_entry(rest: Rest, domain: str, answers: dict[str, Any]) -> dict[str, Any]:
    """Set up an integration; return its config entry."""
    result = await _fill_in(rest, _ENTRIES, {"handler": domain}, answers, ends="create_entry")
    return dict(result["result"])


async def add_subentry(rest: Rest, entry_id: str, kind: str, answers: dict[str, Any]) -> None:
    """Add a subentry to a config entry."""
    await _fill_in(rest, _SUBENTRIES, {"handler": [entry_id, kind]}, answers, ends="create_entry")


async def change_subentry(
    rest: Rest, entry_id: str, kind: str, subentry_id: str, answers: dict[str, Any]
) -> None:
    """Change a subentry."""
    start = {"handler": [entry_id, kind], "subentry_id": subentry_id}
    await _fill_in(rest, _SUBENTRIES, start, answers, ends="abort")


async def _fill_in(
    rest: Rest, path: str, start: dict[str, Any], answers: dict[str, Any], *, ends: str
) -> dict[str, Any]:
    shown = await rest.post(path, start)
    if shown["type"] != "form":
        raise DialogRefused(f"{start}: expected a form, got {shown}")
    result = await rest.post(f"{path}/{shown['flow_id']}", answers)
    if result["type"] != ends or (ends == "abort" and result["reason"] != "reconfigure_successful"):
        raise DialogRefused(f"{start}: {answers} led to {result.get('errors') or result}")
    return dict(result)


async def entry(rest: Rest, domain: str) -> dict[str, Any]:
    """Return the only config entry of an integration."""
    (found,) = await rest.get(f"/api/config/config_entries/entry?domain={domain}")
    return dict(found)


async def until_entry(rest: Rest, domain: str, state: str = "loaded") -> dict[str, Any]:
    """Wait until the only config entry of an integration is in a state; return it."""
    return await until(
        lambda: entry(rest, domain),
        lambda found: found["state"] == state,
        f"the config entry of {domain} is {state}",
        timeout_s=TIMEOUT_S,
    )


async def subentries(connection: WebSocket, entry_id: str) -> list[dict[str, Any]]:
    """Return the subentries of a config entry."""
    return list(await connection.call("config_entries/subentries/list", entry_id=entry_id))


async def entity_ids(connection: WebSocket, domain: str) -> dict[tuple[str, str], str]:
    """Return the entity ids of an integration by (platform, unique id): names may be anything."""
    registered = await connection.call("config/entity_registry/list")
    return {
        (item["entity_id"].partition(".")[0], item["unique_id"]): item["entity_id"]
        for item in registered
        if item["platform"] == domain and item["disabled_by"] is None
    }


async def until_entities(
    connection: WebSocket, domain: str, wanted: set[tuple[str, str]]
) -> dict[tuple[str, str], str]:
    """Wait until all the wanted (platform, unique id) are registered; return all of the integration's."""
    return await until(
        lambda: entity_ids(connection, domain),
        lambda found: wanted <= found.keys(),
        f"the entities {sorted(wanted)} of {domain} are there",
        timeout_s=TIMEOUT_S,
    )
