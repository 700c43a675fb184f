"""The sampler against plain definitions that sort the whole vocabulary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from engine_service.backends.base import Sampling
from engine_service.backends.sampling import Sampler, log_probabilities, nucleus

SIZE = 500


def row(seed: int, scale: float = 3.0, size: int = SIZE) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def sampler(**rest: Any) -> Sampler:
    prompt = rest.pop("prompt", ())
    banned = rest.pop("banned", ())
    return Sampler(Sampling(**rest), prompt_ids=prompt, vocab_size=SIZE, banned_ids=banned)


def plain_nucleus(weights: np.ndarray, top_k: int, top_p: float) -> list[int]:
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[: top_k or None]
    total = sum(float(weights[i]) for i in order)
    kept, mass = [], 0.0
    for index in order:
        kept.append(index)
        mass += float(weights[index])
        if mass >= top_p * total:
            break
    return kept


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 499, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.01]),
)
def test_truncation_keeps_what_a_full_sort_would(seed: int, scale: float, top_k: int, top_p: float) -> None:
    scores = row(seed, scale)
    weights = np.exp(scores - scores.max())
    kept = nucleus(weights, top_k=top_k, top_p=top_p).tolist()
    expected = plain_nucleus(weights.astype(np.float64), top_k, top_p)
    # Sums in another order may place the last token on either side of the edge.
    assert kept[: len(expected) - 1] == expected[: len(kept)][: len(expected) - 1]
    assert abs(len(kept) - len(expected)) <= 1 or top_p > 0.99


@pytest.mark.parametrize(
    "rest",
    [
        {},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 2.0},
    ],
)
def test_draws_follow_the_truncated_distribution(rest: dict[str, float]) -> None:
    logits = row(4, 2.0, 30)
    temperature = rest.get("temperature", 1.0)
    weights = np.exp((logits - logits.max()) / temperature).astype(np.float64)
    allowed = np.flatnonzero(weights >= rest.get("min_p", 0.0))
    kept = allowed[plain_nucleus(weights[allowed], int(rest.get("top_k", 0)), rest.get("top_p", 1.0))]
    expected = np.zeros(30)
    expected[kept] = weights[kept] / weights[kept].sum()
    settings = Sampling(**{"temperature": 1.0, **rest, "seed": 5})
    one = Sampler(settings, prompt_ids=(), vocab_size=30)
    draws = 20_000
    counts = np.bincount([one.choose(logits) for _ in range(draws)], minlength=30)
    assert set(np.flatnonzero(counts)) <= set(kept.tolist())
    # Five standard deviations of a binomial count: the seed is fixed, so this cannot flake.
    assert np.all(np.abs(counts - draws * expected) <= 5 * np.sqrt(draws * expected) + 1)


def test_draws_from_a_long_vocabulary_follow_it_too() -> None:
    """More tokens than fit one block of the running sum; the heavy ones lie in several blocks."""
    logits = np.full(2_000, -30.0, dtype=np.float32)
    heavy = {3: 1.0, 255: 0.5, 256: 0.25, 1_999: 1.25}
    for token_id, weight in heavy.items():
        logits[token_id] = math.log(weight)
    one = Sampler(Sampling(temperature=1.0, seed=9), prompt_ids=(), vocab_size=2_000)
    draws = 9_000
    counts = np.bincount([one.choose(logits) for _ in range(draws)], minlength=2_000)
    assert counts.sum() == sum(counts[token_id] for token_id in heavy)
    for token_id, weight in heavy.items():
        expected = draws * weight / 3
        assert abs(counts[token_id] - expected) <= 5 * math.sqrt(expected)


def test_temperature_zero_is_greedy_whatever_else_is_set() -> None:
    logits = row(1)
    greedy = sampler(temperature=0.0, top_k=3, top_p=0.1, min_p=0.9, seed=1)
    assert {greedy.choose(logits) for _ in range(5)} == {int(logits.argmax())}
    assert sampler(temperature=1e-30).choose(logits) == int(logits.argmax())


def test_the_logits_are_left_unchanged() -> None:
    logits = row(2)
    before = logits.copy()
    one = sampler(
        temperature=0.9,
        seed=1,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        logit_bias={3: 5.0},
        prompt=(1,),
    )
    for _ in range(5):
        one.choose(logits)
    assert np.array_equal(logits, before)


def test_a_seed_repeats_the_draws_and_none_does_not() -> None:
    logits = row(3)
    draw = [[sampler(temperature=1.0, seed=seed).choose(logits) for _ in range(1)] for seed in (1, 1)]
    assert draw[0] == draw[1]
    first, second = sampler(temperature=3.0), sampler(temperature=3.0)
    assert [first.choose(logits) for _ in range(20)] != [second.choose(logits) for _ in range(20)]


def test_repetition_penalty_counts_prompt_and_output() -> None:
    logits = np.array([5.0, 4.9, -1.0] + [-9.0] * (SIZE - 3), dtype=np.float32)
    one = sampler(temperature=0.0, repetition_penalty=2.0, prompt=(0,))
    assert [one.choose(logits) for _ in range(3)] == [1, 0, 0]  # 5.0 is 2.5 from the start, 4.9 after one use
    negative = sampler(temperature=0.0, repetition_penalty=2.0, prompt=(0,))
    assert negative.choose(np.array([-1.0, -1.5] + [-9.0] * (SIZE - 2), dtype=np.float32)) == 1


def test_presence_is_charged_once_and_frequency_every_time() -> None:
    logits = np.array([3.0, 2.5] + [-9.0] * (SIZE - 2), dtype=np.float32)
    presence = sampler(temperature=0.0, presence_penalty=1.0)
    assert [presence.choose(logits) for _ in range(4)] == [0, 1, 0, 0]
    frequency = sampler(temperature=0.0, frequency_penalty=1.0)
    assert [frequency.choose(logits) for _ in range(4)] == [0, 1, 0, 1]


def test_banned_tokens_are_never_chosen() -> None:
    logits = np.zeros(SIZE, dtype=np.float32)
    logits[[7, 8]] = 50.0
    assert sampler(temperature=0.0, banned=(7, 8)).choose(logits) not in (7, 8)
    drawn = sampler(temperature=1.0, seed=2, banned=(7, 8))
    assert not {drawn.choose(logits) for _ in range(50)} & {7, 8}


class Only:
    """A filter that allows a fixed set."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = np.array(allowed, dtype=np.int64)

    def allows(self, token_id: int) -> bool:
        return token_id in self.allowed

    def allowed_ids(self) -> np.ndarray:
        return self.allowed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_filter_rules(temperature: float) -> None:
    logits = row(5)
    one = sampler(temperature=temperature, seed=1, top_k=10)
    assert {one.choose(logits, Only(3, 9)) for _ in range(30)} <= {3, 9}
    with pytest.raises(ValueError, match="leaves no token"):
        one.choose(logits, Only())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_no_numbers_are_an_error(temperature: float) -> None:
    logits = row(6)
    logits[40] = np.nan
    with pytest.raises(ValueError, match="not a number"):
        sampler(temperature=temperature).choose(logits)


