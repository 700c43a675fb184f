"""What the memory is worth: conversations that fit, who holds what, what could be had back."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from engine_service.server.models import name_of
from engine_service.server.service import SERVICE, Service, respond


async def capacity(request: web.Request) -> web.StreamResponse:
    """GET /v1/capacity: of the model that serves, and what every other one would offer."""
    service = request.app[SERVICE]
    serving = service.engine.serving
    return respond(
        {
            **service.identity(),
            "backend": serving.info.backend,
            "parking_bytes": serving.info.parking_bytes,
            **service.engine.memory(),
            "serving": serving.info.name,
            "models": _models(service),
        }
    )


def _models(service: Service) -> list[dict[str, Any]]:
    """Return what each model's memory is worth; one that cannot be read is left out."""
    states = {entry["id"]: entry for entry in service.models.states()}
    return [
        states[name_of(status)] | service.engine.memory_of(status.model_id)
        for status in service.engine.models()
        if status.info is not None
    ]
