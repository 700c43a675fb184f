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


class CostEstimator:
    """Seconds per iteration, learned while running."""

    def __init__(self) -> None:
        """Know nothing yet."""
        size = len(IterationShape().features())
        self._weights = [0.0] * size
        self._covariance = [[_PRIOR if i == j else 0.0 for j in range(size)] for i in range(size)]
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
        if not self.has_learned:
            return None
        # A negative coefficient is noise, never physics: more work does not take less time.
        return max(1e-6, sum(max(0.0, w) * f for w, f in zip(self._weights, shape.features(), strict=True)))

    def observe(self, shape: IterationShape, seconds: float) -> None:
        """Learn from a finished (not aborted) iteration."""
        forecast = self.predict(shape)
        if forecast is not None and seconds > 0:
            self._error += 0.05 * (abs(forecast - seconds) / seconds - self._error)
        features = shape.features()
        projected = [sum(row[j] * features[j] for j in range(len(features))) for row in self._covariance]
        gain_scale = _FORGETTING + sum(f * p for f, p in zip(features, projected, strict=True))
        surprise = seconds - sum(w * f for w, f in zip(self._weights, features, strict=True))
        for i, p in enumerate(projected):
            self._weights[i] += p / gain_scale * surprise
        for i, p in enumerate(projected):
            for j, q in enumerate(projected):
                updated = (self._covariance[i][j] - p * q / gain_scale) / _FORGETTING
                # Directions never excited would grow without bound under forgetting.
                self._covariance[i][j] = max(-1e6, min(1e6, updated))
        self._num_seen += 1