def test_log_probabilities_are_those_of_the_softmax() -> None:
    logits = row(7)
    exact = logits.astype(np.float64)
    exact -= exact.max() + math.log(np.exp(exact - exact.max()).sum())
    own, top = log_probabilities(logits, 11, 5)
    assert own == pytest.approx(exact[11], abs=1e-5)
    assert [i for i, _ in top] == np.argsort(-exact, kind="stable")[:5].tolist()
    assert [p for _, p in top] == pytest.approx(sorted(exact, reverse=True)[:5], abs=1e-5)
    assert log_probabilities(logits, 11, 0)[1] == []
    assert len(log_probabilities(logits, 11, 10**6)[1]) == SIZE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -1),
        ("top_p", 0.0), ("top_p", 1.1), ("min_p", 1.0), ("repetition_penalty", 0.0), ("num_logprobs", -1),
        ("seed", -1), ("presence_penalty", math.nan), ("logit_bias", {1: math.inf}),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: value})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_refused", [1, SIZE - 1])
def test_a_refused_token_is_as_if_it_did_not_exist(temperature: float, num_refused: int) -> None:
    """One by one at first, all at once when many are likely."""
    logits = np.arange(SIZE, 0, -1, dtype=np.float32) / 4
    before = logits.copy()
    chosen = {
        sampler(temperature=temperature, seed=seed).choose(logits, None, lambda i: i < num_refused)
        for seed in range(20)
    }
    assert min(chosen) >= num_refused
    assert temperature or chosen == {num_refused}
    assert (logits == before).all()


def test_what_is_left_keeps_its_chances() -> None:
    logits = np.log(np.array([0.7, 0.2, 0.1] + [1e-30] * (SIZE - 3), dtype=np.float32))
    one = sampler(temperature=1.0, seed=1)
    counts = np.bincount([one.choose(logits, None, lambda i: i == 0) for _ in range(3000)], minlength=SIZE)
    assert counts[0] == 0
    assert counts[1] / counts[2] == pytest.approx(2, rel=0.15)


def test_only_the_token_that_is_kept_counts_for_penalties() -> None:
    logits = np.array([5.0, 4.9] + [0.0] * (SIZE - 2), dtype=np.float32)
    one = sampler(temperature=0.0, presence_penalty=2.0)
    assert one.choose(logits, None, lambda i: i == 0) == 1
    assert one.choose(logits) == 0


@pytest.mark.parametrize("token_filter", [None, Only(3, 9)])
def test_refusing_everything_is_told(token_filter: Only | None) -> None:
    with pytest.raises(ValueError, match=r"not a number|leaves no token to choose"):
        sampler(temperature=1.0, seed=1).choose(
            np.zeros(SIZE, dtype=np.float32), token_filter, lambda _: True
        )
