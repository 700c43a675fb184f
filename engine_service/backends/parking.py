"""Sequences moved from the device's cache to host memory, so that they cost nothing until they are of use.

Decides which are forgotten: least recently used first, when the bytes run out. Knows tokens and bytes, no
cells. Used from the engine's thread only.

On a CPU a stored sequence slows everybody's decoding even while nobody uses it (every row is masked against
all cells), and fetching it back is some hundred times cheaper than computing it again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.generation import common_prefix

PARKING_BYTES: Final = 256 * 2**20
"""What the llama.cpp backend parks in, beside its cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parked:
    """A sequence's tokens and what the device needs to have it back."""

    number: int
    tokens: NDArray[np.int32]
    data: NDArray[np.uint8]


class Parking:
    """Bounded host memory for sequences that are not in use."""

    def __init__(self, max_bytes: int) -> None:
        """Hold at most max_bytes (0: nothing is ever parked)."""
        self._max_bytes = max_bytes
        self._parked: OrderedDict[int, Parked] = OrderedDict()
        self._numbers = count()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def is_open(self) -> bool:
        """Whether anything may be parked here."""
        return self._max_bytes > 0

    def put(self, tokens: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        """Keep a sequence as the most recently used one; what it repeats from its start is forgotten."""
        if data.nbytes > self._max_bytes:
            return
        for parked in list(self._parked.values()):
            shared = common_prefix(parked.tokens, tokens)
            if shared == len(tokens):
                self._parked.move_to_end(parked.number)
                return  # a longer one with this beginning is here
            if shared == len(parked.tokens):
                self._drop(parked)
        parked = Parked(number=next(self._numbers), tokens=tokens, data=data)
        self._parked[parked.number] = parked
        self.num_bytes += data.nbytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._parked.values())))

    def best_match(self, tokens: NDArray[np.int32]) -> tuple[Parked | None, int]:
        """Return the sequence that shares the longest beginning with the tokens, and that length."""
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
        """Forget everything."""
        self._parked.clear()
        self.num_bytes = 0

    def _drop(self, parked: Parked) -> None:
        del self._parked[parked.number]
        self.num_bytes -= parked.data.nbytes
