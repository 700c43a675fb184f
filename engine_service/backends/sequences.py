"""The life of requests on a device that stores tokens in cells: everything but the computing.

Decides where a request's tokens are stored and what can be reused; never who runs. A backend inherits from
`SequenceHolder`, hands in a `CellStore` and adds `step`. Must be used from one thread, except where said.

Rules: a request never stores more tokens than it reserved; what is pinned or reserved always fits, because
everything else in the store is given up when cells are needed; a fault of one request releases only that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from engine_service.backends.base import (
    BackendError,
    ChunkOrder,
    FinishReason,
    GenerationOrder,
    SequenceOutcome,
)
from engine_service.backends.generation import Generation, Matcher, Vocabulary, as_tokens
from engine_service.backends.prefixes import PrefixStore, Stored, best_match
from engine_service.backends.sampling import Floats
from engine_service.scheduling.model import PreemptionMode, RequestId


class CellStore(Protocol):
    """Token slots, held by sequences that are known by small numbers and may share them."""

    @property
    def num_cells(self) -> int:
        """Slots in all."""
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


class Live:
    """A request the backend knows: its generation and, while it holds cells, where they are."""

    __slots__ = ("generation", "num_stored", "reserved", "sequence_id")

    def __init__(self, generation: Generation) -> None:
        """Begin without a sequence."""
        self.generation = generation
        self.sequence_id = -1  #: -1 while preempted
        self.num_stored = 0
        self.reserved = 0

    @property
    def request_id(self) -> RequestId:
        """Whose it is."""
        return self.generation.order.request_id

    @property
    def holds_cells(self) -> bool:
        """Whether it has a sequence."""
        return self.sequence_id >= 0


class Part:
    """What one request has in the iteration under way."""

    __slots__ = ("is_chunk", "is_last", "live", "num_tokens", "output_row")

    def __init__(self, live: Live, num_tokens: int, *, is_chunk: bool) -> None:
        """Plan num_tokens (>= 1) more of the request's tokens."""
        self.live = live
        self.num_tokens = num_tokens
        self.is_chunk = is_chunk  #: ordered as a prefill
        #: every token of the sequence is stored after this, so the next one can be chosen
        self.is_last = live.num_stored + num_tokens == live.generation.num_tokens
        self.output_row = -1  #: the backend's row of logits; -1: none

    @property
    def wants_logits(self) -> bool:
        """Whether the next token is to be chosen after this."""
        return self.is_last and self.live.generation.order.max_tokens > 0


