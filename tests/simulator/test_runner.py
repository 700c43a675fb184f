"""The same scenario gives the same decisions, whoever drives the core; books and device agree."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from engine_service.backends.base import Sampling
from engine_service.backends.cost_model import CostModel
from engine_service.backends.simulated import SimulatedBackend
from engine_service.engine import eventlog
from engine_service.engine.loop import Engine
from engine_service.engine.sessions import Finished, Order
from engine_service.scheduling.decisions import AbortIteration, Decision
from engine_service.scheduling.events import Arrived, Event, IterationDone
from engine_service.scheduling.model import Capacity, Policy, Request, Resident, ResidentId, WorkloadClass
from engine_service.scheduling.scheduler import Scheduler
from engine_service.simulator import measure
from engine_service.simulator.profiles import DeviceProfile
from engine_service.simulator.runner import Run, Runner
from engine_service.simulator.scenario import Scenario
from engine_service.simulator.workload import Faults, RecordedOrder
from tests.scheduling.household import Household, Sequence as HouseholdSequence
from tests.simulator.builders import TWO, assert_same, parsed, run

POLICIES = ("default", "waiting", "completions", "fifo", "fifo-chunked", "class_only", "vtc", "vllm-priority")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_repeats_byte_for_byte(policy: str) -> None:
    one = run(parsed(), policy, keep_turns=True)
    other = run(parsed(), policy, keep_turns=True)
    assert_same(one.turns, other.turns)
    assert len(one.turns) > 100
    first, second = (measure.summarise(ended, policy=policy, seed=1) for ended in (one, other))
    is_same = first == second
    assert is_same


def test_another_seed_is_another_run() -> None:
    is_same = run(parsed(), keep_turns=True).turns == run(parsed(), seed=2, keep_turns=True).turns
    assert not is_same


@pytest.mark.parametrize("policy", POLICIES)
def test_the_books_agree_with_the_device(policy: str) -> None:
    """P5, checked from outside: what was charged is what was computed, each token once."""
    ended = run(parsed(), policy, check_every=1)
    summary = measure.summarise(ended, policy=policy, seed=1)
    counters = ended.scheduler.state.counters
    for name in ("anna", "ben"):
        assert summary.groups[name].service == counters.service(ResidentId(name))
    assert summary.recomputed == ended.scheduler.state.recomputed_tokens
    assert all(group.unfinished == 0 for group in summary.groups.values())
    assert (summary.leaked_pages, summary.stuck) == (0, 0)


def test_every_answer_has_its_real_length() -> None:
    ended = run(parsed())
    assert ended.meter.outcomes
    for outcome in ended.meter.outcomes.values():
        assert outcome.sequence.output == outcome.sequence.output_length
        assert outcome.prefilled == outcome.sequence.request.prompt_tokens


def test_what_has_not_come_by_the_end_counts_with_the_time_waited() -> None:
    scenario = dataclasses.replace(parsed(), drain_s=0.0, duration_s=8.0)
    summary = measure.summarise(run(scenario, "fifo"), policy="fifo", seed=1)
    agent = summary.groups["agent"]
    assert agent.unfinished > 0
    assert agent.e2e.n == agent.requests


def test_a_stream_alone_sends_what_it_sends_in_company() -> None:
    company, alone = run(parsed()), run(parsed().only("voice"))
    lengths = [
        [
            (o.arrived_at, o.sequence.request.prompt_tokens, o.sequence.output_length)
            for o in r.meter.outcomes.values()
            if o.class_id is WorkloadClass.VOICE
        ]
        for r in (company, alone)
    ]
    assert lengths[0] == lengths[1]


FAULTS = """
[faults]
disconnects = 0.4
failures = 0.1
losses_per_hour = 700
down_s = 1
clock_jumps = [[3, 60], [9, 3600]]
days = [
    { at_s = 1, day = "2026-03-29", ends_in_s = 82800 },
    { at_s = 5, day = "2026-03-30", ends_in_s = 86400 },
    { at_s = 6, day = "2026-03-29", ends_in_s = 10 },
]
"""


@pytest.mark.parametrize("policy", ["default", "fifo", "vtc", "vllm-priority"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_goes_wrong_nothing_leaks_and_a_replay_agrees(policy: str, seed: int) -> None:
    ended = run(parsed(TWO + FAULTS), policy, seed=seed, check_every=1, keep_turns=True)
    from engine_service.simulator.policies import choose

    summary = measure.summarise(
        ended, policy=policy, seed=seed, replay=lambda: choose(policy).scheduler(ended.scenario.policy)
    )
    assert (summary.leaked_pages, summary.stuck, summary.replay_differs) == (0, 0, 0)
    assert summary.losses >= 1
    assert summary.disconnects >= 1
    assert ended.device.num_held == 0


def test_a_replay_that_differs_is_noticed() -> None:
    ended = run(parsed(), keep_turns=True)
    other = Policy(max_chunk_tokens=256)
    summary = measure.summarise(ended, policy="default", seed=1, replay=lambda: Scheduler(other))
    assert summary.replay_differs > 0


def test_an_idle_device_reminds_the_scheduler_of_who_waits() -> None:
    class Shy(Scheduler):
        """Serves nobody before it was reminded at five seconds."""

        def _plan(self, *, now: float) -> list[Decision]:
            return super()._plan(now=now) if now >= 5 else []

    scenario = dataclasses.replace(parsed().only("voice"), duration_s=6.0)
    machine = scenario.machine(run(parsed()).profile)
    ended = Runner(scenario, Shy(), profile=machine, seed=1).run()
    summary = measure.summarise(ended, policy="shy", seed=1)
    assert summary.groups["voice"].unfinished == 0
    assert summary.idle_waiting > 0


# ---- three drivers, one log

COST = CostModel(
    prefill_s=0.003,
    prefill_token_s=0.00016,
    prefill_pair_s=0.0,
    decode_s=0.0085,
    decode_sequence_s=0.00035,
    decode_pair_s=0.0,
)
CAPACITY = Capacity(num_pages=96, page_tokens=32, max_sequences=6, max_context_tokens=3072, can_abort=True)
RESIDENTS = tuple(Resident(resident_id=ResidentId(name)) for name in ("anna", "ben"))
POLICY = Policy(voice_headroom_pages=8, prefix_share=0.0, max_chunk_tokens=256)

Asked = tuple[float, str, str, int, int]
VISITS: tuple[Asked, ...] = (
    (0.0, "ben", "background", 1200, 60),
    (0.0, "ben", "background", 900, 90),
    (0.01, "anna", "chat", 300, 40),
    (0.05, "anna", "voice", 200, 12),
    (0.2, "ben", "agent", 700, 50),
    (0.21, "anna", "chat", 90, 30),
    (0.9, "anna", "voice", 220, 9),
    (9.0, "ben", "chat", 100, 20),
    (9.005, "anna", "voice", 150, 10),
)


async def by_engine(folder: Path) -> list[tuple[float, Event, list[Decision]]]:
    """Drive the core by the engine's own loop, on the simulated backend, in virtual time."""
    left = list(VISITS)
    loop = asyncio.get_running_loop()
    clock = [0.0]
    aborted = [False]

    class Backend(SimulatedBackend):
        def abort(self) -> None:
            aborted[0] = True

    async def arrive(at_s: float) -> None:
        clock[0] = at_s
        while left and left[0][0] == at_s:
            _, resident, class_id, prompt, output = left.pop(0)
            order = Order(
                resident_id=ResidentId(resident),
                class_id=WorkloadClass(class_id),
                # Prompts that begin alike would be found in the cache.
                prompt_ids=tuple((i * 7 + 31 * len(left)) % 250 + 1 for i in range(prompt)),
                max_tokens=output,
                sampling=Sampling(temperature=0),
                ignore_eos=True,
            )
            session = await engine.submit(order)
            readers.append(asyncio.create_task(ended(session)))

    async def ended(session: object) -> None:
        async for event in session.events():  # type: ignore[attr-defined]
            if isinstance(event, Finished):
                return

    def advance(seconds: float) -> float:
        started = clock[0]
        aborted[0] = False
        while left and left[0][0] < started + seconds:
            at_s = left[0][0]
            asyncio.run_coroutine_threadsafe(arrive(at_s), loop).result(timeout=60)
            if aborted[0]:
                return at_s - started
        clock[0] = started + seconds
        return seconds

    backend = Backend(
        cost_model=COST,
        context_tokens=CAPACITY.num_pages * CAPACITY.page_tokens,
        max_sequences=CAPACITY.max_sequences,
        micro_batch=1_000_000,
        advance=advance,
    )
    assert backend.capacity == CAPACITY
    log = folder / "events.jsonl"
    # A moment in which others may come is one of the wall's clock, which this evening does not have.
    engine = Engine(
        backend, policy=POLICY, residents=RESIDENTS, clock=lambda: clock[0], event_log=log, company_s=0
    )
    readers: list[asyncio.Task[None]] = []
    await engine.start()
    while left:
        await arrive(left[0][0])
        await asyncio.gather(*readers)
    await engine.stop(drain_s=0)
    return list(eventlog.read(log))


