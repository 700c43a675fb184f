"""The life of requests on a device that stores tokens in cells: everything but the computing.

Decides where a request's tokens are stored and what can be reused; never who runs. A backend inherits from
`SequenceHolder`, hands in a `CellStore` and adds `step`. Must be used from one thread, except where said.

Rules: what is pinned or reserved always fits, because everything else in the store is given up when cells are
needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.base import BackendError
from engine_service.backends.generation import Vocabulary
from engine_service.backends.holding import Live, RequestHolder
from engine_service.backends.parking import Memory, Parking, fresh_memory
from engine_service.backends.prefixes import Stored, best_match
from engine_service.scheduling.model import RequestId

WORTH_FETCHING: Final = 32  #: tokens; fewer are computed again as fast


class CellStore(Protocol):
    """Token slots, held by sequences that are known by small numbers and may share them."""

    @property
    def num_cells(self) -> int:
        """Slots in all."""
        ...

    @property
    def longest(self) -> int:
        """Slots that one sequence may hold."""
        ...

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        ...

    def length(self, sequence_id: int) -> int:
        """Return how many tokens the device itself says the sequence stores."""
        ...

    def num_held(self, sequence_ids: Sequence[int]) -> int:
        """Return how many different slots these sequences hold together."""
        ...

    def cut(self, sequence_id: int, length: int) -> None:
        """Forget the sequence's tokens from position length on; 0 forgets all."""
        ...

    def share(self, source_id: int, target_id: int, start: int, end: int) -> None:
        """Let the target, which stores exactly start tokens, hold the source's slots [start, end) too."""
        ...

    def save(self, sequence_id: int, memory: Memory = fresh_memory) -> NDArray[np.uint8]:
        """Return all that the sequence stores, to be loaded again; empty if the device cannot do that."""
        ...

    def load(self, sequence_id: int, data: NDArray[np.uint8], num_tokens: int) -> bool:
        """Store a saved sequence of num_tokens tokens under an id that stores nothing; False: no room."""
        ...


