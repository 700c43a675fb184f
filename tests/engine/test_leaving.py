"""Callers who leave, and engines that fail, at the one moment at which it would not be noticed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine_service.backends.base import BackendError, ChunkOrder, StepOutcome
from engine_service.backends.simulated import SimulatedBackend, SimulatedSource
from engine_service.engine import loop as loop_module
from engine_service.engine.loop import Engine
from engine_service.engine.residence import Models
from engine_service.engine.sessions import Order
from engine_service.errors import EngineStopping, UnknownResident
from engine_service.scheduling.decisions import Admit, Cancel
from engine_service.scheduling.model import HOUSE, ModelId, Policy, RequestId, WorkloadClass
from tests.engine.conftest import RESIDENTS, eventually, order, read, started, until


class Watched(SimulatedBackend):
    """A device that takes no time, and calls something in the middle of its steps."""

    def __init__(self) -> None:
        super().__init__(advance=lambda seconds: seconds)
        self.during: Callable[[], object] = lambda: None
        self.num_rows: list[int] = []

    def step(self, decode_ids: Sequence[Any], prefills: Sequence[ChunkOrder]) -> StepOutcome:
        self.num_rows.append(len(decode_ids) + len(prefills))
        during, self.during = self.during, lambda: None
        during()
        return super().step(decode_ids, prefills)


def prefix(engine: Engine, text: str, times: int) -> tuple[int, ...]:
    return tuple(engine.tokenizer.encode(text * times))


async def test_a_beginning_whose_caller_left_holds_no_memory_afterwards() -> None:
    """Neither where it was being computed, nor where that had just ended and nobody had been told."""
    backend = Watched()
    async with started(backend) as engine:
        loop = asyncio.get_running_loop()
        for number in range(20):
            is_computing = asyncio.Event()
            go_on = threading.Event()

            def pause(is_computing: asyncio.Event = is_computing, go_on: threading.Event = go_on) -> None:
                loop.call_soon_threadsafe(is_computing.set)
                assert go_on.wait(10)

            backend.during = pause
            text = f"House {number} is calm tonight. "
            asked = asyncio.create_task(engine.pin_prefix(prefix(engine, text, 20)))
            await is_computing.wait()
            if number % 2:
                go_on.set()
                await until(lambda: not engine._live, engine)
            asked.cancel()
            go_on.set()
            await asyncio.gather(asked, return_exceptions=True)
            await until(lambda: not engine.snapshot().engine["requests_running"], engine)
        ids = prefix(engine, "The real one. ", 40)
        assert await engine.pin_prefix(ids) == (len(ids), len(ids)), "what was left made room"
        assert await engine.pin_prefix(ids) == (len(ids), 0)
        pinned = {request_id for request_id, _ in engine._scheduler.state.pages.pinned}
        assert pinned == engine._pinned.keys() == set(backend.pinned_ids)


async def test_a_beginning_given_up_in_its_last_iteration_is_kept_by_nobody() -> None:
    backend = Watched()
    async with started(backend) as engine:
        ids = prefix(engine, "The rain sings. ", 4)
        session = await engine.submit(
            Order(
                resident_id=HOUSE,
                class_id=WorkloadClass.CHAT,
                prompt_ids=ids,
                max_tokens=0,
                keep_prefix=True,
            )
        )
        backend.during = session.cancel
        await until(lambda: engine.snapshot().engine["iterations"] > 0, engine)
        await read(await engine.submit(order(engine, "alice", "chat", "Hello.", 2)))
        assert engine.snapshot().engine["kv_pages_pinned"] == 0
        assert not backend.pinned_ids
        assert not engine._pinned


async def test_who_comes_while_the_engine_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(SimulatedBackend()) as engine:
        prepare = engine._prepare

        def fails_meanwhile(asked: Order) -> Any:
            prepared = prepare(asked)
            thread = threading.Thread(target=engine._backend_lost, args=(BackendError("gone"),))
            thread.start()
            thread.join()
            return prepared

        monkeypatch.setattr(engine, "_prepare", fails_meanwhile)
        with pytest.raises(EngineStopping, match="gone"):
            await engine.submit(order(engine, "alice", "chat", "Hello.", 4))
        assert not engine._live


PAUSED = Policy(paused_classes=(WorkloadClass.BACKGROUND,))


async def test_everybody_hears_of_a_request_given_up_while_it_waited() -> None:
    async with started(SimulatedBackend(), policy=PAUSED) as engine:
        session = await engine.submit(order(engine, "alice", "background", "Hello.", 4))
        version = engine.snapshot().version
        session.cancel()
        assert await asyncio.wait_for(engine.changed(after=version), 10) > version
        assert engine.snapshot().residents["alice"]["cancelled"] == 1


async def test_everybody_hears_of_a_request_that_was_refused() -> None:
    async with started(SimulatedBackend()) as engine:
        version = engine.snapshot().version
        with pytest.raises(UnknownResident, match="no resident"):
            await engine.submit(order(engine, "nobody", "chat", "Hello.", 4))
        assert await asyncio.wait_for(engine.changed(after=version), 10) > version


async def test_an_engine_does_not_wait_at_its_end_for_who_has_left() -> None:
    engine = Engine(SimulatedBackend(), residents=RESIDENTS, policy=PAUSED)
    await engine.start()
    session = await engine.submit(order(engine, "alice", "background", "Hello.", 4))
    began = time.monotonic()
    stopping = asyncio.create_task(engine.stop(drain_s=30))
    await asyncio.sleep(0)
    session.cancel()
    await stopping
    assert time.monotonic() - began < 20


async def test_an_iteration_is_not_stopped_for_who_came_after_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Speech that comes between a step and its result is planned with it; nothing is to be stopped."""
    backend = Watched()
    async with started(backend) as engine:
        loop = asyncio.get_running_loop()
        spoken: list[Any] = []
        judged, observe = loop_module.judged, engine._observe
        aborted: list[bool] = []

        def speech_comes(*args: Any, **more: Any) -> StepOutcome:
            if not spoken:
                asked = engine.submit(order(engine, "bob", "voice", "Light.", 2))
                spoken.append(asyncio.run_coroutine_threadsafe(asked, loop).result(10))
            return judged(*args, **more)

        def noted(outcome: StepOutcome, faults: Any) -> None:
            aborted.append(outcome.aborted)
            observe(outcome, faults)

        monkeypatch.setattr(loop_module, "judged", speech_comes)
        monkeypatch.setattr(engine, "_observe", noted)
        document = await engine.submit(order(engine, "alice", "background", "A long report. " * 200, 2))
        await read(document)
        await read(spoken[0])
        assert not any(aborted)


