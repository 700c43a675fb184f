"""The demonstration's dashboard: the one that the integration brings, and a second view with the comparison.

Nothing of it is listed by hand but the comparison, which only this demonstration has measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from household.residence import Household

URL_PATH: Final = "fairhearth-home"
PATH: Final = f"/{URL_PATH}/home"
TITLE: Final = "Fair share"

STRATEGY: Final = {"type": "custom:fairhearth", "hours": 0.1}
"""A demonstration is over in minutes; the integration's own default is a day."""

_CLASSES: Final = {"voice": "Spoken", "chat": "Typed", "background": "In the background"}


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
    """Return the dashboard's configuration: without a comparison, just what every household gets."""
    if not fifo_s:
        return {"strategy": STRATEGY}
    now = {"title": TITLE, "path": "home", "icon": "mdi:scale-balance", "strategy": STRATEGY}
    return {"title": TITLE, "views": [now, _comparison(home, fifo_s)]}


def _comparison(home: Household, fifo_s: Mapping[str, float]) -> dict[str, Any]:
    """Return a view of what is measured now beside what first come, first served gave."""
    lines = ["| | Fairhearth | First come, first served |", "|:--|--:|--:|"]
    for key, seconds in fifo_s.items():
        sensor = home.engine_entity("sensor", f"time_to_first_token_p95_{key}")
        now = f"{{{{ states('{sensor}') | float | round(1) ~ ' s' if has_value('{sensor}') else '–' }}}}"
        lines.append(f"| {_CLASSES[key]} | {now} | {seconds:.1f} s |")
    heading = {"type": "heading", "heading": "Until the first word, on this machine, with the same work"}
    table = {"type": "markdown", "content": "\n".join(lines)}
    return {
        "title": "Compared",
        "path": "compared",
        "icon": "mdi:compare",
        "type": "sections",
        "sections": [{"type": "grid", "cards": [heading, table]}],
    }
