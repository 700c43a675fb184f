"""Pages: what is promised, lent, taken back, and who never fits."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from engine_service.scheduling import admission
from engine_service.scheduling.decisions import Admit, Grow, Preempt
from engine_service.scheduling.events import CapacityChanged, PolicyChanged, PrefixDropped
from engine_service.scheduling.model import Capacity, Policy, Resident, ResidentId
from tests.scheduling.household import CAPACITY, Household

ALICE = Resident(resident_id=ResidentId("alice"))
BOB = Resident(resident_id=ResidentId("bob"))
SMALL = Capacity(num_pages=48, page_tokens=32, max_sequences=8, max_context_tokens=1024, can_abort=True)
NO_PREFIXES = Policy(prefix_share=0.0, voice_headroom_pages=8)


def preempted(home: Household) -> list[str]:
    """Return ids in the order they were preempted."""
    return [d.request_id for _, _, decisions in home.log for d in decisions if isinstance(d, Preempt)]


def test_voice_finds_its_headroom_although_memory_is_full() -> None:
    home = Household(capacity=SMALL, policy=NO_PREFIXES, residents=(ALICE, BOB))
    for _ in range(8):
        home.ask("bob", "background", 300, 200)
    home.run_until(home.now + 0.4)
    state = home.scheduler.state
    lent = sum(record.pages for record in admission.losable(state, at_least=1))
    assert state.pages.free < 8, "an empty headroom serves nobody"
    assert state.pages.free + lent >= 8
    arrived_at = home.now
    voice = home.ask("alice", "voice", 150, 20)
    home.run_dry()
    assert home.ttft(voice, arrived_at) < 0.2
    assert home.all_finished()


def test_background_gives_its_pages_to_voice_that_does_not_fit_and_ends_exactly() -> None:
    home = Household(capacity=SMALL, policy=NO_PREFIXES, residents=(ALICE, BOB))
    for _ in range(4):
        home.ask("bob", "background", 320, 300)
    home.run_until(home.now + 3.0)
    voice = home.ask("alice", "voice", 700, 20)
    home.run_dry()
    assert preempted(home)
    assert home.all_finished()
    assert home.sequences[voice].output == 20
    assert all(s.output == 300 for r, s in home.sequences.items() if r != voice)


def test_recompute_after_preemption_is_paid_by_the_system() -> None:
    home = Household(capacity=SMALL, policy=NO_PREFIXES, residents=(ALICE, BOB))
    for _ in range(4):
        home.ask("bob", "background", 320, 300)
    home.run_until(home.now + 3.0)
    home.ask("alice", "voice", 700, 20)
    home.run_dry()
    state = home.scheduler.state
    assert state.recomputed_tokens > 0
    assert state.account(ResidentId("bob")).prefill_tokens == 4 * 320
    assert state.account(ResidentId("bob")).decode_tokens == 4 * 300
    assert state.counters.system_service == state.recomputed_tokens


def test_long_answers_grow_slice_by_slice() -> None:
    home = Household(capacity=SMALL, policy=NO_PREFIXES, residents=(ALICE,))
    request_id = home.ask("alice", "chat", 64, 20, max_tokens=900)
    home.run_dry()
    assert max(home.sequences[request_id].reserved for _ in [0]) <= 64 + 64
    long = home.ask("alice", "chat", 64, 500)
    home.run_dry()
    grown = [d for _, _, ds in home.log for d in ds if isinstance(d, Grow) and d.request_id == long]
    assert len(grown) >= 6


def test_growing_answers_never_deadlock_on_full_memory() -> None:
    home = Household(capacity=SMALL, policy=NO_PREFIXES, residents=(ALICE, BOB))
    for i in range(8):
        home.ask(("alice", "bob")[i % 2], "background", 64, 900)
    home.run_dry()
    assert home.all_finished()
    assert all(s.preempted <= NO_PREFIXES.max_preemptions for s in home.sequences.values())


def test_a_request_that_can_never_fit_is_refused_with_what_would() -> None:
    home = Household(capacity=SMALL, policy=NO_PREFIXES, residents=(ALICE,))
    too_long = home.ask("alice", "chat", 1000, 100)
    reject = home.rejected[too_long]
    assert reject.reason == "prompt_too_long"
    assert reject.limit == 1024 - 100
    tight = Household(
        capacity=dataclasses.replace(SMALL, num_pages=20), policy=NO_PREFIXES, residents=(ALICE,)
    )
    never = tight.ask("alice", "chat", 600, 100)
    assert tight.rejected[never].reason == "never_fits"
    limit = tight.rejected[never].limit
    assert limit is not None
    fits = tight.ask("alice", "chat", limit, 100)
    tight.run_dry()
    assert tight.sequences[fits].finished_at is not None


def test_a_large_request_is_passed_over_only_so_often() -> None:
    home = Household(capacity=SMALL, policy=NO_PREFIXES, residents=(ALICE, BOB))
    for _ in range(5):
        home.ask("bob", "chat", 100, 100)
    large = home.ask("alice", "background", 900, 50)
    for _ in range(60):
        home.ask("bob", "background", 100, 100)
    home.run_until(home.now + 60)
    done = sorted((s.finished_at, r) for r, s in home.sequences.items() if s.finished_at is not None)
    assert home.sequences[large].finished_at is not None
    assert [r for _, r in done].index(large) < 40


def test_a_page_cap_lends_what_nobody_uses_and_takes_it_back() -> None:
    capped = Resident(resident_id=ResidentId("capped"), page_cap=12)
    home = Household(capacity=SMALL, policy=NO_PREFIXES, residents=(capped, ALICE))
    for _ in range(4):
        home.ask("capped", "chat", 200, 400)
    home.run_until(home.now + 3.0)
    state = home.scheduler.state
    assert state.pages.held_by(ResidentId("capped")) > 12, "nobody else wants the memory"
    late = home.ask("alice", "chat", 700, 20)
    home.run_dry()
    assert any(r.startswith("capped") for r in preempted(home))
    assert home.sequences[late].finished_at is not None
    assert home.all_finished()


@pytest.mark.parametrize("when", [0.0, 0.001, 0.05, 0.2, 0.5])
def test_a_cancelled_request_gives_its_pages_back_within_one_iteration(when: float) -> None:
    home = Household(capacity=SMALL, residents=(ALICE, BOB))
    ids = [home.ask("alice", "chat", 400, 100) for _ in range(3)]
    home.run_until(home.now + when)
    for request_id in ids:
        home.cancel(request_id)
        home.cancel(request_id)
    home.step()
    assert home.scheduler.state.pages.num_held == 0
    assert not home.scheduler.state.records
    assert home.scheduler.state.account(ResidentId("alice")).cancelled == 3


def test_a_pinned_prefix_stays_and_is_paid_by_the_household() -> None:
    home = Household(residents=(ALICE,))
    prefix = home.ask("alice", "chat", 300, 0, keep_prefix=True)
    home.run_dry()
    state = home.scheduler.state
    assert state.pages.num_pinned == 10
    assert state.account(ResidentId("alice")).service == 0
    assert state.counters.system_service == 300
    home.ask("alice", "voice", 330, 10, shared=300)
    home.run_dry()
    assert state.account(ResidentId("alice")).prefill_tokens == 30
    assert state.account(ResidentId("alice")).cached_tokens == 300
    home.tell(PrefixDropped(request_id=prefix))
    assert state.pages.free == CAPACITY.num_pages


def test_prefixes_may_not_take_more_than_their_allowance() -> None:
    home = Household(capacity=SMALL, residents=(ALICE,))
    refused = home.ask("alice", "chat", 600, 0, keep_prefix=True)
    assert home.rejected[refused].reason == "never_fits"


def test_a_lost_backend_makes_everybody_wait_again_and_nobody_pay_twice() -> None:
    home = Household(residents=(ALICE, BOB))
    home.ask("alice", "chat", 400, 100)
    home.ask("bob", "background", 900, 50)
    home.run_until(home.now + 0.8)
    home.lose_backend(back=False)
    assert home.scheduler.state.pages.num_held == 0
    assert home.flying is None, "nothing is composed before the backend is back"
    home.tell(CapacityChanged(capacity=CAPACITY))
    home.run_dry()
    assert home.all_finished()
    assert home.scheduler.state.account(ResidentId("alice")).prefill_tokens == 400
    assert home.scheduler.state.account(ResidentId("bob")).decode_tokens == 50


def test_a_shrunken_memory_is_drained_by_preemption() -> None:
    home = Household(residents=(ALICE, BOB))
    for _ in range(6):
        home.ask("bob", "background", 800, 200)
    home.run_until(home.now + 2.0)
    home.capacity = dataclasses.replace(CAPACITY, num_pages=64)
    home.tell(CapacityChanged(capacity=home.capacity))
    home.run_dry()
    assert home.all_finished()


def test_who_waits_and_no_longer_fits_a_shrunken_memory_is_told() -> None:
    home = Household(residents=(ALICE, BOB))
    home.ask("bob", "background", 800, 200)
    waiting = home.ask("bob", "background", 3000, 200)
    home.capacity = dataclasses.replace(CAPACITY, num_pages=64)
    home.tell(CapacityChanged(capacity=home.capacity))
    assert home.rejected[waiting].reason == "never_fits"
    home.run_dry()
    assert home.all_finished()


def test_the_same_chunk_policy_applies_after_a_policy_change_while_running() -> None:
    home = Household(residents=(ALICE, BOB))
    home.ask("bob", "background", 2000, 20)
    home.tell(PolicyChanged(policy=Policy(max_chunk_tokens=64)))
    before = len(home.iterations)
    home.run_dry()
    sizes = [c.num_tokens for _, _, compose in home.iterations[before + 1 :] for c in compose.prefills]
    assert sizes
    assert max(sizes) <= 64


def test_freed_pages_go_to_the_request_they_were_taken_for() -> None:
    home = Household(capacity=SMALL, policy=NO_PREFIXES, residents=(ALICE, BOB))
    for _ in range(4):
        home.ask("bob", "background", 320, 300)
    home.run_until(home.now + 3.0)
    for _ in range(3):
        home.ask("bob", "background", 40, 10)
    home.ask("alice", "voice", 700, 20)
    home.run_dry()
    taken = 0
    for _, _, decisions in home.log:
        for decision, following in itertools.pairwise(decisions):
            if isinstance(decision, Preempt) and decision.beneficiary_id is not None:
                taken += 1
                ids = {d.request_id for d in decisions if isinstance(d, (Admit, Grow))}
                assert decision.beneficiary_id in ids, "nobody else may have them first"
                assert isinstance(following, (Preempt, Admit, Grow))
    assert taken


def test_what_the_reserve_lent_beyond_a_cap_is_given_back_to_whoever_is_within_its_own() -> None:
    capped = Resident(resident_id=ResidentId("capped"), page_cap=4)
    policy = dataclasses.replace(NO_PREFIXES, background_reserve=0.5)
    home = Household(capacity=SMALL, policy=policy, residents=(ALICE, capped))
    home.ask("alice", "chat", 64, 20)
    home.run_dry()
    loan = home.ask("capped", "agent", 900, 100)
    home.run_until(home.now + 0.5)
    record = home.scheduler.state.records[loan]
    assert record.holds_pages
    assert "reserve" in record.story[-1]
    home.ask("alice", "chat", 700, 20)
    home.step()
    assert preempted(home) == [loan]
    home.run_dry()
    assert home.all_finished()


def test_prefixes_pinned_while_there_was_more_memory_make_nobody_wait_for_ever() -> None:
    """15 of 30 pages are pinned, 7 are speech's: who needs 12 is told so, and who needs 8 is served."""
    home = Household(capacity=dataclasses.replace(SMALL, num_pages=90), residents=(ALICE,))
    for prompt in (127, 110):
        home.ask("alice", "chat", prompt * SMALL.page_tokens // 16, 0, keep_prefix=True)
    home.run_dry()
    pinned = home.scheduler.state.pages.num_pinned
    home.capacity = dataclasses.replace(SMALL, num_pages=2 * pinned)
    home.tell(CapacityChanged(capacity=home.capacity))
    headroom = home.scheduler.state.headroom_pages(2)
    room = (pinned - headroom) * SMALL.page_tokens
    never = home.ask("alice", "agent", room, 1)
    assert home.rejected[never].reason == "never_fits"
    fits = home.ask("alice", "agent", room - 1, 1)
    home.run_dry()
    assert home.sequences[fits].finished_at is not None


@pytest.mark.parametrize("class_id", ["voice", "chat", "embedding", "background"])
@pytest.mark.parametrize("num_pages", [8, 40, 64])
@pytest.mark.parametrize("max_tokens", [1, 50])
def test_whoever_asks_for_no_more_than_a_refusal_says_is_served(
    class_id: str, num_pages: int, max_tokens: int
) -> None:
    """There are two limits, the context and the memory beside what is kept; only one is told."""
    capacity = Capacity(num_pages=num_pages, page_tokens=32, max_sequences=4, max_context_tokens=1024)
    home = Household(residents=(Resident(resident_id=ResidentId("alice")),), capacity=capacity)
    refused = home.rejected[home.ask("alice", class_id, 5000, max_tokens)]
    assert refused.limit is not None
    obeying = home.ask("alice", class_id, refused.limit, max_tokens)
    home.run_dry()
    assert obeying not in home.rejected
    assert home.ask("alice", class_id, refused.limit + 1, max_tokens) in home.rejected
