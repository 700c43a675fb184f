"""What an idle engine waits for, and what it does not; and what it asks of an iteration that speech meets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest

from engine_service.backends.base import ChunkOrder, StepOutcome
from engine_service.backends.simulated import SimulatedBackend
from engine_service.engine import loop as loop_module
from engine_service.scheduling.invariants import check
from engine_service.scheduling.model import Policy, RequestId
from tests.engine.conftest import order, read, started


class Watched(SimulatedBackend):
    """A device that takes no time and notes what it is told."""

    def __init__(self) -> None:
        super().__init__(advance=lambda seconds: seconds)
        self.steps: list[list[RequestId]] = []

    def step(self, decode_ids: Sequence[RequestId], prefills: Sequence[ChunkOrder]) -> StepOutcome:
        self.steps.append([chunk.request_id for chunk in prefills])
        return super().step(decode_ids, prefills)


async def test_those_who_come_at_one_moment_are_computed_together_by_class() -> None:
    backend = Watched()
    async with started(backend) as engine:
        orders = [("background", "A long report. " * 40), ("chat", "Hello."), ("chat", "Good evening.")]
        sessions = [await engine.submit(order(engine, "alice", kind, text, 4)) for kind, text in orders]
        for session in sessions:
            assert len((await read(session))[0]) == 4
        document, *chats = [session.request_id for session in sessions]
    assert backend.steps[0][:2] == chats
    assert document in [request_id for step in backend.steps for request_id in step]


async def test_nobody_waits_long_for_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_LONGEST_COMPANY_S", 0.05)
    backend = Watched()
    async with started(backend, company_s=3600) as engine:
        readers = []
        began = time.monotonic()
        while not backend.steps:
            session = await engine.submit(order(engine, "alice", "chat", "Hello.", 2))
            readers.append(asyncio.create_task(read(session)))
            await asyncio.sleep(0.005)
            assert time.monotonic() < began + 10, "each newcomer puts the beginning off"
        await asyncio.gather(*readers)


async def test_speech_begins_at_once_and_takes_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_LONGEST_COMPANY_S", 3600)
    monkeypatch.setattr(loop_module, "_TICK_S", 3600)  # a tick begins what waits, too
    backend = Watched()
    async with started(backend, company_s=3600) as engine:
        chat = await engine.submit(order(engine, "alice", "chat", "Hello.", 4))
        await asyncio.sleep(0.05)
        assert not backend.steps
        spoken = await engine.submit(order(engine, "bob", "voice", "Turn on the light.", 4))
        assert len((await read(spoken))[0]) == len((await read(chat))[0]) == 4


async def test_whoever_leaves_while_waiting_for_company_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_LONGEST_COMPANY_S", 3600)
    backend = Watched()
    async with started(backend, company_s=3600) as engine:
        session = await engine.submit(order(engine, "alice", "chat", "Hello.", 4))
        session.cancel()
        assert engine.snapshot().engine["requests_waiting"] == 0
        check(engine._scheduler)


async def test_an_engine_can_be_told_to_wait_for_nobody() -> None:
    backend = Watched()
    async with started(backend, company_s=0) as engine:
        session = await engine.submit(order(engine, "alice", "chat", "Hello.", 4))
        assert engine._beginning is None
        await read(session)


async def test_a_queue_is_not_full_of_those_who_only_wait_for_company(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "_LONGEST_COMPANY_S", 3600)
    backend = Watched()
    async with started(backend, company_s=3600, policy=Policy(max_waiting=1)) as engine:
        first = await engine.submit(order(engine, "alice", "chat", "Hello.", 4))
        second = await engine.submit(order(engine, "bob", "chat", "Good evening.", 4))
        for session in (first, second):
            assert len((await read(session))[0]) == 4


class Stubborn(SimulatedBackend):
    """A device whose prompts are stopped only when it is asked for the fourth time."""

    def __init__(self) -> None:
        super().__init__(advance=self._take_long)
        self.is_busy, self._is_let_go = threading.Event(), threading.Event()
        self.times_asked = 0

    def _take_long(self, seconds: float) -> float:
        if seconds < 0.5:
            return seconds
        self.is_busy.set()
        assert self._is_let_go.wait(10), "nobody asked often enough"
        return 0.0

    def abort(self) -> None:
        self.times_asked += 1
        if self.times_asked >= 4:
            self._is_let_go.set()


async def test_speech_asks_again_until_what_runs_is_over() -> None:
    backend = Stubborn()
    async with started(backend) as engine:
        document = await engine.submit(order(engine, "alice", "background", "A long report. " * 200, 2))
        assert await asyncio.to_thread(backend.is_busy.wait, 10)
        spoken = await engine.submit(order(engine, "bob", "voice", "Turn on the light.", 2))
        assert len((await read(spoken))[0]) == 2
        asked = backend.times_asked
        assert asked >= 4
        document.cancel()
        await asyncio.sleep(0.1)
        assert backend.times_asked == asked, "and not after that"
