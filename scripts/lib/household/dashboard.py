"""The household's dashboard: who got what, who waits, how soon the first word comes, whether all is agreed.

The one place that defines it. Entities are looked up by their unique ids, so that names may be anything.
Made of cards that come with Home Assistant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from household.residence import Household

URL_PATH: Final = "fairhearth-home"
PATH: Final = f"/{URL_PATH}/home"
TITLE: Final = "Fair share"

Card = dict[str, Any]

_HISTORY_HOURS: Final = 0.25

_NAMES: Final = {"alice": "Alice", "bob": "Bob", "guest": "Guests", "house": "House"}
_COLORS: Final = {"alice": "indigo", "bob": "teal", "guest": "amber", "house": "blue-grey"}
_CLASSES: Final = {
    "voice": ("Spoken", "mdi:account-voice", "green"),
    "chat": ("Typed", "mdi:keyboard", "cyan"),
    "background": ("In the background", "mdi:moon-waning-crescent", "blue-grey"),
}


async def create(home: Household, fifo_s: Mapping[str, float] | None = None) -> None:
    """Add the dashboard to Home Assistant's sidebar, or bring it up to date.

    fifo_s: seconds to the first word that first come, first served gave on this machine, by class.
    """
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
    config = definition(home, fifo_s or {})
    await home.socket.call("lovelace/config/save", url_path=URL_PATH, config=config)


def definition(home: Household, fifo_s: Mapping[str, float]) -> dict[str, Any]:
    """Return the dashboard's configuration."""
    sections = [_now(home), _shares(home), _speed(home, fifo_s), *_history(home)]
    view = {
        "title": TITLE,
        "path": "home",
        "type": "sections",
        "max_columns": 3,
        "sections": sections,
    }
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


def _tile(entity_id: str, name: str, icon: str, color: str, *, columns: int = 6) -> Card:
    return {
        "type": "tile",
        "entity": entity_id,
        "name": name,
        "icon": icon,
        "color": color,
        "grid_options": {"columns": columns, "rows": 1},
    }


def _subtitle(text: str) -> Card:
    return {"type": "heading", "heading_style": "subtitle", "heading": text}


def _note(text: str) -> Card:
    return {"type": "markdown", "content": text, "text_only": True}


def _now(home: Household) -> Card:
    met = home.engine_entity("binary_sensor", "policy_met")
    running = home.engine_entity("sensor", "requests_running")
    waiting = home.engine_entity("sensor", "requests_waiting")
    return _section(
        "Right now",
        "mdi:pulse",
        [
            _tile(met, "Everyone is served", "mdi:check-decagram", "green", columns=12),
            _tile(running, "Being answered", "mdi:message-processing", "indigo"),
            _tile(waiting, "Waiting", "mdi:timer-sand", "amber"),
            _tile(home.engine_entity("sensor", "tokens_per_second"), "Speed", "mdi:speedometer", "cyan"),
            _tile(home.engine_entity("sensor", "kv_memory_used"), "Memory in use", "mdi:memory", "purple"),
            *_glance(home, "Waiting", "requests_waiting"),
            *_glance(home, "Being answered", "requests_running"),
        ],
    )


def _shares(home: Household) -> Card:
    return _section(
        "Who got how much",
        "mdi:scale-balance",
        [
            _subtitle("Received in the last five minutes"),
            {"type": "distribution", "entities": _by_resident(home, "service_share")},
            _subtitle("Fair share, when all want more"),
            {"type": "distribution", "entities": _by_resident(home, "entitled_share")},
            _note("Nobody has to use up a fair share. What one leaves, the others may have."),
            *_glance(home, "Tokens so far", "tokens_served"),
        ],
    )


def _by_resident(home: Household, key: str) -> list[Card]:
    return [
        {"entity": home.resident_sensor(resident, key), "name": name, "color": _COLORS[resident]}
        for resident, name in _NAMES.items()
    ]


def _speed(home: Household, fifo_s: Mapping[str, float]) -> Card:
    tiles = [
        _tile(home.engine_entity("sensor", f"time_to_first_token_p95_{key}"), *look, columns=12)
        for key, look in _CLASSES.items()
    ]
    notes = [_note("Nineteen of twenty answers began within this time.")]
    if fifo_s:
        notes += [_subtitle("On this machine, with the same work"), _comparison(home, fifo_s)]
    return _section("Until the first word", "mdi:timer-outline", [*tiles, *notes])


def _comparison(home: Household, fifo_s: Mapping[str, float]) -> Card:
    """Return a table of what is measured now beside what first come, first served gave."""
    lines = ["| | Fairhearth | First come, first served |", "|:--|--:|--:|"]
    for key, seconds in fifo_s.items():
        sensor = home.engine_entity("sensor", f"time_to_first_token_p95_{key}")
        now = f"{{{{ states('{sensor}') | float | round(1) ~ ' s' if has_value('{sensor}') else '–' }}}}"
        lines.append(f"| {_CLASSES[key][0]} | {now} | {seconds:.1f} s |")
    return _note("\n".join(lines))


def _glance(home: Household, title: str, key: str) -> list[Card]:
    """Return one number for each resident, side by side."""
    row = {"type": "glance", "columns": len(_NAMES), "show_icon": False, "entities": _by_resident(home, key)}
    return [_subtitle(title), row]


def _history(home: Household) -> list[Card]:
    first_words = [
        {"entity": home.engine_entity("sensor", f"time_to_first_token_p95_{key}"), "name": look[0]}
        for key, look in _CLASSES.items()
    ]
    graphs = (
        ("Share received", "mdi:chart-areaspline", _by_resident(home, "service_share")),
        ("Waiting", "mdi:timer-sand", _by_resident(home, "requests_waiting")),
        ("Until the first word", "mdi:timer-outline", first_words),
    )
    return [
        _section(
            title,
            icon,
            [{"type": "history-graph", "hours_to_show": _HISTORY_HOURS, "entities": shown}],
        )
        for title, icon, shown in graphs
    ]
