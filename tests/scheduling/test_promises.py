"""The scheduler keeps every promise, and every mutant is caught breaking the one it breaks."""

from __future__ import annotations

import pytest

from engine_service.scheduling.invariants import InvariantBroken
from engine_service.scheduling.scheduler import Scheduler
from tests.scheduling.mutants import BREAKS
from tests.scheduling.promises import PROMISES


@pytest.mark.parametrize("promise", sorted(PROMISES))
def test_the_scheduler_keeps_its_promise(promise: str) -> None:
    PROMISES[promise](Scheduler)


@pytest.mark.parametrize("mutant", BREAKS, ids=lambda mutant: mutant.__name__)
def test_the_mutant_is_killed(mutant: type[Scheduler]) -> None:
    with pytest.raises((AssertionError, InvariantBroken)):
        PROMISES[BREAKS[mutant]](mutant)


def test_all_ten_mistakes_of_the_contract_are_made() -> None:
    assert len(BREAKS) >= 10
    assert len({mutant.__name__ for mutant in BREAKS}) == len(BREAKS)
