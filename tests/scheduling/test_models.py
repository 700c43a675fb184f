"""Several models behind one scheduler: who asks another one waits, and nothing else changes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from engine_service.scheduling.decisions import Preempt
from engine_service.scheduling.events import CapacityChanged
from engine_service.scheduling.model import (
    MICRO,
    ModelId,
    Policy,
    RejectReason,
    RequestId,
    Resident,
    ResidentId,
    ServiceUnit,
)
from engine_service.scheduling.scheduler import Scheduler
from tests.scheduling.household import CAPACITY, Household

ALICE, BOB = (Resident(resident_id=ResidentId(name)) for name in ("alice", "bob"))
OTHER = "other"


def test_who_asks_a_model_that_does_not_serve_waits_and_is_not_in_anybodys_way() -> None:
    home = Household(residents=(ALICE, BOB))
    elsewhere = home.ask("bob", "chat", 200, 10, model=OTHER)
    here = home.ask("alice", "chat", 200, 10)
    home.run_dry()
    assert home.sequences[here].finished_at is not None
    assert home.sequences[elsewhere].finished_at is None
    assert home.scheduler.eta_s(elsewhere, now=home.now) is None, "nobody knows when its model comes"
    home.leave()
    home.enter(OTHER)
    home.run_dry()
    assert home.all_finished()


def test_what_runs_may_end_before_its_model_is_left_and_nobody_is_admitted_meanwhile() -> None:
    home = Household(residents=(ALICE, BOB))
    first = home.ask("alice", "chat", 200, 30)
    for _ in range(5):
        home.step()
    home.leave()
    late = home.ask("bob", "voice", 50, 5)
    home.run_dry()
    assert home.sequences[first].finished_at is not None
    assert home.sequences[first].preempted == 0
    assert home.sequences[late].admitted_at == []


def test_all_but_speech_can_be_put_back_and_goes_on_where_it_was() -> None:
    home = Household(residents=(ALICE, BOB))
    chat = home.ask("alice", "chat", 200, 60)
    for _ in range(8):
        home.step()
    speech = home.ask("bob", "voice", 60, 20)
    for _ in range(4):
        home.step()
    written = home.sequences[chat].output
    assert written
    home.leave(puts_back_from=1)
    home.run_dry()
    assert home.sequences[speech].finished_at is not None
    assert home.sequences[chat].preempted == 1
    home.enter(OTHER)
    home.leave()
    home.enter("")
    home.run_dry()
    assert home.sequences[chat].finished_at is not None
    assert home.sequences[chat].output == 60
    recomputed = home.scheduler.state.counters.system_service
    assert recomputed >= 200, "what is computed again because of the switch is paid by the system"
    assert home.served("alice") == 200 + 2 * 60


def test_a_switch_that_is_called_off_changes_nothing() -> None:
    home = Household(residents=(ALICE,))
    home.ask("alice", "chat", 200, 30)
    waiting = home.ask("alice", "chat", 200, 30)
    home.leave()
    home.step()
    home.tell(CapacityChanged(capacity=home.capacity))
    home.run_dry()
    assert home.all_finished()
    assert home.sequences[waiting].preempted == 0


def test_the_time_of_a_switch_is_the_systems() -> None:
    home = Household(residents=(ALICE,), policy=Policy(unit=ServiceUnit.ACCELERATOR_TIME))
    home.leave()
    home.enter(OTHER, switch_s=2.5)
    assert home.scheduler.state.switch_micros == 2.5 * MICRO
    assert home.scheduler.state.counters.system_service == 2.5 * MICRO
    assert home.served("alice") == 0
    saved = json.loads(json.dumps(home.scheduler.snapshot(now=home.now)))
    fresh = Scheduler(home.policy)
    fresh.restore(saved, now=home.now)
    assert fresh.state.switch_micros == 2.5 * MICRO
    del saved["switch_micros"]  # as engines of one model wrote it
    Scheduler(home.policy).restore(saved, now=home.now)


def test_each_model_is_measured_by_its_own_memory_and_keeps_its_own_prefixes_and_costs() -> None:
    home = Household(residents=(ALICE,))
    prefix = home.ask("alice", "chat", 320, 0, keep_prefix=True)
    home.run_dry()
    assert home.scheduler.state.pages.pinned == ((prefix, 10),)
    learned = home.scheduler.state.estimator
    long = home.ask("alice", "chat", 3000, 100, model=OTHER)
    assert long not in home.rejected, "its model's memory is not known to be too small"
    home.leave()
    home.capacity = dataclasses.replace(CAPACITY, num_pages=40, max_context_tokens=1024)
    home.enter(OTHER)
    assert home.rejected[long].reason is RejectReason.PROMPT_TOO_LONG
    assert home.scheduler.state.pages.pinned == ()
    assert home.scheduler.state.estimator is not learned
    home.leave()
    home.capacity = CAPACITY
    home.enter("", pinned=((prefix, 10),))
    assert home.scheduler.state.pages.pinned == ((RequestId(prefix), 10),)
    assert home.scheduler.state.estimator is learned


def test_a_model_is_not_exchanged_under_somebody() -> None:
    home = Household(residents=(ALICE,))
    home.ask("alice", "chat", 200, 30)
    with pytest.raises(RuntimeError, match="another model cannot serve"):
        home.scheduler.handle(CapacityChanged(capacity=CAPACITY, model_id=ModelId(OTHER)), now=home.now)


def test_the_longest_request_of_a_model_that_does_not_serve_is_told_by_its_own_memory() -> None:
    home = Household(residents=(ALICE,))
    small = dataclasses.replace(CAPACITY, max_context_tokens=512)
    most = home.scheduler.most_tokens
    voice = next(iter(home.policy.classes))
    assert most(voice, elsewhere=small) == 512 < most(voice)


def test_what_is_put_back_before_a_switch_is_told_to_the_backend() -> None:
    home = Household(residents=(ALICE,))
    chat = home.ask("alice", "chat", 200, 60)
    home.step()
    home.leave(puts_back_from=1)
    home.step()
    preempted = [d.request_id for _, _, told in home.log for d in told if isinstance(d, Preempt)]
    assert preempted == [chat]
