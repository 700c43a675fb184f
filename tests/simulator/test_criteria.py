"""Criteria are comparisons of known figures, and say so when they are not."""

from __future__ import annotations

import pytest

from engine_service.simulator import criteria
from engine_service.simulator.criteria import CriterionError, Names

NAMES = Names(
    policies=criteria.POLICY_NAMES,
    groups={"voice", "chat", "anna"},
    phases={"back"},
    residents={"anna"},
)
FIGURES = {
    ("voice", "ttft", "p95"): 0.3,
    ("fifo", "voice", "ttft", "p95"): 6.0,
    ("alone", "voice", "ttft", "p95"): 0.24,
    ("longest_iteration",): 0.1,
    ("chunk",): 512.0,
    ("back", "anna"): 0.5,
    ("chat", "finished"): 0.0,
}


def judged(text: str) -> criteria.Judgement:
    return criteria.parse("n", text, names=NAMES).judge(FIGURES.get)


def test_both_sides_are_computed() -> None:
    judgement = judged(
        "voice.ttft.p95 <= alone.voice.ttft.p95 + longest_iteration + ceil(1400 / chunk) * 0.01"
    )
    assert judgement.holds
    assert judgement.left == 0.3
    assert judgement.right == pytest.approx(0.37)


def test_another_policy_is_looked_up_by_its_name() -> None:
    assert judged("voice.ttft.p95 <= fifo.voice.ttft.p95 / 15").holds


def test_a_phase_gives_shares() -> None:
    assert judged("back.anna >= 0.45").holds


def test_what_is_unknown_does_not_hold() -> None:
    judgement = judged("voice.itl.p95 <= 1")
    assert not judgement.holds
    assert judgement.left is None


def test_division_by_nothing_does_not_hold() -> None:
    assert not judged("background_share <= 1 / chat.finished").holds


def test_needs_name_the_other_runs() -> None:
    needs = criteria.parse("n", "max(alone.voice.utilisation, 0) <= fifo.utilisation * 2", names=NAMES).needs
    assert needs.policies == {"fifo"}
    assert needs.alone == {"voice"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("voice.ttft.p95", "must be one comparison"),
        ("1 <= 2 <= 3", "must be one comparison"),
        ("voice.ttft.p95 <= ", "is not a comparison"),
        ("voice.ttfft.p95 <= 1", "did you mean 'ttft'"),
        ("voicee.ttft.p95 <= 1", "did you mean 'voice'"),
        ("voice.ttft <= 1", "ttft must be followed by one of max, mean, n, p50, p95, p99"),
        ("voice.ttft.p96 <= 1", "ttft must be followed by"),
        ("voice.tokens.p95 <= 1", "tokens is a number"),
        ("tokens.x <= 1", "tokens is a number"),
        ("alone.ttft.p95 <= 1", "alone must be followed by one of anna, chat, voice"),
        ("back.chat <= 1", "only residents have a share"),
        ("back.ben <= 1", "a phase must be followed by"),
        ("fifo <= 1", "names a policy and no figure"),
        ("open('x') <= 1", "is not understood"),
        ("voice.ttft.p95 ** 2 <= 1", "is not understood"),
        ("'a' <= 1", "is not understood"),
        ("voice['ttft'] <= 1", "is not understood"),
        ("timeline <= 1", "is not known"),
    ],
)
def test_a_mistake_is_named_with_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(CriterionError, match=message):
        criteria.parse("n", text, names=NAMES)
