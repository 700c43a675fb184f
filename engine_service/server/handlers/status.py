"""A page for a browser: that the engine runs, and how its household is served.

Decides what may be shown without a token: nothing but that this is an engine. The rest is fetched by the page
with a token that the reader types in; it stays in that tab. No script or style comes from elsewhere.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from aiohttp import web

_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FILES: Final = {
    "/": ("status.html", "text/html"),
    "/status.js": ("status.js", "text/javascript"),
    "/status.css": ("status.css", "text/css"),
}


async def page(request: web.Request) -> web.StreamResponse:
    """GET /: the page, its script and its style."""
    name, content_type = _FILES[request.path]
    text = (files("engine_service.server") / "page" / name).read_text(encoding="utf-8")
    return web.Response(text=text, content_type=content_type, charset="utf-8", headers=_HEADERS)
