"""The simulator's evening, lived through by the engine's loop and ExLlamaV2's own generator: one log.

H1 with lengths and counts that a CPU can compute, in virtual time: the backend is the real one, and only the
seconds that an iteration takes come from the simulator's cost model.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from engine_service.backends.base import ChunkOrder, Sampling, StepOutcome
from engine_service.engine import eventlog
from engine_service.engine.loop import Engine
from engine_service.engine.sessions import Delta, Finished, Order, Session
from engine_service.scheduling.decisions import Compose, Decision, Preempt
from engine_service.scheduling.events import Arrived, Event, IterationDone
from engine_service.scheduling.model import Capacity, PreemptionMode, Request, RequestId
from engine_service.scheduling.scheduler import Scheduler
from engine_service.simulator import scenario as scenarios
from engine_service.simulator.profiles import DeviceProfile, profile
from engine_service.simulator.runner import Runner
from engine_service.simulator.scenario import Scenario
from engine_service.simulator.workload import Length, RecordedOrder, StreamState
from tests.backends.exllamav2_cpu import PAGE, EchoModel, ExLlamaV2Backend, make_loaded

SCALE = 8  # of lengths; the machine is as much slower
Turn = tuple[float, Event, list[Decision]]


def scaled_evening() -> Scenario:
    """Return H1 for a cache of 24 pages, a minute long."""
    evening = scenarios.load("H1")
    streams = []
    for stream in evening.streams:
        arrivals = dataclasses.replace(
            stream.arrivals, count=8, rate=stream.arrivals.rate * 3, gap_s=stream.arrivals.gap_s / 2
        )
        lengths = {"prompt": shorter(stream.prompt), "output": shorter(stream.output)}
        streams.append(dataclasses.replace(stream, arrivals=arrivals, max_tokens=None, **lengths))
    policy = dataclasses.replace(evening.policy, voice_headroom_pages=2, prefix_share=0.0)
    return dataclasses.replace(
        evening, duration_s=60.0, drain_s=600.0, streams=tuple(streams), policy=policy, criteria=()
    )


def shorter(length: Length) -> Length:
    return dataclasses.replace(length, low=max(1, length.low // SCALE), high=max(1, length.high // SCALE))


def machine(capacity: Capacity) -> DeviceProfile:
    """Return H1's card, slower by the scale for every token, with the memory of the test."""
    card = profile("rtx4090-8b")
    cost = dataclasses.replace(
        card.cost,
        prefill_token_s=card.cost.prefill_token_s * SCALE,
        prefill_pair_s=card.cost.prefill_pair_s * SCALE * SCALE,
        decode_pair_s=card.cost.decode_pair_s * SCALE,
    )
    return DeviceProfile(name="scaled", cost=cost, capacity=capacity)


class InVirtualTime(ExLlamaV2Backend):
    """The real backend; the clock leaps by what the cost model says, and arrivals come in between."""

    clock: VirtualTime

    @property
    def capacity(self) -> Capacity:
        # An iteration that is stopped early keeps what happens to be computed, which no cost model knows.
        return dataclasses.replace(super().capacity, can_abort=False)

    def preempt(self, request_id: RequestId, mode: PreemptionMode) -> None:
        """Preempt and forget what was stored: the scaled card has no prefix cache."""
        super().preempt(request_id, mode)
        self.drop_cache()

    def step(self, decode_ids: Any, prefills: Any) -> StepOutcome:
        seconds = self.seconds(decode_ids, prefills)
        outcome = super().step(decode_ids, prefills)
        assert not outcome.aborted
        self.check()
        self.clock.pass_by(seconds)
        return dataclasses.replace(outcome, seconds=seconds)

    def seconds(self, decode_ids: list[RequestId], prefills: list[ChunkOrder]) -> float:
        """Return what the simulator's device would take: a pass per chunk, then one for who decodes."""
        decoding = [self._live[r].num_stored for r in decode_ids]
        chunks = []
        for chunk in prefills:
            live = self._live[chunk.request_id]
            chunks.append((chunk.num_tokens, live.num_stored))
            if live.num_stored + chunk.num_tokens == live.generation.num_tokens:
                decoding.append(live.generation.num_tokens)
        return machine(self.capacity).seconds(
            chunks=chunks, num_decodes=len(decoding), decode_context_tokens=sum(decoding)
        )


