"""A simulated backend that misbehaves on request, and an engine on it that takes no time."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Any

from engine_service.backends.base import BackendError, ChunkOrder, SequenceOutcome, StepOutcome
from engine_service.backends.simulated import SimulatedBackend
from engine_service.engine.loop import Engine
from engine_service.scheduling.model import RequestId, Resident, ResidentId

RESIDENTS = (Resident(resident_id=ResidentId("alice")), Resident(resident_id=ResidentId("bob")))


class Lie(StrEnum):
    """What a backend can say that cannot be."""

    STRANGER = "a result for a request that has no part"
    NEGATIVE = "fewer than no prompt tokens"
    TOO_MANY = "more prompt tokens than asked"
    NO_TOKEN = "a token that is not in the vocabulary"
    TWICE = "two results for one request"
    SILENT = "no result for one request"
    NO_TIME = "a time that is no number"


class WildBackend(SimulatedBackend):
    """Real sequences and cells; takes no time; fails as told before, or lies after, a real step."""

    def __init__(self, *, max_sequences: int = 6, context_tokens: int = 4096) -> None:
        super().__init__(
            max_sequences=max_sequences, context_tokens=context_tokens, advance=lambda seconds: seconds
        )
        self.guilty: set[RequestId] = set()
        self.is_dying = False
        self.is_hanging = False
        self.let_go = threading.Event()
        self.is_closed = False
        self.lie: Lie | None = None
        self.lied_about: RequestId | None = None
        self.num_steps = 0
        self.before_step: Callable[[WildBackend], None] = lambda backend: None

    def step(self, decode_ids: Sequence[RequestId], prefills: Sequence[ChunkOrder]) -> StepOutcome:
        self.num_steps += 1
        self.before_step(self)
        if self.is_dying:
            raise BackendError("the device fell off the bus")
        if self.is_hanging:
            self.let_go.wait(60)
        if self.guilty & {*decode_ids, *(c.request_id for c in prefills)}:
            raise RuntimeError("a request poisoned its iteration")
        outcome = super().step(decode_ids, prefills)
        lie, self.lie = self.lie, None
        return outcome if lie is None or not outcome.outcomes else self._lying(lie, outcome)

    def _lying(self, lie: Lie, outcome: StepOutcome) -> StepOutcome:
        *others, last = outcome.outcomes
        self.lied_about = last.request_id
        match lie:
            case Lie.STRANGER:
                self.lied_about = None
                stranger = SequenceOutcome(request_id=RequestId("stranger"), prefill_tokens=5)
                return replace(outcome, outcomes=(*outcome.outcomes, stranger))
            case Lie.NEGATIVE:
                last = replace(last, prefill_tokens=-7)
            case Lie.TOO_MANY:
                last = replace(last, prefill_tokens=100_000)
            case Lie.NO_TOKEN:
                last = replace(last, token_ids=(-1,))
            case Lie.TWICE:
                others.append(last)
            case Lie.SILENT:
                return replace(outcome, outcomes=tuple(others))
            case Lie.NO_TIME:
                self.lied_about = None
                return replace(outcome, seconds=math.nan)
        return replace(outcome, outcomes=(*others, last))

    def close(self) -> None:
        self.is_closed = True
        super().close()


class Builder:
    """Builds backends for an engine and remembers them; at most one may be open where none hangs."""

    def __init__(self, dress: Callable[[WildBackend], None] = lambda backend: None) -> None:
        self.built: list[WildBackend] = []
        self.num_open_before: list[int] = []
        self._dress = dress

    def __call__(self) -> WildBackend:
        self.num_open_before.append(sum(not backend.is_closed for backend in self.built))
        backend = WildBackend()
        self._dress(backend)
        self.built.append(backend)
        return backend

    @property
    def latest(self) -> WildBackend:
        return self.built[-1]


@asynccontextmanager
async def wild_engine(builder: Builder, **options: Any) -> AsyncIterator[Engine]:
    """Run an engine on what the builder builds; let go at the end what hangs."""
    engine = Engine(builder(), **{"residents": RESIDENTS, "rebuild": builder, **options})
    await engine.start()
    try:
        yield engine
    finally:
        for backend in builder.built:
            backend.let_go.set()
        await engine.stop(drain_s=0)


def mischief(chance: random.Random, *, fatal_left: list[int]) -> Callable[[WildBackend], None]:
    """Return what makes a backend misbehave now and then; fatal_left bounds losses and hangs over all."""

    def before(backend: WildBackend) -> None:
        roll = chance.random()
        if roll < 0.02 and fatal_left[0] > 0:
            fatal_left[0] -= 1
            backend.is_dying = True
        elif roll < 0.03 and fatal_left[0] > 0:
            fatal_left[0] -= 1
            backend.is_hanging = True
        elif roll < 0.15:
            backend.lie = chance.choice(list(Lie))

    return before
