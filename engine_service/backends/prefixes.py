"""Sequences that outlived their request: pinned prefixes and an automatic cache.

Decides which stored sequence shares the longest beginning with a prompt and which is given up first. Knows
sequence ids and tokens, no cells. Only `pinned_match` may be called from any thread.

Pinned ones stay until they are dropped. Cached ones are given up whenever cells or ids are needed, so they
never count as held: first those of finished requests, least recently used first, then those of preempted
requests, which are sure to come back for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.generation import common_prefix
from engine_service.scheduling.model import RequestId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """A sequence whose tokens are in the cache, or were saved to be copied there."""

    sequence_id: int  #: -1: in no cells
    tokens: NDArray[np.int32]
    owner: RequestId | None = None  #: the preempted request it waits for
    data: NDArray[np.uint8] | None = None  #: what the device needs to store it again, where it was saved

    @property
    def is_saved(self) -> bool:
        """Whether it holds no cells."""
        return self.data is not None


def best_match(tokens: NDArray[np.int32], candidates: Iterable[Stored]) -> tuple[Stored | None, int]:
    """Return the candidate that shares the longest beginning with the tokens, and that length."""
    best, best_length = None, 0
    for stored in candidates:
        length = common_prefix(tokens, stored.tokens)
        if length > best_length:
            best, best_length = stored, length
    return best, best_length


class PrefixStore:
    """What is stored without belonging to a request."""

    def __init__(self) -> None:
        """Start empty."""
        self._pinned: dict[RequestId, Stored] = {}
        self._pinned_view: tuple[Stored, ...] = ()  # replaced as a whole: other threads read it
        self._cached: OrderedDict[int, Stored] = OrderedDict()

    @property
    def num_pinned(self) -> int:
        """Pinned prefixes."""
        return len(self._pinned)

    def __iter__(self) -> Iterator[Stored]:
        yield from self._pinned.values()
        yield from self._cached.values()

    @property
    def pinned_ids(self) -> tuple[RequestId, ...]:
        """The requests that pinned something."""
        return tuple(self._pinned)

    @property
    def pinned(self) -> tuple[Stored, ...]:
        """The pinned sequences (any thread)."""
        return self._pinned_view

    @property
    def pinned_sequence_ids(self) -> list[int]:
        """The pinned sequences that hold cells."""
        return [stored.sequence_id for stored in self._pinned_view if not stored.is_saved]

    @property
    def cached(self) -> tuple[Stored, ...]:
        """The cached sequences, least recently used first."""
        return tuple(self._cached.values())

    @property
    def num_ownerless(self) -> int:
        """Cached sequences that no preempted request waits for."""
        return sum(stored.owner is None for stored in self._cached.values())

    def take_owned(self, request_id: RequestId) -> int | None:
        """Forget the sequence that waited for a preempted request; return its id, None if it was given up."""
        for sequence_id, stored in self._cached.items():
            if stored.owner == request_id:
                del self._cached[sequence_id]
                return sequence_id
        return None

    def disown(self, request_id: RequestId) -> None:
        """Note that a preempted request will not come back."""
        for sequence_id, stored in self._cached.items():
            if stored.owner == request_id:
                self._cached[sequence_id] = Stored(sequence_id=sequence_id, tokens=stored.tokens)

    def pin(self, request_id: RequestId, stored: Stored) -> None:
        """Keep a sequence until `unpin`."""
        self._pinned[request_id] = stored
        self._pinned_view = tuple(self._pinned.values())

    def unpin(self, request_id: RequestId) -> Stored | None:
        """Return the sequence that was pinned by that request, now nobody's; None if there is none."""
        stored = self._pinned.pop(request_id, None)
        self._pinned_view = tuple(self._pinned.values())
        return stored

    def pinned_match(self, tokens: NDArray[np.int32]) -> tuple[Stored | None, int]:
        """Return the pinned sequence with the longest shared beginning and its length (any thread)."""
        return best_match(tokens, self._pinned_view)

    def keep(self, stored: Stored) -> None:
        """Cache a sequence as the most recently used one."""
        self._cached[stored.sequence_id] = stored

    def take(self, sequence_id: int) -> None:
        """Forget a cached sequence that a request goes on with."""
        del self._cached[sequence_id]

    def touch(self, sequence_id: int) -> None:
        """Note that a cached sequence was of use."""
        if sequence_id in self._cached:
            self._cached.move_to_end(sequence_id)

    def take_beginnings_of(self, stored: Stored) -> list[int]:
        """Forget the cached sequences that the given one repeats from its start; return their ids."""
        num = len(stored.tokens)
        repeated = [
            other.sequence_id
            for other in self._cached.values()
            if len(other.tokens) <= num and common_prefix(other.tokens, stored.tokens) == len(other.tokens)
        ]
        for sequence_id in repeated:
            del self._cached[sequence_id]
        return repeated

    def take_oldest(self) -> Stored | None:
        """Forget the cached sequence that is missed least and return it, None if nothing is cached."""
        ownerless = (i for i, stored in self._cached.items() if stored.owner is None)
        sequence_id = next(ownerless, next(iter(self._cached), None))
        return None if sequence_id is None else self._cached.pop(sequence_id)
