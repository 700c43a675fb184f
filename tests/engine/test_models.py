"""Several models behind one engine: simulated ones for the rules, real ones for the words."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_service.backends.base import (
    BackendError,
    ChunkOrder,
    Constraint,
    ConstraintKind,
    ModelError,
    StepOutcome,
    Tell,
)
from engine_service.backends.cost_model import CostModel
from engine_service.backends.llama_cpp import LlamaCppBackend
from engine_service.backends.llama_cpp.binding import open_library
from engine_service.backends.llama_cpp.provision import GgufSource, default_model_path, open_default_model
from engine_service.backends.simulated import SimulatedBackend, SimulatedSource
from engine_service.engine import eventlog
from engine_service.engine.loop import Engine
from engine_service.engine.residence import Models
from engine_service.engine.sessions import Delta, Order, Session
from engine_service.errors import GenerationFailed, ModelUnavailable, UnknownModel
from engine_service.scheduling.baseline import FirstComeFirstServed
from engine_service.scheduling.invariants import check
from engine_service.scheduling.model import (
    ModelId,
    Policy,
    RequestId,
    ResidencyPolicy,
    ResidentId,
    WorkloadClass,
)
from engine_service.scheduling.residency import Residence
from engine_service.scheduling.scheduler import Scheduler
from engine_service.simulator.recorded import replay_recording
from tests.engine.conftest import GREEDY, RESIDENTS, Clock, read, until

A, B, V = ModelId("a"), ModelId("b"), ModelId("voice")
QUICK = ResidencyPolicy(min_stay_s=0.2, patience_s=0.05, drain_s=0.2, speech_drain_s=5, retry_s=30)
POLICY = Policy(voice_headroom_pages=4, prefix_share=0.2, max_chunk_tokens=64, min_chunk_tokens=16)


FAST = CostModel(
    prefill_s=0.0005,
    prefill_token_s=0.00001,
    prefill_pair_s=0,
    decode_s=0.002,
    decode_sequence_s=0.0001,
    decode_pair_s=0,
)


class Source(SimulatedSource):
    """A simulated model that can refuse to be loaded, and counts how often it was."""

    def __init__(self, name: str, **more: Any) -> None:
        super().__init__(name, context_tokens=2048, max_sequences=6, cost_model=FAST, **more)
        self.trouble: Exception | None = None
        self.opened: list[SimulatedBackend] = []
        self.may_open = threading.Event()
        self.may_open.set()

    def open(self, tell: Tell) -> SimulatedBackend:
        tell(0.4)
        self.may_open.wait(30)
        if self.trouble is not None:
            raise self.trouble
        backend = super().open(tell)
        self.opened.append(backend)
        return backend


@asynccontextmanager
async def home(
    *sources: Source,
    pinned: frozenset[ModelId] = frozenset(),
    event_log: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    **policy: Any,
) -> AsyncIterator[Engine]:
    """An engine of simulated models, the first of which serves."""
    rules = ResidencyPolicy(**{**{f: getattr(QUICK, f) for f in QUICK.__dataclass_fields__}, **policy})
    named = {ModelId(source.describe().info.name): source for source in sources}
    models = Models(named, pinned=pinned, policy=rules)
    engine = Engine(
        models.open_first(),
        policy=POLICY,
        residents=RESIDENTS,
        models=models,
        event_log=event_log,
        clock=clock,
    )
    await engine.start()
    try:
        yield engine
        check(engine._scheduler)
    finally:
        await engine.stop(drain_s=0)


async def ask(
    engine: Engine,
    model: str,
    class_id: str = "chat",
    *,
    tokens: int = 8,
    text: str = "the rain",
    **more: Any,
) -> Session:
    model_id = ModelId(model)
    return await engine.submit(
        Order(
            resident_id=ResidentId("alice"),
            class_id=WorkloadClass(class_id),
            prompt_ids=tuple(engine.language(model_id).tokenizer.encode(text)),
            max_tokens=tokens,
            sampling=GREEDY,
            ignore_eos=True,
            model_id=model_id,
            **more,
        )
    )


async def answer(engine: Engine, model: str, *args: Any, **more: Any) -> str:
    return (await read(await ask(engine, model, *args, **more)))[1]


def place(engine: Engine, model: str) -> Residence:
    return next(status.place for status in engine.models() if status.model_id == model)


async def first_words(session: Session) -> None:
    async for event in session.events():
        if isinstance(event, Delta) and event.text:
            return


def is_writing(engine: Engine) -> bool:
    return any(live.decode_tokens > 5 for live in list(engine._live.values()))


def held(backend: SimulatedBackend, *, when: Callable[[], bool]) -> threading.Event:
    """Let the device wait from that moment on until the event is set, so that it is not ahead of the test."""
    may_go_on, step = threading.Event(), backend.step

    def waiting(decode_ids: Sequence[RequestId], prefills: Sequence[ChunkOrder]) -> StepOutcome:
        if not may_go_on.is_set() and when():
            assert may_go_on.wait(30), "nobody let the device go on"
        return step(decode_ids, prefills)

    backend.step = waiting  # type: ignore[method-assign]
    return may_go_on


async def test_a_model_is_loaded_for_who_asks_it_and_the_other_given_up_where_memory_is_for_one() -> None:
    a, b = Source("a"), Source("b")
    async with home(a, b) as engine:
        assert [status.place for status in engine.models()] == [Residence.LOADED, Residence.ABSENT]
        alone = await answer(engine, "a")
        assert await answer(engine, "b")
        assert (place(engine, "a"), place(engine, "b")) == (Residence.ABSENT, Residence.LOADED)
        assert await answer(engine, "a") == alone
        assert (len(a.opened), len(b.opened)) == (2, 1)
        system = engine._scheduler.state.switch_micros
        assert system > 0, "the switches are the system's"


async def test_two_models_in_memory_take_turns_without_loading() -> None:
    a, b = Source("a"), Source("b")
    async with home(a, b, max_loaded=2) as engine:
        for _ in range(3):
            assert await answer(engine, "a")
            assert await answer(engine, "b")
        assert (len(a.opened), len(b.opened)) == (1, 1)
        assert {status.place for status in engine.models()} == {Residence.LOADED, Residence.IDLE}


@pytest.mark.parametrize("max_loaded", [1, 2])
async def test_an_answer_that_is_put_back_goes_on_where_it_was(max_loaded: int) -> None:
    """Also when its model was unloaded in between: not a word is lost or told twice."""
    a, b = Source("a"), Source("b")
    async with home(a, b, max_loaded=max_loaded, drain_s=0.05) as engine:
        whole = (await read(await ask(engine, "a", tokens=150, text="once upon a time")))[0]
        may_go_on = held(a.opened[-1], when=lambda: is_writing(engine))
        session = await ask(engine, "a", tokens=150, text="once upon a time")
        reading = asyncio.create_task(read(session))
        await until(lambda: is_writing(engine), engine)
        other = await ask(engine, "b")
        may_go_on.set()
        assert (await read(other))[1]
        ids, _, timings = await reading
        assert ids == whole
        assert timings.preemptions >= 1
        assert timings.decode_tokens == 150


async def test_speech_for_an_idle_model_does_not_wait_for_a_chat_with_another() -> None:
    async with home(
        Source("voice"), Source("a"), pinned=frozenset({V}), max_loaded=2, min_stay_s=60
    ) as engine:
        await answer(engine, "a")
        chat = await ask(engine, "a", tokens=400)
        reading = asyncio.create_task(read(chat))
        await until(lambda: is_writing(engine), engine)
        assert await answer(engine, "voice", "voice", tokens=5)
        assert not reading.done(), "speech came first"
        assert len((await reading)[0]) == 400
        assert place(engine, "a") is Residence.LOADED, "the chat had its turn again at once"


async def test_a_pinned_model_serves_speech_while_another_is_being_loaded() -> None:
    a, b = Source("a"), Source("b")
    async with home(Source("voice"), a, b, pinned=frozenset({V}), max_loaded=2) as engine:
        await answer(engine, "a")
        b.may_open.clear()
        waiting = asyncio.create_task(answer(engine, "b"))
        await until(lambda: place(engine, "b") is Residence.LOADING, engine)
        status = next(s for s in engine.models() if s.model_id == "b")
        assert status.num_waiting == 1
        async with asyncio.timeout(10):
            while next(s for s in engine.models() if s.model_id == "b").progress != 0.4:
                await asyncio.sleep(0.01)
            assert await answer(engine, "voice", "voice", tokens=5)
        assert engine.is_ready
        assert not waiting.done()
        b.may_open.set()
        assert await waiting
        assert place(engine, "voice") is not Residence.ABSENT
        assert place(engine, "a") is Residence.ABSENT


async def test_a_model_that_cannot_be_loaded_is_told_to_who_waits_and_the_first_goes_on() -> None:
    a, b = Source("a"), Source("b")
    clock = Clock()
    async with home(a, b, max_loaded=2, retry_s=30, clock=clock) as engine:
        chat = asyncio.create_task(answer(engine, "a", tokens=200))
        b.trouble = ModelError("the file is cut short")
        b.may_open.clear()  # until both have asked
        waiting = [await ask(engine, "b"), await ask(engine, "b", "voice")]
        b.may_open.set()
        for session in waiting:
            with pytest.raises(ModelUnavailable, match=r"'b' could not be loaded.*cut short") as told:
                await read(session)
            assert told.value.code == "model_unavailable"
        with pytest.raises(ModelUnavailable, match="cut short") as refused:
            await ask(engine, "b")
        assert refused.value.retry_after_s is not None
        assert 0 < refused.value.retry_after_s <= 30
        assert await chat
        b.trouble = None
        clock.ahead_s += 30
        assert await answer(engine, "b"), "it is tried again"


async def test_whoever_waits_for_company_is_begun_when_another_model_fails_before_that() -> None:
    """The loader's thread tells of its failure, and what is planned then is carried out, too."""
    a, b = Source("a"), Source("b")
    async with home(a, b, max_loaded=2) as engine:
        b.trouble = ModelError("the file is cut short")
        b.may_open.clear()
        waiting = await ask(engine, "b")
        chat = await ask(engine, "a")
        time.sleep(0.05)  # noqa: ASYNC251 - the engine's thread has seen that there is nothing to do yet
        b.may_open.set()
        engine._several.join(30)  # meanwhile the event loop, whose timer would begin the chat, stands still
        with pytest.raises(ModelUnavailable, match="cut short"):
            await read(waiting)
        assert await asyncio.wait_for(read(chat), 10)


