"""The measures say what the papers define, also against slow and simple computations."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from engine_service.simulator import fairness
from engine_service.simulator.fairness import Ledger, ServiceGap
from engine_service.simulator.quantiles import Histogram, of_values

Step = tuple[str, int, int]


def slow_difference(weights: list[int], steps: list[Step]) -> float:
    """Return D by looking at every interval of every pair."""
    service = [0.0] * len(weights)
    waiting: set[int] = set()
    history: list[tuple[list[float], frozenset[int]]] = [([*service], frozenset())]
    for what, who, amount in steps:
        if what == "serve":
            service[who] += amount / weights[who]
        elif what == "start":
            waiting.add(who)
        else:
            waiting.discard(who)
        history.append(([*service], frozenset(waiting)))
    worst = 0.0
    for i, j in itertools.combinations(range(len(weights)), 2):
        for start in range(len(history)):
            for end in range(start, len(history)):
                if not all({i, j} <= history[k][1] for k in range(start, end + 1)):
                    break
                change = [history[end][0][k] - history[start][0][k] for k in (i, j)]
                worst = max(worst, abs(change[0] - change[1]))
    return worst


@given(
    st.lists(
        st.tuples(st.sampled_from(["serve", "start", "stop"]), st.integers(0, 2), st.integers(1, 50)),
        max_size=24,
    )
)
def test_the_service_difference_is_the_supremum_over_all_intervals(steps: list[Step]) -> None:
    weights = [1, 2, 3]
    gap = ServiceGap(weights)
    waiting: set[int] = set()
    kept: list[Step] = []
    for what, who, amount in steps:
        if what == "serve":
            gap.served({who: amount})
        elif (what == "start") == (who in waiting):
            continue
        elif what == "start":
            waiting.add(who)
            gap.starts_waiting("chat", who)
        else:
            waiting.remove(who)
            gap.stops_waiting("chat", who)
        kept.append((what, who, amount))
    assert gap.worst == pytest.approx(slow_difference(weights, kept))


def test_differences_between_classes_do_not_count() -> None:
    gap = ServiceGap([1, 1])
    gap.starts_waiting("chat", 0)
    gap.starts_waiting("background", 1)
    gap.served({0: 1000})
    assert gap.worst == 0
    assert gap.spread() is None


def test_the_spread_is_between_those_who_wait_in_a_class() -> None:
    gap = ServiceGap([1, 1, 1])
    gap.served({0: 5, 1: 20, 2: 300})
    gap.starts_waiting("chat", 0)
    gap.starts_waiting("chat", 1)
    assert gap.spread() == 15


def test_who_asks_for_little_gets_it_and_the_rest_is_split_by_weight() -> None:
    assert fairness.entitlements([10, 1000, 1000], [1, 1, 2], 310) == pytest.approx([10, 100, 200])


def test_nobody_is_entitled_to_more_than_asked() -> None:
    assert fairness.entitlements([10, 20], [1, 1], 1000) == pytest.approx([10, 20])


def ledger(served: list[list[int]], asked: list[list[int]]) -> Ledger:
    return Ledger(weights=[1] * len(served), served=served, asked=asked)


def test_under_demand_is_not_unfairness() -> None:
    light_and_heavy = ledger([[1] * 60, [9] * 60], [[1] * 60, [20] * 60])
    assert fairness.window_difference(light_and_heavy).mean == 0


def test_the_window_difference_is_what_was_withheld() -> None:
    starved = ledger([[1] * 60, [9] * 60], [[20] * 60, [20] * 60])
    assert fairness.window_difference(starved).mean == pytest.approx(8)


def test_jain_is_one_for_equals_and_less_for_others() -> None:
    demand = [[20] * 300] * 2
    assert fairness.jain(ledger([[5] * 300] * 2, demand)).mean == pytest.approx(1)
    assert fairness.jain(ledger([[1] * 300, [9] * 300], demand)).mean == pytest.approx(100 / 164)


def test_jain_leaves_out_who_asked_for_less_than_a_share() -> None:
    three = ledger([[5] * 300, [5] * 300, [1] * 300], [[20] * 300, [20] * 300, [1] * 300])
    assert fairness.jain(three).mean == pytest.approx(1)


def test_the_least_share_of_a_window_is_found_where_it_is_least() -> None:
    part = [5] * 600 + [1] * 600 + [5] * 600
    assert fairness.least_window_share(part, [10] * 1800, 600) == pytest.approx(0.1)
    assert fairness.least_window_share(part[:100], [10] * 100, 600) is None


def test_exact_quantiles_are_ranks() -> None:
    quantiles = of_values([float(i) for i in range(1, 101)])
    assert (quantiles.p50, quantiles.p95, quantiles.p99, quantiles.max) == (50, 95, 99, 100)
    assert of_values([]).p50 is None


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=200))
def test_a_histogram_is_within_a_percent(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact, near = of_values(values), histogram.quantiles()
    assert near.n == exact.n
    for name in ("p50", "p95", "p99", "max"):
        assert getattr(exact, name) <= getattr(near, name) * (1 + 1e-9)
        assert getattr(near, name) <= getattr(exact, name) * 1.0101


def test_merged_histograms_count_both() -> None:
    one, other = Histogram(), Histogram()
    one.add(0.01, 99)
    other.add(5.0)
    one.merge(other)
    assert one.num == 100
    assert one.quantiles().max == 5.0
    assert one.quantiles().p95 == pytest.approx(0.01, rel=0.01)
