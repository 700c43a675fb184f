"""Small scenarios as text, and short versions of the project's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from engine_service.simulator import scenario as scenarios
from engine_service.simulator.policies import choose
from engine_service.simulator.profiles import profile
from engine_service.simulator.runner import Run, Runner
from engine_service.simulator.scenario import Scenario

TWO = """
title = "Two residents"
duration_s = 20
drain_s = 120
profile = "rtx4090-8b"

[residents]
anna = {}
ben = { weight = 2 }

[[stream]]
resident = "anna"
class = "voice"
arrivals = { pattern = "poisson", rate = 0.5 }
prompt = { uniform = [900, 1400] }
output = { uniform = [12, 40] }

[[stream]]
resident = "ben"
class = "agent"
arrivals = { pattern = "uniform", rate = 0.5 }
prompt = { uniform = [2000, 6000] }
output = { uniform = [50, 200] }
max_tokens = 200

[[criterion]]
name = "voice starts at once"
check = "voice.ttft.p95 <= 1.0"
"""


def parsed(text: str = TWO, name: str = "two") -> Scenario:
    """Return the scenario that a text describes."""
    return scenarios.parse(text, name=name, source=f"{name}.toml")


def run(scenario: Scenario, policy: str = "default", seed: int = 1, **options: object) -> Run:
    """Run a scenario once, on its own machine."""
    machine = scenario.machine(profile(scenario.profile))
    scheduler = choose(policy).scheduler(scenario.policy)
    return Runner(scenario, scheduler, profile=machine, seed=seed, **options).run()  # type: ignore[arg-type]


def shortened(name: str, factor: float, folder: Path) -> str:
    """Write one of the project's scenarios with all its times multiplied by factor; return the path."""
    text = (resources.files("engine_service.simulator") / "scenarios" / f"{name}.toml").read_text("utf-8")
    times = re.compile(r"^(duration_s|drain_s|from_s|until_s|to_s) = ([0-9.]+)$", re.MULTILINE)
    path = folder / f"{name}.toml"
    path.write_text(times.sub(lambda m: f"{m[1]} = {float(m[2]) * factor:g}", text))
    return str(path)


def assert_same(one: Sequence[object], other: Sequence[object]) -> None:
    """Fail with the first difference; pytest's own comparison of long logs takes minutes."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            raise AssertionError(f"turn {i} of {len(one)} differs:\n  {a}\n  {b}")
    if len(one) != len(other):
        raise AssertionError(f"{len(one)} turns, and {len(other)}")
