"""A backend that raises, hangs or lies: the guilty request fails, waiting work is kept, nothing leaks."""

from __future__ import annotations

import asyncio
import logging
import random
import threading

import pytest

from engine_service.engine.loop import Engine
from engine_service.engine.sessions import Delta, Session
from engine_service.engine.watchdog import Alarm, Watchdog
from engine_service.errors import EngineError, EngineStopping, GenerationFailed, TooManyRequests
from engine_service.scheduling.invariants import check
from engine_service.scheduling.model import RequestId
from tests.engine.conftest import order, read, until
from tests.engine.wild import Builder, Lie, WildBackend, mischief, wild_engine

PROMPT = "the light in the kitchen was warm and the rain sings on the window "


async def submitted(engine: Engine, resident: str = "alice", *, tokens: int = 20, times: int = 1) -> Session:
    return await engine.submit(order(engine, resident, "chat", PROMPT * times, tokens))


async def has_spoken(session: Session) -> None:
    async for event in session.events():
        if isinstance(event, Delta):
            return


def is_empty(engine: Engine) -> bool:
    seen = engine.snapshot().engine
    return not (seen["requests_running"] or seen["requests_waiting"] or seen["kv_pages_used"])


@pytest.mark.parametrize("lie", list(Lie))
async def test_a_lie_about_one_request_fails_that_one_only(lie: Lie) -> None:
    builder = Builder()
    async with wild_engine(builder) as engine:
        sessions = [await submitted(engine, times=2 + n, tokens=300) for n in range(3)]
        for session in sessions:
            await has_spoken(session)
        builder.latest.lie = lie
        ends = await asyncio.gather(*map(read, sessions), return_exceptions=True)
        failed = {
            s.request_id: end for s, end in zip(sessions, ends, strict=True) if isinstance(end, Exception)
        }
        assert set(failed) == {builder.latest.lied_about} - {None}
        assert all("the backend reported" in str(error) for error in failed.values())
        await until(lambda: is_empty(engine), engine)
        while builder.latest.request_ids:  # the backend forgets the guilty one too
            await asyncio.sleep(0.01)
        builder.latest.check()
        assert len(builder.built) == 1
        check(engine._scheduler)


async def test_a_lost_backend_is_closed_before_the_next_is_built() -> None:
    builder = Builder()
    async with wild_engine(builder) as engine:
        for _ in range(3):
            session = await submitted(engine, tokens=300)
            await has_spoken(session)
            builder.latest.is_dying = True
            with pytest.raises(GenerationFailed, match="ask again"):
                await read(session)
            await read(await submitted(engine))
    assert builder.num_open_before == [0, 0, 0, 0]
    assert all(backend.is_closed for backend in builder.built)


async def test_what_comes_while_the_model_is_loaded_again_is_served_afterwards() -> None:
    builder = Builder()
    is_building, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def rebuild() -> WildBackend:
        loop.call_soon_threadsafe(is_building.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(60)
        return builder()

    async with wild_engine(builder, rebuild=rebuild) as engine:
        prefix = tuple(engine.tokenizer.encode(PROMPT * 8))
        await engine.pin_prefix(prefix)
        session = await submitted(engine, tokens=300)
        await has_spoken(session)
        builder.latest.is_dying = True
        await is_building.wait()
        assert not engine.is_ready
        # Its beginning was pinned on the backend that is gone: it has to pay for all of its pages.
        late = await submitted(engine, times=10)
        go_on.set()
        ids, _, timings = await read(late)
        assert len(ids) == 20
        assert timings.cached_tokens == 0
        assert engine.is_ready
        check(engine._scheduler)
        assert engine.snapshot().engine["kv_pages_pinned"] == 0, "the prefix went with the backend"
        await engine.pin_prefix(prefix)
        assert engine.snapshot().engine["kv_pages_pinned"] > 0


async def test_a_tokenizer_kept_by_the_server_follows_the_new_backend() -> None:
    builder = Builder()
    async with wild_engine(builder) as engine:
        kept = engine.tokenizer
        session = await submitted(engine, tokens=300)
        await has_spoken(session)
        builder.latest.is_dying = True
        await read(await submitted(engine))
        assert kept.decode(kept.encode(PROMPT)) == PROMPT
        assert engine.tokenizer is kept


async def test_a_backend_that_hangs_is_replaced_and_waiting_work_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    builder = Builder()
    async with wild_engine(builder, patience_s=0.4) as engine:
        talking = await submitted(engine, tokens=300)
        await has_spoken(talking)
        first = builder.latest
        first.is_hanging = True
        waiting = [await submitted(engine, "bob", times=30) for _ in range(8)]
        with pytest.raises(GenerationFailed, match="ask again"):
            await read(talking)
        for session in waiting:
            ids, _, _ = await read(session)
            assert len(ids) == 20
        assert len(builder.built) == 2
        assert not first.is_closed, "it is still inside of its iteration"
        before = engine.snapshot().residents["bob"]["tokens_served"]
        with caplog.at_level(logging.WARNING):
            first.let_go.set()
            while not first.is_closed:
                await asyncio.sleep(0.01)
        assert "has come back" in caplog.text
        assert engine.snapshot().residents["bob"]["tokens_served"] == before, "its late result counts nothing"
        assert len((await read(await submitted(engine)))[0]) == 20
        check(engine._scheduler)


async def test_a_long_iteration_that_heeds_the_abort_costs_nobody_anything() -> None:
    builder, goes_on = Builder(), threading.Event()

    def hang_once(backend: WildBackend) -> None:
        if backend.let_go.is_set():
            goes_on.set()
        elif backend.num_steps == 10:
            backend.is_hanging = True

    def heed() -> None:
        """Let the iteration end, and the watchdog look again only after that, however long it takes."""
        slow.let_go.set()
        assert goes_on.wait(30)

    async with wild_engine(builder, patience_s=0.4) as engine:
        slow = builder.latest
        slow.before_step, slow.abort = hang_once, heed  # type: ignore[method-assign]
        ids, _, _ = await read(await submitted(engine, tokens=100))
        assert len(ids) == 100
        assert slow.let_go.is_set(), "it was told to stop"
        assert len(builder.built) == 1


async def test_an_engine_that_cannot_go_on_says_why_to_whoever_waits_for_it() -> None:
    builder = Builder()

    def cannot() -> WildBackend:
        raise OSError("the card is gone")

    async with wild_engine(builder, rebuild=cannot) as engine:
        sessions = [await submitted(engine, times=30) for _ in range(8)]
        builder.latest.is_dying = True
        for session in sessions:
            with pytest.raises((EngineStopping, GenerationFailed)):
                await read(session)
        assert "the card is gone" in await engine.failed()
        assert not engine.is_ready
        assert is_empty(engine)
        with pytest.raises(EngineStopping, match="the card is gone"):
            await submitted(engine)


async def test_stopping_does_not_wait_for_a_backend_that_hangs_nor_frees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine_service.engine.loop._JOIN_S", 0.2)
    builder = Builder()
    engine = Engine(builder(), patience_s=60)
    await engine.start()
    session = await engine.submit(order(engine, "guest", "chat", PROMPT, 300))
    await has_spoken(session)
    builder.latest.is_hanging = True
    await engine.stop(drain_s=0.1)
    assert not builder.latest.is_closed
    builder.latest.let_go.set()


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_a_backend_does_every_request_ends_and_nothing_leaks(seed: int) -> None:
    await storm(seed, num_requests=60)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 160))
