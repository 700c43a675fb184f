"""Who is served first, and what waiting does and does not change."""

from __future__ import annotations

import dataclasses

from engine_service.scheduling.decisions import Admit
from engine_service.scheduling.model import (
    Capacity,
    ClassPolicy,
    FairnessGoal,
    Policy,
    Resident,
    ResidentId,
    WorkloadClass,
)
from tests.scheduling.household import Household

ALICE = Resident(resident_id=ResidentId("alice"), max_waiting=1000)
BOB = Resident(resident_id=ResidentId("bob"), max_waiting=1000)
HEAVY = Resident(resident_id=ResidentId("heavy"), weight=3, max_waiting=1000)
TWO_AT_ONCE = Capacity(num_pages=64, page_tokens=32, max_sequences=2, max_context_tokens=1024)


def admitted(home: Household) -> list[str]:
    """Return request ids in the order of admission."""
    return [d.request_id for _, _, decisions in home.log for d in decisions if isinstance(d, Admit)]


def test_voice_is_served_before_work_that_came_earlier() -> None:
    home = Household(residents=(ALICE, BOB))
    for _ in range(6):
        home.ask("bob", "background", 1500, 200)
    home.run_until(home.now + 1.0)
    arrived_at = home.now
    voice = home.ask("alice", "voice", 200, 20)
    home.run_dry()
    assert home.ttft(voice, arrived_at) < 0.15
    assert home.all_finished()


def test_classes_come_in_order_of_urgency_among_requests_that_wait() -> None:
    policy = Policy(background_reserve=0.0)
    home = Household(residents=(ALICE,), capacity=TWO_AT_ONCE, policy=policy)
    running = home.ask("alice", "chat", 64, 30)
    waiting = [home.ask("alice", c, 64, 10) for c in ("background", "embedding", "agent", "chat")]
    home.run_dry()
    order = [r for r in admitted(home) if r != running]
    assert order == list(reversed(waiting))


def test_a_chat_does_not_wait_for_a_document_that_is_half_computed() -> None:
    home = Household(residents=(ALICE, BOB), cost=lambda chunk, decodes: 0.004 * chunk + 0.02 * decodes)
    document = home.ask("bob", "background", 3000, 20)
    home.run_until(home.now + 2.5)
    arrived_at = home.now
    chat = home.ask("alice", "chat", 40, 10)
    home.run_dry()
    assert home.ttft(chat, arrived_at) < 3.0, "one chunk and its own prompt"
    assert home.sequences[document].preempted == 0
    assert home.all_finished()


def test_equal_residents_get_equal_service_while_both_have_work_waiting() -> None:
    home = Household(residents=(ALICE, BOB))
    for _ in range(60):
        home.ask("alice", "chat", 256, 256)
        home.ask("bob", "chat", 64, 64)
        home.ask("bob", "chat", 64, 64)
    home.run_until(home.now + 5.0)
    alice, bob = home.served("alice"), home.served("bob")
    bound = 2 * max(1024, 2 * 4096)
    assert home.scheduler.state.num_waiting["alice"] > 0
    assert home.scheduler.state.num_waiting["bob"] > 0
    assert abs(alice - bob) <= bound
    assert min(alice, bob) > 0.5 * max(alice, bob)


def test_a_resident_of_weight_three_gets_three_times_the_service() -> None:
    home = Household(residents=(ALICE, HEAVY), capacity=dataclasses.replace(TWO_AT_ONCE, max_sequences=4))
    for _ in range(60):
        home.ask("alice", "chat", 128, 64)
        for _ in range(3):
            home.ask("heavy", "chat", 128, 64)
    home.run_until(home.now + 10.0)
    assert home.scheduler.state.num_waiting["alice"] > 0
    assert home.scheduler.state.num_waiting["heavy"] > 0
    assert 2.5 < home.served("heavy") / home.served("alice") < 3.5


