"""What goes into an iteration."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from engine_service.scheduling.decisions import Compose, Pause, Resume
from engine_service.scheduling.model import Policy, RequestId, Resident, ResidentId
from tests.scheduling.household import CAPACITY, Household

ALICE = Resident(resident_id=ResidentId("alice"))
BOB = Resident(resident_id=ResidentId("bob"))


def composed(home: Household) -> list[Compose]:
    """Return all iterations."""
    return [d for _, _, decisions in home.log for d in decisions if isinstance(d, Compose)]


def test_at_most_one_prompt_is_left_half_computed() -> None:
    home = Household(residents=(ALICE, BOB))
    for _ in range(6):
        home.ask("bob", "background", 1300, 50)
        home.ask("alice", "chat", 700, 50)
    home.run_dry()
    for compose in composed(home):
        partial = [
            c for c in compose.prefills if c.num_tokens < home.sequences[c.request_id].request.prompt_tokens
        ]
        assert len(partial) <= 2


def test_short_prompts_share_an_iteration_where_the_backend_mixes() -> None:
    home = Household(residents=(ALICE, BOB))
    home.ask("alice", "chat", 100, 20)
    home.run_dry()
    for _ in range(6):
        home.ask("alice", "chat", 40, 20)
    home.run_dry()
    assert max(len(c.prefills) for c in composed(home)) >= 4
    apart = Household(
        residents=(ALICE, BOB), capacity=dataclasses.replace(CAPACITY, mixes_prefill_and_decode=False)
    )
    apart.ask("alice", "chat", 100, 20)
    apart.run_dry()
    for _ in range(6):
        apart.ask("alice", "chat", 40, 20)
    apart.run_dry()
    assert max(len(c.prefills) for c in composed(apart)) == 1


def test_while_an_answer_is_spoken_nobody_else_prefills() -> None:
    home = Household(residents=(ALICE, BOB))
    for _ in range(3):
        home.ask("bob", "background", 2000, 50)
    home.run_until(home.now + 0.3)
    voice = home.ask("alice", "voice", 200, 30)
    home.run_dry()
    spoken = home.sequences[voice]
    for since, until, compose in home.iterations:
        if spoken.admitted_at[0] <= since and spoken.finished_at is not None and until <= spoken.finished_at:
            assert all(c.request_id == voice for c in compose.prefills)


def test_voice_stops_a_chunk_that_is_under_way() -> None:
    home = Household(residents=(ALICE, BOB), cost=lambda chunk, decodes: 0.004 * chunk + 0.02 * decodes)
    home.ask("bob", "background", 2000, 50)
    home.run_until(home.now + 0.1)
    arrived_at = home.now
    voice = home.ask("alice", "voice", 30, 10)
    assert home.num_aborts == 1
    home.run_dry()
    assert home.ttft(voice, arrived_at) < 0.25
    assert home.all_finished()


def test_voice_waits_for_a_chunk_that_is_nearly_done() -> None:
    home = Household(residents=(ALICE, BOB), cost=lambda chunk, decodes: 0.001 * chunk + 0.02 * decodes)
    for i in range(60):
        home.ask("bob", "chat", 100 + 30 * i, 20)
        home.run_dry()
    home.ask("bob", "background", 3000, 50)
    home.run_until(home.now + 2.0)
    home.now = home.flying_until - 0.02
    home.ask("alice", "voice", 30, 10)
    assert home.num_aborts == 0
    home.run_until(home.now + 1.0)
    home.now = home.flying_until - 0.3
    home.ask("alice", "voice", 30, 10)
    assert home.num_aborts == 1


def test_chat_does_not_stop_a_chunk_and_nothing_is_stopped_where_it_cannot_be() -> None:
    home = Household(residents=(ALICE, BOB))
    home.ask("bob", "background", 2000, 50)
    home.ask("alice", "chat", 30, 10)
    assert home.num_aborts == 0
    unable = Household(residents=(ALICE, BOB), capacity=dataclasses.replace(CAPACITY, can_abort=False))
    unable.ask("bob", "background", 2000, 50)
    unable.ask("alice", "voice", 30, 10)
    assert unable.num_aborts == 0


def test_streams_keep_their_reading_speed_beside_a_document() -> None:
    home = Household(
        residents=(ALICE, BOB), cost=lambda chunk, decodes: 0.003 * chunk + 0.012 * decodes + 0.004
    )
    chat = home.ask("alice", "chat", 100, 120)
    home.run_until(home.now + 1.0)
    home.ask("bob", "background", 3500, 20)
    home.run_dry()
    times = home.sequences[chat].tokens_at
    target = Policy().classes[home.sequences[chat].request.class_id].inter_token_target_s
    assert target is not None
    late = [t - (times[0] + i * target) for i, t in enumerate(times)]
    assert max(late) < 0.3, "each token comes before a reader needs it, up to one small chunk"


def test_a_document_prefills_in_large_chunks_when_nobody_reads_along() -> None:
    home = Household(residents=(BOB,))
    home.ask("bob", "background", 2000, 20)
    home.run_dry()
    sizes = [c.num_tokens for compose in composed(home) for c in compose.prefills]
    assert sizes[0] == Policy().max_chunk_tokens


def test_lower_decodes_are_paused_for_speech_only_for_a_bounded_time() -> None:
    slow = lambda chunk, decodes: 0.002 * chunk + 0.03 * decodes  # noqa: E731
    home = Household(residents=(ALICE, BOB), cost=slow)
    for _ in range(6):
        home.ask("bob", "chat", 60, 400)
    home.run_until(home.now + 5.0)
    voice = home.ask("alice", "voice", 60, 200)
    home.run_dry()
    decisions = [d for _, _, ds in home.log for d in ds]
    assert any(isinstance(d, Pause) for d in decisions)
    assert any(isinstance(d, Resume) for d in decisions)
    spoken = home.sequences[voice].tokens_at
    gaps = [b - a for a, b in itertools.pairwise(spoken)]
    assert sum(gaps) / len(gaps) < 0.14
    for request_id, sequence in home.sequences.items():
        if request_id != voice:
            pauses = [b - a for a, b in itertools.pairwise(sequence.tokens_at)]
            assert max(pauses) < Policy().max_pause_s + 1.0


def spoken_beside(
    cost: Callable[[int, int], float], lower: str
) -> tuple[Household, RequestId, list[RequestId]]:
    """Let three documents or chats be answered, then somebody speak."""
    home = Household(residents=(ALICE, BOB), cost=cost)
    others = [home.ask("bob", lower, 60, 400) for _ in range(3)]
    home.run_until(home.now + 2.0)
    voice = home.ask("alice", "voice", 40, 20)
    home.run_dry()
    return home, voice, others


def tokens_during(home: Household, spoken: RequestId, other: RequestId) -> int:
    times = home.sequences[spoken].tokens_at
    return sum(times[0] < t <= times[-1] for t in home.sequences[other].tokens_at)


@pytest.mark.parametrize("lower", ["background", "chat"])
def test_a_spoken_answer_is_computed_alone_where_every_row_costs(lower: str) -> None:
    """As on a processor: the others are done as soon, and who speaks is answered three times sooner."""
    home, voice, others = spoken_beside(lambda chunk, decodes: 0.001 * chunk + 0.01 * decodes + 0.001, lower)
    times = home.sequences[voice].tokens_at
    assert times[-1] - times[0] < 19 * 0.013
    assert [tokens_during(home, voice, other) for other in others] == [0, 0, 0]


def test_a_spoken_answer_is_computed_with_others_where_one_pass_serves_all() -> None:
    """As on a GPU: to leave the others out would win nothing."""
    home, voice, others = spoken_beside(
        lambda chunk, decodes: 0.0001 * chunk + 0.0005 * decodes + 0.01, "background"
    )
    assert all(tokens_during(home, voice, other) >= 18 for other in others)


def test_a_reader_without_text_left_is_not_left_out_for_speech() -> None:
    """Chats that are as slow as they may be have nothing to spare; documents, which nobody reads, wait."""
    home = Household(
        residents=(ALICE, BOB), cost=lambda chunk, decodes: 0.001 * chunk + 0.05 * decodes + 0.002
    )
    chats = [home.ask("bob", "chat", 40, 100) for _ in range(4)]
    home.run_until(home.now + 3.0)
    voice = home.ask("alice", "voice", 40, 60)
    home.run_dry()
    assert sum(tokens_during(home, voice, chat) for chat in chats) >= 10


def test_a_cut_prompt_fills_whole_passes_of_the_backend() -> None:
    capacity = dataclasses.replace(CAPACITY, row_multiple=64)
    home = Household(residents=(ALICE, BOB), capacity=capacity)
    for _ in range(3):
        home.ask("bob", "background", 60, 400)
    home.run_until(home.now + 0.2)
    document = home.ask("alice", "background", 2000, 20)
    home.run_dry()
    cut = [
        sum(c.num_tokens for c in compose.prefills)
        for compose in composed(home)
        if any(c.request_id == document for c in compose.prefills)
    ]
    assert len(cut) >= 4
    assert all(rows % 64 == 0 for rows in cut[:-1]), "only the prompt's last piece may be odd"


def test_an_answer_far_ahead_of_its_reader_makes_room_while_others_wait() -> None:
    def document_done_at(policy: Policy) -> float:
        home = Household(residents=(ALICE, BOB), policy=policy, cost=lambda c, d: 0.0002 * c + 0.02 * d)
        chats = [home.ask("alice", "chat", 60, 200) for _ in range(4)]
        home.run_until(home.now + 4.0)
        document = home.ask("bob", "background", 1500, 50)
        home.run_dry()
        for chat in chats:
            times = home.sequences[chat].tokens_at
            late = max(t - (times[0] + i * 0.2) for i, t in enumerate(times))
            assert late < 0.05, "no reader notices"
        done_at = home.sequences[document].finished_at
        assert done_at is not None
        return done_at

    assert document_done_at(Policy(sprint=False, pace_ahead_s=1.0)) < document_done_at(Policy(sprint=False))


def test_pacing_leaves_nobody_idle_when_everybody_is_ahead() -> None:
    policy = Policy(pace_ahead_s=0.1)
    home = Household(
        residents=(ALICE,), policy=policy, capacity=dataclasses.replace(CAPACITY, max_sequences=2)
    )
    for _ in range(4):
        home.ask("alice", "chat", 60, 100)
    home.run_dry()
    assert home.all_finished()
    gaps = [b[0] - a[1] for a, b in itertools.pairwise(home.iterations)]
    assert max(gaps) == 0.0, "the device never stands still while somebody waits"