def by_simulator(requests: list[tuple[float, Request]]) -> list[tuple[float, Event, list[Decision]]]:
    scenario = Scenario(
        name="three",
        title="three drivers",
        description="",
        duration_s=20.0,
        drain_s=60.0,
        profile="",
        device={},
        policy=POLICY,
        residents=RESIDENTS,
        streams=(),
        phases=(),
        faults=Faults(),
        criteria=(),
        recorded=tuple(
            RecordedOrder(at_s=at_s, request=request, output_tokens=request.max_tokens)
            for at_s, request in requests
        ),
    )
    machine = DeviceProfile(name="three", cost=COST, capacity=CAPACITY)
    ended: Run = Runner(scenario, Scheduler(POLICY), profile=machine, seed=0, keep_turns=True).run()
    return ended.turns


def by_hand(requests: list[tuple[float, Request]]) -> list[tuple[float, Event, list[Decision]]]:
    """Drive the core as its own tests do."""
    home = Household(policy=POLICY, capacity=CAPACITY, residents=RESIDENTS, now=0.0)
    for at_s, request in requests:
        home.run_until(at_s)
        home.sequences[request.request_id] = HouseholdSequence(
            request=request, output_length=request.max_tokens
        )
        home.tell(Arrived(request=request))
    home.run_dry()
    return home.log


