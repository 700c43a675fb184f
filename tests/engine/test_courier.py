"""The courier: text leaves only when it is counted, and no disk holds the engine thread up."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine_service.backends.simulated import SimulatedBackend
from engine_service.engine.courier import Courier
from engine_service.engine.ledger import Ledger
from engine_service.engine.loop import Engine
from engine_service.engine.sessions import Accepted, Delta
from tests.engine.conftest import RESIDENTS, order


class SlowDisk(Ledger):
    """A ledger whose writes take until they are let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()
        self.written: list[Any] = []

    def write(self, snapshot: Any) -> None:
        assert self.may_write.wait(10), "nobody let the disk go on"
        self.written.append(snapshot)
        super().write(snapshot)


async def eventually(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_text_waits_for_the_ledger_and_computing_does_not(tmp_path: Path) -> None:
    ledger = SlowDisk(tmp_path)
    backend = SimulatedBackend(advance=lambda seconds: seconds)
    engine = Engine(backend, residents=RESIDENTS, ledger=ledger)
    await engine.start()
    try:
        session = await engine.submit(order(engine, "alice", "chat", "Say something.", 8))
        events = session.events()
        assert isinstance(await anext(events), Accepted)
        await eventually(lambda: engine.snapshot().residents["alice"]["finished"] == 1)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.05)
        assert not first.done(), "text left before it was counted"
        ledger.may_write.set()
        assert isinstance(await first, Delta)
        assert ledger.written[0]["accounts"]["alice"]["decode_tokens"] >= 1
    finally:
        ledger.may_write.set()
        await engine.stop(drain_s=0)


async def test_deliveries_come_in_order_and_all_before_the_end(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.load()
    courier = Courier(asyncio.get_running_loop(), ledger)
    courier.start()
    seen: list[int] = []
    for number in range(200):
        courier.leave({"number": number} if number % 2 else None, lambda n=number: seen.append(n))
    assert await asyncio.to_thread(courier.stop, 10)
    await asyncio.sleep(0)
    assert seen == list(range(200))
    ledger.close()
    kept = Ledger(tmp_path).load()
    assert kept is not None
    assert kept.snapshot == {"number": 199}


async def test_a_snapshot_that_cannot_be_kept_is_said_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path)
    ledger.load()
    courier = Courier(asyncio.get_running_loop(), ledger)
    courier.start()
    arrived = asyncio.Event()
    courier.leave({"not": object()}, arrived.set)
    await asyncio.wait_for(arrived.wait(), 10)
    assert await asyncio.to_thread(courier.stop, 10)
    assert "What was served could not be kept" in caplog.text


async def test_an_event_loop_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    gone = asyncio.new_event_loop()
    gone.close()
    courier = Courier(gone, None)
    courier.start()
    courier.leave(None, lambda: None)
    assert await asyncio.to_thread(courier.stop, 10)
