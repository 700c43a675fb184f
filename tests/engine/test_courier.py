"""The courier: text leaves only when it is counted, and no disk holds the engine thread up."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine_service.backends.base import FinishReason, TokenLogprob
from engine_service.backends.simulated import SimulatedBackend
from engine_service.engine.courier import Courier
from engine_service.engine.ledger import Ledger
from engine_service.engine.loop import Engine
from engine_service.engine.sessions import Accepted, Delta, Finished, Session, Timings, joined
from engine_service.scheduling.model import RequestId
from tests.engine.conftest import RESIDENTS, eventually, order

NO_TIME = Timings(
    queue_s=0,
    time_to_first_token_s=0,
    completion_s=0,
    prefill_tokens=0,
    cached_tokens=0,
    decode_tokens=0,
    recomputed_tokens=0,
    preemptions=0,
)


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


async def counted(engine: Engine) -> tuple[int, int]:
    account = engine.snapshot().residents["alice"]
    await engine.kept()
    return account["tokens_served"], account["cancelled"]


async def test_nobody_is_told_a_counter_that_a_kill_could_take_back(tmp_path: Path) -> None:
    """Between deliveries the ledger is behind; whoever tells a counter waits until it is not."""
    ledger = SlowDisk(tmp_path)
    ledger.may_write.set()
    engine = Engine(SimulatedBackend(), residents=RESIDENTS, ledger=ledger, gather_s=3600)
    await engine.start()
    try:
        session = await engine.submit(order(engine, "alice", "chat", "Say something.", 400))
        for _ in range(3):
            before = engine.snapshot().engine["iterations"]
            await eventually(lambda: engine.snapshot().engine["iterations"] > before + 3)  # noqa: B023
            told, _ = await counted(engine)
            kept = ledger.written[-1]["accounts"]["alice"]
            assert kept["prefill_tokens"] + kept["decode_tokens"] >= told > 0
        session.cancel()
        await eventually(lambda: engine.snapshot().residents["alice"]["cancelled"])
        assert (await counted(engine))[1] == ledger.written[-1]["accounts"]["alice"]["cancelled"] == 1
    finally:
        await engine.stop(drain_s=0)


async def test_a_disk_that_hangs_does_not_hide_what_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine_service.engine.loop._KEPT_WITHIN_S", 0.05)
    ledger = SlowDisk(tmp_path)
    engine = Engine(SimulatedBackend(), residents=RESIDENTS, ledger=ledger)
    await engine.start()
    try:
        for _ in range(3):
            await counted(engine)
        assert not ledger.written
        assert caplog.text.count("The disk takes very long") == 1
    finally:
        ledger.may_write.set()
        await engine.stop(drain_s=0)


class Household:
    """Takes deliveries, and says what was served so far."""

    def __init__(self, ledger: Ledger | None = None, *, gather_s: float = 0.0) -> None:
        self.served: Any = {"number": 0}
        self.deliveries: list[list[int]] = []
        self.arrived = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.courier: Courier[int] = Courier(
            loop, self.take, ledger=ledger, snapshot=lambda: self.served, gather_s=gather_s
        )
        self.courier.start()

    def take(self, parcels: Sequence[int]) -> None:
        self.deliveries.append(list(parcels))
        self.arrived.set()

    async def next(self) -> list[int]:
        await asyncio.wait_for(self.arrived.wait(), 10)
        self.arrived.clear()
        return self.deliveries[-1]


async def test_deliveries_come_in_order_and_all_before_the_end(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.load()
    household = Household(ledger)
    for number in range(200):
        household.served = {"number": number}
        household.courier.leave(number, has_served=True, is_urgent=bool(number % 2))
    assert await asyncio.to_thread(household.courier.stop, 10)
    await asyncio.sleep(0)
    assert [number for delivery in household.deliveries for number in delivery] == list(range(200))
    ledger.close()
    kept = Ledger(tmp_path).load()
    assert kept is not None
    assert kept.snapshot == {"number": 199}


async def test_what_is_not_urgent_waits_and_goes_out_together() -> None:
    household = Household(gather_s=3600)
    household.courier.leave(1, is_urgent=False)
    assert await household.next() == [1], "nothing went out for long: it need not wait"
    household.courier.leave(2, is_urgent=False)
    household.courier.leave(3, is_urgent=False)
    await asyncio.sleep(0.05)
    assert len(household.deliveries) == 1
    household.courier.leave(4, is_urgent=True)
    assert await household.next() == [2, 3, 4]
    household.courier.leave(5, is_urgent=False)
    assert await asyncio.to_thread(household.courier.stop, 10)
    assert await household.next() == [5], "what was left is not lost at the end"


async def test_what_is_not_urgent_waits_no_longer_than_it_may() -> None:
    household = Household(gather_s=0.02)
    for number in (1, 2):
        household.courier.leave(number, is_urgent=False)
        assert await household.next() == [number]
    assert await asyncio.to_thread(household.courier.stop, 10)


async def test_many_parcels_are_taken_at_once() -> None:
    """Or the engine's thread would wait for them."""
    household = Household(gather_s=3600)
    household.courier.leave(0)
    assert await household.next() == [0]
    for number in range(1, 17):
        household.courier.leave(number, is_urgent=False)
    assert await household.next() == list(range(1, 17))
    assert await asyncio.to_thread(household.courier.stop, 10)


