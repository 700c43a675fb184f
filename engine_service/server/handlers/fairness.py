"""Who is served, who waits, and what each share comes to: one look, or a stream of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

from aiohttp import web

from engine_service.server.service import SERVICE, Service, faults_told, respond, unless_stopping
from engine_service.server.streaming import EventStream, ReaderGone

MIN_INTERVAL_S: Final = 1.0


async def _look(service: Service) -> dict[str, Any]:
    """Return the message of docs/wire.md as of now, whose counters no restart takes back."""
    info = service.engine.info
    message = {
        **service.identity(),
        "backend": info.backend,
        "policy": service.engine.policy_name,
        "at": round(time.time(), 3),
        **service.engine.snapshot().as_dict(),
    }
    await service.engine.kept()
    return message


async def once(request: web.Request) -> web.StreamResponse:
    """GET /v1/fairness."""
    return respond(await _look(request.app[SERVICE]))


async def stream(request: web.Request) -> web.StreamResponse:
    """GET /v1/fairness/stream: at once, then at most once a second when something changed."""
    service = request.app[SERVICE]
    events = EventStream(request)
    with contextlib.suppress(ReaderGone):
        async with events, faults_told(events):
            await _send_changes(service, events)
    return events.response


async def _send_changes(service: Service, events: EventStream) -> None:
    """Send snapshots until the service stops."""
    version = -1
    while not service.stopping.is_set():
        changed = await unless_stopping(service, service.engine.changed(after=version))
        version = version if changed is None else changed  # 0: nothing has happened since the start
        await events.send(await _look(service), event="fairness")
        await _pause(service, MIN_INTERVAL_S)


async def _pause(service: Service, seconds: float) -> None:
    """Wait, but not longer than the service lasts."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(service.stopping.wait(), seconds)