def test_an_idle_resident_saves_up_no_credit() -> None:
    home = Household(residents=(ALICE, BOB), capacity=TWO_AT_ONCE)
    for _ in range(40):
        home.ask("bob", "chat", 128, 64)
    home.run_until(home.now + 8.0)
    before = home.served("bob")
    assert home.scheduler.state.num_waiting["bob"] > 0
    for _ in range(40):
        home.ask("alice", "chat", 128, 64)
    home.run_until(home.now + 8.0)
    assert home.scheduler.state.num_waiting["alice"] > 0
    assert home.served("bob") - before > 0.4 * home.served("alice")


def test_a_newcomer_to_an_empty_queue_starts_at_the_last_to_leave() -> None:
    home = Household(residents=(ALICE, BOB))
    bob = home.ask("bob", "chat", 128, 400)
    home.run_until(home.now + 1.0)
    assert home.sequences[bob].finished_at is None
    home.ask("alice", "chat", 64, 8)
    home.run_dry()
    home.ask("bob", "chat", 64, 8)
    counters = home.scheduler.state.counters
    last = counters.value(ResidentId("alice"))
    assert last >= 0
    assert counters.value(ResidentId("bob")) >= last


def test_waiting_long_changes_the_tier_but_never_the_class() -> None:
    classes = dict(Policy().classes)
    classes[WorkloadClass.BACKGROUND] = ClassPolicy(max_wait_s=3.0, inter_token_target_s=None)
    policy = Policy(classes=classes, background_reserve=0.0)
    home = Household(policy=policy, residents=(ALICE, BOB), capacity=TWO_AT_ONCE)
    for _ in range(200):
        home.ask("bob", "chat", 128, 32)
    summary = home.ask("alice", "background", 300, 50)
    home.run_until(home.now + 6.0)
    record = home.sequences[summary]
    assert record.finished_at is not None, "a due summary is served although chats wait"
    assert home.scheduler.state.class_accounts[WorkloadClass.BACKGROUND].finished == 1
    assert home.scheduler.state.num_waiting["bob"] > 0


def test_background_gets_its_reserve_although_chat_never_ends() -> None:
    home = Household(residents=(ALICE, BOB), capacity=TWO_AT_ONCE, policy=Policy(background_reserve=0.2))
    for _ in range(400):
        home.ask("bob", "chat", 128, 32)
    for _ in range(200):
        home.ask("alice", "background", 128, 32)
    home.run_until(home.now + 30.0)
    share = home.served("alice") / (home.served("alice") + home.served("bob"))
    assert home.scheduler.state.num_waiting["bob"] > 0
    assert 0.15 < share < 0.3


def test_who_talks_without_end_falls_back_to_chat() -> None:
    home = Household(residents=(ALICE, BOB), capacity=TWO_AT_ONCE, policy=Policy(voice_bucket=2_000))
    for _ in range(100):
        home.ask("bob", "voice", 200, 100)
    for _ in range(100):
        home.ask("alice", "chat", 200, 100)
    home.run_until(home.now + 20.0)
    assert home.served("alice") > 0.5 * home.served("bob")


def test_a_spent_soft_quota_falls_to_background_and_a_hard_one_is_refused() -> None:
    soft = Resident(resident_id=ResidentId("soft"), daily_tokens=100)
    hard = Resident(resident_id=ResidentId("hard"), daily_tokens=100, daily_is_hard=True)
    policy = Policy(background_reserve=0.0)
    home = Household(residents=(soft, hard, BOB), capacity=TWO_AT_ONCE, policy=policy)
    home.ask("soft", "chat", 200, 10)
    home.ask("hard", "chat", 200, 10)
    home.run_dry()
    late = home.ask("hard", "chat", 20, 5)
    assert home.rejected[late].reason == "quota_exhausted"
    running = home.ask("bob", "chat", 64, 40)
    first = home.ask("soft", "chat", 64, 10)
    second = home.ask("bob", "agent", 64, 10)
    home.run_dry()
    assert admitted(home)[-3:] == [running, second, first]


