"""What a job does: a chat completion, gone on with where an earlier run of it left off.

Decides from which token on an answer that broke off can be continued. Knows no HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from engine_service.engine.sessions import Accepted, Delta, Finished, SessionEvent
from engine_service.jobs.model import Job, Output
from engine_service.protocol import Options, parse_chat_request
from engine_service.server.plans import Plan, Running, ordered, plan_chat
from engine_service.server.replies import Reply, messages_of
from engine_service.server.service import Service

_LOGGER = logging.getLogger(__name__)

_MAX_DROPPED: Final = 64
"""Longest end of an answer (tokens) that is given up to find a place where text and tokens agree."""


class ChatWork:
    """Orders chat completions for jobs."""

    def __init__(self, service: Service):
        """Order from this service's engine."""
        self._service = service

    async def start(self, job: Job) -> ChatRun:
        """Order the job; raise EngineError where it is refused."""
        message = parse_chat_request(job.request)
        plan = await plan_chat(self._service, message, job.who)
        served = plan.model.info.name
        written = Output()
        if job.model in (None, served):
            written = resumable(job.output, plan, message.options, plan.model.language.tokenizer.decode)
        elif job.output.token_ids:
            _LOGGER.info("Job %s begins anew: %s wrote its beginning, not %s", job.job_id, job.model, served)
        run, reply = await ordered(self._service, _continued(plan, written))
        return ChatRun(run, reply, written, served, lambda: self._service.engine.eta_s(run.request_id))


def resumable(
    output: Output, plan: Plan, options: Options, decode: Callable[[tuple[int, ...]], str]
) -> Output:
    """Return the part of an answer that a new run can go on from; nothing if it must begin anew.

    A grammar and log probabilities know what came before, so answers with them begin anew. Else the last
    token is always computed again (it may have been the end), and with it whatever was held back from the
    text.
    """
    if plan.order.constraint is not None or options.num_logprobs is not None:
        return Output()
    token_ids = output.token_ids
    for length in range(len(token_ids) - 1, max(0, len(token_ids) - _MAX_DROPPED), -1):
        try:
            text = decode(token_ids[:length])
        except ValueError as error:  # ids of another model, loaded when the answer broke off
            _LOGGER.info("an answer begins anew, another model wrote its beginning: %s", error)
            return Output()
        if output.text.startswith(text) and "\ufffd" not in text[-1:]:
            return Output(token_ids=token_ids[:length], text=text)
    return Output()


def _continued(plan: Plan, written: Output) -> Plan:
    order, count = plan.order, len(written.token_ids)
    most = None if order.max_tokens is None else order.max_tokens - count
    order = replace(order, prompt_ids=order.prompt_ids + written.token_ids, max_tokens=most)
    return replace(plan, order=order, num_written=count)


class ChatRun:
    """A chat completion under way, told as one answer however often it was begun."""

    def __init__(
        self,
        run: Running,
        reply: Reply,
        written: Output,
        model: str,
        wait_s: Callable[[], float | None],
    ):
        """Follow run of a model; what was written before belongs to the answer.

        wait_s asks how long it waits yet.
        """
        self.model = model
        self._run = run
        self._reply = reply
        self._written = written
        self._wait_s = wait_s

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """Yield all that is written so far; raise the EngineError that ended it."""
        token_ids, texts = list(self._written.token_ids), [self._written.text]
        async with aclosing(self._run.events()) as events:
            async for event in events:
                self._tell(event)
                if isinstance(event, Delta):
                    token_ids += event.token_ids
                    texts.append(event.text)
                    yield Output(token_ids=tuple(token_ids), text="".join(texts))

    def _tell(self, event: SessionEvent) -> None:
        told: list[SessionEvent] = [event]
        written = self._written
        if isinstance(event, Accepted) and written.token_ids:
            told.append(Delta(text=written.text, token_ids=written.token_ids))
        if isinstance(event, Finished):
            decoded = event.timings.decode_tokens + len(written.token_ids)
            told = [replace(event, timings=replace(event.timings, decode_tokens=decoded))]
        for one in told:
            for _ in messages_of(self._reply, one):
                pass  # the reply keeps what it needs for the whole

    def result(self) -> dict[str, Any]:
        """Return the chat completion."""
        return self._reply.whole()

    def wait_s(self) -> float | None:
        """Return the seconds until it probably starts; None if it does not wait, or unknown."""
        return self._wait_s()

    def close(self) -> None:
        """Give the request up unless it has ended."""
        self._run.close()
