"""The online cost model: how long will an iteration with this content take?

Knows nothing of requests. Deterministic: same observations, same forecast.

    seconds = a + b * chunk + c * chunk * context + d * decodes + e * decode context

Fitted to measured iterations by least squares of the *relative* error, with forgetting, under the condition
that no coefficient is negative (more work never takes less time). Both conditions are there because a plain
recursive least squares was poisoned for minutes by a handful of iterations during which another program had
the processors: it forecast 0.7 s for a decode of 13 ms. An iteration of five seconds among such of 50 ms
weighs a ten-thousandth here.

Source of the shape: Sarathi-Serve's and QoServe's linear models; the context terms are needed because
attention over a long cache dominates decoding on small devices. Non-negative least squares by coordinate
descent: Franc, Hlavac, Navara (CAIP 2005).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from engine_service.scheduling.events import SequenceResult

_KILO: Final = 1e-3
_FORGETTING: Final = 0.99
_LEARNED_AFTER: Final = 6
_RIDGE: Final = 1e-9  #: a direction without any evidence stays where it is
_SHORTEST_S: Final = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationShape:
    """What decides the time of an iteration."""

    chunk_tokens: int = 0  #: prompt tokens computed
    chunk_context: int = 0  #: tokens stored before the chunk, of the largest prefill
    num_decodes: int = 0
    decode_context: int = 0  #: stored tokens of all decoding sequences together

    def features(self) -> tuple[float, float, float, float, float]:
        """Return the regressors, scaled to similar sizes."""
        kilo = self.chunk_tokens * _KILO
        return (
            1.0,
            kilo,
            kilo * (self.chunk_context + self.chunk_tokens / 2) * _KILO,
            self.num_decodes * 0.1,
            self.decode_context * _KILO,
        )

    def as_computed(self, results: Iterable[SequenceResult]) -> IterationShape:
        """Return what was really done of this: a prompt that was found in a cache takes no time."""
        computed = sum([result.prefill_tokens for result in results])
        return self if computed == self.chunk_tokens else replace(self, chunk_tokens=computed)


class CostEstimator:
    """Seconds per iteration, learned while running.

    Sums are written out term by term: the order of additions, and so the forecast to its last bit, is the
    same under every version of the language.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        size = len(IterationShape().features())
        self._weights = [0.0] * size
        self._moments = [[0.0] * size for _ in range(size)]  #: sum of x x^T, forgotten; x = features / scale
        self._targets = [0.0] * size  #: sum of x * seconds / scale, forgotten
        self._num_seen = 0
        self._error = 0.0

    @property
    def has_learned(self) -> bool:
        """Return whether enough iterations were seen to trust a forecast."""
        return self._num_seen >= _LEARNED_AFTER

    @property
    def relative_error(self) -> float:
        """Return the smoothed |forecast - measured| / measured (0 is perfect)."""
        return self._error

    def predict(self, shape: IterationShape) -> float | None:
        """Return the expected seconds (> 0), None until learned."""
        return self.seconds(shape.chunk_tokens, shape.chunk_context, shape.num_decodes, shape.decode_context)

    def seconds(
        self, chunk_tokens: int, chunk_context: int, num_decodes: int, decode_context: int
    ) -> float | None:
        """Return the same for the parts of a shape (asked a dozen times per iteration)."""
        if self._num_seen < _LEARNED_AFTER:
            return None
        base, per_token, per_context, per_decode, per_stored = self._weights
        kilo = chunk_tokens * _KILO
        total = (
            base
            + per_token * kilo
            + per_context * (kilo * (chunk_context + chunk_tokens / 2) * _KILO)
            + per_decode * (num_decodes * 0.1)
            + per_stored * (decode_context * _KILO)
        )
        return total if total > _SHORTEST_S else _SHORTEST_S

    def observe(self, shape: IterationShape, seconds: float) -> None:
        """Learn from a finished (not aborted) iteration."""
        seconds = max(seconds, _SHORTEST_S)
        forecast = self.predict(shape)
        if forecast is not None:
            self._error += 0.05 * (abs(forecast - seconds) / seconds - self._error)
        # Relative to what was measured; but what seems far too fast (a backend that did less than it was
        # told) must not weigh more than everything else together.
        scale = seconds if forecast is None else max(seconds, forecast / 2)
        scaled = [feature / scale for feature in shape.features()]
        wanted = seconds / scale
        y0, y1, y2, y3, y4 = scaled
        for x, row in zip(scaled, self._moments, strict=True):
            m0, m1, m2, m3, m4 = row
            row[:] = (
                _FORGETTING * m0 + x * y0,
                _FORGETTING * m1 + x * y1,
                _FORGETTING * m2 + x * y2,
                _FORGETTING * m3 + x * y3,
                _FORGETTING * m4 + x * y4,
            )
        self._targets = [
            _FORGETTING * target + x * wanted for target, x in zip(self._targets, scaled, strict=True)
        ]
        self._num_seen += 1
        # From nothing it takes a few sweeps; afterwards one keeps up, since every observation moves little.
        for _ in range(1 if self._num_seen > 10 * _LEARNED_AFTER else 20):
            self._sweep()

    def _sweep(self) -> None:
        """Put each coefficient where it is best given the others, at least 0."""
        weights = self._weights
        for i, row in enumerate(self._moments):
            if row[i] <= _RIDGE:
                continue
            m0, m1, m2, m3, m4 = row
            w0, w1, w2, w3, w4 = weights
            gradient = self._targets[i] - (m0 * w0 + m1 * w1 + m2 * w2 + m3 * w3 + m4 * w4)
            moved = weights[i] + gradient / row[i]
            weights[i] = moved if moved > 0.0 else 0.0
