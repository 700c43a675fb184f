"""What is charged by forecast or by the clock: settled exactly, and never the promise of another."""

from __future__ import annotations

import pytest

from engine_service.scheduling.events import SequenceResult
from engine_service.scheduling.lengths import OutputLengths
from engine_service.scheduling.model import MICRO, Capacity, Policy, Resident, ResidentId, ServiceUnit
from tests.scheduling.household import Household

ALICE = Resident(resident_id=ResidentId("alice"), max_waiting=1000)
BOB = Resident(resident_id=ResidentId("bob"), max_waiting=1000)
SMALL = Capacity(num_pages=48, page_tokens=32, max_sequences=8, max_context_tokens=1024, can_abort=True)
PREDICTING = Policy(prefix_share=0.0, voice_headroom_pages=8, predict_output=True)
TIMED = Policy(unit=ServiceUnit.ACCELERATOR_TIME, voice_bucket=10**9)


def test_a_forecast_is_the_mean_of_the_last_five_answers_of_the_flow() -> None:
    lengths = OutputLengths()
    assert lengths.expected("flow", most=100) is None
    for output in (1000, 10, 20, 30, 40, 50):
        lengths.note("flow", output)
    assert lengths.expected("flow", most=100) == 30
    assert lengths.expected("flow", most=25) == 25
    assert lengths.expected("other", most=100) is None


def test_an_answer_is_charged_at_admission_and_settled_as_it_is_computed() -> None:
    home = Household(capacity=SMALL, policy=PREDICTING, residents=(ALICE,))
    home.ask("alice", "chat", 100, 40, max_tokens=200)
    counters = home.scheduler.state.counters
    assert counters.value(ALICE.resident_id) == (100 + 2 * 100) * MICRO, "half of the most, before any answer"
    home.run_dry()
    assert counters.value(ALICE.resident_id) == (100 + 2 * 40) * MICRO
    home.ask("alice", "chat", 100, 60, max_tokens=200)
    assert counters.ahead(ALICE.resident_id) == 100 + 2 * 40, "as long as the last one"
    home.run_until(home.now + 0.1)
    assert counters.ahead(ALICE.resident_id) < 2 * 40
    home.run_dry()
    assert counters.ahead(ALICE.resident_id) == 0
    assert counters.value(ALICE.resident_id) == (200 + 2 * 100) * MICRO


@pytest.mark.parametrize("when", [0.0, 0.05, 0.3])
def test_a_cancelled_request_takes_its_forecast_back(when: float) -> None:
    home = Household(capacity=SMALL, policy=PREDICTING, residents=(ALICE,))
    request_id = home.ask("alice", "chat", 100, 400)
    home.run_until(home.now + when)
    home.cancel(request_id)
    home.run_dry()
    state = home.scheduler.state
    assert state.counters.ahead(ALICE.resident_id) == 0
    assert state.counters.value(ALICE.resident_id) == state.account(ALICE.resident_id).service * MICRO


def test_a_preempted_request_is_forecast_anew_and_pays_once() -> None:
    home = Household(capacity=SMALL, policy=PREDICTING, residents=(ALICE, BOB))
    for _ in range(4):
        home.ask("bob", "background", 320, 300)
    home.run_until(home.now + 3.0)
    home.ask("alice", "voice", 700, 20)
    home.run_dry()
    state = home.scheduler.state
    assert state.recomputed_tokens > 0
    assert state.counters.value(BOB.resident_id) == 4 * (320 + 2 * 300) * MICRO


def test_forecasts_keep_two_overloaded_residents_closer() -> None:
    def widest(policy: Policy) -> int:
        home = Household(
            capacity=Capacity(num_pages=1000, page_tokens=32, max_sequences=16, max_context_tokens=1024),
            policy=policy,
            residents=(ALICE, BOB),
        )
        for _ in range(100):
            home.ask("alice", "chat", 256, 256)
            home.ask("bob", "chat", 256, 256)
        gaps = []
        for _ in range(1000):
            home.step()
            gaps.append(abs(home.served("alice") - home.served("bob")))
        assert home.scheduler.state.num_waiting["bob"] > 0
        return max(gaps)

    assert widest(Policy(predict_output=True)) < widest(Policy()) / 2


def test_measured_time_is_split_without_losing_a_microsecond() -> None:
    home = Household(policy=TIMED, residents=(ALICE, BOB))
    for i in range(6):
        home.ask(("alice", "bob")[i % 2], "chat", 100 + 200 * i, 50)
    home.run_dry()
    seconds = [int((end - start) * MICRO) for start, end, _ in home.iterations]
    assert home.served("alice") + home.served("bob") == sum(seconds)


def test_measured_time_is_split_by_the_cost_model_once_it_has_learned() -> None:
    # A prompt token costs a hundredth of a decode here: by token prices it would pay half of one.
    home = Household(policy=TIMED, residents=(ALICE, BOB), cost=lambda c, d: 0.0001 * c + 0.01 * d)
    for i in range(30):
        home.ask("bob", "background", 100 + 20 * i, 20)
        home.run_dry()
    scheduler = home.scheduler
    home.ask("alice", "chat", 64, 8)
    home.run_dry()
    assert scheduler.state.estimator.has_learned
    long, short = home.ask("bob", "background", 500, 100), home.ask("alice", "chat", 32, 100)
    home.run_until(home.now + 0.5)
    costs = scheduler._costs_of(
        (
            SequenceResult(request_id=long, prefill_tokens=100),
            SequenceResult(request_id=short, decode_tokens=1),
        )
    )
    assert 0.5 < costs[long] / costs[short] < 2.0, "100 tokens of a prompt take as long as one decode"


def test_service_in_time_is_shared_equally() -> None:
    home = Household(
        policy=TIMED,
        residents=(ALICE, BOB),
        capacity=Capacity(num_pages=64, page_tokens=32, max_sequences=3, max_context_tokens=1024),
    )
    for _ in range(60):
        home.ask("alice", "chat", 900, 4)
        for _ in range(4):
            home.ask("bob", "chat", 32, 100)
    home.run_until(home.now + 12.0)
    alice, bob = home.served("alice"), home.served("bob")
    assert min(home.scheduler.state.num_waiting.values()) > 0
    assert min(alice, bob) > 0.7 * max(alice, bob), (alice, bob)
