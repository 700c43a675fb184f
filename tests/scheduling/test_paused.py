"""A paused class waits and nothing else changes; resumed, it goes on and nothing of it is lost."""

from __future__ import annotations

import dataclasses

import pytest

from engine_service.scheduling.decisions import Decision, Reject
from engine_service.scheduling.events import Arrived, Event, PolicyChanged, Ticked
from engine_service.scheduling.model import (
    Policy,
    RejectReason,
    Resident,
    ResidentId,
    WorkloadClass,
)
from tests.scheduling.household import CAPACITY, Household

ALICE, BOB, CAROL = (Resident(resident_id=ResidentId(name)) for name in ("alice", "bob", "carol"))
PAUSED = Policy(paused_classes=(WorkloadClass.BACKGROUND,))


def turn(home: Household, *classes: WorkloadClass) -> None:
    policy = dataclasses.replace(home.scheduler.state.policy, paused_classes=classes)
    home.tell(PolicyChanged(policy=policy))


def evening(home: Household, *, with_background: bool) -> None:
    """Speak, chat and run agents for ten seconds, beside documents that wait or do not."""
    for number in range(20):
        home.now = max(home.now, 100 + number / 2)
        home.ask("alice", "chat", 300 + 17 * number, 40)
        if with_background:
            home.ask("carol", "background", 700, 50)
            home.ask("alice", "background", 900, 60)
        home.ask("bob", "agent", 500, 30 + number)
        if number % 5 == 4:
            home.ask("carol", "voice", 200, 12)
        home.run_until(100 + (number + 1) / 2)


def told_to_others(home: Household) -> list[tuple[float, list[Decision]]]:
    """Return what was decided, but for arrivals of the background, whose ids are counted apart."""

    def is_background(event: Event) -> bool:
        return isinstance(event, Arrived) and event.request.class_id is WorkloadClass.BACKGROUND

    return [(now, decisions) for now, event, decisions in home.log if not is_background(event)]


class Numbered(Household):
    """A household whose background takes no numbers from the others."""

    def ask(self, resident, class_id, *args, **more):  # type: ignore[no-untyped-def]  # as above
        if class_id != "background":
            return super().ask(resident, class_id, *args, **more)
        count, self._count = self._count, 90_000 + len(self.sequences)
        request_id = super().ask(resident, class_id, *args, **more)
        self._count = count
        return request_id


def test_nothing_else_changes() -> None:
    """Everybody else gets to the microsecond what they would get if the background were not there."""
    without, beside = (Numbered(policy=PAUSED, residents=(ALICE, BOB, CAROL)) for _ in range(2))
    evening(without, with_background=False)
    evening(beside, with_background=True)
    assert told_to_others(without) == told_to_others(beside)
    assert len(beside.scheduler.state.set_aside) == 2
    assert not any(s.admitted_at for s in beside.sequences.values() if s.request.class_id == "background")


def test_what_waited_and_what_ran_is_finished_once_the_class_is_resumed() -> None:
    home = Household(residents=(ALICE, BOB))
    running = [home.ask("alice", "background", 900, 200) for _ in range(3)]
    home.run_until(100.5)
    assert any(home.sequences[r].output for r in running)
    turn(home, WorkloadClass.BACKGROUND)
    waiting = [home.ask("bob", "background", 400, 30)]
    home.run_dry()
    state = home.scheduler.state
    assert not state.holding
    assert state.pages.num_held == 0, "its memory is free for the others"
    assert not home.scheduler.has_work
    assert not any(home.sequences[r].finished_at for r in (*running, *waiting))
    home.now += 7200
    home.tell(Ticked())
    assert home.flying is None, "a paused class is the reserve that P9 names"
    turn(home)
    home.run_dry()
    assert home.all_finished()


