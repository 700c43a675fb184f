"""Short versions of the households keep their promises. The whole suite: docs/simulator.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_service.simulator import suite
from tests.simulator.builders import shortened


@pytest.mark.parametrize(
    ("name", "factor", "num_seeds"),
    [
        ("H1", 0.25, 2),
        ("H3", 0.2, 1),
        ("H4", 0.1, 1),
        ("H7", 0.1, 2),
        ("H9", 0.2, 2),
        ("H10", 0.06, 1),
        ("H11", 0.1, 1),
    ],
)
def test_a_household_keeps_its_promises(name: str, factor: float, num_seeds: int, tmp_path: Path) -> None:
    outcome = suite.simulate(shortened(name, factor, tmp_path), ["default"], num_seeds=num_seeds)
    broken = [
        f"{v.criterion.name}: {v.criterion.text}: {v.worst.left} {v.criterion.sign} {v.worst.right}"
        for v in outcome.verdicts
        if not v.holds
    ]
    assert not broken
    assert outcome.passes
