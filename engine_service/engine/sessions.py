"""What a caller of the engine holds: an order going in, a stream of events coming out.

Knows asyncio and nothing of HTTP. A session belongs to the event loop; the engine thread reaches it only
through the courier.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from engine_service.backends.base import Constraint, FinishReason, PlacedPicture, Sampling, TokenLogprob
from engine_service.errors import EngineError
from engine_service.scheduling.model import THE_MODEL, ModelId, RequestId, ResidentId, WorkloadClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One request as the server hands it to the engine."""

    resident_id: ResidentId
    class_id: WorkloadClass
    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None  #: None: as much as the class and the context allow
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    banned: tuple[str, ...] = ()  #: strings that must not come out
    heal_prompt: bool = False  #: the prompt's last token is chosen anew, with what it shows as a beginning
    constraint: Constraint | None = None
    program_id: str | None = None
    keep_prefix: bool = False
    wants_embedding: bool = False  #: of the prompt, instead of an answer
    ignore_eos: bool = False
    pictures: tuple[PlacedPicture, ...] = ()  #: in the prompt, where placeholders stand for them
    model_id: ModelId = THE_MODEL  #: the model that is to answer; THE_MODEL: the engine's first


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The engine took the order; the first event of every session."""

    request_id: RequestId
    num_ahead: int  #: requests waiting when it arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New text. Never splits a character; may be empty while logprobs are not."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What one request cost and how long it took; the ledger's own numbers."""

    queue_s: float  #: arrival to first admission
    time_to_first_token_s: float | None
    completion_s: float
    prefill_tokens: int  #: computed for the resident
    cached_tokens: int  #: found, not computed
    decode_tokens: int
    recomputed_tokens: int  #: computed again after a preemption, charged to the system
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of a session that went well."""

    reason: FinishReason
    timings: Timings
    embedding: tuple[float, ...] | None = None  #: if one was wanted


SessionEvent = Accepted | Delta | Finished


class Session:
    """The caller's end of one request."""

    def __init__(
        self, request_id: RequestId, *, cancel: Callable[[RequestId], None], max_buffered: int = 4096
    ) -> None:
        """Hold at most max_buffered events for a slow reader; then the request is cancelled."""
        self.request_id = request_id
        self._cancel = cancel
        self._queue: asyncio.Queue[SessionEvent | EngineError] = asyncio.Queue()
        self._max_buffered = max_buffered
        self._is_closed = False

    def push(self, event: SessionEvent | EngineError) -> None:
        """Deliver an event (event loop only). A reader too slow for its buffer loses the request."""
        if self._is_closed:
            return
        if self._queue.qsize() >= self._max_buffered and isinstance(event, Delta):
            self.cancel()
            event = EngineError("the reader is too slow: its output buffer is full")
        self._queue.put_nowait(event)

    @property
    def has_more(self) -> bool:
        """Whether something is there that was not taken."""
        return not self._queue.empty()

    async def events(self) -> AsyncIterator[SessionEvent]:
        """Yield Accepted, then Deltas, then Finished; raise the EngineError that ended it otherwise."""
        while True:
            event = await self._queue.get()
            if isinstance(event, EngineError):
                raise event
            yield event
            if isinstance(event, Finished):
                return

    def cancel(self) -> None:
        """Give the request up; its pages are free within one iteration. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._cancel(self.request_id)


def joined(
    events: Iterable[tuple[Session, SessionEvent | EngineError]],
) -> Iterator[tuple[Session, SessionEvent | EngineError]]:
    """Yield the events, each session's in their order, with deltas that follow one another made one."""
    pending: dict[Session, list[Delta]] = {}
    for session, event in events:
        if isinstance(event, Delta):
            pending.setdefault(session, []).append(event)
            continue
        if deltas := pending.pop(session, None):
            yield session, _sum(deltas)
        yield session, event
    yield from ((session, _sum(deltas)) for session, deltas in pending.items())


def _sum(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        text="".join([delta.text for delta in deltas]),
        token_ids=tuple([token for delta in deltas for token in delta.token_ids]),
        logprobs=tuple([entry for delta in deltas for entry in delta.logprobs]),
    )
