"""What people are told of the time: forecasts of a queue, whatever the engine did before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_service.scheduling.events import PolicyChanged
from engine_service.scheduling.model import Capacity, Policy, Resident, ResidentId, ServiceUnit
from tests.scheduling.household import Household

NARROW = Resident(resident_id=ResidentId("narrow"), max_waiting=40)
TWO_AT_ONCE = Capacity(num_pages=64, page_tokens=32, max_sequences=2, max_context_tokens=1024)


def rested(home: Household) -> None:
    """Two requests, then an hour in which nobody asks for anything, and two more."""
    for pause_s in (3600.0, 0.0):
        for _ in range(2):
            home.ask("narrow", "chat", 64, 64)
        home.run_dry()
        home.now += pause_s


def repriced(home: Household) -> None:
    rested(home)
    for policy in (Policy(decode_cost=50), Policy()):
        home.tell(PolicyChanged(policy=policy))
        home.ask("narrow", "chat", 64, 64)
        home.run_dry()


def timed(home: Household) -> None:
    rested(home)
    for policy in (Policy(unit=ServiceUnit.ACCELERATOR_TIME), Policy()):
        home.tell(PolicyChanged(policy=policy))
        home.ask("narrow", "chat", 64, 64)
        home.run_dry()


def restarted_after_that(home: Household) -> None:
    timed(home)
    home.restart(elapsed_s=10.0)
    home.ask("narrow", "chat", 64, 64)
    home.run_dry()


@pytest.mark.parametrize("before", [rested, repriced, timed, restarted_after_that])
def test_a_full_queue_says_how_long_it_really_takes(before: Callable[[Household], None]) -> None:
    home = Household(residents=(NARROW,), capacity=TWO_AT_ONCE)
    before(home)
    began = home.now
    for _ in range(45):
        last = home.ask("narrow", "chat", 64, 64)
    refused = home.rejected[last]
    home.run_dry()
    took_s = home.now - began
    assert refused.retry_after_s is not None
    assert took_s / 6 < refused.retry_after_s < took_s * 1.5
    assert refused.eta_s is not None
    assert took_s / 3 < refused.eta_s < took_s * 3