async def test_what_was_served_is_kept_where_nothing_is_delivered(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.load()
    household = Household(ledger)
    household.served = {"number": 7}
    household.courier.leave(has_served=True)
    assert await asyncio.to_thread(household.courier.stop, 10)
    ledger.close()
    kept = Ledger(tmp_path).load()
    assert kept is not None
    assert kept.snapshot == {"number": 7}
    assert household.deliveries == []


async def test_a_snapshot_that_cannot_be_kept_is_said_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path)
    ledger.load()
    household = Household(ledger)
    household.served = {"not": object()}
    household.courier.leave(1, has_served=True)
    assert await household.next() == [1]
    assert await asyncio.to_thread(household.courier.stop, 10)
    assert "What was served could not be kept" in caplog.text


async def test_an_event_loop_that_is_gone_is_not_waited_for() -> None:
    gone = asyncio.new_event_loop()
    gone.close()
    courier: Courier[int] = Courier(gone, lambda parcels: None)
    courier.start()
    courier.leave(1)
    assert await asyncio.to_thread(courier.stop, 10)


async def test_a_token_in_the_middle_comes_with_others_the_first_and_the_end_at_once() -> None:
    is_told, iterations = threading.Event(), itertools.count()

    def advance(seconds: float) -> float:
        if next(iterations) > 0:  # the first one of an answer ends with its first token
            assert is_told.wait(10), "the first token did not come at once"
        return seconds

    engine = Engine(SimulatedBackend(advance=advance), residents=RESIDENTS, gather_s=3600)
    await engine.start()
    try:
        for _ in range(2):  # what comes first of all need not wait in any case
            is_told.clear()
            iterations = itertools.count()
            session = await engine.submit(order(engine, "alice", "chat", "Say something.", 8))
            told = []
            async for event in session.events():
                told.append(event)
                if isinstance(event, Delta):
                    is_told.set()
            first, rest = [event for event in told if isinstance(event, Delta)]
            assert (len(first.token_ids), len(rest.token_ids)) == (1, 7)
            assert isinstance(told[-1], Finished)
    finally:
        is_told.set()
        await engine.stop(drain_s=0)


def test_deltas_are_joined_for_each_session_and_stay_before_its_end() -> None:
    alice, bob = (Session(RequestId(name), cancel=lambda _: None) for name in ("a", "b"))
    finished = Finished(reason=FinishReason.LENGTH, timings=NO_TIME)
    logprob = TokenLogprob(token_id=2, text=b"y", logprob=-1.0)
    events = [
        (alice, Delta(text="x", token_ids=(1,))),
        (bob, Delta(text="1", token_ids=(3,))),
        (alice, Delta(text="y", token_ids=(2,), logprobs=(logprob,))),
        (alice, finished),
        (bob, Delta(text="2", token_ids=(4, 5))),
    ]
    assert list(joined(events)) == [
        (alice, Delta(text="xy", token_ids=(1, 2), logprobs=(logprob,))),
        (alice, finished),
        (bob, Delta(text="12", token_ids=(3, 4, 5))),
    ]
