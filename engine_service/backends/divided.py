"""Where the cache is divided: every sequence has a part of it, and no cell is ever shared.

Decides what is copied from where. A backend that mixes `DividedHolder` in front of its own `SequenceHolder`
has one sequence id for each request that runs at once; pinned prefixes and what was given up lie in host
memory as saved bytes and are copied into the part of who begins with them. Knows no library.

Computing is faster this way, because a row passes over the cells of its own sequence only, and no request
can be longer than a part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.generation import common_prefix
from engine_service.backends.holding import Live
from engine_service.backends.prefixes import Stored, best_match
from engine_service.backends.sequences import WORTH_FETCHING, SequenceHolder
from engine_service.scheduling.model import RequestId

_MOST_BEYOND: Final = 32
"""Tokens that are moved to host memory for each that need not be computed again.

Moving 32 takes a third of the time of computing one; but host memory is finite, and a part may be free.
"""


class DividedHolder(SequenceHolder):
    """Requests of a device on which a sequence can be saved and loaded, and not shared."""

    def drop_prefix(self, request_id: RequestId) -> None:
        """Give up the prefix pinned by that request; sequences that began with it keep their copy."""
        stored = self._prefixes.unpin(request_id)
        if stored is not None and stored.data is not None and len(stored.tokens):
            self._parking.put(stored.tokens, stored.data)

    def _place(self, live: Live, reserved_tokens: int) -> None:
        """Go on in the part that holds the beginning, or copy the longest known beginning into one."""
        self._check_reservation(live, reserved_tokens)
        tokens = self._tokens_to_find(live, reserved_tokens)
        left, num_stored = best_match(tokens, self._left_by_nobody_else(live.request_id))
        if left is not None and self._goes_on_in(left, num_stored, num_saved=self._best_saved(tokens)[1]):
            sequence_id = left.sequence_id
            self._prefixes.take(sequence_id)
            if not _is_hardly_anything(len(left.tokens) - num_stored, num_stored):
                self._park(left)
            self._cells.cut(sequence_id, num_stored)
        else:
            sequence_id, num_stored = self._take_part(tokens)
            num_stored = self._copy_beginning(tokens, sequence_id, num_stored)
        live.sequence_id, live.reserved, live.num_stored = sequence_id, reserved_tokens, num_stored

    def _left_by_nobody_else(self, request_id: RequestId) -> list[Stored]:
        """Return what may be gone on in, the least number first: parts in use are to lie side by side."""
        left = [stored for stored in self._prefixes.cached if stored.owner in (None, request_id)]
        return sorted(left, key=lambda stored: stored.sequence_id)

    def _goes_on_in(self, left: Stored, num_shared: int, *, num_saved: int) -> bool:
        """Return whether a cached sequence is the best beginning, and little enough lies beyond.

        That is saved first, unless it is hardly anything.
        """
        num_beyond = len(left.tokens) - num_shared
        if num_shared < num_saved or _is_hardly_anything(num_beyond, num_shared):
            return num_shared >= num_saved
        return self._parking.is_open and num_beyond <= _MOST_BEYOND * num_shared

    def _take_part(self, tokens: NDArray[np.int32]) -> tuple[int, int]:
        """Return an empty part, or the one that is missed least, and how many of the tokens it holds."""
        oldest = None if self._free_ids else self._prefixes.take_oldest()
        if oldest is None:
            return self._take_id(), 0
        self._park(oldest)  # it may be what is wanted
        num_shared = common_prefix(tokens, oldest.tokens)
        self._cells.cut(oldest.sequence_id, num_shared)
        return oldest.sequence_id, num_shared

    def _copy_beginning(self, tokens: NDArray[np.int32], sequence_id: int, num_stored: int) -> int:
        """Fill a part with the longest beginning that is known, if it holds less; return what it holds."""
        saved, num_saved = self._best_saved(tokens)
        other, num_shared = best_match(tokens, self._reusable())
        if other is not None and num_shared >= num_saved + WORTH_FETCHING:
            self._prefixes.touch(other.sequence_id)
            saved, num_saved = replace(other, data=self._cells.save(other.sequence_id)), num_shared
        if saved is None or saved.data is None or num_saved <= num_stored:
            return num_stored
        self._cells.cut(sequence_id, 0)
        if not self._load(sequence_id, saved.tokens, saved.data):
            return 0
        self._cells.cut(sequence_id, num_saved)
        return num_saved

    def _best_saved(self, tokens: NDArray[np.int32]) -> tuple[Stored | None, int]:
        """Return the longest beginning in host memory and its length, rather a pinned one."""
        pinned, num_pinned = self._prefixes.pinned_match(tokens)
        parked, num_parked = self._parking.best_match(tokens)
        if parked is None or num_parked < num_pinned + WORTH_FETCHING:
            return pinned, num_pinned
        self._parking.touch(parked)
        return Stored(sequence_id=-1, tokens=parked.tokens, data=parked.data), num_parked

    def _load(self, sequence_id: int, tokens: NDArray[np.int32], data: NDArray[np.uint8]) -> bool:
        return len(data) > 0 and self._cells.load(sequence_id, data, len(tokens))

    def _pin(self, live: Live) -> None:
        """Save the prompt as nobody's, in no cells; nothing, if the device cannot save it."""
        num_prompt = live.generation.num_prompt
        self._cells.cut(live.sequence_id, num_prompt)
        data = self._cells.save(live.sequence_id)
        tokens = live.generation.tokens(0, num_prompt if len(data) else 0).copy()
        self._prefixes.pin(live.request_id, Stored(sequence_id=-1, tokens=tokens, data=data))
        self._free(live.sequence_id)
        live.sequence_id = -1


def _is_hardly_anything(num_beyond: int, num_shared: int) -> bool:
    """Return whether what a sequence has beyond a beginning may be lost for it."""
    return num_beyond < min(WORTH_FETCHING, num_shared)
