"""What all handlers share, and the body of a request read safely."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from aiohttp import web

from engine_service import __version__
from engine_service.checks import shown
from engine_service.engine.loop import Engine
from engine_service.errors import EngineError, InvalidRequest, RequestTooLarge
from engine_service.identity.caller import Caller
from engine_service.identity.pairing import PairingDesk
from engine_service.identity.tokens import TokenBook
from engine_service.jobs.desk import JobDesk
from engine_service.jobs.teller import Tell
from engine_service.protocol import SCHEMA_VERSION, parse_json
from engine_service.scheduling.model import ResidentId
from engine_service.server.auth import Guard
from engine_service.server.changes import Changes
from engine_service.server.meters import Meters
from engine_service.server.models import ModelDesk
from engine_service.server.policies import PolicyBook
from engine_service.server.rehearsal import Rehearsals
from engine_service.server.replies import error_body
from engine_service.server.residents import ResidentBook
from engine_service.server.streaming import EventStream, dumps

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)

BODY_TIMEOUT_S: Final = 30.0


@dataclass(slots=True, kw_only=True)
class Service:
    """One engine as the handlers see it."""

    engine: Engine
    models: ModelDesk
    residents: ResidentBook
    guard: Guard
    tokens: TokenBook
    pairing: PairingDesk
    users: Mapping[str, ResidentId]  #: OpenAI's `user` to the resident it is
    meters: Meters
    jobs: JobDesk
    webhook_hosts: Collection[str]  #: host or host:port that may be told of ended jobs
    tell: Tell  #: how the webhook of a job is told
    policies: PolicyBook
    engine_id: str
    name: str
    created: int  #: seconds since 1970, when this process began to serve
    rehearsals: Rehearsals = field(default_factory=Rehearsals)
    changes: Changes = field(default_factory=Changes)  #: what must not be left half done
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  #: ends streams that would never end

    def identity(self) -> dict[str, Any]:
        """Return who answers: the beginning of several messages."""
        return {
            "engine_id": self.engine_id,
            "version": __version__,
            "schema_version": SCHEMA_VERSION,
            "model": self.engine.info.name,
        }


SERVICE: Final = web.AppKey("service", Service)
CALLER: Final = web.RequestKey("caller", Caller)


async def unless_stopping(service: Service, asked: Coroutine[Any, Any, T]) -> T | None:
    """Return what is asked for, or None as soon as the service stops."""
    answer = asyncio.ensure_future(asked)
    stopping = asyncio.ensure_future(service.stopping.wait())
    try:
        await asyncio.wait({answer, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()
        stopping.cancel()


@asynccontextmanager
async def faults_told(events: EventStream) -> AsyncIterator[None]:
    """Tell the reader of a stream of the error that ends the block.

    The stream's head is sent, so that an answer to the request itself would stand in the middle of it.
    """
    try:
        yield
    except EngineError as error:
        await events.send(error_body(error))
    except ConnectionError:
        raise  # nobody is left to tell
    except Exception:
        _LOGGER.exception("A stream failed")
        mistake = EngineError("the engine made a mistake; its log says more")
        await events.send(error_body(mistake))


def respond(message: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a JSON answer, in UTF-8."""
    return web.json_response(message, status=status, headers=headers, dumps=dumps)


async def read_json(request: web.Request) -> Any:
    """Return the request's JSON body; raise InvalidRequest or RequestTooLarge."""
    if request.content_type != "application/json":
        raise InvalidRequest(f"Content-Type must be application/json, not {request.content_type}")
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding != "identity":
        raise InvalidRequest(f"the body must be sent as it is, without Content-Encoding {shown(coding)}")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.read()
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestTooLarge(f"the body is larger than the engine reads: {error.text}") from None
    return parse_json(body)