async def test_the_first_comes_back_where_the_other_took_its_memory_and_could_not_be_loaded() -> None:
    a, b = Source("a"), Source("b")
    async with home(a, b) as engine:
        b.trouble = BackendError("no memory")
        with pytest.raises(ModelUnavailable, match="no memory"):
            await answer(engine, "b")
        assert place(engine, "a") is Residence.ABSENT
        assert await answer(engine, "a")


async def test_a_request_for_a_model_that_pinned_ones_leave_no_room_for_is_refused_in_words() -> None:
    async with home(Source("voice"), Source("a"), pinned=frozenset({V})) as engine:
        with pytest.raises(ModelUnavailable, match=r"memory for 1 at once, and 'voice' stays there"):
            await ask(engine, "a")
        assert await answer(engine, "voice")
    async with home(Source("voice"), Source("a"), pinned=frozenset({V}), releases_pinned=True) as engine:
        assert await answer(engine, "a")
        await until(lambda: place(engine, "voice") is Residence.LOADED, engine)


async def test_names_are_known_or_refused_with_those_that_are() -> None:
    async with home(Source("a"), Source("b")) as engine:
        assert engine.model_named(None) == engine.model_named("a") == A
        assert engine.model_named("b") == B
        with pytest.raises(UnknownModel, match="'c' is not served here; these are: 'a', 'b'"):
            engine.model_named("c")


