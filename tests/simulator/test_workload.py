"""Streams send what their file says, the same for the same seed, whoever else is there."""

from __future__ import annotations

import itertools
import statistics

import pytest

from engine_service.scheduling.model import ResidentId, WorkloadClass
from engine_service.simulator.workload import (
    Arrivals,
    FaultDraws,
    Faults,
    Length,
    Order,
    Pattern,
    Shape,
    Stream,
    StreamState,
)

FIXED = Length(shape=Shape.FIXED, low=100, high=100)
UNIFORM = Length(shape=Shape.UNIFORM, low=10, high=50)


def stream(arrivals: Arrivals, **more: object) -> Stream:
    given = {"prompt": UNIFORM, "output": UNIFORM, **more}
    return Stream(
        name="s",
        resident_id=ResidentId("anna"),
        class_id=WorkloadClass.CHAT,
        arrivals=arrivals,
        **given,  # type: ignore[arg-type]
    )


def orders(arrivals: Arrivals, *, seed: int = 1, duration_s: float = 600.0, **more: object) -> list[Order]:
    return StreamState(stream(arrivals, **more), seed, duration_s).open_loop()


def test_a_seed_gives_the_same_requests_and_another_others() -> None:
    poisson = Arrivals(pattern=Pattern.POISSON, rate=0.5)
    assert orders(poisson) == orders(poisson)
    assert orders(poisson) != orders(poisson, seed=2)


def test_uniform_arrivals_are_evenly_spaced() -> None:
    times = [o.at_s for o in orders(Arrivals(pattern=Pattern.UNIFORM, rate=2))]
    assert len(times) == 1200
    assert times[:3] == [0.0, 0.5, 1.0]


def test_poisson_arrivals_have_the_rate_and_the_spread_of_chance() -> None:
    times = [o.at_s for o in orders(Arrivals(pattern=Pattern.POISSON, rate=2), duration_s=10_000)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.5, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.5, rel=0.03)


def test_a_stream_that_is_on_and_off_is_silent_in_between() -> None:
    times = [o.at_s for o in orders(Arrivals(pattern=Pattern.UNIFORM, rate=1, on_s=60, off_s=60))]
    assert len(times) == 300
    assert all(at % 120 < 60 for at in times)


def test_a_ramp_goes_from_one_rate_to_the_other() -> None:
    times = [o.at_s for o in orders(Arrivals(pattern=Pattern.RAMP, rate=0.2, rate_end=2))]
    assert len(times) == 660
    assert sum(at < 60 for at in times) == pytest.approx(60 * 0.29, abs=1)
    assert sum(at >= 540 for at in times) == pytest.approx(60 * 1.91, abs=1)


def test_a_falling_ramp_ends_at_its_last_rate() -> None:
    times = [o.at_s for o in orders(Arrivals(pattern=Pattern.RAMP, rate=2, rate_end=0))]
    assert len(times) == 600
    assert sum(at < 60 for at in times) > 10 * sum(at >= 540 for at in times)


def test_a_day_swings_between_its_rates() -> None:
    times = [
        o.at_s
        for o in orders(
            Arrivals(pattern=Pattern.DIURNAL, rate=1, swing=0.8, period_s=10_000), duration_s=10_000
        )
    ]
    assert len(times) == pytest.approx(10_000, rel=0.05)
    noon = sum(4500 <= at < 5500 for at in times)
    night = sum(at < 500 or at >= 9500 for at in times)
    assert noon == pytest.approx(9 * night, rel=0.3)


def test_bursts_are_calls_in_a_row_and_then_a_gap() -> None:
    times = [o.at_s for o in orders(Arrivals(pattern=Pattern.BURSTS, calls=(3, 3), every_s=4, gap_s=20))]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[:5] == pytest.approx([4, 4, 24, 4, 4])


def test_requests_together_come_at_once() -> None:
    found = orders(Arrivals(pattern=Pattern.TOGETHER, count=40), from_s=3.0)
    assert [o.at_s for o in found] == [3.0] * 40


def test_a_closed_loop_starts_with_its_concurrency_and_goes_on_after_answers() -> None:
    state = StreamState(stream(Arrivals(pattern=Pattern.CLOSED, concurrency=3)), 1, 100.0)
    assert len(state.first()) == 3
    assert state.order(99.0) is not None
    assert state.order(100.0) is None


def test_a_stream_stops_after_its_most_requests() -> None:
    assert len(orders(Arrivals(pattern=Pattern.UNIFORM, rate=1), most_requests=7)) == 7


def test_lengths_stay_within_their_limits() -> None:
    lognormal = Length(shape=Shape.LOGNORMAL, low=1, high=2048, mu=5.769, sigma=1.001)
    lengths = [o.output_tokens for o in orders(Arrivals(pattern=Pattern.UNIFORM, rate=5), output=lognormal)]
    assert min(lengths) >= 1
    assert max(lengths) == 2048
    assert statistics.median(lengths) == pytest.approx(320, rel=0.1)


def test_what_is_asked_may_be_more_than_what_comes() -> None:
    found = orders(Arrivals(pattern=Pattern.UNIFORM, rate=1), output=FIXED, max_tokens=8000)
    assert {(o.output_tokens, o.max_tokens) for o in found} == {(100, 8000)}


def test_no_answer_is_longer_than_what_was_asked() -> None:
    found = orders(Arrivals(pattern=Pattern.UNIFORM, rate=1), output=FIXED, max_tokens=20)
    assert {(o.output_tokens, o.max_tokens) for o in found} == {(20, 20)}


def test_faults_happen_as_often_as_said() -> None:
    draws = FaultDraws(Faults(disconnects=0.2, failures=0.1, losses_per_hour=60), seed=3)
    gone = [draws.disconnects_after_s() for _ in range(5000)]
    assert sum(delay is not None for delay in gone) == pytest.approx(1000, rel=0.1)
    assert all(1e-3 <= delay <= 64 for delay in gone if delay is not None)
    failed = [draws.fails_after(50) for _ in range(5000)]
    assert sum(n is not None for n in failed) == pytest.approx(500, rel=0.15)
    assert len(list(draws.losses_at_s(36_000))) == pytest.approx(600, rel=0.15)


def test_without_faults_nothing_goes_wrong() -> None:
    draws = FaultDraws(Faults(), seed=3)
    assert draws.disconnects_after_s() is None
    assert draws.fails_after(50) is None
    assert not list(draws.losses_at_s(36_000))
