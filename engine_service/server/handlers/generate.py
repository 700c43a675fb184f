"""Chat, text completion and pinned prefixes: from a request to an order, from a session to an answer.

Whatever ends the handler (client gone, error, shutdown), a session that has not finished is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, TypeVar, assert_never

from aiohttp import web

from engine_service.chat.conversation import Prepared
from engine_service.chat.sampling import sampling_for
from engine_service.engine.sessions import Accepted, Delta, Finished, Order, Session, SessionEvent
from engine_service.errors import EngineError, GenerationFailed, InvalidRequest, UnknownModel
from engine_service.protocol import (
    Extension,
    Message,
    Options,
    parse_chat_request,
    parse_completion_request,
    parse_prefix_request,
)
from engine_service.server.meters import Meters
from engine_service.server.replies import ChatReply, Head, Reply, TextReply, error_body
from engine_service.server.service import CALLER, SERVICE, Service, read_json, respond
from engine_service.server.streaming import DONE, EventStream, ReaderGone

_LOGGER = logging.getLogger(__name__)

_LONG_CHARACTERS: Final = 8_192
"""Longer prompts are prepared in a thread, so that other streams go on meanwhile."""

T = TypeVar("T")


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    service = request.app[SERVICE]
    message = parse_chat_request(await read_json(request))
    options = message.options
    caller = _attributed(request, options)
    _check(service, options, caller)
    prepared: Prepared = await _off_loop(
        _length(message.messages), lambda: service.conversation.prepare(message)
    )
    bias = {**prepared.logit_bias, **options.logit_bias}
    order = replace(
        _order(replace(options, logit_bias=bias), caller, prepared.prompt_ids), constraint=prepared.constraint
    )

    def reply(head: Head) -> Reply:
        return ChatReply(head, prepared.parser, include_usage=options.include_usage)

    constrained_by = "tools" if message.tools else "response_format"
    return await _answer(request, order, options, caller, reply, params={"response_format": constrained_by})


async def complete(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    service = request.app[SERVICE]
    message = parse_completion_request(await read_json(request))
    options = message.options
    caller = _attributed(request, options)
    _check(service, options, caller)
    if isinstance(message.prompt, str):
        text = message.prompt
        prompt_ids = await _off_loop(len(text), lambda: service.conversation.text_ids(text))
    else:
        prompt_ids = message.prompt
        _check_token_ids(service, prompt_ids, "prompt")
    order = _order(options, caller, prompt_ids)

    def reply(head: Head) -> Reply:
        return TextReply(head, include_usage=options.include_usage)

    return await _answer(request, order, options, caller, reply, params={"messages": "prompt"})


async def prefix(request: web.Request) -> web.StreamResponse:
    """POST /v1/prefix."""
    service = request.app[SERVICE]
    message = parse_prefix_request(await read_json(request))
    prompt_ids = await _off_loop(_length(message.messages), lambda: service.conversation.prefix_ids(message))
    constraint = service.conversation.prefix_constraint(message)
    if constraint is not None:
        # The first grammar of a set of tools takes a second to compile: now, not while somebody waits.
        await service.engine.prepare_constraint(constraint)
    prefix_tokens, computed_tokens = await service.engine.pin_prefix(prompt_ids)
    return respond({"prefix_tokens": prefix_tokens, "computed_tokens": computed_tokens})


# --- from a request to an order ---


def _attributed(request: web.Request, options: Options) -> Extension:
    """Return who is charged and how urgent it is: token first, then request, then settings."""
    mapped = request.app[SERVICE].users.get(options.user or "")
    return request[CALLER].attribute(options.asked, resident_id=mapped)


def _check(service: Service, options: Options, caller: Extension) -> None:
    """Refuse what only this engine can know to be wrong, before any work is done."""
    served = service.engine.info.name
    if options.model and options.model != served:
        raise UnknownModel(f"the model {options.model!r} is not served here; {served!r} is", param="model")
    service.residents.check(caller.resident_id, param="fairhearth.resident")
    _check_token_ids(service, tuple(options.logit_bias), "logit_bias")


def _check_token_ids(service: Service, token_ids: tuple[int, ...], param: str) -> None:
    size = service.engine.info.vocab_size
    if (highest := max(token_ids, default=0)) >= size:
        raise InvalidRequest(
            f"{param} holds token id {highest}; the model's are 0 to {size - 1}", param=param
        )


def _order(options: Options, caller: Extension, prompt_ids: tuple[int, ...]) -> Order:
    return Order(
        resident_id=caller.resident_id,
        class_id=caller.class_id,
        prompt_ids=prompt_ids,
        max_tokens=options.max_tokens,
        sampling=sampling_for(options),
        stop=options.stop,
        program_id=caller.program_id,
        ignore_eos=options.ignore_eos,
    )


def _length(messages: tuple[Message, ...]) -> int:
    return sum(len(message.content or "") for message in messages)


async def _off_loop(num_characters: int, prepare: Callable[[], T]) -> T:
    """Prepare a prompt: short ones at once, long ones in a thread."""
    return await asyncio.to_thread(prepare) if num_characters > _LONG_CHARACTERS else prepare()


# --- from a session to an answer ---


async def _answer(
    request: web.Request,
    order: Order,
    options: Options,
    caller: Extension,
    reply: Callable[[Head], Reply],
    *,
    params: dict[str, str],
) -> web.StreamResponse:
    """Submit the order and answer it, as a stream or in one piece. params renames keys in refusals."""
    service = request.app[SERVICE]
    try:
        session = await service.engine.submit(order)
    except EngineError as error:
        service.meters.ended(caller, "refused")
        error.param = params.get(error.param or "", error.param)
        raise
    run = _Run(session, caller, service.meters)
    try:
        head = Head(
            request_id=session.request_id,
            created=int(time.time()),
            model=service.engine.info.name,
            caller=caller,
            prompt_tokens=len(order.prompt_ids),
        )
        if options.stream:
            return await _streamed(request, reply(head), run)
        return await _in_one_piece(reply(head), run)
    finally:
        run.close()


class _Run:
    """A session being answered, and how it ended."""

    def __init__(self, session: Session, caller: Extension, meters: Meters):
        self._session = session
        self._caller = caller
        self._meters = meters
        self._outcome = "cancelled"

    async def events(self) -> AsyncGenerator[SessionEvent, None]:
        """Yield the session's events; raise the EngineError that ended it."""
        try:
            async for event in self._session.events():
                if isinstance(event, Finished):
                    self._outcome = "finished"
                    self._meters.finished(self._caller, event.timings)
                yield event
        except EngineError:
            self._outcome = "failed"
            raise

    def close(self) -> None:
        """Give the request up unless it has ended by itself."""
        if self._outcome == "cancelled":
            self._session.cancel()
        if self._outcome != "finished":
            self._meters.ended(self._caller, self._outcome)
        _LOGGER.info(
            "Request %s of %s (%s) %s",
            self._session.request_id,
            self._caller.resident_id,
            self._caller.class_id.value,
            self._outcome,
        )


def _messages(reply: Reply, event: SessionEvent) -> Iterator[dict[str, Any]]:
    match event:
        case Accepted():
            return reply.begin(event)
        case Delta():
            return reply.more(event)
        case Finished():
            return reply.end(event)
        case _:
            assert_never(event)


async def _in_one_piece(reply: Reply, run: _Run) -> web.StreamResponse:
    async for event in run.events():
        for _ in _messages(reply, event):
            pass
    return respond(reply.whole())


async def _streamed(request: web.Request, reply: Reply, run: _Run) -> web.StreamResponse:
    out = EventStream(request)
    with contextlib.suppress(ReaderGone):
        async with out, aclosing(run.events()) as events:
            try:
                async for event in events:
                    for message in _messages(reply, event):
                        await out.send(message)
                await out.send(DONE)
            except EngineError as error:
                await out.send(error_body(error))
            except ReaderGone:
                raise
            except Exception:
                # The status line is sent: the middleware could not tell the caller any more.
                _LOGGER.exception("A stream failed")
                await out.send(error_body(GenerationFailed("the engine could not go on with this answer")))
    return out.response
