"""One policy, measured: commands to an idle engine, then the evening, then what the ledger says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from household import measure, workload
from household.documents import DOCUMENTS
from household.engine import EngineProcess
from household.places import read_cpu_seconds
from household.residence import RESIDENTS, ROOMS, Household
from household.stage import Stage
from household.stalls import StallWatch
from household.waiting import until

NUM_IDLE_COMMANDS: Final = 12
NUM_COMMANDS: Final = 14
LONGEST_PACE_S: Final = 5.0
SHORTEST_PACE_S: Final = 0.3

_SENSOR_TIMEOUT_S: Final = 10.0


@dataclass(slots=True, kw_only=True)
class Phase:
    """What was seen under one policy."""

    policy: str
    evening: workload.Evening
    facts: list[measure.RequestFacts] = field(default_factory=list)  #: read once the engine has stopped
    snapshot: dict[str, Any] = field(default_factory=dict)  #: the engine's, when all was done
    sensors: dict[str, str] = field(
        default_factory=dict
    )  #: tokens served as Home Assistant shows them, by resident
    shares: dict[str, str] = field(default_factory=dict)  #: service share likewise, percent
    policy_met: str = "unknown"  #: as Home Assistant shows it
    evening_s: float = 0.0
    cores: float = 0.0  #: processor time the engine got during the evening, per second
    stalled_s: float = 0.0  #: time in which the machine itself stood still, idle commands included


async def pace(stage: Stage) -> float:
    """Return the seconds between commands: so many that the summaries last for most of the commands.

    Measured on the engine itself, so that a fast machine is asked faster and has enough to show.
    """
    text = " ".join(document.instructions for document in DOCUMENTS)[:3000]
    body = {
        "prompt": text,
        "max_tokens": 33,
        "temperature": 0,
        "ignore_eos": True,
        "fairhearth": {"workload_class": "agent"},
    }
    started = time.monotonic()
    answer = await stage.engine_api.post("/v1/completions", body)
    elapsed_s = time.monotonic() - started
    first_s = float(answer["fairhearth"]["time_to_first_token_s"])
    prefill_s = first_s / int(answer["usage"]["prompt_tokens"])
    decode_s = (elapsed_s - first_s) / (int(answer["usage"]["completion_tokens"]) - 1)
    work_s = 3 * 2000 * prefill_s + 256 * 1.5 * decode_s
    return max(SHORTEST_PACE_S, min(LONGEST_PACE_S, round(work_s / NUM_COMMANDS, 1)))


def plan_for(pace_s: float, num_commands: int = NUM_COMMANDS) -> list[workload.Arrival]:
    """Return the evening at a pace: commands all along, and two chats among them."""
    return workload.evening(num_commands, every_s=pace_s, chats_at=(1.2 * pace_s, 7.4 * pace_s))


async def run_idle_commands(home: Household, num_commands: int = NUM_IDLE_COMMANDS) -> None:
    """Say commands one after the other, with nothing else to do for the engine."""
    for number in range(num_commands):
        command = workload.COMMANDS[-1 - number % len(workload.COMMANDS)]
        await workload.speak(home, ROOMS[number % len(ROOMS)], command)
        await asyncio.sleep(0.2)


async def run_phase(
    stage: Stage,
    policy: str,
    plan: Sequence[workload.Arrival],
    *,
    on_answer: Callable[[str], None] = lambda line: None,
) -> Phase:
    """Measure the policy the engine runs under; on_answer is told every answer as it comes."""
    home = stage.household
    with StallWatch() as watch:
        await stage.while_both_live(run_idle_commands(home))
        started, cpu = time.monotonic(), _cpu_seconds(stage.engine)
        evening = await stage.while_both_live(workload.run_evening(home, plan, on_answer=on_answer))
        evening_s, cpu = time.monotonic() - started, _cpu_seconds(stage.engine) - cpu
    phase = Phase(
        policy=policy,
        evening=evening,
        evening_s=evening_s,
        cores=cpu / evening_s,
        stalled_s=watch.stalled_s,
    )
    await _read_ledgers(stage, phase)
    return phase


def _cpu_seconds(engine: EngineProcess) -> float:
    return read_cpu_seconds(engine.pid)


async def _read_ledgers(stage: Stage, phase: Phase) -> None:
    """Note what the engine and Home Assistant say once nothing goes on; Home Assistant may need a moment."""
    home = stage.household
    phase.snapshot = await stage.engine_api.quiet(timeout_s=60)

    async def tokens() -> dict[str, str]:
        return {name: await home.state(home.resident_sensor(name, "tokens_served")) for name in RESIDENTS}

    expected = {name: str(phase.snapshot["residents"][name]["tokens_served"]) for name in RESIDENTS}
    with contextlib.suppress(TimeoutError):  # what differs is shown, and judged, by the checks
        await until(tokens, lambda seen: seen == expected, "sensors", timeout_s=_SENSOR_TIMEOUT_S)
    phase.sensors = await tokens()
    phase.shares = {name: await home.state(home.resident_sensor(name, "service_share")) for name in RESIDENTS}
    phase.policy_met = await home.state(home.engine_entity("binary_sensor", "policy_met"))
