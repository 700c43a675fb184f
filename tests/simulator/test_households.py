"""Short versions of the households keep their promises. The whole suite: docs/simulator.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_service.simulator import scenario as scenarios, suite
from engine_service.simulator.suite import Outcome
from tests.simulator.builders import shortened


@pytest.mark.parametrize(
    ("name", "factor", "num_seeds"),
    [
        ("kitchen_light", 1.0, 2),
        ("homework", 1.0, 2),
        ("H1", 0.5, 1),
        ("H4", 0.1, 1),
        ("H6", 0.1, 1),
        ("H7", 0.1, 2),
        ("H9", 0.2, 2),
        ("H10", 0.06, 1),
        ("H11", 0.1, 1),
        ("overload", 0.3, 1),
        ("on_off_less", 0.4, 1),
    ],
)
def test_a_household_keeps_its_promises(name: str, factor: float, num_seeds: int, tmp_path: Path) -> None:
    assert_kept(suite.simulate(shortened(name, factor, tmp_path), ["default"], num_seeds=num_seeds))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", scenarios.names())
def test_a_whole_scenario_keeps_its_promises(name: str) -> None:
    assert_kept(suite.simulate(name, ["default"], num_seeds=5))


def assert_kept(outcome: Outcome) -> None:
    """Fail with the criteria that do not hold, and both of their sides in the worst seed."""
    broken = [
        f"{v.criterion.name}: {v.criterion.text}: {v.worst.left} {v.criterion.sign} {v.worst.right}"
        for v in outcome.verdicts
        if not v.holds
    ]
    assert not broken
    assert outcome.passes
