"""The residents: list, create or replace, remove."""

from __future__ import annotations

from aiohttp import web

from engine_service.protocol import parse_resident_id, parse_resident_request
from engine_service.scheduling.model import ResidentId
from engine_service.server.replies import resident_body
from engine_service.server.service import SERVICE, Service, read_json, respond
from engine_service.settings import named


async def list_all(request: web.Request) -> web.StreamResponse:
    """GET /v1/residents."""
    entries = request.app[SERVICE].residents.all()
    return respond({"residents": [resident_body(entry) for entry in entries]})


async def put(request: web.Request) -> web.StreamResponse:
    """PUT /v1/residents/{id}."""
    resident_id = parse_resident_id(request.match_info["resident_id"])
    entry = named(resident_id, parse_resident_request(await read_json(request)))
    service = request.app[SERVICE]
    await service.changes.carry_out(service.residents.put(entry))
    return respond(resident_body(entry))


async def delete(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/residents/{id}."""
    resident_id = parse_resident_id(request.match_info["resident_id"])
    service = request.app[SERVICE]
    await service.changes.carry_out(_remove(service, resident_id))
    return web.Response(status=204)


async def _remove(service: Service, resident_id: ResidentId) -> None:
    await service.residents.remove(resident_id)
    service.meters.forget(resident_id)