class SequenceHolder:
    """Requests, their sequences, pinned prefixes and the automatic cache of one `CellStore`."""

    def __init__(
        self,
        store: CellStore,
        *,
        vocabulary: Vocabulary,
        num_sequence_ids: int,
        max_sequences: int,
        max_idle_cells: int,
    ) -> None:
        """Use the store's sequences 0 to num_sequence_ids - 1; max_sequences of them are for requests.

        Finished sequences stay cached in at most max_idle_cells cells (the newest in any case).
        """
        self._cells = store
        self._vocabulary = vocabulary
        self._live: dict[RequestId, Live] = {}
        self._prefixes = PrefixStore()
        self._num_ids = num_sequence_ids
        self._free_ids = list(range(num_sequence_ids - 1, -1, -1))
        self._max_sequences = max_sequences
        self._max_pinned = num_sequence_ids - max_sequences
        self._max_idle_cells = max_idle_cells

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def num_cells_held(self) -> int:
        """Token slots held by requests and pinned prefixes; what is only cached does not count."""
        ids = [live.sequence_id for live in self._live.values() if live.holds_cells]
        return self._cells.num_held(ids + [stored.sequence_id for stored in self._prefixes.pinned])

    @property
    def num_cells_cached(self) -> int:
        """Token slots held by nothing but the automatic cache."""
        return self._cells.num_cells - self._cells.num_free - self.num_cells_held

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """Every request that is known, preempted ones included."""
        return tuple(self._live)

    @property
    def pinned_ids(self) -> tuple[RequestId, ...]:
        """The requests whose prompts are pinned prefixes."""
        return self._prefixes.pinned_ids

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
        expected = {stored.sequence_id: len(stored.tokens) for stored in self._prefixes}
        expected |= {live.sequence_id: live.num_stored for live in self._live.values() if live.holds_cells}
        expected |= dict.fromkeys(self._free_ids, 0)
        if sorted(expected) != list(range(self._num_ids)):
            raise AssertionError(f"sequence ids were lost or used twice: {sorted(expected)}")
        stored = {sequence_id: self._cells.length(sequence_id) for sequence_id in expected}
        if stored != expected:
            wrong = {i: (stored[i], expected[i]) for i in expected if stored[i] != expected[i]}
            raise AssertionError(f"tokens (stored, accounted) differ by sequence: {wrong}")

    def drop_cache(self) -> None:
        """Give up every sequence that is only cached."""
        while self._evict():
            pass

    def shared_prefix_tokens(self, prompt_ids: Sequence[int]) -> int:
        """Return how many leading tokens a pinned prefix holds; always < len(prompt_ids) (any thread)."""
        return self._prefixes.pinned_match(as_tokens(prompt_ids[:-1]))[1]

    # -- a request's life ------------------------------------------------------------------------------

    def _matcher_for(self, order: GenerationOrder) -> Matcher | None:
        """Return the order's grammar at its beginning, None without; raise InvalidConstraint."""
        raise NotImplementedError

    def admit(self, order: GenerationOrder, *, reserved_tokens: int) -> int:
        """Give the request a sequence; return how many leading tokens need not be computed.

        Raises ValueError for an order that cannot be carried out, InvalidConstraint for its grammar.
        """
        if order.request_id in self._live:
            raise ValueError(f"request {order.request_id} is known already")
        if order.keep_prefix and self._prefixes.num_pinned >= self._max_pinned:
            raise ValueError(f"{self._max_pinned} prefixes are pinned already; drop one first")
        live = Live(Generation(order, vocabulary=self._vocabulary, matcher=self._matcher_for(order)))
        self._place(live, reserved_tokens)
        self._live[order.request_id] = live
        return live.num_stored

    def resume(self, request_id: RequestId, *, reserved_tokens: int) -> int:
        """Give a preempted request a sequence again; its output so far counts as prompt."""
        live = self._known(request_id)
        if live.holds_cells:
            raise ValueError(f"request {request_id} is not preempted")
        self._place(live, reserved_tokens)
        kept = self._prefixes.take_owned(request_id)
        if kept is not None:
            self._free(kept)  # its cells are the request's own again
        return live.num_stored

    def grow(self, request_id: RequestId, *, reserved_tokens: int) -> None:
        """Let the request fill up to reserved_tokens slots."""
        live = self._holding(request_id)
        self._check_reservation(live, reserved_tokens)
        live.reserved = reserved_tokens

    def preempt(self, request_id: RequestId, mode: PreemptionMode) -> None:
        """Take the sequence away (RELEASE) or nothing (PAUSE); tokens, sampler and grammar stay."""
        live = self._holding(request_id)
        match mode:
            case PreemptionMode.PAUSE:
                return
            case PreemptionMode.RELEASE:
                self._retire(live, owner=request_id)
            case PreemptionMode.SWAP:
                raise ValueError("this backend does not swap; use release")

    def release(self, request_id: RequestId) -> None:
        """Forget the request in whatever state it is; unknown ids are ignored."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        if live.holds_cells:
            self._retire(live, owner=None)
        else:
            self._prefixes.disown(request_id)
        self._trim_cache()

    def drop_prefix(self, request_id: RequestId) -> None:
        """Give up the prefix pinned by that request; sequences that share it keep their copy."""
        stored = self._prefixes.unpin(request_id)
        if stored is not None:
            self._keep(stored)
            self._trim_cache()

    # -- an iteration ----------------------------------------------------------------------------------

    def _plan(self, decode_ids: Sequence[RequestId], prefills: Sequence[ChunkOrder]) -> list[Part]:
        """Return the iteration's parts, decodes first; raise ValueError for an order that cannot be."""
        parts = [self._plan_decode(request_id) for request_id in decode_ids]
        parts += [self._plan_chunk(chunk) for chunk in prefills]
        if len({part.live.request_id for part in parts}) != len(parts):
            raise ValueError("a request may have only one part in an iteration")
        return parts

    def _plan_decode(self, request_id: RequestId) -> Part:
        live = self._holding(request_id)
        generation = live.generation
        if generation.num_tokens - live.num_stored != 1 or not generation.num_output:
            raise ValueError(f"request {request_id} cannot decode: its prompt is not computed")
        self._check_room(live, 1)
        return Part(live, 1, is_chunk=False)

    def _plan_chunk(self, chunk: ChunkOrder) -> Part:
        live = self._holding(chunk.request_id)
        left = live.generation.num_tokens - live.num_stored
        if not 1 <= chunk.num_tokens <= left:
            raise ValueError(
                f"request {chunk.request_id} has {left} tokens left to compute, not {chunk.num_tokens}"
            )
        self._check_room(live, chunk.num_tokens)
        return Part(live, chunk.num_tokens, is_chunk=True)

    def _make_room(self, num_tokens: int) -> None:
        """Give up cached sequences, oldest first, until num_tokens slots are free; raise BackendError."""
        while self._cells.num_free < num_tokens:
            if not self._evict():
                raise BackendError(
                    f"no room for {num_tokens} tokens: {self._cells.num_free} of {self._cells.num_cells} "
                    "slots are free and the rest is reserved"
                )

    def _settle(self, part: Part, kept: int, logits: Floats | None) -> SequenceOutcome:
        """Describe what one request got: kept tokens stored (already counted) and, perhaps, a new token.

        logits is the part's row if it has one. A finished or faulty request is released.
        """
        live, generation = part.live, part.live.generation
        prefill_tokens = kept if part.is_chunk else 0
        if not part.is_last or kept < part.num_tokens:
            return SequenceOutcome(request_id=live.request_id, prefill_tokens=prefill_tokens)
        if logits is None:
            outcome = SequenceOutcome(
                request_id=live.request_id, prefill_tokens=prefill_tokens, finish_reason=FinishReason.PREFIX
            )
        else:
            try:
                outcome = generation.choose_next(logits, prefill_tokens=prefill_tokens)
            except Exception as error:  # whatever a sampler or grammar raises is this request's fault alone
                outcome = self._fault(part, kept, error)
        if outcome.finish_reason is not None or outcome.error is not None:
            self._finish(live, keeps_prefix=outcome.error is None and generation.order.keep_prefix)
        return outcome

    @staticmethod
    def _fault(part: Part, kept: int, error: Exception) -> SequenceOutcome:
        prefill_tokens = kept if part.is_chunk else 0
        return SequenceOutcome(request_id=part.live.request_id, prefill_tokens=prefill_tokens, error=error)

    # -- cells and ids ---------------------------------------------------------------------------------

    def _known(self, request_id: RequestId) -> Live:
        try:
            return self._live[request_id]
        except KeyError:
            raise ValueError(f"there is no request {request_id}") from None

    def _holding(self, request_id: RequestId) -> Live:
        live = self._known(request_id)
        if not live.holds_cells:
            raise ValueError(f"request {request_id} is preempted; resume it first")
        return live

    def _check_reservation(self, live: Live, reserved_tokens: int) -> None:
        if not max(1, live.num_stored) <= reserved_tokens <= self._cells.num_cells:
            raise ValueError(
                f"request {live.request_id} cannot reserve {reserved_tokens} tokens: it stores "
                f"{live.num_stored} and there are {self._cells.num_cells} slots"
            )

    def _check_room(self, live: Live, num_tokens: int) -> None:
        if live.num_stored + num_tokens > live.reserved:
            raise ValueError(
                f"request {live.request_id} stores {live.num_stored} tokens and reserved {live.reserved}: "
                f"no room for {num_tokens} more"
            )

    def _place(self, live: Live, reserved_tokens: int) -> None:
        """Give a sequence id and share the longest known beginning, one token short of everything.

        The pinned part comes from the pinned sequence itself even where a cached one is longer, so that its
        cells are really shared and not held a second time.
        """
        self._check_reservation(live, reserved_tokens)
        generation = live.generation
        sequence_id = self._take_id()
        tokens = generation.tokens(0, min(generation.num_tokens - 1, reserved_tokens))
        pinned, num_pinned = self._prefixes.pinned_match(tokens)
        if pinned is not None:
            self._cells.share(pinned.sequence_id, sequence_id, 0, num_pinned)
        other, num_shared = best_match(tokens, self._reusable())
        if other is not None and num_shared > num_pinned:
            self._cells.share(other.sequence_id, sequence_id, num_pinned, num_shared)
            self._prefixes.touch(other.sequence_id)
        live.sequence_id, live.reserved = sequence_id, reserved_tokens
        live.num_stored = max(num_pinned, num_shared)

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

    def _evict(self) -> bool:
        """Give the oldest cached sequence up; return whether there was one."""
        sequence_id = self._prefixes.take_oldest()
        if sequence_id is None:
            return False
        self._free(sequence_id)
        return True

    def _free(self, sequence_id: int) -> None:
        self._cells.cut(sequence_id, 0)
        self._free_ids.append(sequence_id)

    def _finish(self, live: Live, *, keeps_prefix: bool) -> None:
        """End a request; pin its prompt or leave its cells to the cache."""
        if keeps_prefix:
            num_prompt = live.generation.num_prompt
            self._cells.cut(live.sequence_id, num_prompt)
            tokens = live.generation.tokens(0, num_prompt).copy()
            self._prefixes.pin(live.request_id, Stored(sequence_id=live.sequence_id, tokens=tokens))
            live.sequence_id = -1
        self.release(live.request_id)

    def _retire(self, live: Live, *, owner: RequestId | None) -> None:
        """Take the sequence from a request; what it stored stays cached while nobody needs the cells."""
        tokens = live.generation.tokens(0, live.num_stored).copy()
        stored = Stored(sequence_id=live.sequence_id, tokens=tokens, owner=owner)
        live.sequence_id = -1
        live.num_stored = live.reserved = 0
        self._keep(stored)

    def _trim_cache(self) -> None:
        """Bound what idle cells cost: every row that is computed passes over all cells, its own or not."""
        while self._prefixes.num_ownerless > 1 and self._num_idle() > self._max_idle_cells:
            self._evict()

    def _num_idle(self) -> int:
        """Return the cells held by nothing but sequences of finished requests."""
        ids = [live.sequence_id for live in self._live.values() if live.holds_cells]
        ids += [stored.sequence_id for stored in self._prefixes.pinned]
        ids += [stored.sequence_id for stored in self._prefixes.cached if stored.owner is not None]
        return self._cells.num_cells - self._cells.num_free - self._cells.num_held(ids)

    def _keep(self, stored: Stored) -> None:
        if not len(stored.tokens):
            self._free(stored.sequence_id)
            return
        for sequence_id in self._prefixes.take_beginnings_of(stored):
            self._free(sequence_id)
        self._prefixes.keep(stored)