async def test_first_come_first_served_takes_turns_between_models_too() -> None:
    """The yardstick switches as well, so that it can be compared."""
    rules = ResidencyPolicy(min_stay_s=0.2, patience_s=0.05, drain_s=0.05)
    models = Models({A: Source("a"), B: Source("b")}, policy=rules)
    engine = Engine(
        models.open_first(),
        residents=RESIDENTS,
        models=models,
        scheduler=FirstComeFirstServed(POLICY),
    )
    await engine.start()
    try:
        long = asyncio.create_task(read(await ask(engine, "a", tokens=300)))
        assert await answer(engine, "b")
        assert not long.done()
        assert len((await long)[0]) == 300
    finally:
        await engine.stop(drain_s=0)


async def test_who_gives_up_waiting_for_a_model_calls_the_switch_off() -> None:
    a, b = Source("a"), Source("b")
    async with home(a, b, drain_s=20) as engine:
        may_go_on = held(a.opened[-1], when=lambda: engine._scheduler.state.is_leaving)
        chat = asyncio.create_task(read(await ask(engine, "a", tokens=200)))
        session = await ask(engine, "b")
        await until(lambda: engine._scheduler.state.is_leaving, engine)
        session.cancel()
        may_go_on.set()
        ids, _, timings = await chat
        assert len(ids) == 200
        assert timings.preemptions == 0
        assert await answer(engine, "a")
        assert (len(a.opened), b.opened) == (1, []), "nothing was unloaded, nothing loaded for nobody"