class SequenceHolder(RequestHolder):
    """Requests, their sequences, pinned prefixes and the automatic cache of one `CellStore`."""

    def __init__(
        self,
        store: CellStore,
        *,
        vocabulary: Vocabulary,
        num_sequence_ids: int,
        max_sequences: int,
        max_pinned: int,
        max_idle_cells: int,
        parking_bytes: int = 0,
    ) -> None:
        """Use the store's sequences 0 to num_sequence_ids - 1; max_sequences requests may hold one.

        Finished sequences stay cached in at most max_idle_cells cells (the newest in any case); those given
        up there are parked in at most parking_bytes of host memory.
        """
        super().__init__(
            vocabulary=vocabulary,
            num_slots=store.longest,
            max_sequences=max_sequences,
            max_pinned=max_pinned,
        )
        self._cells = store
        self._num_ids = num_sequence_ids
        self._free_ids = list(range(num_sequence_ids - 1, -1, -1))
        self._max_idle_cells = max_idle_cells
        self._parking = Parking(parking_bytes)

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def num_cells_held(self) -> int:
        """Token slots held by requests and pinned prefixes; what is only cached does not count."""
        return self._cells.num_held(self._ids_of_live() + self._prefixes.pinned_sequence_ids)

    @property
    def num_cells_cached(self) -> int:
        """Token slots held by nothing but the automatic cache."""
        return self._cells.num_cells - self._cells.num_free - self.num_cells_held

    @property
    def max_idle_cells(self) -> int:
        """Token slots that sequences of finished requests may keep in all, if they are more than one."""
        return self._max_idle_cells

    @property
    def num_parked(self) -> int:
        """Sequences that were moved to host memory."""
        return len(self._parking)

    @property
    def num_sequence_ids(self) -> int:
        """Sequences in all: for requests, pinned prefixes and what is cached."""
        return self._num_ids

    @property
    def cached_lengths(self) -> tuple[int, ...]:
        """The tokens of every cached sequence, least recently used first."""
        return tuple(len(stored.tokens) for stored in self._prefixes.cached)

    def check(self) -> None:
        """Compare these accounts with what the device says it stores; raise AssertionError otherwise."""
        expected = {
            stored.sequence_id: len(stored.tokens) for stored in self._prefixes if not stored.is_saved
        }
        expected |= {live.sequence_id: live.num_stored for live in self._live.values() if live.holds_cells}
        expected |= dict.fromkeys(self._free_ids, 0)
        if sorted(expected) != list(range(self._num_ids)):
            raise AssertionError(f"sequence ids were lost or used twice: {sorted(expected)}")
        stored = {sequence_id: self._cells.length(sequence_id) for sequence_id in expected}
        if stored != expected:
            wrong = {i: (stored[i], expected[i]) for i in expected if stored[i] != expected[i]}
            raise AssertionError(f"tokens (stored, accounted) differ by sequence: {wrong}")

    def drop_cache(self) -> None:
        """Give up every sequence that is only cached, parked ones included."""
        while self._evict(parks=False):
            pass
        self._parking.clear()

    # -- a request's life ------------------------------------------------------------------------------

    def resume(self, request_id: RequestId, *, reserved_tokens: int) -> int:
        """Give a preempted request a sequence again; its output so far counts as prompt."""
        num_stored = super().resume(request_id, reserved_tokens=reserved_tokens)
        kept = self._prefixes.take_owned(request_id)
        if kept is not None:
            self._free(kept)  # its cells are the request's own again
        return num_stored

    def release(self, request_id: RequestId) -> None:
        """Forget the request in whatever state it is; unknown ids are ignored."""
        super().release(request_id)
        self._prefixes.disown(request_id)
        self._trim_cache()

    def drop_prefix(self, request_id: RequestId) -> None:
        """Give up the prefix pinned by that request; sequences that share it keep their copy."""
        stored = self._prefixes.unpin(request_id)
        if stored is not None:
            self._keep(stored)
            self._trim_cache()

    def _make_room(self, num_tokens: int) -> None:
        """Give up cached sequences, oldest first, until num_tokens slots are free; raise BackendError."""
        while self._cells.num_free < num_tokens:
            if not self._evict():
                raise BackendError(
                    f"no room for {num_tokens} tokens: {self._cells.num_free} of {self._cells.num_cells} "
                    "slots are free and the rest is reserved"
                )

    # -- cells and ids ---------------------------------------------------------------------------------

    def _place(self, live: Live, reserved_tokens: int) -> None:
        """Give a sequence id and share the longest known beginning, one token short of everything.

        The pinned part comes from the pinned sequence itself even where a cached one is longer, so that its
        cells are really shared and not held a second time.
        """
        self._check_reservation(live, reserved_tokens)
        sequence_id = self._take_id()
        tokens = self._tokens_to_find(live, reserved_tokens)
        pinned, num_pinned = self._prefixes.pinned_match(tokens)
        if pinned is not None:
            self._cells.share(pinned.sequence_id, sequence_id, 0, num_pinned)
        other, num_shared = best_match(tokens, self._reusable())
        fetched = self._fetch(tokens, better_than=max(num_pinned, num_shared))
        if fetched is not None:
            other, num_shared = fetched
        if other is not None and num_shared > num_pinned:
            self._cells.share(other.sequence_id, sequence_id, num_pinned, num_shared)
            self._prefixes.touch(other.sequence_id)
        if fetched is not None:
            self._free(fetched[0].sequence_id)  # what the request does not share of it stays parked
        live.sequence_id, live.reserved = sequence_id, reserved_tokens
        live.num_stored = max(num_pinned, num_shared)

    @staticmethod
    def _tokens_to_find(live: Live, reserved_tokens: int) -> NDArray[np.int32]:
        """Return the tokens that may be stored already: all but one that the request has room for."""
        generation = live.generation
        if generation.order.wants_embedding:
            live.hidden_sum = None
            return generation.tokens(0, 0)  # what the model makes of every token is needed, and not kept
        return generation.tokens(0, min(generation.num_tokens - 1, reserved_tokens))

    def _reusable(self) -> Iterator[Stored]:
        yield from reversed(self._prefixes.cached)
        for live in self._live.values():
            if live.holds_cells and live.num_stored:
                tokens = live.generation.tokens(0, live.num_stored)
                yield Stored(sequence_id=live.sequence_id, tokens=tokens)

    def _take_id(self) -> int:
        if not self._free_ids:
            self._evict()
        if not self._free_ids:
            raise ValueError(f"{self._max_sequences} requests hold a sequence already")
        return self._free_ids.pop()

    def _evict(self, *, parks: bool = True) -> bool:
        """Give the oldest cached sequence up, if possible to host memory; return whether there was one."""
        stored = self._prefixes.take_oldest()
        if stored is None:
            return False
        if parks:
            self._park(stored)
        self._free(stored.sequence_id)
        return True

    def _park(self, stored: Stored) -> None:
        """Save a cached sequence to host memory, if it is long enough to be fetched and there is room."""
        if self._parking.is_open and len(stored.tokens) >= WORTH_FETCHING:
            memory = partial(self._parking.buffer, stored.tokens, owner=stored.owner, is_away=self._is_away)
            data = self._cells.save(stored.sequence_id, memory)
            if len(data):
                self._parking.put(stored.tokens, data)

    def _is_away(self, request_id: RequestId) -> bool:
        """Return whether a request was preempted and has not come back."""
        live = self._live.get(request_id)
        return live is not None and not live.holds_cells

    def _fetch(self, tokens: NDArray[np.int32], *, better_than: int) -> tuple[Stored, int] | None:
        """Bring a parked sequence back if it shares clearly more with the tokens; return it and how much.

        Nothing that is cached is given up for it: without free cells or ids there is no fetching.
        """
        parked, num_shared = self._parking.best_match(tokens)
        if parked is None or num_shared < better_than + WORTH_FETCHING:
            return None
        if not self._free_ids or self._cells.num_free < len(parked.tokens):
            return None
        sequence_id = self._free_ids.pop()
        if not self._cells.load(sequence_id, parked.data, len(parked.tokens)):
            self._give_back(sequence_id)
            return None
        self._parking.touch(parked)
        return Stored(sequence_id=sequence_id, tokens=parked.tokens), num_shared

    def _free(self, sequence_id: int) -> None:
        self._cells.cut(sequence_id, 0)
        self._give_back(sequence_id)

    def _give_back(self, sequence_id: int) -> None:
        """Note that an id stores nothing; the least is taken first, so that those in use lie together."""
        self._free_ids.append(sequence_id)
        self._free_ids.sort(reverse=True)

    def _pin(self, live: Live) -> None:
        """Keep the sequence with the prompt alone, as nobody's."""
        num_prompt = live.generation.num_prompt
        self._cells.cut(live.sequence_id, num_prompt)
        tokens = live.generation.tokens(0, num_prompt).copy()
        self._prefixes.pin(live.request_id, Stored(sequence_id=live.sequence_id, tokens=tokens))
        live.sequence_id = -1

    def _retire(self, live: Live, *, owner: RequestId | None) -> None:
        """Take the sequence from a request; what it stored stays cached while nobody needs the cells.

        Nothing is kept of a text to be embedded: it begins anew, and a sweep would drive conversations out.
        """
        tokens = live.generation.tokens(0, live.num_stored).copy()
        stored = Stored(sequence_id=live.sequence_id, tokens=tokens, owner=owner)
        live.sequence_id = -1
        live.num_stored = live.reserved = 0
        if live.generation.order.wants_embedding:
            self._free(stored.sequence_id)
        else:
            self._keep(stored)

    def _ids_of_live(self) -> list[int]:
        return [live.sequence_id for live in self._live.values() if live.holds_cells]

    def _trim_cache(self) -> None:
        """Bound what idle cells cost: every row that is computed passes over all cells, its own or not."""
        while self._prefixes.num_ownerless > 1 and self._num_idle() > self._max_idle_cells:
            self._evict()

    def _num_idle(self) -> int:
        """Return the cells held by nothing but sequences of finished requests."""
        ids = self._ids_of_live() + self._prefixes.pinned_sequence_ids
        ids += [stored.sequence_id for stored in self._prefixes.cached if stored.owner is not None]
        return self._cells.num_cells - self._cells.num_free - self._cells.num_held(ids)

    def _keep(self, stored: Stored) -> None:
        if not len(stored.tokens):
            self._free(stored.sequence_id)
            return
        for sequence_id in self._prefixes.take_beginnings_of(stored):
            self._free(sequence_id)
        self._prefixes.keep(stored)