def test_a_cancelled_request_of_a_paused_class_is_gone() -> None:
    home = Household(residents=(ALICE,))
    first, second = (home.ask("alice", "background", 900, 200) for _ in range(2))
    home.run_until(100.2)
    turn(home, WorkloadClass.BACKGROUND)
    home.run_dry()
    home.cancel(first)
    home.cancel(second)
    assert not home.scheduler.state.records
    assert not home.scheduler.state.set_aside


def test_who_is_paused_saves_up_no_advantage_over_who_is_served_meanwhile() -> None:
    """A resident who is set aside comes back like one who was away: with the least of those who wait."""
    home = Household(policy=PAUSED, residents=(ALICE, BOB, CAROL))
    for _ in range(10):
        home.ask("alice", "background", 900, 100)
    for _ in range(60):
        home.ask("bob", "agent", 900, 100)
    home.run_until(103.0)
    counters = home.scheduler.state.counters
    behind = counters.value(BOB.resident_id) - counters.value(ALICE.resident_id)
    assert behind > 0
    assert home.scheduler.state.num_waiting["bob"] > 0
    turn(home)
    assert counters.value(ALICE.resident_id) == counters.value(BOB.resident_id)


def test_what_is_between_those_who_are_resumed_together_stays() -> None:
    home = Household(residents=(ALICE, BOB, CAROL))
    for _ in range(40):
        home.ask("alice", "background", 900, 100)
    home.run_until(101.0)
    for _ in range(40):
        home.ask("bob", "background", 900, 100)
    home.run_until(101.5)
    turn(home, WorkloadClass.BACKGROUND)
    counters = home.scheduler.state.counters
    home.run_until(101.8)
    assert len(home.scheduler.state.set_aside) == 2
    between = counters.value(ALICE.resident_id) - counters.value(BOB.resident_id)
    for _ in range(30):
        home.ask("carol", "agent", 900, 100)
    home.run_until(104.0)
    assert home.scheduler.state.num_waiting["carol"] > 0
    turn(home)
    assert min(counters.value(r.resident_id) for r in (ALICE, BOB)) == counters.value(CAROL.resident_id)
    assert counters.value(ALICE.resident_id) - counters.value(BOB.resident_id) == between


def test_the_lengths_of_the_queues_hold_for_who_is_paused_too() -> None:
    few = dataclasses.replace(ALICE, max_waiting=2)
    home = Household(policy=dataclasses.replace(PAUSED, max_waiting=3), residents=(few, BOB))
    for _ in range(3):
        home.ask("alice", "background", 100, 10)
    for _ in range(2):
        home.ask("bob", "background", 100, 10)
    refused: list[Reject] = list(home.rejected.values())
    assert [r.reason for r in refused] == [RejectReason.TOO_MANY_REQUESTS, RejectReason.QUEUE_FULL]
    assert [r.eta_s for r in refused] == [None, None]


def test_where_nothing_can_be_put_back_what_runs_is_let_to_its_end() -> None:
    home = Household(capacity=dataclasses.replace(CAPACITY, can_release=False), residents=(ALICE,))
    running, waiting = (home.ask("alice", "background", 1500, 300) for _ in range(2))
    home.run_until(100.1)
    turn(home, WorkloadClass.BACKGROUND)
    home.run_dry()
    finished = {r for r in (running, waiting) if home.sequences[r].finished_at}
    assert running in finished
    assert not any(s.preempted for s in home.sequences.values())


@pytest.mark.parametrize("class_id", ["voice", "accessibility", "chat"])
def test_what_somebody_waits_for_cannot_be_paused(class_id: str) -> None:
    with pytest.raises(ValueError, match=f"agent, embedding and background, not {class_id}"):
        Policy(paused_classes=(WorkloadClass(class_id),))


def test_a_restart_keeps_the_class_paused() -> None:
    home = Household(policy=PAUSED, residents=(ALICE,))
    home.ask("alice", "background", 100, 10)
    home.restart()
    home.ask("alice", "background", 100, 10)
    assert home.flying is None
    turn(home)
    home.run_dry()
    assert home.sequences[list(home.sequences)[-1]].finished_at
