"""The cost model forecasts what was measured, and a bad minute of the machine does not spoil it."""

from __future__ import annotations

import random

import pytest

from engine_service.scheduling.estimator import CostEstimator, IterationShape
from engine_service.scheduling.events import IterationDone, SequenceResult
from engine_service.scheduling.model import Resident, ResidentId
from tests.scheduling.household import Household


def _true_seconds(shape: IterationShape) -> float:
    """An invented device: 12 ms a pass, 3 ms a prompt token, 3 ms a decode, attention over what is stored."""
    attention = 2.5e-6 * shape.chunk_tokens * (shape.chunk_context + shape.chunk_tokens / 2)
    decodes = 0.003 * shape.num_decodes + 7e-6 * shape.decode_context
    return 0.012 + 0.003 * shape.chunk_tokens + attention + decodes


def _decodes(rng: random.Random) -> IterationShape:
    num = rng.randint(1, 4)
    return IterationShape(num_decodes=num, decode_context=num * rng.randint(100, 1500))


def _mixed(rng: random.Random) -> IterationShape:
    num = rng.randint(0, 4)
    return IterationShape(
        chunk_tokens=rng.choice((64, 128, 256)),
        chunk_context=rng.randint(0, 2000),
        num_decodes=num,
        decode_context=num * 500,
    )


def _taught(rng: random.Random, estimator: CostEstimator, times: int) -> None:
    for i in range(times):
        shape = _mixed(rng) if i % 3 == 0 else _decodes(rng)
        estimator.observe(shape, _true_seconds(shape) * rng.uniform(0.95, 1.05))


def _error(estimator: CostEstimator, shape: IterationShape) -> float:
    forecast = estimator.predict(shape)
    assert forecast is not None
    return abs(forecast / _true_seconds(shape) - 1)


_PROBES = (
    IterationShape(num_decodes=1, decode_context=200),
    IterationShape(num_decodes=4, decode_context=4000),
    IterationShape(chunk_tokens=128, chunk_context=1000, num_decodes=2, decode_context=1000),
    IterationShape(chunk_tokens=512),
)


def test_nothing_is_forecast_before_enough_was_seen() -> None:
    estimator = CostEstimator()
    for _ in range(5):
        assert estimator.predict(_PROBES[0]) is None
        estimator.observe(_PROBES[0], 0.01)
    estimator.observe(_PROBES[0], 0.01)
    assert estimator.predict(_PROBES[0]) == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("shape", _PROBES)
def test_a_device_is_forecast_within_a_tenth(shape: IterationShape) -> None:
    estimator = CostEstimator()
    _taught(random.Random(1), estimator, 150)
    assert _error(estimator, shape) < 0.1
    assert estimator.relative_error < 0.1


@pytest.mark.parametrize("shape", _PROBES)
def test_a_start_on_a_busy_machine_is_forgotten_after_a_few_iterations(shape: IterationShape) -> None:
    """Warm-up iterations of seconds made the former model forecast 0.7 s for a decode of 13 ms."""
    estimator = CostEstimator()
    rng = random.Random(2)
    for chunk in (172, 26, 25, 1, 1, 1, 1):
        estimator.observe(IterationShape(chunk_tokens=chunk), 4.6 * rng.uniform(0.5, 1))
    _taught(rng, estimator, 60)
    assert _error(estimator, shape) < 0.15


@pytest.mark.parametrize("shape", _PROBES)
@pytest.mark.parametrize("factor", [100.0, 0.01], ids=["stall", "too fast to be true"])
def test_one_mad_measurement_hardly_moves_the_forecast(shape: IterationShape, factor: float) -> None:
    estimator = CostEstimator()
    rng = random.Random(3)
    _taught(rng, estimator, 150)
    mad = IterationShape(chunk_tokens=512, chunk_context=500, num_decodes=3, decode_context=1500)
    estimator.observe(mad, factor * _true_seconds(mad))
    assert _error(estimator, shape) < 0.3


def test_a_machine_that_became_twice_as_slow_is_believed() -> None:
    estimator = CostEstimator()
    rng = random.Random(4)
    _taught(rng, estimator, 150)
    for i in range(300):
        shape = _mixed(rng) if i % 3 == 0 else _decodes(rng)
        estimator.observe(shape, 2 * _true_seconds(shape))
    for shape in _PROBES:
        assert estimator.predict(shape) == pytest.approx(2 * _true_seconds(shape), rel=0.15)


def test_long_decoding_does_not_forget_what_a_chunk_costs() -> None:
    estimator = CostEstimator()
    rng = random.Random(5)
    _taught(rng, estimator, 150)
    for _ in range(5000):
        shape = _decodes(rng)
        estimator.observe(shape, _true_seconds(shape))
    assert _error(estimator, IterationShape(chunk_tokens=256, chunk_context=500)) < 0.2


def test_more_work_is_never_forecast_to_take_less_time() -> None:
    rng = random.Random(6)
    estimator = CostEstimator()
    for _ in range(200):
        estimator.observe(_mixed(rng), rng.uniform(0.001, 1.0))  # noise without any law
        small, large = (
            _mixed(rng),
            IterationShape(chunk_tokens=1024, chunk_context=4000, num_decodes=9, decode_context=9000),
        )
        if estimator.has_learned:
            assert (estimator.predict(small) or 0) <= (estimator.predict(large) or 0)


def test_a_prompt_found_in_a_cache_teaches_nothing_about_computing_one() -> None:
    """Ordered 400 tokens, 399 of them were there: 10 ms is not the price of computing 400."""
    home = Household(residents=(Resident(resident_id=ResidentId("alice")),))
    for _ in range(8):
        home.ask("alice", "chat", prompt=400, output=4)
        home.run_dry()
    estimator = home.scheduler.state.estimator
    before = estimator.seconds(400, 0, 0, 0)
    for _ in range(5):
        request_id = home.ask("alice", "chat", prompt=400, output=1)
        found = SequenceResult(
            request_id=request_id, prefill_tokens=1, cached_tokens=399, decode_tokens=1, finished=True
        )
        home.flying = None
        home.tell(IterationDone(results=(found,), seconds=0.01))
    assert before is not None
    assert estimator.seconds(400, 0, 0, 0) == pytest.approx(before, rel=0.1)
