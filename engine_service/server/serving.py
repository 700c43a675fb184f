"""One engine's life on one socket: bind, serve, drain.

Decides the order: the port is taken before a model is loaded (so that a second engine fails at once); answers
begin when the engine runs. At the end new work is refused, running answers may finish, the socket closes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from engine_service.engine.loop import Engine
from engine_service.identity.pairing import PairingDesk
from engine_service.identity.tokens import TokenBook
from engine_service.jobs.desk import JobDesk
from engine_service.server.app import build_app, refusal
from engine_service.server.auth import Guard
from engine_service.server.chatwork import ChatWork
from engine_service.server.connections import Complaints, Connection
from engine_service.server.meters import Meters
from engine_service.server.models import ModelDesk
from engine_service.server.policies import PolicyBook
from engine_service.server.residents import ResidentBook
from engine_service.server.service import Service
from engine_service.server.webhooks import teller_for
from engine_service.settings import NamedResident, Settings, TokenSetting
from engine_service.state import StateFolder

_BACKLOG: Final = 128
_CLOSE_S: Final = 2.0
_SETTLE_S: Final = 5.0
SILENCE_S: Final = 75.0
"""A connection that has not sent a whole request for this long is closed, however busily it dribbles."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to host and port (0: any free one), not listening; raise OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    """Return the address a client on this machine would use."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def build_service(
    engine: Engine,
    settings: Settings,
    *,
    state: StateFolder,
    tokens: tuple[TokenSetting, ...],
    kept: tuple[NamedResident, ...] = (),
) -> Service:
    """Return what the handlers need.

    Raises ModelError for a model whose chat template cannot be read, SettingsError for damaged tokens
    or policies.
    """
    book = TokenBook(state.path)
    return Service(
        engine=engine,
        models=ModelDesk(engine, for_embeddings=settings.embedding_model),
        residents=ResidentBook(engine, settings.residents, state, kept),
        guard=Guard(
            tokens,
            book=book,
            allow_loopback_without_token=settings.server.allow_loopback_without_token,
        ),
        tokens=book,
        pairing=PairingDesk(state.path),
        users=settings.server.users,
        policies=PolicyBook(settings.policy, state),
        jobs=JobDesk(state.path / "jobs.sqlite3"),
        webhook_hosts=settings.server.webhook_hosts,
        tell=teller_for(settings.server.webhook_hosts, secret=settings.server.webhook_secret),
        meters=Meters(engine.snapshot),
        engine_id=state.engine_id(),
        name=settings.server.name,
        created=int(time.time()),
    )


@asynccontextmanager
async def serving(
    service: Service,
    bound: socket.socket,
    *,
    max_body_bytes: int,
    drain_s: float,
    silence_s: float = SILENCE_S,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Serve while the block runs; then drain for up to drain_s seconds and close socket and engine."""
    runner = web.AppRunner(
        build_app(service, max_body_bytes=max_body_bytes),
        handler_cancellation=True,
        shutdown_timeout=_CLOSE_S,
    )
    await runner.setup()
    listening: asyncio.Server | None = None
    try:
        await service.engine.start()
        if service.policies.current.number:
            await service.engine.set_policy(service.policies.current.policy)
        await service.jobs.open(ChatWork(service), service.tell)
        listening = await _listen(runner, bound, silence_s=silence_s, tls=tls)
        yield
    finally:
        service.stopping.set()
        service.engine.refuse_new_work()
        await service.changes.settled(within_s=_SETTLE_S)  # some still need the jobs' file
        await service.jobs.close()  # they go on at the next start; only people's answers may finish now
        await service.engine.stop(drain_s=drain_s)
        await asyncio.sleep(0)  # the last events of drained sessions reach their handlers
        if listening is not None:
            listening.close()
        await runner.cleanup()
        await service.changes.settled(within_s=_SETTLE_S)


async def _listen(
    runner: web.AppRunner, bound: socket.socket, *, silence_s: float, tls: ssl.SSLContext | None
) -> asyncio.Server:
    """Answer on the socket as aiohttp's own sites do, but by connections of ours."""
    server, complaints = runner.server, Complaints()
    assert server is not None  # it is set up
    loop = asyncio.get_running_loop()

    def connection() -> Connection:
        return Connection(
            server,
            complaints=complaints,
            refuse=refusal,
            loop=loop,
            access_log=None,
            keepalive_timeout=silence_s,
            auto_decompress=False,  # a small body could unpack to a huge one; `read_json` refuses packed ones
        )

    return await loop.create_server(connection, sock=bound, ssl=tls, backlog=_BACKLOG)
