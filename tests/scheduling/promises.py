"""The promises as scenarios: each takes a kind of scheduler and raises if the promise is broken.

The real scheduler must keep all of them (`test_promises.py`); each mutant of `mutants/` must break the one
it was made to break (`test_mutants.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine_service.scheduling import admission
from engine_service.scheduling.events import DayStarted, Ticked
from engine_service.scheduling.invariants import check, lead_bound
from engine_service.scheduling.model import (
    MICRO,
    Capacity,
    ClassPolicy,
    Policy,
    Resident,
    ResidentId,
    WorkloadClass,
)
from engine_service.scheduling.scheduler import Scheduler
from tests.scheduling.household import Household

MakeScheduler = Callable[[Policy], Scheduler]
ALICE = Resident(resident_id=ResidentId("alice"), max_waiting=1000)
BOB = Resident(resident_id=ResidentId("bob"), max_waiting=1000)
NARROW = Capacity(num_pages=64, page_tokens=32, max_sequences=3, max_context_tokens=1024, can_abort=True)
WIDE = Capacity(num_pages=48, page_tokens=32, max_sequences=8, max_context_tokens=1024, can_abort=True)
NO_PREFIXES = Policy(prefix_share=0.0, voice_headroom_pages=8, background_reserve=0.0)


def returning_gets_no_credit(make: MakeScheduler) -> None:
    """Who was away while others worked does not then own the machine (VTC, lift, first branch)."""
    home = Household(make=make, residents=(ALICE, BOB), capacity=NARROW)
    for _ in range(60):
        home.ask("bob", "chat", 128, 64)
    home.run_until(home.now + 8.0)
    before = home.served("bob")
    assert home.scheduler.state.num_waiting["bob"] > 0
    for _ in range(60):
        home.ask("alice", "chat", 128, 64)
    home.run_until(home.now + 8.0)
    gained = home.served("bob") - before
    assert home.scheduler.state.num_waiting["alice"] > 0
    assert gained > 0.35 * (gained + home.served("alice"))


def empty_queue_gives_no_credit(make: MakeScheduler) -> None:
    """Who arrives while all others run but nobody waits starts at the last that left (second branch)."""
    home = Household(make=make, residents=(ALICE, BOB), capacity=NARROW)
    home.ask("bob", "chat", 900, 100)
    home.run_until(home.now + 0.6)
    home.ask("bob", "chat", 64, 400)
    home.run_until(home.now + 0.6)
    assert not home.scheduler.state.total_waiting
    assert home.scheduler.state.holding
    home.ask("alice", "chat", 64, 8)
    counters = home.scheduler.state.counters
    assert counters.value(ALICE.resident_id) >= 900 * MICRO


def waiting_never_becomes_urgency(make: MakeScheduler) -> None:
    """A due summary is not spoken work: it may not take the headroom that is kept for speech."""
    classes = dict(Policy().classes)
    classes[WorkloadClass.BACKGROUND] = ClassPolicy(max_wait_s=1.0, inter_token_target_s=None)
    policy = Policy(prefix_share=0.0, voice_headroom_pages=8, classes=classes)
    home = Household(make=make, policy=policy, residents=(ALICE, BOB), capacity=WIDE)
    for _ in range(30):
        home.ask("bob", "background", 300, 200)
    home.run_until(home.now + 5.0)
    for _ in range(200):
        if not home.step():
            break
        state = home.scheduler.state
        lent = sum(r.pages for r in admission.losable(state, at_least=1))
        assert state.pages.free + lent >= 8, "due work sits in the headroom of speech, and cannot be moved"
    arrived_at = home.now
    voice = home.ask("alice", "voice", 150, 10)
    home.run_until(home.now + 2.0)
    assert home.ttft(voice, arrived_at) < 0.3


def prompts_are_charged_too(make: MakeScheduler) -> None:
    """Long prompts with short answers cost what they cost."""
    home = Household(make=make, residents=(ALICE, BOB), capacity=NARROW)
    for _ in range(60):
        home.ask("alice", "chat", 900, 4)
        for _ in range(4):
            home.ask("bob", "chat", 32, 100)
    home.run_until(home.now + 10.0)
    state = home.scheduler.state
    assert state.num_waiting["alice"] > 0
    assert state.num_waiting["bob"] > 0
    computed = {
        name: state.account(name).prefill_tokens + 2 * state.account(name).decode_tokens
        for name in (ALICE.resident_id, BOB.resident_id)
    }
    assert min(computed.values()) > 0.7 * max(computed.values()), computed


def speech_comes_before_the_reserve(make: MakeScheduler) -> None:
    """The background reserve is not spent while somebody speaks."""
    policy = Policy(background_reserve=0.5, prefix_share=0.0)
    roomy = Capacity(num_pages=256, page_tokens=32, max_sequences=8, max_context_tokens=1024)
    home = Household(make=make, residents=(ALICE, BOB), capacity=roomy, policy=policy)
    for _ in range(20):
        home.ask("bob", "chat", 128, 32)
    home.run_dry()
    voices = []
    for _ in range(6):
        voices.append(home.ask("alice", "voice", 200, 60))
        home.ask("bob", "background", 900, 60)
    admitted_in_speech = 0
    while home.step():
        state = home.scheduler.state
        speaks = any(r.class_id is WorkloadClass.VOICE for r in state.records.values())
        admitted_in_speech += speaks and any(
            r.class_id is WorkloadClass.BACKGROUND and r.admitted_at == home.now
            for r in state.holding.values()
        )
        if all(home.sequences[v].finished_at is not None for v in voices):
            break
    assert not admitted_in_speech


def caps_lend_what_nobody_uses(make: MakeScheduler) -> None:
    """A page cap does not leave memory empty while only its owner has work."""
    capped = Resident(resident_id=ResidentId("capped"), page_cap=12)
    home = Household(make=make, residents=(capped,), capacity=WIDE, policy=NO_PREFIXES)
    for _ in range(4):
        home.ask("capped", "chat", 200, 400)
    home.run_until(home.now + 3.0)
    assert home.scheduler.state.pages.held_by(capped.resident_id) > 24


def cancelling_gives_everything_back(make: MakeScheduler) -> None:
    """Pages are free and the account settled within one iteration, whatever the state."""
    for when in (0.0, 0.05, 0.2, 0.6):
        home = Household(make=make, residents=(ALICE, BOB), capacity=WIDE)
        ids = [home.ask("alice", "chat", 400, 100) for _ in range(3)]
        home.run_until(home.now + when)
        for request_id in ids:
            home.cancel(request_id)
        home.step()
        check(home.scheduler)
        assert home.scheduler.state.pages.num_held == 0
        assert not home.scheduler.state.records


def victims_do_not_pay_for_preemption(make: MakeScheduler) -> None:
    """What is computed twice because we took the memory away is paid by the house."""
    home = Household(make=make, residents=(ALICE, BOB), capacity=WIDE, policy=NO_PREFIXES)
    for _ in range(4):
        home.ask("bob", "background", 320, 300)
    home.run_until(home.now + 3.0)
    home.ask("alice", "voice", 700, 20)
    home.run_dry()
    assert home.scheduler.state.recomputed_tokens > 0
    assert home.served("bob") == 4 * (320 + 2 * 300)


def a_day_is_a_local_day(make: MakeScheduler) -> None:
    """The day on which clocks go forward has 23 hours; the quota resets with it, not an hour later."""
    miser = Resident(resident_id=ResidentId("miser"), daily_tokens=100, daily_is_hard=True)
    home = Household(make=make, residents=(miser,))
    home.tell(DayStarted(day="2026-03-29", ends_at=home.now + 23 * 3600))
    home.ask("miser", "chat", 200, 5)
    home.run_dry()
    assert home.ask("miser", "chat", 20, 5) in home.rejected
    home.now += 23 * 3600
    home.tell(DayStarted(day="2026-03-30", ends_at=home.now + 24 * 3600))
    home.tell(Ticked())
    assert home.ask("miser", "chat", 20, 5) not in home.rejected


def forecasts_are_settled(make: MakeScheduler) -> None:
    """Whatever was charged ahead: in the end everybody has paid for what was computed."""
    policy = Policy(prefix_share=0.0, predict_output=True)
    home = Household(make=make, residents=(ALICE, BOB), capacity=WIDE, policy=policy)
    home.ask("alice", "chat", 200, 20, max_tokens=300)
    cancelled = home.ask("bob", "chat", 200, 200)
    home.run_until(home.now + 0.2)
    home.cancel(cancelled)
    home.run_dry()
    counters = home.scheduler.state.counters
    for name in (ALICE.resident_id, BOB.resident_id):
        assert counters.value(name) == counters.service(name) * MICRO


def a_restart_forgets_nothing(make: MakeScheduler) -> None:
    """Who was served much before a restart is not first after it, and a spent quota stays spent."""
    miser = Resident(
        resident_id=ResidentId("miser"), rolling_tokens=100, rolling_window_s=600.0, rolling_is_hard=True
    )
    home = Household(make=make, residents=(ALICE, BOB, miser), capacity=NARROW)
    home.ask("miser", "chat", 200, 5)
    home.ask("alice", "chat", 900, 100)
    home.ask("bob", "chat", 100, 10)
    home.run_dry()
    counters = home.scheduler.state.counters
    before = {r: counters.value(r) for r in (ALICE.resident_id, BOB.resident_id)}
    home.restart(elapsed_s=5.0)
    counters = home.scheduler.state.counters
    assert {r: counters.value(r) for r in before} == before
    assert home.ask("miser", "chat", 20, 5) in home.rejected


def a_due_call_goes_before_new_agent_runs(make: MakeScheduler) -> None:
    """A run that was served much waits for new short ones, but not for ever."""
    classes = dict(Policy().classes)
    classes[WorkloadClass.AGENT] = ClassPolicy(max_wait_s=2.0, inter_token_target_s=0.5)
    policy = Policy(classes=classes, background_reserve=0.0)
    home = Household(make=make, residents=(ALICE,), capacity=NARROW, policy=policy)
    home.ask("alice", "agent", 800, 100, program="long")
    home.run_dry()
    for i in range(4):
        home.ask("alice", "agent", 64, 200, program=f"first{i}")
    long = home.ask("alice", "agent", 64, 10, program="long")
    asked_at = home.now
    for i in range(150):
        home.run_until(home.now + 0.04)
        home.ask("alice", "agent", 64, 30, program=f"short{i}", max_tokens=30)
        if home.rejected:
            break
    home.run_until(asked_at + 12.0)
    assert home.sequences[long].admitted_at
    assert home.sequences[long].admitted_at[0] < asked_at + 7.0


def large_requests_keep_their_share(make: MakeScheduler) -> None:
    """Who sends requests that need most of the memory is passed by small ones, but not with each of them."""
    policy = Policy(
        prefix_share=0.0, voice_headroom_pages=0, due_budget=1, max_skips=100, output_slice_tokens=200
    )
    memory = Capacity(num_pages=64, page_tokens=16, max_sequences=12, max_context_tokens=800)
    home = Household(make=make, residents=(ALICE, BOB), capacity=memory, policy=policy)
    bound = lead_bound(home.scheduler.state)
    for i in range(1200):
        while home.scheduler.state.num_waiting.get(ALICE.resident_id, 0) < 8:
            home.ask("alice", "chat", 64, 60 + 7 * i % 100)
        while home.scheduler.state.num_waiting.get(BOB.resident_id, 0) < 8:
            home.ask("bob", "chat", (100, 700)[len(home.sequences) % 2], 10)
        home.step()
        assert (home.served("alice") - home.served("bob")) * MICRO <= bound


PROMISES: Final[dict[str, Callable[[MakeScheduler], None]]] = {
    promise.__name__: promise
    for promise in (
        returning_gets_no_credit,
        empty_queue_gives_no_credit,
        waiting_never_becomes_urgency,
        prompts_are_charged_too,
        speech_comes_before_the_reserve,
        caps_lend_what_nobody_uses,
        cancelling_gives_everything_back,
        victims_do_not_pay_for_preemption,
        a_day_is_a_local_day,
        forecasts_are_settled,
        a_restart_forgets_nothing,
        a_due_call_goes_before_new_agent_runs,
        large_requests_keep_their_share,
    )
}
