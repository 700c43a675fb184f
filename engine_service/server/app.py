"""The application: routes behind the token check, and how errors leave. Source: docs/wire.md."""

from __future__ import annotations

import logging
import math

from aiohttp import web

from engine_service.errors import (
    EngineError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestTooLarge,
)
from engine_service.server.openapi import DOCUMENT, Handler, document
from engine_service.server.replies import error_body
from engine_service.server.routes import ROUTES
from engine_service.server.service import CALLER, SERVICE, Service, respond
from engine_service.settings import Scope

_LOGGER = logging.getLogger(__name__)


def build_app(service: Service, *, max_body_bytes: int) -> web.Application:
    """Return the application that serves this engine."""
    app = web.Application(middlewares=[_errors_as_messages], client_max_size=max_body_bytes)
    app[SERVICE] = service
    app[DOCUMENT] = document(ROUTES)
    for route in ROUTES:
        handler = route.handler if route.is_open else _guarded(route.handler, route.scope)
        app.router.add_route(route.method, route.path, handler)
        if route.is_open and route.method == "GET":
            app.router.add_route("HEAD", route.path, handler)  # what watches over services asks so
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
        return refusal(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return refusal(_translated(error, request))
    except ConnectionError:
        raise  # nobody is left to answer
    except Exception:
        _LOGGER.exception("%s %s failed", request.method, request.path)
        return refusal(EngineError("the engine made a mistake; its log says more"))


def refusal(error: EngineError) -> web.Response:
    """Return the answer that says this error."""
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
            return NotFound(f"there is nothing at {request.path:.100}")
        case web.HTTPMethodNotAllowed(allowed_methods=allowed):
            return MethodNotAllowed(
                f"{request.path:.100} takes {', '.join(sorted(allowed))}, not {request.method}"
            )
        case web.HTTPRequestEntityTooLarge():
            return RequestTooLarge(f"the body is larger than the engine reads: {error.text}")
        case _:
            return InvalidRequest(error.text or error.reason)