def told(turns: list[tuple[float, Event, list[Decision]]]) -> list[tuple[float, Event, list[Decision]]]:
    """Return what drivers have in common: arrivals, ends of iterations, and what was decided.

    Whether a request that got nothing out of an aborted iteration is reported or left out is the backend's.
    """
    return [
        (
            round(now, 9),
            _plain(e),
            [
                dataclasses.replace(d, predicted_s=round(d.predicted_s, 9))
                if getattr(d, "predicted_s", None) is not None
                else d
                for d in ds
            ],
        )
        for now, e, ds in turns
        if isinstance(e, Arrived | IterationDone)
    ]


def _plain(event: Arrived | IterationDone) -> Arrived | IterationDone:
    if isinstance(event, Arrived):
        return event
    results = tuple(r for r in event.results if r.prefill_tokens or r.decode_tokens or r.finished)
    return dataclasses.replace(event, results=results, seconds=round(event.seconds, 9))


async def test_three_drivers_write_one_log(tmp_path: Path) -> None:
    engine = await by_engine(tmp_path)
    requests = [(now, e.request) for now, e, _ in engine if isinstance(e, Arrived)]
    assert len(requests) == len(VISITS)
    assert any(isinstance(d, AbortIteration) for _, _, ds in engine for d in ds)
    assert_same(told(by_simulator(requests)), told(engine))
    assert_same(told(by_hand(requests)), told(engine))