def test_the_same_events_give_the_same_decisions() -> None:
    def play() -> list[object]:
        home = Household(residents=(ALICE, BOB, HEAVY), capacity=TWO_AT_ONCE)
        for i in range(40):
            home.ask(
                ("alice", "bob", "heavy")[i % 3], ("chat", "background", "voice")[i % 3], 50 + 17 * i, 9 + i
            )
            home.run_until(home.now + 0.05)
        home.run_dry()
        return [(now, decisions) for now, _, decisions in home.log]

    assert play() == play()


def test_by_waiting_time_whoever_has_waited_most_goes_first() -> None:
    policy = Policy(fairness=FairnessGoal.WAITING, background_reserve=0.0)
    home = Household(residents=(ALICE, BOB), capacity=TWO_AT_ONCE, policy=policy)
    running = home.ask("bob", "chat", 64, 200)
    patient = home.ask("alice", "chat", 64, 10)
    home.run_until(home.now + 0.5)
    hasty = home.ask("bob", "chat", 64, 10)
    home.run_dry()
    assert admitted(home) == [running, patient, hasty]
    # Alice has waited more than Bob ever did: she is first again, although Bob asks earlier.
    running = home.ask("bob", "chat", 64, 100)
    second, first = home.ask("bob", "chat", 64, 10), home.ask("alice", "chat", 64, 10)
    home.run_dry()
    assert admitted(home)[3:] == [running, first, second]


def test_by_completions_whoever_had_fewest_answers_goes_first() -> None:
    policy = Policy(fairness=FairnessGoal.COMPLETIONS, background_reserve=0.0)
    home = Household(residents=(ALICE, BOB), capacity=TWO_AT_ONCE, policy=policy)
    for _ in range(3):
        home.ask("bob", "chat", 8, 2)
        home.run_dry()
    home.ask("alice", "chat", 900, 100)
    home.run_dry()
    running = home.ask("bob", "chat", 64, 60)
    second, first = home.ask("bob", "chat", 64, 10), home.ask("alice", "chat", 64, 10)
    home.run_dry()
    assert admitted(home)[-3:] == [running, first, second], "one long answer counts less than three short"


def test_by_class_only_arrival_decides_whoever_was_served_most() -> None:
    policy = Policy(fairness=FairnessGoal.CLASS_ONLY, background_reserve=0.0)
    home = Household(residents=(ALICE, BOB), capacity=TWO_AT_ONCE, policy=policy)
    home.ask("bob", "chat", 900, 100)
    home.run_dry()
    running, first = home.ask("bob", "chat", 64, 60), home.ask("bob", "chat", 64, 10)
    home.run_until(home.now + 0.1)
    second = home.ask("alice", "chat", 64, 10)
    home.run_dry()
    assert admitted(home)[-3:] == [running, first, second]


def test_a_short_agent_run_is_not_held_up_by_a_long_one() -> None:
    home = Household(residents=(ALICE,), capacity=TWO_AT_ONCE, policy=Policy(background_reserve=0.0))
    home.ask("alice", "agent", 900, 100, program="long")
    home.run_dry()
    running = home.ask("alice", "agent", 64, 60, program="other")
    long, short = (
        home.ask("alice", "agent", 64, 10, program="long"),
        home.ask("alice", "agent", 64, 10, program="short"),
    )
    home.run_dry()
    assert admitted(home)[-3:] == [running, short, long]


