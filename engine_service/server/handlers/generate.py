"""Chat, text completion and pinned prefixes: a request in, a stream or one message out.

Whatever ends the handler (client gone, error, shutdown), a session that has not finished is cancelled.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import aclosing
from typing import Any, Final

from aiohttp import web

from engine_service.engine.sessions import Finished
from engine_service.errors import EngineError, GenerationFailed
from engine_service.protocol import (
    Extension,
    Options,
    parse_chat_request,
    parse_completion_request,
    parse_embeddings_request,
    parse_prefix_request,
)
from engine_service.scheduling.model import WorkloadClass
from engine_service.server.embeddings import embedded, embeddings_body
from engine_service.server.plans import (
    Plan,
    Running,
    length_of,
    off_loop,
    ordered,
    plan_chat,
    plan_completion,
)
from engine_service.server.replies import Reply, error_body, messages_of
from engine_service.server.service import CALLER, SERVICE, read_json, respond
from engine_service.server.streaming import DONE, EventStream, ReaderGone

_LOGGER = logging.getLogger(__name__)

_MOST_AT_ONCE: Final = 64
"""Messages of a stream that go out in one write, where so many are there."""


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    message = parse_chat_request(await read_json(request))
    plan = await plan_chat(request.app[SERVICE], message, _attributed(request, message.options))
    return await _answer(request, plan, is_stream=message.options.stream)


async def complete(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    message = parse_completion_request(await read_json(request))
    plan = await plan_completion(request.app[SERVICE], message, _attributed(request, message.options))
    return await _answer(request, plan, is_stream=message.options.stream)


async def embed(request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings: refused, by name, where the backend makes none."""
    service = request.app[SERVICE]
    message = parse_embeddings_request(await read_json(request))
    caller = request[CALLER].attribute(
        message.asked, default=WorkloadClass.EMBEDDING, resident_id=service.users.get(message.user or "")
    )
    model = service.models.choose_for_embeddings(message.model)
    found = await embedded(service, message, caller, model)
    return respond(embeddings_body(found, model.info.name, caller, encoding=message.encoding))


async def prefix(request: web.Request) -> web.StreamResponse:
    """POST /v1/prefix."""
    service = request.app[SERVICE]
    message = parse_prefix_request(await read_json(request))
    model = service.models.choose(message.model)
    prompt_ids = await off_loop(length_of(message.messages), lambda: model.conversation.prefix_ids(message))
    constraint = model.conversation.prefix_constraint(message)
    if constraint is not None:
        # The first grammar of a set of tools takes a second to compile: now, not while somebody waits.
        await service.engine.prepare_constraint(constraint, model.model_id)
    prefix_tokens, computed_tokens = await service.engine.pin_prefix(prompt_ids, model.model_id)
    return respond({"prefix_tokens": prefix_tokens, "computed_tokens": computed_tokens})


def _attributed(request: web.Request, options: Options) -> Extension:
    """Return who is charged and how urgent it is: token first, then request, then settings."""
    mapped = request.app[SERVICE].users.get(options.user or "")
    return request[CALLER].attribute(options.asked, resident_id=mapped)


# --- from a session to an answer ---


async def _answer(request: web.Request, plan: Plan, *, is_stream: bool) -> web.StreamResponse:
    """Submit the plan and answer it, as a stream or in one piece."""
    run, reply = await ordered(request.app[SERVICE], plan)
    try:
        return await (_streamed(request, reply, run) if is_stream else _in_one_piece(reply, run))
    finally:
        run.close()


async def _in_one_piece(reply: Reply, run: Running) -> web.StreamResponse:
    async for event in run.events():
        for _ in messages_of(reply, event):
            pass
    return respond(reply.whole())


async def _streamed(request: web.Request, reply: Reply, run: Running) -> web.StreamResponse:
    out = EventStream(request)
    told: list[dict[str, Any] | str] = []
    with contextlib.suppress(ReaderGone):
        async with out, aclosing(run.events()) as events:
            try:
                async for event in events:
                    told += messages_of(reply, event)
                    if isinstance(event, Finished):
                        told.append(DONE)
                    if told and (not run.has_more or len(told) >= _MOST_AT_ONCE):
                        await out.send(*told)
                        told.clear()
            except EngineError as error:
                await out.send(*told, error_body(error))
            except ReaderGone:
                raise
            except Exception:
                # The status line is sent: the middleware could not tell the caller any more.
                _LOGGER.exception("A stream failed")
                fault = GenerationFailed("the engine could not go on with this answer")
                await out.send(*told, error_body(fault))
    return out.response
