"""A real engine on the real embedded model, small enough that memory runs out when a test wants it to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from engine_service.backends.base import Backend, BackendError, ChunkOrder, Sampling, StepOutcome
from engine_service.backends.llama_cpp import LlamaCppBackend, open_backend
from engine_service.engine.loop import Engine
from engine_service.engine.sessions import Delta, Finished, Order, Session, Timings
from engine_service.scheduling.invariants import check
from engine_service.scheduling.model import Policy, RequestId, Resident, ResidentId, WorkloadClass

GREEDY = Sampling(temperature=0)
RESIDENTS = (
    Resident(resident_id=ResidentId("alice")),
    Resident(resident_id=ResidentId("bob")),
    Resident(resident_id=ResidentId("miser"), daily_tokens=40, daily_is_hard=True),
)
SMALL = Policy(voice_headroom_pages=4, prefix_share=0.2, max_chunk_tokens=48, min_chunk_tokens=16)
"""Iterations stay below 64 rows, where the model's arithmetic does not depend on the batch."""


class Clock:
    """Real time, moved by hand."""

    def __init__(self, of: object = time.monotonic) -> None:
        self.of = of
        self.ahead_s = 0.0

    def __call__(self) -> float:
        now: float = self.of() + self.ahead_s  # type: ignore[operator]
        return now


class FaultyBackend:
    """The real backend, with faults on request. Everything that is not at fault is the real thing."""

    def __init__(self, real: Backend) -> None:
        self.real = real
        self.guilty: set[RequestId] = set()
        self.is_dying = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def step(self, decode_ids: Sequence[RequestId], prefills: Sequence[ChunkOrder]) -> StepOutcome:
        """Fail where told to, before anything is computed."""
        if self.is_dying:
            self.is_dying = False
            raise BackendError("the device fell off the bus")
        if self.guilty & {*decode_ids, *(c.request_id for c in prefills)}:
            raise RuntimeError("a request poisoned its iteration")
        return self.real.step(decode_ids, prefills)


@asynccontextmanager
async def started(backend: Backend, **options: Any) -> AsyncIterator[Engine]:
    """An engine on that backend, whose books must be right at the end."""
    engine = Engine(backend, residents=RESIDENTS, **options)
    await engine.start()
    try:
        yield engine
        check(engine._scheduler)
    finally:
        await engine.stop(drain_s=0)


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for what no change of the engine tells of."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


class MakeEngine(Protocol):
    """Starts an engine for the length of a with block."""

    def __call__(self, **options: Any) -> Any:
        """Return an asynchronous context manager of (engine, backend)."""
        ...


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the requantised model is kept for all tests of this run."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def open_model(cache_dir: Path) -> Callable[[], LlamaCppBackend]:
    """Open the embedded model with 64 pages of 32 tokens and one thread."""
    return lambda: open_backend(
        None, cache_dir=cache_dir, context_tokens=2048, max_sequences=6, threads=1, progress=lambda _: None
    )


@pytest.fixture
def make_engine(open_model: Callable[[], LlamaCppBackend]) -> MakeEngine:
    """Return a function that starts an engine on a fresh backend."""

    @asynccontextmanager
    async def make(**options: Any) -> AsyncIterator[tuple[Engine, FaultyBackend]]:
        backend = FaultyBackend(open_model())
        engine = Engine(backend, **{"policy": SMALL, "residents": RESIDENTS, **options})
        await engine.start()
        try:
            yield engine, backend
        finally:
            await engine.stop(drain_s=0)

    return make


def order(engine: Engine, resident: str, class_id: str, text: str, max_tokens: int, **more: Any) -> Order:
    """Return a greedy order for a text."""
    ids = tuple(engine.tokenizer.encode(text))
    return Order(
        resident_id=ResidentId(resident),
        class_id=WorkloadClass(class_id),
        prompt_ids=ids,
        max_tokens=max_tokens,
        **{"sampling": GREEDY, "ignore_eos": True, **more},
    )


async def read(session: Session) -> tuple[list[int], str, Timings]:
    """Read a session to its end; return token ids, text and timings."""
    ids: list[int] = []
    text = ""
    async for event in session.events():
        if isinstance(event, Delta):
            ids.extend(event.token_ids)
            text += event.text
        elif isinstance(event, Finished):
            return ids, text, event.timings
    raise AssertionError("a session ended without Finished")


async def ask(engine: Engine, *args: Any, **more: Any) -> tuple[list[int], str, Timings]:
    """Submit an order and read it to its end."""
    return await read(await engine.submit(order(engine, *args, **more)))


async def until(condition: Callable[[], bool], engine: Engine, *, seconds: float = 30.0) -> None:
    """Wait until the condition holds after some change of the engine."""
    async with asyncio.timeout(seconds):
        version = -1
        while not condition():
            version = await engine.changed(after=version)
