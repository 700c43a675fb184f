"""How equal the service was: the measures of the papers, from who was served what and when.

Knows residents by their place in a list, service in units divided by weight, and seconds.

    D            sup over intervals [a, b) of max |s_i/w_i - s_j/w_j| over residents with something waiting
                 in the same class throughout (VTC, theorem 4.4), computed online: per pair, the range of the
                 difference since both began to wait
    bound used   D / 2U, U = max(w_p L, w_q M), L the longest prompt, M the tokens that can run at once
    window diff  sum_i min(max_j s_j - s_i, |r_i - s_i|) over 60 s, r what was asked: under-demand is not
                 unfairness (VTC's plots). Differs: service counts when computed, not spread over a request
    Jain         (sum x)^2 / (n sum x^2) over 5 minutes, among those who asked for at least their fair share
    entitlement  the weighted max-min fair share of what was served, given what everybody asked for
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_service.simulator.quantiles import Quantiles, of_values

WINDOW_S = 60
JAIN_WINDOW_S = 300


class ServiceGap:
    """The greatest difference in service between two residents while both wait in the same class.

    Across classes a difference is meant: a class comes before another whoever waits in it.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        """Know the residents by their weights (>= 1)."""
        self._weights = list(weights)
        self.normal = [0.0] * len(weights)  #: service divided by weight
        self.worst = 0.0
        self._backlogged: dict[str, list[int]] = {}
        self._ranges: dict[str, dict[tuple[int, int], list[float]]] = {}

    def starts_waiting(self, class_id: str, who: int) -> None:
        """Note that the resident had nothing waiting in the class and now has."""
        others = self._backlogged.setdefault(class_id, [])
        ranges = self._ranges.setdefault(class_id, {})
        for other in others:
            pair = (min(who, other), max(who, other))
            difference = self.normal[pair[0]] - self.normal[pair[1]]
            ranges[pair] = [difference, difference]
        others.append(who)
        others.sort()

    def stops_waiting(self, class_id: str, who: int) -> None:
        """Note that the resident has nothing waiting in the class any more."""
        others = self._backlogged[class_id]
        others.remove(who)
        for other in others:
            self._ranges[class_id].pop((min(who, other), max(who, other)), None)

    def served(self, units: dict[int, int]) -> None:
        """Add what an iteration computed for each resident."""
        for who, amount in units.items():
            self.normal[who] += amount / self._weights[who]
        for class_id, backlogged in self._backlogged.items():
            if len(backlogged) > 1:
                self._widen_all(class_id, backlogged, units)

    def _widen_all(self, class_id: str, backlogged: list[int], units: dict[int, int]) -> None:
        ranges = self._ranges[class_id]
        for who in backlogged:
            if who not in units:
                continue
            for other in backlogged:
                if other != who and (other not in units or who < other):
                    self._widen(ranges, (who, other) if who < other else (other, who))

    def _widen(self, ranges: dict[tuple[int, int], list[float]], pair: tuple[int, int]) -> None:
        span = ranges[pair]
        difference = self.normal[pair[0]] - self.normal[pair[1]]
        if difference < span[0]:
            span[0] = difference
        elif difference > span[1]:
            span[1] = difference
        else:
            return
        if span[1] - span[0] > self.worst:
            self.worst = span[1] - span[0]

    def spread(self) -> float | None:
        """Return most minus least served so far among those who wait in a class; None for fewer than two."""
        spreads = []
        for backlogged in self._backlogged.values():
            if len(backlogged) > 1:
                values = [self.normal[who] for who in backlogged]
                spreads.append(max(values) - min(values))
        return max(spreads, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Per resident and second: units of service asked for and computed, and the weight."""

    weights: Sequence[int]
    served: Sequence[Sequence[int]]
    asked: Sequence[Sequence[int]]

    @property
    def num_seconds(self) -> int:
        """Whole seconds of the run."""
        return len(self.served[0]) if self.served else 0


def window_difference(ledger: Ledger, window_s: int = WINDOW_S) -> Quantiles:
    """Return VTC's windowed difference, in units per second, over all windows of the run."""
    served, asked = _running(ledger.served), _running(ledger.asked)
    differences = []
    for start in range(max(0, ledger.num_seconds - window_s) + 1 if ledger.num_seconds else 0):
        end = min(start + window_s, ledger.num_seconds)
        got = [(s[end] - s[start]) / w for s, w in zip(served, ledger.weights, strict=True)]
        wanted = [(a[end] - a[start]) / w for a, w in zip(asked, ledger.weights, strict=True)]
        most = max(got, default=0.0)
        total = sum(min(most - s, abs(r - s)) for s, r in zip(got, wanted, strict=True))
        differences.append(total / window_s)
    return of_values(differences)


def _running(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(itertools.accumulate(row, initial=0)) for row in rows]


def jain(ledger: Ledger, window_s: int = JAIN_WINDOW_S) -> Quantiles:
    """Return Jain's index of every window in which at least two residents asked for their fair share.

    What was asked before and not yet served counts as asked.
    """
    served, asked = _running(ledger.served), _running(ledger.asked)
    indices = []
    for start in range(0, max(1, ledger.num_seconds - window_s + 1), window_s):
        end = min(start + window_s, ledger.num_seconds)
        got = [s[end] - s[start] for s in served]
        wanted = [a[end] - s[start] for a, s in zip(asked, served, strict=True)]
        shares = _fair_shares(sum(got), ledger.weights)
        x = [
            amount / weight
            for amount, want, share, weight in zip(got, wanted, shares, ledger.weights, strict=True)
            if want >= share > 0
        ]
        squares = sum(value * value for value in x)
        if len(x) > 1 and squares:
            indices.append(sum(x) ** 2 / (len(x) * squares))
    return of_values(indices)


def _fair_shares(total: int, weights: Sequence[int]) -> list[float]:
    return [total * weight / sum(weights) for weight in weights]


def entitlements(asked: Sequence[float], weights: Sequence[int], total: float) -> list[float]:
    """Return the weighted max-min fair split of total among residents who asked for that much at most."""
    granted = [0.0] * len(asked)
    open_ids = [i for i, want in enumerate(asked) if want > 0]
    left = min(total, float(sum(asked)))
    while open_ids and left > 1e-9:
        per_weight = left / sum(weights[i] for i in open_ids)
        satisfied = [i for i in open_ids if asked[i] <= per_weight * weights[i]]
        if not satisfied:
            for i in open_ids:
                granted[i] = per_weight * weights[i]
            return granted
        for i in satisfied:
            granted[i] = float(asked[i])
            left -= asked[i]
        open_ids = [i for i in open_ids if i not in satisfied]
    return granted


def least_window_share(part: Sequence[int], whole: Sequence[int], window_s: int) -> float | None:
    """Return the least share that part had of whole in any window; None for runs shorter than one."""
    parts, wholes = _running([part])[0], _running([whole])[0]
    shares = [
        (parts[start + window_s] - parts[start]) / total
        for start in range(len(part) - window_s + 1)
        if (total := wholes[start + window_s] - wholes[start])
    ]
    return min(shares, default=None)


def added(rows: Iterable[Sequence[int]], length: int) -> list[int]:
    """Return the sum of the rows, column by column."""
    total = [0] * length
    for row in rows:
        for i, value in enumerate(row):
            total[i] += value
    return total