async def test_a_turn_that_ended_is_not_taken_for_one_that_hangs() -> None:
    """The watchdog judged the turn before; the one that runs now is in good health."""
    backend = Watched()
    async with started(backend) as engine:
        is_computing, go_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def pause() -> None:
            loop.call_soon_threadsafe(is_computing.set)
            assert go_on.wait(10)

        backend.during = pause
        session = await engine.submit(order(engine, "alice", "voice", "Hello.", 4))
        await is_computing.wait()
        thread = engine._thread
        engine._leave_hanging(engine._turn - 1)
        go_on.set()
        assert len((await read(session))[0]) == 4
        assert engine._thread is thread


async def test_looking_after_the_engine_goes_on_after_a_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_module, "_TICK_S", 0.01)
    async with started(SimulatedBackend()) as engine:
        looks: list[int] = []

        def see_day() -> None:
            looks.append(1)
            if len(looks) == 1:
                raise RuntimeError("no such zone")

        monkeypatch.setattr(engine, "_see_day", see_day)
        await eventually(lambda: len(looks) >= 3)
    assert "no such zone" in caplog.text


async def test_what_was_given_up_of_another_model_is_forgotten_although_this_one_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order to forget it came behind the one that met the lost device."""
    a, b = ModelId("a"), ModelId("b")
    models = Models({m: SimulatedSource(m) for m in (a, b)})
    engine = Engine(models.open_first(), residents=RESIDENTS, models=models)
    await engine.start()
    try:
        put_back = RequestId("put-back")
        models._entries[b].handed = {put_back: object()}
        carry_out, orders = engine._carry_out, []

        def lost_once(asked: Any) -> None:
            orders.append(asked)
            if len(orders) == 1:
                raise BackendError("the device fell off the bus")
            carry_out(asked)

        monkeypatch.setattr(engine, "_carry_out", lost_once)
        with engine._wakeup:
            engine._order(Admit(request_id=RequestId("unknown"), reserved_tokens=1))
            engine._order(Cancel(request_id=put_back))
        await eventually(lambda: not models._entries[b].handed)
    finally:
        await engine.stop(drain_s=0)