@pytest.mark.parametrize("max_loaded", [1, 2])
async def test_what_is_cancelled_while_its_model_is_away_leaves_nothing_behind(max_loaded: int) -> None:
    a, b = Source("a"), Source("b")
    async with home(a, b, max_loaded=max_loaded, drain_s=0.05) as engine:
        session = await ask(engine, "a", tokens=400)
        await until(lambda: is_writing(engine), engine)
        assert await answer(engine, "b", tokens=2) is not None
        other = asyncio.create_task(answer(engine, "b", tokens=60))
        await asyncio.sleep(0)
        session.cancel()
        await other
        assert await answer(engine, "a")
        assert a.opened[-1].request_ids == ()
        assert not engine._scheduler.state.records


async def test_a_prefix_pinned_for_one_model_survives_the_others_turn_and_is_not_mistaken() -> None:
    a, b = Source("a"), Source("b")
    text = "the kitchen light and the garden door and the window in the hall " * 6
    async with home(a, b, max_loaded=2) as engine:
        ids = tuple(engine.language(A).tokenizer.encode(text))
        kept, computed = await engine.pin_prefix(ids, A)
        assert (kept, computed) == (len(ids), len(ids))
        assert await engine.pin_prefix(ids, B) == (0, 0), "no model is loaded to be told a prefix"
        await answer(engine, "b", text=text + "rain")
        assert engine._scheduler.state.pages.num_pinned == 0
        _, _, timings = await read(await ask(engine, "a", text=text + "rain"))
        assert timings.cached_tokens >= len(ids) - 1
        assert engine._scheduler.state.pages.num_pinned > 0
        assert await engine.pin_prefix(ids, A) == (len(ids), 0)


async def test_a_prefix_goes_with_its_model() -> None:
    a, b = Source("a"), Source("b")
    text = "the kitchen light and the garden door " * 6
    async with home(a, b) as engine:
        ids = tuple(engine.language(A).tokenizer.encode(text))
        await engine.pin_prefix(ids, A)
        await answer(engine, "b")
        await answer(engine, "a", text=text + "rain")
        assert engine._scheduler.state.pages.num_pinned == 0
        assert a.opened[-1].pinned_ids == ()
        await engine.pin_prefix(ids, A)
        assert len(a.opened[-1].pinned_ids) == 1
        assert engine._scheduler.state.pages.num_pinned > 0


async def test_a_lost_backend_takes_only_its_own_answers_along() -> None:
    a, b = Source("a"), Source("b")
    async with home(a, b, max_loaded=2, drain_s=0.05, min_stay_s=0.3) as engine:
        put_back = asyncio.create_task(read(await ask(engine, "a", tokens=150)))
        await until(lambda: is_writing(engine), engine)
        doomed = await ask(engine, "b", tokens=300)
        await until(lambda: engine._live[doomed.request_id].decode_tokens > 0, engine)
        b.opened[-1].lose_everything()
        with pytest.raises(GenerationFailed, match="half-way"):
            await read(doomed)
        assert len((await put_back)[0]) == 150
        assert await answer(engine, "b")
        assert len(b.opened) == 2


