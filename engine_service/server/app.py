"""Routes, what each needs, and how errors leave.

Decides which scope an address needs. Source: docs/wire.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from engine_service.errors import (
    EngineError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestTooLarge,
)
from engine_service.server.handlers import about, fairness, generate, jobs, pair, policy, residents, status
from engine_service.server.replies import error_body
from engine_service.server.service import CALLER, SERVICE, Service, respond
from engine_service.settings import Scope

_LOGGER = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_OPEN: Final[tuple[tuple[str, str, Handler], ...]] = (
    ("GET", "/", status.page),
    ("GET", "/status.js", status.page),
    ("GET", "/status.css", status.page),
    ("GET", "/health", about.health),
    ("GET", "/ready", about.ready),
    ("POST", "/v1/pair", pair.pair),
)
_GUARDED: Final[tuple[tuple[str, str, Handler, Scope | None], ...]] = (
    ("GET", "/v1/engine", about.engine, None),
    ("GET", "/v1/models", about.models, None),
    ("POST", "/v1/chat/completions", generate.chat, Scope.GENERATE),
    ("POST", "/v1/completions", generate.complete, Scope.GENERATE),
    ("POST", "/v1/prefix", generate.prefix, Scope.GENERATE),
    ("POST", "/v1/embeddings", generate.embed, Scope.GENERATE),
    ("GET", "/v1/policy", policy.read, None),
    ("PUT", "/v1/policy", policy.replace, Scope.POLICY),
    ("PATCH", "/v1/policy", policy.change, Scope.POLICY),
    ("POST", "/v1/policy/validate", policy.validate, Scope.POLICY),
    ("POST", "/v1/policy/rollback", policy.roll_back, Scope.POLICY),
    ("POST", "/v1/jobs", jobs.submit, Scope.GENERATE),
    ("GET", "/v1/jobs", jobs.list_newest, Scope.GENERATE),
    ("GET", "/v1/jobs/stream", jobs.stream, Scope.GENERATE),
    ("GET", "/v1/jobs/{job_id}", jobs.get, Scope.GENERATE),
    ("DELETE", "/v1/jobs/{job_id}", jobs.cancel, Scope.GENERATE),
    ("GET", "/v1/residents", residents.list_all, None),
    ("PUT", "/v1/residents/{resident_id}", residents.put, Scope.RESIDENTS),
    ("DELETE", "/v1/residents/{resident_id}", residents.delete, Scope.RESIDENTS),
    ("GET", "/v1/fairness", fairness.once, None),
    ("GET", "/v1/fairness/stream", fairness.stream, None),
    ("GET", "/metrics", about.metrics, Scope.METRICS),
)


def build_app(service: Service, *, max_body_bytes: int) -> web.Application:
    """Return the application that serves this engine."""
    app = web.Application(middlewares=[_errors_as_messages], client_max_size=max_body_bytes)
    app[SERVICE] = service
    for method, path, handler in _OPEN:
        app.router.add_route(method, path, handler)
    for method, path, handler, scope in _GUARDED:
        app.router.add_route(method, path, _guarded(handler, scope))
    return app


def _guarded(handler: Handler, scope: Scope | None) -> Handler:
    """Return the handler behind the token check. Nothing of the body is read before."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        request[CALLER] = request.app[SERVICE].guard.check(request, scope)
        return await handler(request)

    return guarded


@web.middleware
async def _errors_as_messages(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except EngineError as error:
        return _refusal(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _refusal(_translated(error, request))
    except ConnectionError:
        raise  # nobody is left to answer
    except Exception:
        _LOGGER.exception("%s %s failed", request.method, request.path)
        return _refusal(EngineError("the engine made a mistake; its log says more"))


def _refusal(error: EngineError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(0, math.ceil(error.retry_after_s)))
    if error.http_status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="fairhearth"'
    return respond(error_body(error), status=error.http_status, headers=headers)


def _translated(error: web.HTTPException, request: web.Request) -> EngineError:
    """Return aiohttp's own refusal as one of ours."""
    match error:
        case web.HTTPNotFound():
            return NotFound(f"there is nothing at {request.path}")
        case web.HTTPMethodNotAllowed(allowed_methods=allowed):
            return MethodNotAllowed(
                f"{request.path} takes {', '.join(sorted(allowed))}, not {request.method}"
            )
        case web.HTTPRequestEntityTooLarge():
            return RequestTooLarge(f"the body is larger than the engine reads: {error.text}")
        case _:
            return InvalidRequest(error.text or error.reason)
