"""Pairing: the code that a person read at the engine, for a token."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from aiohttp import web

from engine_service.errors import EngineError, StorageUnavailable, WrongCode
from engine_service.identity.caller import Caller
from engine_service.protocol import parse_pair_request
from engine_service.server.service import SERVICE, read_json, respond
from engine_service.settings import Scope

_LOGGER = logging.getLogger(__name__)

PAIRED_SCOPES: Final = frozenset({Scope.GENERATE, Scope.POLICY, Scope.RESIDENTS})


async def pair(request: web.Request) -> web.StreamResponse:
    """POST /v1/pair: no token needed, but a code that somebody at the engine had made."""
    service = request.app[SERVICE]
    message = parse_pair_request(await read_json(request))
    try:
        await asyncio.to_thread(service.pairing.trade, message.code)
        caller = Caller(name=message.name, scopes=PAIRED_SCOPES)
        token, kept = await asyncio.to_thread(service.tokens.create, caller, rename=True)
    except WrongCode:
        service.guard.note_failure(request)
        raise
    except EngineError:
        raise
    except OSError as error:
        raise StorageUnavailable(f"the engine cannot keep a token: {error.strerror}") from None
    _LOGGER.info("%r paired from %s; its token is %s", kept.caller.name, request.remote, kept.token_id)
    return respond(
        {
            "token": token,
            "name": kept.caller.name,
            "scopes": sorted(scope.value for scope in kept.caller.scopes),
            "engine_id": service.engine_id,
        },
        status=201,
    )
