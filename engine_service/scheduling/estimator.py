"""The online cost model: how long will an iteration with this content take?

Knows nothing of requests. Fitted by recursive least squares with forgetting from measured iterations, so
that it follows a machine whose speed changes (another program, heat). Deterministic: same observations,
same forecast.

    seconds = a + b * chunk + c * chunk * context + d * decodes + e * decode context

Source of the shape: Sarathi-Serve's and QoServe's linear models; the context terms are needed because
attention over a long cache dominates decoding on small devices.
"""

from __future__ import annotations

from dataclasses import dataclass

_KILO = 1e-3
_FORGETTING = 0.995
_PRIOR = 10.0
_LEARNED_AFTER = 6
_MOST = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationShape:
    """What decides the time of an iteration."""

    chunk_tokens: int = 0  #: prompt tokens computed
    chunk_context: int = 0  #: tokens stored before the chunk, of the largest prefill
    num_decodes: int = 0
    decode_context: int = 0  #: stored tokens of all decoding sequences together

    def features(self) -> list[float]:
        """Return the regressors, scaled to similar sizes."""
        return [
            1.0,
            self.chunk_tokens * _KILO,
            self.chunk_tokens * _KILO * (self.chunk_context + self.chunk_tokens / 2) * _KILO,
            self.num_decodes * 0.1,
            self.decode_context * _KILO,
        ]


_SIZE = len(IterationShape().features())


class CostEstimator:
    """Seconds per iteration, learned while running.

    Sums are written out term by term: the order of additions, and so the forecast to its last bit, is the
    same under every version of the language.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._weights = [0.0] * _SIZE
        self._covariance = [[_PRIOR if i == j else 0.0 for j in range(_SIZE)] for i in range(_SIZE)]
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
        # A negative coefficient is noise, never physics: more work does not take less time.
        base, per_token, per_context, per_decode, per_stored = self._weights
        kilo = chunk_tokens * _KILO
        total = base if base > 0.0 else 0.0
        if per_token > 0.0:
            total += per_token * kilo
        if per_context > 0.0:
            total += per_context * (kilo * (chunk_context + chunk_tokens / 2) * _KILO)
        if per_decode > 0.0:
            total += per_decode * (num_decodes * 0.1)
        if per_stored > 0.0:
            total += per_stored * (decode_context * _KILO)
        return total if total > 1e-6 else 1e-6

    def observe(self, shape: IterationShape, seconds: float) -> None:
        """Learn from a finished (not aborted) iteration."""
        forecast = self.predict(shape)
        if forecast is not None and seconds > 0:
            self._error += 0.05 * (abs(forecast - seconds) / seconds - self._error)
        f0, f1, f2, f3, f4 = shape.features()
        covariance, weights = self._covariance, self._weights
        projected = [r[0] * f0 + r[1] * f1 + r[2] * f2 + r[3] * f3 + r[4] * f4 for r in covariance]
        p0, p1, p2, p3, p4 = projected
        scale = _FORGETTING + (f0 * p0 + f1 * p1 + f2 * p2 + f3 * p3 + f4 * p4)
        w0, w1, w2, w3, w4 = weights
        surprise = seconds - (w0 * f0 + w1 * f1 + w2 * f2 + w3 * f3 + w4 * f4)
        for i in range(_SIZE):
            weights[i] += projected[i] / scale * surprise
            p, row = projected[i], covariance[i]
            for j in range(i, _SIZE):
                updated = (row[j] - p * projected[j] / scale) / _FORGETTING
                # Directions never excited would grow without bound under forgetting.
                if updated > _MOST:
                    updated = _MOST
                elif updated < -_MOST:
                    updated = -_MOST
                row[j] = covariance[j][i] = updated
        self._num_seen += 1
