"""How the next token is chosen from a row of logits.

Decides one token at a time for one request. Knows no model and no grammar: what a grammar allows arrives as
a `TokenFilter`. The order is: penalties and bias, grammar, temperature, min-p, top-k, top-p, draw; greedy
(temperature 0) ends after the grammar. No step sorts the whole vocabulary.

Source: repetition penalty of CTRL (Keskar et al. 2019), over prompt and output; presence and frequency
penalties as documented by OpenAI, over the output; nucleus sampling (Holtzman et al. 2020); min-p (Nguyen et
al. 2024). Log probabilities are the model's own, before all of that.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.base import Sampling

Floats = NDArray[np.floating[Any]]
TokenIds = NDArray[np.integer[Any]]

_GREEDY_BELOW: Final = 1e-6  # below, dividing by it would overflow
_CUTS: Final = (1e-2, 1e-4, 1e-7, 0.0)  # relative to the best; each is tried until enough is above it
_DISTANCES: Final = (4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 18.0)  # below the best score, in logits
_COLUMNS: Final = 256
_SINGLE_REFUSALS: Final = 16


class TokenFilter(Protocol):
    """What a grammar says about the next token."""

    def allows(self, token_id: int) -> bool:
        """Return whether this one token may come next."""
        ...

    def allowed_ids(self) -> TokenIds:
        """Return every token that may come next, ascending."""
        ...


class _Scratch(threading.local):
    """Rows to compute in, one set per thread.

    An array as long as a vocabulary is mapped from the system anew whenever it is allocated, which costs more
    than computing in it.
    """

    def __init__(self) -> None:
        self._rows = np.empty((2, 0), dtype=np.float32)

    def row(self, which: int, size: int) -> NDArray[np.float32]:
        if self._rows.shape[1] < size:
            self._rows = np.empty((2, size), dtype=np.float32)
        return self._rows[which, :size]


_scratch = _Scratch()


class _Penalties:
    """Which tokens were seen, and how often in the output."""

    __slots__ = ("_counts", "_ids", "_index", "_sampling")

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int]) -> None:
        self._sampling = sampling
        seen = dict.fromkeys(prompt_ids) if sampling.repetition_penalty != 1.0 else {}
        self._index = {token_id: index for index, token_id in enumerate(seen)}
        self._ids = np.array([*seen, *([0] * 64)], dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    def count(self, token_id: int) -> None:
        """Note an output token."""
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[index] = token_id
        self._counts[index] += 1

    def apply(self, scores: Floats) -> None:
        """Change the scores of the tokens seen."""
        sampling, num = self._sampling, len(self._index)
        ids, counts = self._ids[:num], self._counts[:num]
        values = scores[ids]
        with np.errstate(all="ignore"):  # what overflows is caught when the token is chosen
            if sampling.repetition_penalty != 1.0:
                penalty = np.float32(sampling.repetition_penalty)
                values = np.where(values > 0, values / penalty, values * penalty)
            values -= np.float32(sampling.presence_penalty) * (counts > 0)
            values -= np.float32(sampling.frequency_penalty) * counts
        scores[ids] = values


class Sampler:
    """Chooses tokens for one request; its random state and counts survive preemption."""

    __slots__ = ("_banned", "_bias", "_penalties", "_random", "sampling")

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
        self._banned = np.array(sorted(banned_ids), dtype=np.int64)
        self._bias: tuple[TokenIds, Floats] | None = None
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias.items(), strict=True)
            self._bias = np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)
        self._penalties: _Penalties | None = None
        if sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
            self._penalties = _Penalties(sampling, prompt_ids)

    def choose(
        self,
        logits: Floats,
        token_filter: TokenFilter | None = None,
        is_refused: Callable[[int], bool] | None = None,
    ) -> int:
        """Return the next token for a row of logits (float32, one per token; left unchanged).

        A token that is_refused is given up and another one chosen, as if it did not exist. Raises ValueError
        if the logits are not numbers or nothing is allowed.
        """
        is_adjusted = self._penalties is not None or self._bias is not None
        scores = self._adjusted(logits) if is_adjusted else logits
        token_id = self._one(scores, token_filter)
        if is_refused is not None and is_refused(token_id):
            token_id = self._another(scores.copy(), token_id, token_filter, is_refused)
        if self._penalties is not None:
            self._penalties.count(token_id)
        return token_id

    def _one(self, scores: Floats, token_filter: TokenFilter | None) -> int:
        if self.sampling.temperature < _GREEDY_BELOW:
            return self._best(scores, token_filter)
        return self._drawn(scores, token_filter)

    def _another(
        self,
        scores: Floats,
        token_id: int,
        token_filter: TokenFilter | None,
        is_refused: Callable[[int], bool],
    ) -> int:
        """Return a token that is not refused; scores are overwritten.

        Refused tokens are ruled out one by one, and after a few all at once: asking about each takes longer
        than a choice, and rarely more than one is likely.
        """
        for attempt in itertools.count():
            refused = [token_id] if attempt < _SINGLE_REFUSALS else filter(is_refused, range(len(scores)))
            scores[list(refused)] = -np.inf
            token_id = self._one(scores, token_filter)
            if not math.isfinite(scores[token_id]):
                break
            if not is_refused(token_id):
                return token_id
        raise ValueError("what is refused leaves no token to choose")

    def _adjusted(self, logits: Floats) -> Floats:
        """Return a copy with penalties and bias."""
        scores = _scratch.row(0, len(logits))
        np.copyto(scores, logits)
        if self._penalties is not None:
            self._penalties.apply(scores)
        if self._bias is not None:
            ids, values = self._bias
            scores[ids] += values
        return scores

    def _without_banned(self, scores: Floats) -> Floats:
        allowed = scores.copy()
        allowed[self._banned] = -np.inf
        return allowed

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
            return int(self._without_banned(scores).argmax())
        return best

    def _drawn(self, scores: Floats, token_filter: TokenFilter | None) -> int:
        if token_filter is not None:
            allowed = _not_empty(token_filter.allowed_ids())
            return int(allowed[self._draw(scores[allowed])])
        return self._draw(self._without_banned(scores) if len(self._banned) else scores)

    def _draw(self, scores: Floats) -> int:
        """Return an index, drawn by the softmax of scores / temperature after the truncations."""
        sampling, top = self.sampling, float(scores.max())
        if not math.isfinite(top):
            raise ValueError("the model's output is not a number")
        if sampling.min_p > 0:
            candidates: TokenIds = np.flatnonzero(
                scores >= top + sampling.temperature * math.log(sampling.min_p)
            )
        elif sampling.top_k:
            candidates = _at_least(scores, sampling.top_k)
        else:
            return self._draw_from_all(scores, top)
        weights = np.exp((scores[candidates] - top) / sampling.temperature)
        if sampling.top_k or sampling.top_p < 1:
            kept = nucleus(weights, top_k=sampling.top_k, top_p=sampling.top_p)
            candidates, weights = candidates[kept], weights[kept]
        return int(candidates[_pick(weights, self._random.random())])

    def _draw_from_all(self, scores: Floats, top: float) -> int:
        weights = _scratch.row(1, len(scores))
        np.subtract(scores, np.float32(top), out=weights)
        np.multiply(weights, np.float32(1 / self.sampling.temperature), out=weights)
        np.exp(weights, out=weights)
        if self.sampling.top_p == 1:
            return _pick(weights, self._random.random())
        kept = nucleus(weights, top_k=0, top_p=self.sampling.top_p)
        return int(kept[_pick(weights[kept], self._random.random())])


def _at_least(scores: Floats, num: int) -> TokenIds:
    """Return the indices of all scores above some cut that leaves at least num (or all there are)."""
    top = float(scores.max())
    for distance in _DISTANCES:
        mask = scores >= top - distance
        if np.count_nonzero(mask) >= num:
            return np.flatnonzero(mask)
    return np.arange(len(scores))


def _sums(weights: Floats) -> Floats:
    """Return one sum per column of the weights laid out in rows of `_COLUMNS`, then one of what is left over.

    Adding whole rows is vectorised; numpy's sum of a flat array is seven times slower.
    """
    whole = len(weights) // _COLUMNS * _COLUMNS
    columns = np.add.reduce(weights[:whole].reshape(-1, _COLUMNS), axis=0, dtype=np.float32)
    return np.append(columns, weights[whole:].sum(dtype=np.float32))


def _pick(weights: Floats, share: float) -> int:
    """Return an index with the chance of its weight; share is uniform in [0, 1).

    In two stages, a column and then a place in it, because a running sum over a vocabulary is slow.
    """
    edges = np.cumsum(_sums(weights), dtype=np.float64)
    target = share * edges[-1]
    column = min(int(np.searchsorted(edges, target, side="right")), _COLUMNS)
    whole = len(weights) // _COLUMNS * _COLUMNS
    start, step = (column, _COLUMNS) if column < _COLUMNS else (whole, 1)
    inside = weights[start : whole if step > 1 else None : step]
    rest = target - (edges[column - 1] if column else 0.0)
    place = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), rest, side="right"))
    if place >= len(inside):  # the column's sum was rounded up
        place = int(np.flatnonzero(inside)[-1])
    return start + place * step


def nucleus(weights: Floats, *, top_k: int, top_p: float) -> TokenIds:
    """Return the indices of the best weights, best first: at most top_k (0: any), then mass top_p of those.

    weights are >= 0 and their greatest is 1. Ties go to the lower index.
    """
    total = float(_sums(weights).sum())
    indices: TokenIds = np.arange(0)
    for cut in _CUTS:
        indices = np.flatnonzero(weights >= cut)
        if cut == 0:
            break
        if len(indices) >= top_k if top_k else float(weights[indices].sum()) >= top_p * total:
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
    weights = _scratch.row(1, len(logits))
    np.subtract(logits, np.float32(top), out=weights)
    np.exp(weights, out=weights)
    log_total = top + math.log(float(_sums(weights).sum()))
    best: TokenIds = np.arange(0)
    if num_top:
        best = _at_least(logits, num_top)
        best = best[np.argsort(-logits[best], kind="stable")][:num_top]
    return float(logits[token_id]) - log_total, [(int(i), float(logits[i]) - log_total) for i in best]


def _not_empty(allowed: TokenIds) -> TokenIds:
    if not len(allowed):
        raise ValueError("the constraint leaves no token to choose")
    return allowed