class VirtualTime:
    """Lets people arrive when their time has come."""

    def __init__(self, scenario: Scenario) -> None:
        self.now = 0.0
        orders = [
            order
            for stream in scenario.streams
            for order in StreamState(stream, 1, scenario.duration_s).open_loop()
        ]
        self.left = sorted(orders, key=lambda order: order.at_s)
        self.readers: list[asyncio.Task[None]] = []
        self.texts: dict[RequestId, tuple[tuple[int, ...], list[int]]] = {}
        self._loop = asyncio.get_running_loop()
        self.engine: Engine

    def pass_by(self, seconds: float) -> None:
        """Let time pass (engine thread); who arrives meanwhile arrives."""
        ends = self.now + seconds
        while self.left and self.left[0].at_s < ends:
            asyncio.run_coroutine_threadsafe(self.arrive(), self._loop).result(timeout=60)
        self.now = ends

    async def arrive(self) -> None:
        """Let the next ones arrive, all that come at one instant."""
        self.now = max(self.now, self.left[0].at_s)
        number = len(self.texts)
        asked = self.left.pop(0)
        prompt = tuple(
            (i * 11 + 7 * number * i + 31 * number + i // 200) % 250 for i in range(asked.prompt_tokens)
        )
        session = await self.engine.submit(
            Order(
                resident_id=asked.stream.resident_id,
                class_id=asked.stream.class_id,
                prompt_ids=prompt,
                max_tokens=asked.output_tokens,
                sampling=Sampling(temperature=0.0),
                ignore_eos=True,
            )
        )
        self.texts[session.request_id] = (prompt, [])
        self.readers.append(asyncio.create_task(self.read(session)))

    async def read(self, session: Session) -> None:
        async for event in session.events():
            if isinstance(event, Delta):
                self.texts[session.request_id][1].extend(event.token_ids)
            elif isinstance(event, Finished):
                return

    async def live(self) -> None:
        """Let everybody arrive and be answered."""
        while self.left:
            await self.arrive()
            while pending := [reader for reader in self.readers if not reader.done()]:
                await asyncio.wait(pending)
        for reader in self.readers:
            reader.result()


async def by_generator(
    directory: Path, scenario: Scenario, log: Path
) -> tuple[list[Turn], VirtualTime, InVirtualTime]:
    loaded = make_loaded(directory, cache_tokens=24 * PAGE)
    backend = InVirtualTime(loaded, max_sequences=6, chunk_tokens=512)
    clock = backend.clock = VirtualTime(scenario)
    clock.engine = Engine(
        backend,
        policy=scenario.policy,
        residents=scenario.residents,
        clock=lambda: clock.now,
        event_log=log,
        company_s=0,  # a moment of the wall's clock, which virtual time does not know
    )
    await clock.engine.start()
    await clock.live()
    await clock.engine.stop(drain_s=0)
    return list(eventlog.read(log)), clock, backend


def by_simulator(scenario: Scenario, capacity: Capacity, requests: list[tuple[float, Request]]) -> list[Turn]:
    recorded = tuple(
        RecordedOrder(at_s=at_s, request=request, output_tokens=request.max_tokens)
        for at_s, request in requests
    )
    scenario = dataclasses.replace(scenario, streams=(), recorded=recorded)
    runner = Runner(scenario, Scheduler(scenario.policy), profile=machine(capacity), seed=0, keep_turns=True)
    return runner.run().turns


def told(turns: list[Turn]) -> list[Turn]:
    """Return arrivals and ends of iterations with what was decided; seconds without their last digits."""
    return [
        (round(now, 6), plain(event), [plain(decision) for decision in decisions])
        for now, event, decisions in turns
        if isinstance(event, Arrived | IterationDone)
    ]


def plain(what: Any) -> Any:
    for name in ("seconds", "predicted_s"):
        if getattr(what, name, None) is not None:
            what = dataclasses.replace(what, **{name: round(getattr(what, name), 6)})
    return what


async def test_the_evening_is_decided_alike_by_simulator_and_real_generator(
    echo_directory: Path, tmp_path: Path
) -> None:
    scenario = scaled_evening()
    real, clock, backend = await by_generator(echo_directory, scenario, tmp_path / "events.jsonl")
    requests = [(now, event.request) for now, event, _ in real if isinstance(event, Arrived)]
    assert {request.class_id.value for _, request in requests} == {"voice", "chat", "agent", "background"}
    decisions = [decision for _, _, turn in real for decision in turn]
    assert any(isinstance(decision, Preempt) for decision in decisions), "memory was never short"
    assert sum(isinstance(decision, Compose) for decision in decisions) > 300

    simulated = told(by_simulator(scenario, backend.capacity, requests))
    for number, (ours, theirs) in enumerate(zip(told(real), simulated, strict=False)):
        assert ours == theirs, f"turn {number} differs"
    assert len(told(real)) == len(simulated)

    model: EchoModel = backend._loaded.model
    for prompt, ids in clock.texts.values():
        assert ids == model.continuation(prompt, len(ids))
