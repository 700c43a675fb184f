"""How the next token is chosen from a row of logits.

Decides one token at a time for one request. Knows no model and no grammar: what a grammar allows arrives as
a `TokenFilter`. The order is: penalties and bias, grammar, temperature, min-p, top-k, top-p, draw; greedy
(temperature 0) ends after the grammar. No step sorts the whole vocabulary.

Source: repetition penalty of CTRL (Keskar et al. 2019), over prompt and output; presence and frequency
penalties as documented by OpenAI, over the output; nucleus sampling (Holtzman et al. 2020); min-p (Nguyen et
al. 2024). Log probabilities are the model's own, before all of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.base import Sampling

Floats = NDArray[np.floating[Any]]
TokenIds = NDArray[np.integer[Any]]

_GREEDY_BELOW: Final = 1e-6  # below, dividing by it would overflow
_CUTS: Final = (1e-2, 1e-4, 1e-7, 0.0)  # relative to the best; each is tried until enough mass is above it


class TokenFilter(Protocol):
    """What a grammar says about the next token."""

    def allows(self, token_id: int) -> bool:
        """Return whether this one token may come next."""
        ...

    def allowed_ids(self) -> TokenIds:
        """Return every token that may come next, ascending."""
        ...


class Sampler:
    """Chooses tokens for one request; its random state and counts survive preemption."""

    __slots__ = ("_adjusts", "_banned", "_bias", "_counts", "_output_counts", "_random", "_seen", "sampling")

    def __init__(
        self,
        sampling: Sampling,
        *,
        prompt_ids: Sequence[int],
        vocab_size: int,
        banned_ids: Sequence[int] = (),
    ) -> None:
        """Start with the prompt's tokens as seen. banned_ids are never chosen unless a grammar rules.

        Raises ValueError for a logit bias on a token that does not exist.
        """
        self.sampling = sampling
        unknown = [i for i in sampling.logit_bias if not 0 <= i < vocab_size]
        if unknown:
            raise ValueError(f"logit_bias names token {unknown[0]}, but tokens are 0 to {vocab_size - 1}")
        self._random = np.random.default_rng(sampling.seed)
        self._bias = _as_arrays(sampling.logit_bias)
        self._banned = np.array(sorted(banned_ids), dtype=np.int64)
        self._output_counts: dict[int, int] = {}
        self._seen: dict[int, None] = {}
        if sampling.repetition_penalty != 1.0:
            self._seen = dict.fromkeys(prompt_ids)
        self._counts = bool(
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
        )
        self._adjusts = self._counts or bool(sampling.logit_bias)

    def choose(self, logits: Floats, token_filter: TokenFilter | None = None) -> int:
        """Return the next token for a row of logits (float32, one per token; left unchanged).

        Raises ValueError if the logits are not numbers or nothing is allowed.
        """
        scores = self._adjusted(logits) if self._adjusts else logits
        if self.sampling.temperature < _GREEDY_BELOW:
            token_id = self._best(scores, token_filter)
        else:
            token_id = self._drawn(scores, token_filter)
        if self._counts:
            self._count(token_id)
        return token_id

    def _best(self, scores: Floats, token_filter: TokenFilter | None) -> int:
        best = int(scores.argmax())
        if not math.isfinite(scores[best]):
            raise ValueError("the model's output is not a number")
        if token_filter is not None:
            if token_filter.allows(best):
                return best
            allowed = _not_empty(token_filter.allowed_ids())
            return int(allowed[scores[allowed].argmax()])
        if len(self._banned) and best in self._banned:
            scores = scores.copy()
            scores[self._banned] = -np.inf
            return int(scores.argmax())
        return best

    def _drawn(self, scores: Floats, token_filter: TokenFilter | None) -> int:
        if token_filter is not None:
            allowed = _not_empty(token_filter.allowed_ids())
            return int(allowed[self._draw(scores[allowed])])
        if len(self._banned):
            scores = scores.copy()
            scores[self._banned] = -np.inf
        return self._draw(scores)

    def _draw(self, scores: Floats) -> int:
        """Return an index, drawn by the softmax of scores / temperature after the truncations."""
        sampling = self.sampling
        top = scores.max()
        if not math.isfinite(top):
            raise ValueError("the model's output is not a number")
        weights = np.exp((scores - top) * np.float32(1 / sampling.temperature))
        indices: TokenIds | None = None
        if sampling.min_p > 0:
            indices = np.flatnonzero(weights >= sampling.min_p)
            weights = weights[indices]
        if sampling.top_k or sampling.top_p < 1:
            kept = nucleus(weights, top_k=sampling.top_k, top_p=sampling.top_p)
            weights = weights[kept]
            indices = kept if indices is None else indices[kept]
        cumulative = np.cumsum(weights, dtype=np.float64)
        place = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        place = min(place, len(cumulative) - 1)
        return place if indices is None else int(indices[place])

    def _adjusted(self, logits: Floats) -> Floats:
        """Return a copy with penalties and bias."""
        sampling, scores = self.sampling, logits.copy()
        if self._seen:
            seen = np.fromiter(self._seen, dtype=np.int64, count=len(self._seen))
            values = scores[seen]
            penalty = np.float32(sampling.repetition_penalty)
            with np.errstate(all="ignore"):  # what overflows is caught when the token is chosen
                scores[seen] = np.where(values > 0, values / penalty, values * penalty)
        if self._output_counts and (sampling.presence_penalty or sampling.frequency_penalty):
            ids, counts = _as_arrays(self._output_counts)
            penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
            scores[ids] -= penalties.astype(scores.dtype)
        if sampling.logit_bias:
            ids, values = self._bias
            scores[ids] += values.astype(scores.dtype)
        return scores

    def _count(self, token_id: int) -> None:
        self._output_counts[token_id] = self._output_counts.get(token_id, 0) + 1
        if self.sampling.repetition_penalty != 1.0:
            self._seen[token_id] = None


def nucleus(weights: Floats, *, top_k: int, top_p: float) -> TokenIds:
    """Return the indices of the best weights, best first: at most top_k (0: any), then mass top_p of those.

    weights are >= 0 and their greatest is 1. Ties go to the lower index.
    """
    total = float(weights.sum(dtype=np.float64))
    indices = np.arange(0)
    for cut in _CUTS:
        indices = np.flatnonzero(weights >= cut)
        if cut == 0 or (len(indices) >= top_k if top_k else float(weights[indices].sum()) >= top_p * total):
            break
    best_first = indices[np.argsort(-weights[indices], kind="stable")]
    if top_k:
        best_first = best_first[:top_k]
    if top_p < 1:
        cumulative = np.cumsum(weights[best_first], dtype=np.float64)
        mass = cumulative[-1] if top_k else total
        best_first = best_first[: int(np.searchsorted(cumulative, top_p * mass)) + 1]
    return best_first


def log_probabilities(logits: Floats, token_id: int, num_top: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the token's natural log probability and the num_top best tokens with theirs, best first."""
    top = float(logits.max())
    log_total = top + float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))
    num_top = min(num_top, len(logits))
    if num_top == 0:
        return float(logits[token_id]) - log_total, []
    best = np.argpartition(logits, -num_top)[-num_top:]
    best = best[np.lexsort((best, -logits[best]))]
    return float(logits[token_id]) - log_total, [(int(i), float(logits[i]) - log_total) for i in best]


def _as_arrays(values: Any) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids = np.fromiter(values.keys(), dtype=np.int64, count=len(values))
    return ids, np.fromiter(values.values(), dtype=np.float64, count=len(values))


def _not_empty(allowed: TokenIds) -> TokenIds:
    if not len(allowed):
        raise ValueError("the constraint leaves no token to choose")
    return allowed
