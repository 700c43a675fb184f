"""Sequences moved from the device's cache to host memory, so that they cost nothing until they are of use.

Decides which are forgotten: least recently used first, when the bytes run out. Knows tokens and bytes, no
cells. Used from the engine's thread only.

On a CPU a stored sequence slows everybody's decoding even while nobody uses it (every row is masked against
all cells), and fetching it back is some hundred times cheaper than computing it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.generation import common_prefix
from engine_service.scheduling.model import RequestId

PARKING_BYTES: Final = 256 * 2**20
"""What the llama.cpp backend parks in, beside its cache."""
Memory = Callable[[int], NDArray[np.uint8]]
"""Where so many bytes may be written: an array of exactly that length."""

_LARGER_BY: Final = 3  #: times; memory larger than that is kept for a longer sequence
_WORTH_KEEPING: Final = 2**20


def fresh_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory that nobody has used yet."""
    return np.empty(num_bytes, dtype=np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parked:
    """A sequence's tokens and what the device needs to have it back."""

    number: int
    tokens: NDArray[np.int32]
    data: NDArray[np.uint8]


class Parking:
    """Bounded host memory for sequences that are not in use.

    Memory that was used once is kept, within the bound, and used again: to map fresh memory takes many times
    as long as to copy into it, and whoever speaks waits for that. Some is reserved for whoever makes room for
    speech and comes back right after.
    """

    def __init__(self, max_bytes: int) -> None:
        """Hold at most max_bytes (0: nothing is ever parked)."""
        self._max_bytes = max_bytes
        self._parked: OrderedDict[int, Parked] = OrderedDict()
        self._spare: list[NDArray[np.uint8]] = []
        self._reserved: NDArray[np.uint8] | None = None
        self._on_reserved: Parked | None = None
        self._reserved_for: RequestId | None = None
        self._numbers = count()
        self.num_bytes = 0  #: of what is parked, spare and reserved memory apart

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def is_open(self) -> bool:
        """Whether anything may be parked here."""
        return self._max_bytes > 0

    def prepare(self, num_bytes: int) -> None:
        """Map memory for one sequence of num_bytes ahead of its being needed, unless that is too much."""
        if num_bytes <= self._max_bytes - self._num_all_bytes:
            self._spare.append(np.ones(num_bytes, dtype=np.uint8))  # zeros would not be mapped yet

    def reserve(self, num_bytes: int) -> None:
        """Map memory that only who comes back is saved in, unless that is too much; it counts from now on."""
        if self._reserved is None and num_bytes <= self._max_bytes - self._num_all_bytes:
            self._reserved = np.ones(num_bytes, dtype=np.uint8)
            self._max_bytes -= num_bytes

    def buffer(
        self,
        tokens: NDArray[np.int32],
        num_bytes: int,
        *,
        owner: RequestId | None = None,
        is_away: Callable[[RequestId], bool] = lambda owner: True,
    ) -> NDArray[np.uint8]:
        """Return memory to save a sequence in; what it repeats from its start is forgotten.

        The owner is the request that will be back for it soon; is_away says of an earlier one whether it
        still will be.
        """
        for parked in list(self._parked.values()):
            if len(parked.tokens) <= len(tokens) and common_prefix(parked.tokens, tokens) == len(
                parked.tokens
            ):
                self._drop(parked)
        if owner is not None and (reserved := self._free_reserve(num_bytes, is_away)) is not None:
            self._reserved_for = owner
            return reserved
        if num_bytes > self._max_bytes:
            return fresh_memory(num_bytes)
        while self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            self._drop(self._oldest())
        fitting = [spare for spare in self._spare if num_bytes <= spare.nbytes <= _LARGER_BY * num_bytes]
        if not fitting:
            return fresh_memory(num_bytes + num_bytes // 8)[:num_bytes]  # it may grow
        best = min(fitting, key=len)
        self._spare = [spare for spare in self._spare if spare is not best]
        return best[:num_bytes]

    def _free_reserve(self, num_bytes: int, is_away: Callable[[RequestId], bool]) -> NDArray[np.uint8] | None:
        """Return the reserved memory if so much fits and nobody has still to come back for what is there."""
        if self._reserved is None or self._reserved.nbytes < num_bytes:
            return None
        if self._on_reserved is not None:
            if self._reserved_for is not None and is_away(self._reserved_for):
                return None
            self._drop(self._on_reserved)
        return self._reserved[:num_bytes]

    def _oldest(self) -> Parked:
        """Return what is forgotten next; reserved memory is not won by forgetting."""
        return next(parked for parked in self._parked.values() if parked is not self._on_reserved)

    def put(self, tokens: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        """Keep a sequence as the most recently used one; what it repeats from its start is forgotten."""
        is_reserved = _memory(data) is self._reserved
        if not is_reserved and _num_bytes(data) > self._max_bytes:
            return
        for parked in list(self._parked.values()):
            shared = common_prefix(parked.tokens, tokens)
            if shared == len(tokens):
                self._parked.move_to_end(parked.number)
                self._keep_memory(data)
                return  # a longer one with this beginning is here
            if shared == len(parked.tokens):
                self._drop(parked)
        parked = Parked(number=next(self._numbers), tokens=tokens, data=data)
        self._parked[parked.number] = parked
        if is_reserved:
            self._on_reserved = parked
            return
        self.num_bytes += _num_bytes(data)
        while self.num_bytes > self._max_bytes:
            self._drop(self._oldest())
        self._trim()

    def best_match(self, tokens: NDArray[np.int32]) -> tuple[Parked | None, int]:
        """Return the sequence that shares the longest beginning with the tokens, and that length.

        Its bytes are valid until `buffer` or `put` is called.
        """
        best, best_length = None, 0
        for parked in reversed(self._parked.values()):
            length = common_prefix(tokens, parked.tokens)
            if length > best_length:
                best, best_length = parked, length
        return best, best_length

    def touch(self, parked: Parked) -> None:
        """Note that a sequence was of use."""
        self._parked.move_to_end(parked.number)

    def clear(self) -> None:
        """Forget everything; reserved memory stays."""
        self._parked.clear()
        self._on_reserved = None
        self._spare.clear()
        self.num_bytes = 0

    def _drop(self, parked: Parked) -> None:
        del self._parked[parked.number]
        if parked is self._on_reserved:
            self._on_reserved = None
            return
        self.num_bytes -= _num_bytes(parked.data)
        self._keep_memory(parked.data)

    def _keep_memory(self, data: NDArray[np.uint8]) -> None:
        memory = _memory(data)
        if memory.nbytes >= _WORTH_KEEPING and memory is not self._reserved:
            self._spare.append(memory)
            self._trim()

    def _trim(self) -> None:
        """Give spare memory back, the oldest first, where there is more than the bound allows."""
        while self._spare and self._num_all_bytes > self._max_bytes:
            del self._spare[0]

    @property
    def _num_all_bytes(self) -> int:
        return self.num_bytes + sum([spare.nbytes for spare in self._spare])


def _memory(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return all of the memory that some bytes lie in."""
    whole = data.base
    return whole if isinstance(whole, np.ndarray) and whole.dtype == np.uint8 else data


def _num_bytes(data: NDArray[np.uint8]) -> int:
    return _memory(data).nbytes
