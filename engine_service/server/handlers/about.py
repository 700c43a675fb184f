"""Who answers, whether it is well, which models it serves, its numbers."""

from __future__ import annotations

from aiohttp import web

from engine_service.errors import EngineStopping, UnknownModel
from engine_service.server.meters import CONTENT_TYPE
from engine_service.server.replies import error_body
from engine_service.server.service import CALLER, SERVICE, respond


async def health(request: web.Request) -> web.StreamResponse:
    """GET /health: the process answers."""
    return respond({"status": "ok"} | request.app[SERVICE].identity())


async def ready(request: web.Request) -> web.StreamResponse:
    """GET /ready: new work would be served."""
    service = request.app[SERVICE]
    if service.engine.is_ready and not service.stopping.is_set():
        return respond({"ready": True, "models": service.models.states()} | service.identity())
    reason = "the engine is stopping, has failed, or has work and completes no iteration"
    error = EngineStopping(reason, retry_after_s=5.0)
    models = {"models": service.models.states()}
    body = {"ready": False} | models | service.identity() | error_body(error)
    return respond(body, status=503, headers={"Retry-After": "5"})


async def engine(request: web.Request) -> web.StreamResponse:
    """GET /v1/engine: what serves here and what this token may do."""
    service = request.app[SERVICE]
    info = service.engine.info
    offered = service.engine.memory_of(service.engine.default_model)
    identity = service.identity()
    return respond(
        {
            "engine_id": identity["engine_id"],
            "name": service.name,
            "version": identity["version"],
            "schema_version": identity["schema_version"],
            "backend": info.backend,
            "model": info.name,
            "max_context_tokens": offered["max_context_tokens"],
            "max_sequences": offered["max_sequences"],
            "can_embed": service.models.can_embed,
            "can_see": info.can_see,
            "policy": service.engine.policy_name,
            "scopes": sorted(scope.value for scope in request[CALLER].scopes),
        }
    )


async def models(request: web.Request) -> web.StreamResponse:
    """GET /v1/models: OpenAI's list of the models, with the state of each."""
    service = request.app[SERVICE]
    return respond({"object": "list", "data": service.models.rows(service.created)})


async def model(request: web.Request) -> web.StreamResponse:
    """GET /v1/models/{id}: OpenAI's description of one model, with its state."""
    service = request.app[SERVICE]
    try:
        return respond(service.models.row(request.match_info["model_id"], service.created))
    except UnknownModel as error:
        error.param = "model_id"
        raise


async def metrics(request: web.Request) -> web.StreamResponse:
    """GET /metrics: Prometheus."""
    service = request.app[SERVICE]
    body = service.meters.exposition()
    await service.engine.kept()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