async def test_a_log_of_switches_replays_to_the_same_decisions_and_can_be_rehearsed(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    async with home(Source("a"), Source("b"), drain_s=0.05, event_log=log) as engine:
        put_back = asyncio.create_task(answer(engine, "a", tokens=80))
        await until(lambda: is_writing(engine), engine)
        await answer(engine, "b")
        await put_back
    turns = list(eventlog.read(log))
    assert {"ServingStopped", "CapacityChanged"} <= {type(event).__name__ for _, event, _ in turns}
    scheduler = Scheduler(POLICY)
    for now, event, decisions in turns:
        assert scheduler.handle(event, now=now) == decisions
    outcome = replay_recording(log, ["default"], profile=None)
    assert outcome.runs["default"][0].groups["chat"].finished == 2, "as if one model had answered all"


async def test_models_under_a_storm_of_requests_cancellations_and_switches_break_no_promise() -> None:
    sources = Source("voice", load_s=0.02), Source("a", load_s=0.02), Source("b", load_s=0.05)
    async with home(*sources, pinned=frozenset({V}), max_loaded=2) as engine:

        async def one(number: int) -> int:
            await asyncio.sleep(number % 7 / 20)
            model = ("voice", "a", "b")[number % 3]
            class_id = ("voice", "chat", "background", "chat")[number % 4]
            session = await ask(engine, model, class_id, tokens=10 + number % 30)
            if number % 5 == 0:
                await asyncio.sleep(0.05)
                session.cancel()
                return 0
            ids, _, _ = await read(session)
            return len(ids) - 10 - number % 30

        async with asyncio.timeout(60):
            assert not any(await asyncio.gather(*(one(number) for number in range(60))))
        await until(lambda: not engine._live, engine)
        check(engine._scheduler)
        assert not engine._scheduler.state.records
        for source in sources:
            for backend in source.opened[-1:]:
                backend.check()


# ---- with the embedded model, as two files


def quiet(_: str) -> None:
    pass


@pytest.fixture
def files(cache_dir: Path) -> tuple[Path, Path]:
    """The embedded model requantised, and as it is shipped."""
    model = open_default_model(open_library(), cache_dir, requantise=True, progress=quiet)
    path = model.path
    model.close()
    assert path != default_model_path()
    return path, default_model_path()


class CountedSource(GgufSource):
    """A real model that counts how often it was loaded."""

    num_opened = 0

    def open(self, tell: Tell | None = None) -> LlamaCppBackend:
        self.num_opened += 1
        return super().open(tell)


def gguf(path: Path, name: str, cache_dir: Path) -> CountedSource:
    return CountedSource(
        path,
        cache_dir=cache_dir,
        context_tokens=1024,
        max_sequences=4,
        threads=1,
        requantise=False,
        progress=quiet,
        name=name,
    )


async def test_two_files_of_a_real_model_take_turns_and_answers_go_on_across_them(
    files: tuple[Path, Path], cache_dir: Path
) -> None:
    """With memory for one: an answer forced by a grammar is put back, its model unloaded, loaded, resumed."""
    sources = {
        ModelId(name): gguf(path, name, cache_dir)
        for name, path in zip(("eight", "four"), files, strict=True)
    }
    schema = Constraint(
        kind=ConstraintKind.JSON_SCHEMA,
        text='{"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}',
    )
    rules = ResidencyPolicy(min_stay_s=0.2, patience_s=0, drain_s=0.1)
    models = Models(sources, policy=rules)
    engine = Engine(models.open_first(), policy=POLICY, residents=RESIDENTS, models=models)
    await engine.start()
    try:
        said = {status.model_id: status.info for status in engine.models()}
        assert {info.name for info in said.values() if info} == {"eight", "four"}
        assert said["eight"] is not None
        assert said["four"] is not None
        assert said["four"].embedding_size == said["eight"].embedding_size == 576
        assert said["four"].chat_template == said["eight"].chat_template

        async def numbers() -> Session:
            return await ask(engine, "eight", tokens=200, text="Numbers: ", constraint=schema)

        whole = (await read(await numbers()))[0]
        reading = asyncio.create_task(read(await numbers()))
        await until(lambda: is_writing(engine), engine)
        assert await answer(engine, "four", tokens=4)
        ids, _, timings = await reading
        assert timings.preemptions == 1
        assert ids == whole
        opened = {model_id: source.num_opened for model_id, source in sources.items()}
        assert opened == {"eight": 2, "four": 1}, "one was unloaded for the other, and loaded again"
        progress = [status.progress for status in engine.models()]
        assert progress == [None, None]
    finally:
        await engine.stop(drain_s=0)


async def test_what_a_model_says_without_its_weights_is_what_it_says_with_them(
    files: tuple[Path, Path], cache_dir: Path
) -> None:
    source = gguf(files[1], "four", cache_dir)
    language = source.describe()
    heard: list[float] = []
    backend = source.open(heard.append)
    try:
        assert backend.capacity == language.capacity
        assert backend.info.max_context_tokens == language.info.max_context_tokens
        assert (backend.info.vocab_size, backend.info.bos_text) == (
            language.info.vocab_size,
            language.info.bos_text,
        )
        assert heard == sorted(heard)
        assert heard[-1] == 1.0
        assert len(heard) > 3
    finally:
        backend.close()
    assert language.tokenizer.decode(language.tokenizer.encode("the rain")) == "the rain"
