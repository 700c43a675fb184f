"""A machine's speed from an event log of the real engine: relative least squares, no coefficient below zero.

Decides nothing. The regressors are those of `backends.cost_model.CostModel`; every iteration that was not
aborted is one observation, weighted so that short iterations count as much as long ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from engine_service.backends.cost_model import CostModel
from engine_service.scheduling.decisions import Compose, Decision
from engine_service.scheduling.events import BackendLost, CapacityChanged, Event, IterationDone
from engine_service.scheduling.model import Capacity, RequestId
from engine_service.simulator.profiles import DeviceProfile

_LEAST_OBSERVATIONS: Final = 20
_RIDGE: Final = 1e-9
_LLAMA_GRAIN: Final = 128

Turn = tuple[float, Event, list[Decision]]


class FitError(ValueError):
    """The log holds too little to learn a machine's speed from; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an iteration computed, in the order of the cost model's coefficients, and how long it took."""

    features: tuple[float, ...]
    seconds: float


def profile_from(path: Path) -> DeviceProfile:
    """Return a machine as fast as the one that wrote the event log."""
    from engine_service.simulator import recorded

    try:
        return fitted(recorded.read(path).turns, name=f"fitted to {path.name}")
    except recorded.RecordingError as error:
        raise FitError(str(error)) from None


def fitted(turns: Sequence[Turn], *, name: str) -> DeviceProfile:
    """Return the machine whose iterations these are."""
    capacity = next((e.capacity for _, e, _ in reversed(turns) if isinstance(e, CapacityChanged)), None)
    if capacity is None:
        raise FitError(f"{name}: the log never says what the machine offers")
    seen = list(observations(turns, capacity))
    if len(seen) < _LEAST_OBSERVATIONS:
        raise FitError(f"{name}: {len(seen)} iterations are too few, {_LEAST_OBSERVATIONS} are needed")
    return DeviceProfile(
        name=name,
        cost=fit(seen),
        capacity=capacity,
        abort_grain_tokens=_LLAMA_GRAIN if capacity.can_abort else 0,
    )


def observations(turns: Iterable[Turn], capacity: Capacity) -> Iterable[Observation]:
    """Yield the iterations of a log that ran to their end."""
    stored: dict[RequestId, int] = {}
    composed: Compose | None = None
    for _, event, decisions in turns:
        if isinstance(event, BackendLost):
            stored.clear()
            composed = None
        if isinstance(event, IterationDone) and composed is not None:
            observation = _observe(event, composed, stored, capacity)
            if not event.aborted and event.seconds > 0:
                yield observation
        for decision in decisions:
            if isinstance(decision, Compose):
                composed = decision
            elif type(decision).__name__ in ("Admit", "Preempt", "Cancel"):
                stored.pop(decision.request_id, None)  # type: ignore[union-attr]


def _observe(
    event: IterationDone, composed: Compose, stored: dict[RequestId, int], capacity: Capacity
) -> Observation:
    decoding = set(composed.decode_ids)
    chunk = pairs = num_chunks = context = 0
    for result in event.results:
        before = stored.get(result.request_id, result.cached_tokens)
        if result.request_id in decoding:
            context += before
        elif result.prefill_tokens:
            chunk += result.prefill_tokens
            pairs += result.prefill_tokens * before
            num_chunks += 1
        stored[result.request_id] = before + result.prefill_tokens + (result.request_id in decoding)
    passes = min(1, num_chunks) if capacity.mixes_prefill_and_decode else num_chunks
    return Observation(
        features=(passes, chunk, pairs, min(1, len(decoding)), len(decoding), context), seconds=event.seconds
    )


def fit(seen: Sequence[Observation]) -> CostModel:
    """Return the cost model that is nearest to the observations, in relative terms."""
    size = len(fields(CostModel))
    scales = [max(o.features[j] for o in seen) or 1.0 for j in range(size)]
    rows = [[o.features[j] / scales[j] / o.seconds for j in range(size)] for o in seen]
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    target = [sum(row[i] for row in rows) for i in range(size)]
    solution = _without_negatives(gram, target)
    values = [value / scale for value, scale in zip(solution, scales, strict=True)]
    return CostModel(**{f.name: value for f, value in zip(fields(CostModel), values, strict=True)})


def _without_negatives(gram: list[list[float]], target: list[float]) -> list[float]:
    """Return the least-squares solution, coefficients that would be negative left out, worst first."""
    active = [i for i in range(len(target)) if gram[i][i] > 0]
    while active:
        part = _solve([[gram[i][j] for j in active] for i in active], [target[i] for i in active])
        worst = min(range(len(active)), key=lambda k: part[k])
        if part[worst] >= 0:
            solution = [0.0] * len(target)
            for i, value in zip(active, part, strict=True):
                solution[i] = value
            return solution
        del active[worst]
    return [0.0] * len(target)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Return x with matrix x = right, by elimination with pivots; columns that hardly differ share."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        rows[i][i] += _RIDGE * matrix[i][i]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            for c in range(i, size + 1):
                rows[r][c] -= factor * rows[i][c]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][c] * solution[c] for c in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


def relative_error(cost: CostModel, seen: Sequence[Observation]) -> float:
    """Return the median of |forecast - measured| / measured."""
    coefficients: list[float] = [getattr(cost, f.name) for f in fields(CostModel)]
    errors = [
        abs(sum(c * f for c, f in zip(coefficients, o.features, strict=True)) - o.seconds) / o.seconds
        for o in seen
    ]
    return statistics.median(errors)
