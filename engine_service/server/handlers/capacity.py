"""What the memory is worth: conversations that fit, who holds what, what could be had back."""

from __future__ import annotations

from aiohttp import web

from engine_service.server.service import SERVICE, respond


async def capacity(request: web.Request) -> web.StreamResponse:
    """GET /v1/capacity."""
    service = request.app[SERVICE]
    info = service.engine.info
    told = {"backend": info.backend, "parking_bytes": info.parking_bytes}
    return respond({**service.identity(), **told, **service.engine.memory()})
