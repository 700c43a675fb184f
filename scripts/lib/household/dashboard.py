"""The household's dashboard: who got what, who waits, how soon the first word comes, whether all is agreed.

The one place that defines it. Entities are looked up by their unique ids, so that names may be anything.
"""

from __future__ import annotations

from typing import Any, Final

from household.residence import Household

URL_PATH: Final = "fairhearth-home"
PATH: Final = f"/{URL_PATH}/home"
TITLE: Final = "Fair share"

Card = dict[str, Any]

_NAMES: Final = {"alice": "Alice", "bob": "Bob", "guest": "Guests", "house": "House"}
_ICONS: Final = {
    "alice": "mdi:account",
    "bob": "mdi:account",
    "guest": "mdi:account-question",
    "house": "mdi:home-clock",
}
_CLASSES: Final = {"voice": "Spoken", "chat": "Typed", "background": "Background"}


async def create(home: Household) -> None:
    """Add the dashboard to Home Assistant's sidebar, or bring it up to date."""
    existing = await home.socket.call("lovelace/dashboards/list")
    if not any(item["url_path"] == URL_PATH for item in existing):
        await home.socket.call(
            "lovelace/dashboards/create",
            url_path=URL_PATH,
            title=TITLE,
            icon="mdi:scale-balance",
            mode="storage",
            show_in_sidebar=True,
            require_admin=False,
        )
    await home.socket.call("lovelace/config/save", url_path=URL_PATH, config=definition(home))


def definition(home: Household) -> dict[str, Any]:
    """Return the dashboard's configuration."""
    sections = [_now(home), _shares(home), _speed(home), _history(home)]
    view = {"title": "Home", "path": "home", "type": "sections", "max_columns": 4, "sections": sections}
    return {"title": TITLE, "views": [view]}


def entities(part: Any) -> set[str]:
    """Return every entity that a part of the definition shows."""
    if isinstance(part, list):
        return set().union(*map(entities, part))
    if not isinstance(part, dict):
        return set()
    own = {part["entity"]} if isinstance(part.get("entity"), str) else set()
    return own.union(*map(entities, part.values()))


def _section(title: str, icon: str, cards: list[Card]) -> Card:
    return {"type": "grid", "cards": [{"type": "heading", "heading": title, "icon": icon}, *cards]}


def _now(home: Household) -> Card:
    tiles = [
        _tile(
            home.engine_entity("binary_sensor", "policy_met"),
            "Everyone served as agreed",
            "mdi:check-decagram",
        ),
        _tile(home.engine_entity("sensor", "requests_running"), "Being answered", "mdi:message-processing"),
        _tile(home.engine_entity("sensor", "requests_waiting"), "Waiting", "mdi:timer-sand"),
    ]
    return _section("Right now", "mdi:pulse", tiles)


def _tile(entity_id: str, name: str, icon: str) -> Card:
    return {"type": "tile", "entity": entity_id, "name": name, "icon": icon}


def _shares(home: Household) -> Card:
    return _section(
        "Who got how much",
        "mdi:scale-balance",
        [
            _tile(home.resident_sensor(key, "service_share"), name, _ICONS[key])
            for key, name in _NAMES.items()
        ],
    )


def _speed(home: Household) -> Card:
    return _section(
        "Until the first word",
        "mdi:timer-outline",
        [
            _tile(home.engine_entity("sensor", f"time_to_first_token_p95_{key}"), name, "mdi:timer-outline")
            for key, name in _CLASSES.items()
        ],
    )


def _history(home: Household) -> Card:
    entities = [
        {"entity": home.resident_sensor(key, "service_share"), "name": name} for key, name in _NAMES.items()
    ]
    return _section(
        "The last hour",
        "mdi:chart-line",
        [{"type": "history-graph", "hours_to_show": 1, "entities": entities}],
    )