async def test_whatever_a_backend_does_for_long_every_request_ends(seed: int) -> None:
    await storm(seed, num_requests=400)


async def storm(seed: int, *, num_requests: int) -> None:
    """Callers come, read, leave early; the backend raises, hangs and lies."""
    chance = random.Random(seed)
    fatal_left = [4]
    guilty: set[RequestId] = set()

    def dress(backend: WildBackend) -> None:
        backend.before_step = mischief(chance, fatal_left=fatal_left)

    builder = Builder(dress)
    async with wild_engine(builder, patience_s=0.3) as engine:

        async def caller(number: int) -> str:
            await asyncio.sleep(chance.random() * num_requests / 60)
            tokens = chance.randrange(1, 40)
            resident = chance.choice(["alice", "bob"])
            try:
                session = await submitted(engine, resident, tokens=tokens, times=chance.randrange(1, 40))
            except TooManyRequests:
                return "refused"
            if chance.random() < 0.05:
                guilty.add(session.request_id)
                builder.latest.guilty.add(session.request_id)
            if chance.random() < 0.1:
                await asyncio.sleep(chance.random() / 10)
                session.cancel()
                return "left"
            try:
                ids, _, _ = await read(session)
            except EngineError as error:
                return error.message
            assert len(ids) == tokens
            return "served"

        async with asyncio.timeout(200):
            ends = await asyncio.gather(*(caller(n) for n in range(num_requests)))
            await until(lambda: is_empty(engine), engine)
            while builder.latest.request_ids:  # the thread carries out the last cancellation
                await asyncio.sleep(0.01)
        check(engine._scheduler)
        builder.latest.check()
        assert engine.is_ready
        lies = sum("reported" in end for end in ends)
        assert ends.count("served") > num_requests // 10
        for end in ends:
            assert (
                end in ("left", "refused", "served")
                or "half-way" in end
                or "reported" in end
                or "poisoned" in end
            )
        if len(builder.built) == 1:
            assert not any("half-way" in end for end in ends)
        assert lies or fatal_left[0] < 4, "nothing happened"


def test_the_watchdog_warns_gives_up_once_and_forgives_progress() -> None:
    dog = Watchdog(10.0, look_every_s=1.0)
    seen = [dog.look(7, now=float(now)) for now in range(30)]
    assert [alarm for alarm in seen if alarm] == [Alarm.ABORT, Alarm.GIVE_UP]
    assert seen[10] is Alarm.ABORT
    assert seen[15] is Alarm.GIVE_UP
    assert dog.look(8, now=31.0) is None
    assert [dog.look(turn, now=40.0 + turn) for turn in range(9, 60)] == [None] * 51
    assert dog.look(None, now=200.0) is None


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_machine_that_stood_still_is_not_taken_for_a_backend_that_hangs(jump_s: float) -> None:
    dog = Watchdog(10.0, look_every_s=1.0)
    assert [dog.look(7, now=float(now)) for now in range(5)] == [None] * 5
    assert dog.look(7, now=5.0 + jump_s) is None
    assert dog.look(7, now=6.0 + jump_s) is None