def test_a_long_agent_run_that_is_due_goes_before_ever_new_short_ones() -> None:
    classes = dict(Policy().classes)
    classes[WorkloadClass.AGENT] = ClassPolicy(max_wait_s=3.0, inter_token_target_s=0.5)
    policy = Policy(classes=classes, background_reserve=0.0)
    home = Household(residents=(ALICE,), capacity=TWO_AT_ONCE, policy=policy)
    home.ask("alice", "agent", 900, 100, program="long")
    home.run_dry()
    asked_at = home.now
    home.ask("alice", "agent", 64, 30)
    long = home.ask("alice", "agent", 64, 10, program="long")
    home.run_until(home.now + 0.01)
    for i in range(400):
        home.ask("alice", "agent", 64, 30, program=f"short{i}")
    home.run_until(home.now + 8.0)
    assert home.sequences[long].admitted_at, "due after three seconds"
    assert home.sequences[long].admitted_at[0] < asked_at + 4.0
    assert home.scheduler.state.num_waiting["alice"] > 0


def test_a_spent_rolling_quota_opens_again_as_the_window_moves_on() -> None:
    hard = Resident(
        resident_id=ResidentId("hard"), rolling_tokens=100, rolling_window_s=60.0, rolling_is_hard=True
    )
    soft = Resident(resident_id=ResidentId("soft"), rolling_tokens=100, rolling_window_s=60.0)
    home = Household(residents=(hard, soft, BOB), capacity=TWO_AT_ONCE, policy=Policy(background_reserve=0))
    home.ask("hard", "chat", 200, 10)
    home.ask("soft", "chat", 200, 10)
    home.run_dry()
    refused = home.rejected[home.ask("hard", "chat", 20, 5)]
    assert refused.reason == "rolling_exhausted"
    assert refused.retry_after_s is not None
    assert 50.0 < refused.retry_after_s <= 62.5
    running = home.ask("bob", "chat", 64, 40)
    last, first = home.ask("soft", "chat", 64, 10), home.ask("bob", "agent", 64, 10)
    home.run_dry()
    assert admitted(home)[-3:] == [running, first, last], "a soft quota falls to background"
    home.now += refused.retry_after_s + 0.01
    assert home.ask("hard", "chat", 20, 5) not in home.rejected


def test_the_eta_of_a_waiting_request_is_about_right_and_known_only_for_who_waits() -> None:
    home = Household(residents=(ALICE, BOB), capacity=TWO_AT_ONCE, policy=Policy(background_reserve=0.0))
    first = home.ask("alice", "chat", 128, 64)
    assert home.scheduler.eta_s(first, now=home.now) is None, "it runs"
    waiting = [home.ask(("alice", "bob")[i % 2], "chat", 128, 64) for i in range(200)]
    assert home.scheduler.eta_s(waiting[-1], now=home.now) is None, "nothing was measured yet"
    home.run_until(home.now + 60.0)
    asked_at, last = home.now, home.ask("alice", "chat", 128, 64)
    eta = home.scheduler.eta_s(last, now=asked_at)
    assert eta is not None
    nearer = next(r for r in waiting if not home.sequences[r].admitted_at)
    assert (home.scheduler.eta_s(nearer, now=asked_at) or 0.0) < eta / 4
    home.run_dry()
    took = home.sequences[last].admitted_at[0] - asked_at
    assert 0.5 * took < eta < 2.0 * took


def test_a_full_queue_says_when_to_come_back_and_when_it_would_have_started() -> None:
    narrow = Resident(resident_id=ResidentId("narrow"), max_waiting=3)
    home = Household(residents=(narrow,), capacity=TWO_AT_ONCE)
    for _ in range(4):
        home.ask("narrow", "chat", 64, 64)
    home.run_until(home.now + 3.0)
    while home.scheduler.state.num_waiting["narrow"] < 3:
        home.ask("narrow", "chat", 64, 64)
    refused = home.rejected[home.ask("narrow", "chat", 64, 64)]
    assert refused.reason == "too_many_requests"
    assert refused.limit == 3
    assert refused.retry_after_s is not None
    assert refused.retry_after_s >= 1.0
    assert refused.eta_s is not None
    assert 0.0 < refused.eta_s < 60.0
