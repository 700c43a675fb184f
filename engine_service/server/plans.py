"""From a message to an order: who pays for it, whether it can be served, how its answer will be told.

Decides nothing about when it is served. Knows neither sockets nor jobs; both streams and jobs are run by it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from engine_service import texts
from engine_service.chat.chosen import Chosen
from engine_service.chat.sampling import sampling_for
from engine_service.engine import memory
from engine_service.engine.sessions import Delta, Finished, Order, Session, SessionEvent
from engine_service.errors import EngineError, InvalidRequest
from engine_service.protocol import ChatRequest, CompletionRequest, Extension, Message, Options
from engine_service.scheduling.model import RequestId
from engine_service.server.meters import Meters
from engine_service.server.replies import ChatReply, Head, Reply, TextReply
from engine_service.server.service import Service

_LOGGER = logging.getLogger(__name__)

_LONG_CHARACTERS: Final = 8_192
"""Longer prompts are prepared in a thread, so that other streams go on meanwhile."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request that can be ordered."""

    order: Order
    caller: Extension
    model: Chosen
    reply: Callable[[Head], Reply]
    renamed: dict[str, str] = field(default_factory=dict)  #: keys in the engine's refusals: here
    num_written: int = 0  #: tokens at the end of the prompt that belong to the answer


async def plan_chat(service: Service, message: ChatRequest, caller: Extension) -> Plan:
    """Return the plan of a chat completion; raise EngineError for what cannot be served."""
    options = message.options
    model = _checked_model(service, options, caller)
    prepared = await off_loop(length_of(message.messages), lambda: model.conversation.prepare(message))
    bias = {**prepared.logit_bias, **options.logit_bias}
    order = _order(replace(options, logit_bias=bias), caller, prepared.prompt_ids, model)
    return Plan(
        order=replace(order, constraint=prepared.constraint, pictures=prepared.pictures),
        caller=caller,
        model=model,
        reply=lambda head: ChatReply(head, prepared.parser, include_usage=options.include_usage),
        renamed={"response_format": "tools" if message.tools else "response_format"},
    )


async def plan_completion(service: Service, message: CompletionRequest, caller: Extension) -> Plan:
    """Return the plan of a text completion; raise EngineError for what cannot be served."""
    options = message.options
    model = _checked_model(service, options, caller)
    if isinstance(message.prompt, str):
        text = message.prompt
        prompt_ids = await off_loop(len(text), lambda: model.conversation.text_ids(text))
    else:
        prompt_ids = message.prompt
        check_token_ids(model, prompt_ids, "prompt")
    return Plan(
        order=replace(_order(options, caller, prompt_ids, model), heal_prompt=message.token_healing),
        caller=caller,
        model=model,
        reply=lambda head: TextReply(head, include_usage=options.include_usage),
        renamed={"messages": "prompt"},
    )


def _checked_model(service: Service, options: Options, caller: Extension) -> Chosen:
    """Return the model asked; refuse what only this engine can know to be wrong, before any work is done."""
    model = service.models.choose(options.model)
    service.residents.check(caller.resident_id, param="fairhearth.resident")
    check_token_ids(model, tuple(options.logit_bias), "logit_bias")
    return model


def check_token_ids(model: Chosen, token_ids: tuple[int, ...], param: str) -> None:
    """Refuse token ids that the model does not have."""
    size = model.info.vocab_size
    if (highest := max(token_ids, default=0)) >= size:
        raise InvalidRequest(
            f"{param} holds token id {highest}; the model's are 0 to {size - 1}", param=param
        )


def check_length(service: Service, plan: Plan, *, names_model: bool) -> None:
    """Raise PromptTooLong, in the engine's words, for a prompt that no policy could make room for.

    What only the policy of today keeps out may be served once that has changed. Where no model is named,
    another one may answer by then, so that the largest memory counts.
    """
    capacity, length = plan.model.language.capacity, len(plan.order.prompt_ids)
    possible = [capacity] if names_model else [capacity, *service.engine.capacities]
    if length < max(one.longest_request for one in possible):
        return
    policy, class_id = service.policies.current.policy, plan.caller.class_id
    raise memory.too_long(length, memory.longest_request(capacity, policy, class_id))


def _order(options: Options, caller: Extension, prompt_ids: tuple[int, ...], model: Chosen) -> Order:
    return Order(
        resident_id=caller.resident_id,
        class_id=caller.class_id,
        prompt_ids=prompt_ids,
        max_tokens=options.max_tokens,
        sampling=sampling_for(options),
        stop=options.stop,
        banned=options.banned_strings,
        program_id=caller.program_id,
        ignore_eos=options.ignore_eos,
        model_id=model.model_id,
    )


def length_of(messages: tuple[Message, ...]) -> int:
    """Return how many characters the messages say; a picture counts as more than any text."""
    num_pictures = sum(len(message.pictures) for message in messages)
    return sum(len(message.content or "") for message in messages) + num_pictures * (_LONG_CHARACTERS + 1)


async def off_loop(num_characters: int, prepare: Callable[[], T]) -> T:
    """Prepare a prompt: short ones at once, long ones in a thread."""
    return await asyncio.to_thread(prepare) if num_characters > _LONG_CHARACTERS else prepare()


# --- ordered ---


async def ordered(service: Service, plan: Plan) -> tuple[Running, Reply]:
    """Submit the plan; raise EngineError where the engine refuses it, in the words of the request."""
    try:
        session = await service.engine.submit(plan.order)
    except EngineError as error:
        service.meters.ended(plan.caller, "refused")
        error.param = plan.renamed.get(error.param or "", error.param)
        raise
    head = Head(
        request_id=session.request_id,
        created=int(time.time()),
        model=plan.model.info.name,
        caller=plan.caller,
        prompt_tokens=len(plan.order.prompt_ids) - plan.num_written,
    )
    if texts.are_logged():
        prompt = plan.model.language.tokenizer.decode(plan.order.prompt_ids)
        texts.log(session.request_id, "prompt", prompt)
    return Running(session, plan.caller, service.meters), plan.reply(head)


class Running:
    """A session being answered, and how it ended."""

    def __init__(self, session: Session, caller: Extension, meters: Meters):
        """Follow the session; `close` must be called whatever happens."""
        self._session = session
        self._caller = caller
        self._meters = meters
        self._outcome = "cancelled"
        self._said: list[str] = []  #: the answer, where texts are logged

    @property
    def request_id(self) -> RequestId:
        """The request as the engine knows it."""
        return self._session.request_id

    @property
    def has_more(self) -> bool:
        """Whether `events` yields another one, or raises, without waiting for it."""
        return self._session.has_more

    async def events(self) -> AsyncGenerator[SessionEvent, None]:
        """Yield the session's events; raise the EngineError that ended it."""
        try:
            async for event in self._session.events():
                if isinstance(event, Delta) and texts.are_logged():
                    self._said.append(event.text)
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
        if self._said:
            texts.log(self._session.request_id, "answer", "".join(self._said))
        _LOGGER.info(
            "Request %s of %s (%s) %s",
            self._session.request_id,
            self._caller.resident_id,
            self._caller.class_id.value,
            self._outcome,
            extra={
                "request_id": self._session.request_id,
                "resident": self._caller.resident_id,
                "workload_class": self._caller.class_id.value,
            },
        )
