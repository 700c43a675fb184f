"""The life of requests on any device: what is known of each, and which orders cannot be carried out.

Decides nothing about memory: where tokens are stored is told by a subclass, which says how a request is
placed, retired and pinned. Must be used from one thread, except where said.

Rules: a request never stores more tokens than it reserved; a fault of one request releases only that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.base import ChunkOrder, Eye, FinishReason, GenerationOrder, SequenceOutcome
from engine_service.backends.generation import Generation, Matcher, Vocabulary, as_tokens
from engine_service.backends.prefixes import PrefixStore
from engine_service.backends.sampling import Floats
from engine_service.scheduling.model import PreemptionMode, RequestId


class Live:
    """A request the backend knows: its generation and, while it holds cells, where they are."""

    __slots__ = ("generation", "hidden_sum", "num_stored", "reserved", "sequence_id")

    def __init__(self, generation: Generation) -> None:
        """Begin without a sequence."""
        self.generation = generation
        self.sequence_id = -1  #: -1 while preempted
        self.num_stored = 0
        self.reserved = 0
        self.hidden_sum: NDArray[np.float64] | None = None  #: over all tokens stored; for an embedding

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

    __slots__ = ("is_chunk", "is_last", "live", "num_done", "num_tokens", "output_row")

    def __init__(self, live: Live, num_tokens: int, *, is_chunk: bool) -> None:
        """Plan num_tokens (>= 1) more of the request's tokens."""
        self.live = live
        self.num_tokens = num_tokens
        self.is_chunk = is_chunk  #: ordered as a prefill
        #: every token of the sequence is stored after this, so the next one can be chosen
        self.is_last = live.num_stored + num_tokens == live.generation.num_tokens
        self.num_done = 0  #: of num_tokens, stored so far
        self.output_row = -1  #: the backend's row of logits; -1: none

    @property
    def wants_logits(self) -> bool:
        """Whether the next token is to be chosen after this."""
        return self.is_last and self.live.generation.order.max_tokens > 0


class RequestHolder:
    """Requests, what they reserved, and the prompts that are pinned."""

    def __init__(
        self, *, vocabulary: Vocabulary, num_slots: int, max_sequences: int, max_pinned: int
    ) -> None:
        """Hold no request yet; num_slots is how many tokens the device stores in all."""
        self._vocabulary = vocabulary
        self._live: dict[RequestId, Live] = {}
        self._prefixes = PrefixStore()
        self._num_slots = num_slots
        self._max_sequences = max_sequences
        self._max_pinned = max_pinned

    # -- what a subclass says ----------------------------------------------------------------------------

    def _matcher_for(self, order: GenerationOrder) -> Matcher | None:
        """Return the order's grammar at its beginning, None without; raise InvalidConstraint."""
        raise NotImplementedError

    def _place(self, live: Live, reserved_tokens: int) -> None:
        """Give the request a sequence with what is stored of it already, one token short of everything."""
        raise NotImplementedError

    def _retire(self, live: Live, *, owner: RequestId | None) -> None:
        """Take the sequence from a request; what it stored may stay cached.

        owner is the request if it was preempted and will come back, None if it is over.
        """
        raise NotImplementedError

    def _pin(self, live: Live) -> None:
        """Keep the request's prompt until it is dropped."""
        raise NotImplementedError

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """Every request that is known, preempted ones included."""
        return tuple(self._live)

    @property
    def eye(self) -> Eye | None:
        """What reads pictures for the model (any thread): nothing, unless a subclass says otherwise."""
        return None

    @property
    def max_pinned(self) -> int:
        """Prefixes that can be pinned at once."""
        return self._max_pinned

    @property
    def pinned_ids(self) -> tuple[RequestId, ...]:
        """The requests whose prompts are pinned prefixes."""
        return self._prefixes.pinned_ids

    def shared_prefix_tokens(self, prompt_ids: Sequence[int]) -> int:
        """Return how many leading tokens a pinned prefix holds; always < len(prompt_ids) (any thread)."""
        return self._prefixes.pinned_match(as_tokens(prompt_ids[:-1]))[1]

    # -- a request's life ------------------------------------------------------------------------------

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
        if live is not None and live.holds_cells:
            self._retire(live, owner=None)

    def hand_over(self) -> Mapping[RequestId, Generation]:
        """Give away what is kept of preempted requests: tokens, sampler, grammar, text held back."""
        handed = {r: live.generation for r, live in self._live.items() if not live.holds_cells}
        for request_id in handed:
            self.release(request_id)
        return handed

    def adopt(self, handed: Mapping[RequestId, Generation]) -> None:
        """Take over preempted requests; they resume where they were, everything computed again."""
        self._live |= {request_id: Live(generation) for request_id, generation in handed.items()}

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
        return self._conclude(live, outcome)

    def _conclude(self, live: Live, outcome: SequenceOutcome) -> SequenceOutcome:
        """Release a finished or faulty request, its prompt pinned if that was ordered; return the outcome."""
        if outcome.finish_reason is not None or outcome.error is not None:
            if outcome.error is None and live.generation.order.keep_prefix:
                self._pin(live)
            self.release(live.request_id)
        return outcome

    @staticmethod
    def _fault(part: Part, kept: int, error: Exception) -> SequenceOutcome:
        prefill_tokens = kept if part.is_chunk else 0
        return SequenceOutcome(request_id=part.live.request_id, prefill_tokens=prefill_tokens, error=error)

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
        if not max(1, live.num_stored) <= reserved_tokens <= self._num_slots:
            raise ValueError(
                f"request {live.request_id} cannot reserve {reserved_tokens} tokens: it stores "
                f"{live.num_stored} and there are {self._num_slots} slots"
            )

    def _check_room(self, live: Live, num_tokens: int) -> None:
        if live.num_stored + num_tokens > live.reserved:
            raise ValueError(
                f"request {live.request_id} stores {live.num_stored} tokens and reserved {live.reserved}: "
                f"no room for {num_tokens} more"
            )
