"""Sequences, cells and iterations of one llama.cpp context, as `base.Backend`.

Decides where a request's tokens are stored and what can be reused; never who runs. One `step` is one
llama_decode over exactly the rows it was told: one row per decoding request and a run of rows per chunk.

Rules: a request never stores more tokens than it reserved; what is pinned or reserved always fits, because
everything else in the cache is given up when cells are needed; an aborted step keeps what llama.cpp's
finished micro-batches stored and reports exactly that; a fault of one request releases only that request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.base import (
    BackendError,
    ChunkOrder,
    FinishReason,
    GenerationOrder,
    ModelInfo,
    SequenceOutcome,
    StepOutcome,
    Tokenizer,
)
from engine_service.backends.generation import Generation, Vocabulary, as_tokens
from engine_service.backends.llama_cpp.binding import ABORTED, NO_ROOM
from engine_service.backends.llama_cpp.context import Context
from engine_service.backends.llama_cpp.grammar import GrammarCompiler
from engine_service.backends.llama_cpp.model import Model, ModelTokenizer
from engine_service.backends.llama_cpp.prefixes import PrefixStore, Stored, best_match
from engine_service.scheduling.model import Capacity, PreemptionMode, RequestId

PAGE_TOKENS: Final = 32
_MAX_SEQUENCE_IDS: Final = 256  # LLAMA_MAX_SEQ
_MIN_SEQUENCE_IDS: Final = 64


class _Live:
    """A request the backend knows: its generation and, while it holds cells, where they are."""

    __slots__ = ("generation", "num_stored", "reserved", "sequence_id")

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.sequence_id: int | None = None  # None while preempted
        self.num_stored = 0
        self.reserved = 0


class _Row:
    """What one request has in the batch under way."""

    __slots__ = ("is_chunk", "is_last", "live", "num_tokens", "output_row")

    def __init__(
        self, live: _Live, num_tokens: int, *, is_chunk: bool, is_last: bool, output_row: int
    ) -> None:
        self.live = live
        self.num_tokens = num_tokens
        self.is_chunk = is_chunk  # ordered as a prefill
        self.is_last = is_last  # all tokens of the sequence are computed after this
        self.output_row = output_row  # -1: no logits


class LlamaCppBackend:
    """One GGUF model on the CPU."""

    def __init__(
        self, model: Model, *, context_tokens: int, max_sequences: int, threads: int, micro_batch: int = 128
    ) -> None:
        """Allocate a cache of context_tokens slots (rounded up by llama.cpp) for an opened model.

        micro_batch is the work that an abort can lose (tokens); larger is a little faster. Raises ModelError
        if the cache cannot be had, ValueError for counts that cannot be.
        """
        num_ids = min(_MAX_SEQUENCE_IDS, max(_MIN_SEQUENCE_IDS, 3 * max_sequences))
        _check_counts(context_tokens=context_tokens, max_sequences=max_sequences, threads=threads)
        self._model = model
        self._context = Context(
            model, num_cells=context_tokens, num_sequences=num_ids, micro_batch=micro_batch, threads=threads
        )
        self._tokenizer = ModelTokenizer(model)
        self._grammars = GrammarCompiler(model)
        self._live: dict[RequestId, _Live] = {}
        self._store = PrefixStore()
        self._free_ids = list(range(num_ids - 1, -1, -1))
        self._max_pinned = num_ids - max_sequences
        self._capacity = self._describe_capacity(max_sequences)
        self._info = self._describe_model()
        self._vocabulary = Vocabulary(
            size=model.vocab_size,
            end_ids=model.end_ids,
            token_bytes=model.token_bytes,
            max_context_tokens=self._capacity.max_context_tokens,
        )

    def _describe_capacity(self, max_sequences: int) -> Capacity:
        num_cells = self._context.num_cells
        trained = self._model.library.trained_context(self._model.handle)
        return Capacity(
            num_pages=num_cells // PAGE_TOKENS,
            page_tokens=PAGE_TOKENS,
            max_sequences=max_sequences,
            max_context_tokens=min(num_cells, trained) if trained > 0 else num_cells,
            can_abort=True,
        )

    def _describe_model(self) -> ModelInfo:
        model, library = self._model, self._model.library
        return ModelInfo(
            name=model.name,
            architecture=library.metadata(model.handle, "general.architecture"),
            max_context_tokens=self._capacity.max_context_tokens,
            vocab_size=model.vocab_size,
            chat_template=library.chat_template(model.handle),
            bos_text=model.special_text(library.begin_of_text(model.vocab)),
            eos_text=model.special_text(model.eos_id),
            backend="llama_cpp",
        )

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """What is loaded (any thread)."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer (any thread)."""
        return self._tokenizer

    @property
    def capacity(self) -> Capacity:
        """What requests may hold in all."""
        return self._capacity

    @property
    def num_cells_held(self) -> int:
        """Token slots held by requests and pinned prefixes; what is cached does not count."""
        ids = [live.sequence_id for live in self._live.values() if live.sequence_id is not None]
        return self._context.cells.num_held(ids + [stored.sequence_id for stored in self._store.pinned])

    @property
    def num_cells_cached(self) -> int:
        """Token slots held by nothing but the automatic cache."""
        return self._context.cells.num_used - self.num_cells_held

    def validate(self, order: GenerationOrder) -> None:
        """Raise InvalidConstraint for a grammar that cannot be compiled (any thread)."""
        if order.constraint is not None:
            self._grammars.compile(order.constraint)

    def shared_prefix_tokens(self, prompt_ids: Sequence[int]) -> int:
        """Return how many leading tokens a pinned prefix holds; always < len(prompt_ids) (any thread)."""
        return self._store.pinned_match(as_tokens(prompt_ids[:-1]))[1]

    # -- a request's life ------------------------------------------------------------------------------

    def admit(self, order: GenerationOrder, *, reserved_tokens: int) -> int:
        """Give the request a sequence; return how many leading tokens need not be computed.

        Raises ValueError for an order that cannot be carried out, InvalidConstraint for its grammar.
        """
        if order.request_id in self._live:
            raise ValueError(f"request {order.request_id} is known already")
        if order.keep_prefix and self._store.num_pinned >= self._max_pinned:
            raise ValueError(f"{self._max_pinned} prefixes are pinned already; drop one first")
        matcher = None if order.constraint is None else self._grammars.compile(order.constraint)
        live = _Live(Generation(order, vocabulary=self._vocabulary, matcher=matcher))
        self._place(live, reserved_tokens)
        self._live[order.request_id] = live
        return live.num_stored

    def resume(self, request_id: RequestId, *, reserved_tokens: int) -> int:
        """Give a preempted request a sequence again; its output so far counts as prompt."""
        live = self._known(request_id)
        if live.sequence_id is not None:
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
                self._retire(live)
            case PreemptionMode.SWAP:
                raise ValueError("the llama.cpp backend does not swap; use release")

    def release(self, request_id: RequestId) -> None:
        """Forget the request in whatever state it is; unknown ids are ignored."""
        live = self._live.pop(request_id, None)
        if live is not None and live.sequence_id is not None:
            self._retire(live)

    def drop_prefix(self, request_id: RequestId) -> None:
        """Give up the prefix pinned by that request; sequences that share it keep their copy."""
        stored = self._store.unpin(request_id)
        if stored is not None:
            self._keep(stored)

    def close(self) -> None:
        """Free the cache and the model."""
        self._context.close()
        self._model.close()

    def abort(self) -> None:
        """Make the step under way return within milliseconds (any thread); no-op when idle."""
        self._context.abort()

    def set_threads(self, threads: int) -> None:
        """Compute with that many threads from the next step on."""
        self._context.set_threads(threads)

    def warm_up(self) -> None:
        """Compute a few tokens and forget them, so that the first request does not pay for page faults."""
        sequence_id = self._take_id()
        for num_tokens in (2, 1):
            self._context.begin()
            tokens = np.full(num_tokens, max(self._model.eos_id, 0), dtype=np.int32)
            self._context.add_chunk(sequence_id, tokens, 0, wants_logits=True)
            self._run(num_tokens)
            self._context.cells.append(sequence_id, num_tokens)
            self._context.cut(sequence_id, 0)
        self._free_ids.append(sequence_id)

    # -- an iteration ----------------------------------------------------------------------------------

    def step(self, decode_ids: Sequence[RequestId], prefills: Sequence[ChunkOrder]) -> StepOutcome:
        """Run one iteration over exactly these.

        Raises ValueError, before anything is computed, for an order that cannot be (unknown request, more
        tokens than reserved or left), BackendError when llama.cpp fails.
        """
        started = time.perf_counter()
        rows = self._compose(decode_ids, prefills)
        if not rows:
            return StepOutcome(outcomes=(), seconds=0.0)
        code = self._run(sum(row.num_tokens for row in rows))
        is_aborted = code == ABORTED
        outcomes = self._collect_aborted(rows) if is_aborted else self._collect(rows)
        return StepOutcome(
            outcomes=tuple(outcomes), seconds=time.perf_counter() - started, aborted=is_aborted
        )

    def _compose(self, decode_ids: Sequence[RequestId], prefills: Sequence[ChunkOrder]) -> list[_Row]:
        context = self._context
        plans = [*self._plan_decodes(decode_ids), *self._plan_chunks(prefills)]
        if len({id(live) for live, _ in plans}) != len(plans):
            raise ValueError("a request may have only one part in an iteration")
        context.begin()
        rows: list[_Row] = []
        for live, num_tokens in plans:
            generation, start = live.generation, live.num_stored
            is_last = start + num_tokens == generation.num_tokens
            wants_logits = is_last and generation.order.max_tokens > 0
            sequence_id = _id_of(live)
            if num_tokens == 1 and wants_logits:
                row = context.add_token(sequence_id, generation.last_token, start)
            else:
                tokens = generation.tokens(start, start + num_tokens)
                row = context.add_chunk(sequence_id, tokens, start, wants_logits=wants_logits)
            is_chunk = len(rows) >= len(decode_ids)
            rows.append(_Row(live, num_tokens, is_chunk=is_chunk, is_last=is_last, output_row=row))
        return rows

    def _plan_decodes(self, decode_ids: Sequence[RequestId]) -> Iterator[tuple[_Live, int]]:
        for request_id in decode_ids:
            live = self._holding(request_id)
            if live.generation.num_tokens - live.num_stored != 1 or not live.generation.num_output:
                raise ValueError(f"request {request_id} cannot decode: its prompt is not computed")
            self._check_room(live, 1)
            yield live, 1

    def _plan_chunks(self, prefills: Sequence[ChunkOrder]) -> Iterator[tuple[_Live, int]]:
        for chunk in prefills:
            live = self._holding(chunk.request_id)
            left = live.generation.num_tokens - live.num_stored
            if not 1 <= chunk.num_tokens <= left:
                raise ValueError(
                    f"request {chunk.request_id} has {left} tokens left to compute, not {chunk.num_tokens}"
                )
            self._check_room(live, chunk.num_tokens)
            yield live, chunk.num_tokens

    def _run(self, num_rows: int) -> int:
        context = self._context
        while context.num_free < num_rows and self._evict():
            pass
        code = context.run()
        while code == NO_ROOM and self._evict():
            code = context.run()
        if code == NO_ROOM:
            raise BackendError(
                f"no room for {num_rows} tokens: {context.num_free} of {context.num_cells} slots are free"
            )
        if code not in (0, ABORTED):
            raise BackendError(f"llama_decode failed ({code}): {self._model.library.recent_log()}")
        return code

    def _collect(self, rows: list[_Row]) -> list[SequenceOutcome]:
        cells = self._context.cells
        for row in rows:
            cells.append(_id_of(row.live), row.num_tokens)
            row.live.num_stored += row.num_tokens
        logits = self._context.logits()
        return [self._outcome(row, row.num_tokens, logits) for row in rows]

    def _collect_aborted(self, rows: list[_Row]) -> list[SequenceOutcome]:
        """Keep what finished micro-batches stored; a last token without logits is taken back.

        llama.cpp rolls the micro-batch under way back itself and has copied the logits of finished ones.
        """
        context = self._context
        logits = context.logits() if self._model.library.provider.keeps_logits_on_abort else None
        outcomes = []
        for row in rows:
            live, sequence_id = row.live, _id_of(row.live)
            kept = context.stored(sequence_id) - live.num_stored
            context.cells.append(sequence_id, kept)
            live.num_stored += kept
            row.is_last = row.is_last and kept == row.num_tokens
            if row.is_last and row.output_row >= 0 and logits is None:
                kept -= 1
                live.num_stored -= 1
                context.cut(sequence_id, live.num_stored)
                row.is_last = False
            outcomes.append(self._outcome(row, kept, logits))
        return outcomes

    def _outcome(self, row: _Row, kept: int, logits: NDArray[np.float32] | None) -> SequenceOutcome:
        """Describe what one request got; a finished or faulty one is released."""
        live, generation = row.live, row.live.generation
        request_id = generation.order.request_id
        prefill_tokens = kept if row.is_chunk else 0
        if not row.is_last:
            return SequenceOutcome(request_id=request_id, prefill_tokens=prefill_tokens)
        if row.output_row < 0 or logits is None:
            outcome = SequenceOutcome(
                request_id=request_id, prefill_tokens=prefill_tokens, finish_reason=FinishReason.PREFIX
            )
        else:
            try:
                outcome = generation.choose_next(logits[row.output_row], prefill_tokens=prefill_tokens)
            except Exception as error:  # whatever a sampler or grammar raises is this request's fault alone
                outcome = SequenceOutcome(request_id=request_id, prefill_tokens=prefill_tokens, error=error)
        if outcome.finish_reason is not None or outcome.error is not None:
            self._finish(live, keeps_prefix=outcome.error is None and generation.order.keep_prefix)
        return outcome

    # -- cells and ids ---------------------------------------------------------------------------------

    def _known(self, request_id: RequestId) -> _Live:
        try:
            return self._live[request_id]
        except KeyError:
            raise ValueError(f"there is no request {request_id}") from None

    def _holding(self, request_id: RequestId) -> _Live:
        live = self._known(request_id)
        if live.sequence_id is None:
            raise ValueError(f"request {request_id} is preempted; resume it first")
        return live

    def _check_reservation(self, live: _Live, reserved_tokens: int) -> None:
        if not max(1, live.num_stored) <= reserved_tokens <= self._context.num_cells:
            raise ValueError(
                f"request {live.generation.order.request_id} cannot reserve {reserved_tokens} tokens: "
                f"it stores {live.num_stored} and the cache has {self._context.num_cells}"
            )

    def _check_room(self, live: _Live, num_tokens: int) -> None:
        if live.num_stored + num_tokens > live.reserved:
            raise ValueError(
                f"request {live.generation.order.request_id} stores {live.num_stored} tokens and reserved "
                f"{live.reserved}: no room for {num_tokens} more"
            )

    def _place(self, live: _Live, reserved_tokens: int) -> None:
        """Give a sequence id and share the longest known beginning, one token short of everything.

        The pinned part comes from the pinned sequence itself even where a cached one is longer, so that its
        cells are really shared and not held a second time.
        """
        self._check_reservation(live, reserved_tokens)
        generation = live.generation
        live.sequence_id = sequence_id = self._take_id()
        live.reserved = reserved_tokens
        tokens = generation.tokens(0, min(generation.num_tokens - 1, reserved_tokens))
        pinned, num_pinned = self._store.pinned_match(tokens)
        if pinned is not None:
            self._context.share(pinned.sequence_id, sequence_id, 0, num_pinned)
        other, num_shared = best_match(tokens, self._reusable())
        if other is not None and num_shared > num_pinned:
            self._context.share(other.sequence_id, sequence_id, num_pinned, num_shared)
            self._store.touch(other.sequence_id)
        live.num_stored = max(num_pinned, num_shared)

    def _reusable(self) -> Iterator[Stored]:
        yield from reversed(self._store.cached)
        for live in self._live.values():
            if live.sequence_id is not None and live.num_stored:
                yield Stored(live.sequence_id, live.generation.tokens(0, live.num_stored))

    def _take_id(self) -> int:
        if not self._free_ids:
            self._evict()
        if not self._free_ids:
            raise ValueError(f"{self._capacity.max_sequences} requests hold a sequence already")
        return self._free_ids.pop()

    def _evict(self) -> bool:
        """Give the oldest cached sequence up; return whether there was one."""
        sequence_id = self._store.take_oldest()
        if sequence_id is None:
            return False
        self._free(sequence_id)
        return True

    def _free(self, sequence_id: int) -> None:
        self._context.cut(sequence_id, 0)
        self._free_ids.append(sequence_id)

    def _finish(self, live: _Live, *, keeps_prefix: bool) -> None:
        """End a request that is still live; pin its prompt or leave its cells to the cache."""
        request_id = live.generation.order.request_id
        if keeps_prefix:
            sequence_id, num_prompt = _id_of(live), live.generation.num_prompt
            self._context.cut(sequence_id, num_prompt)
            self._store.pin(request_id, Stored(sequence_id, live.generation.tokens(0, num_prompt).copy()))
            live.sequence_id = None
        self.release(request_id)

    def _retire(self, live: _Live) -> None:
        """Take the sequence from a request; what it stored stays cached while nobody needs the cells."""
        sequence_id = _id_of(live)
        live.sequence_id = None
        stored = Stored(sequence_id, live.generation.tokens(0, live.num_stored).copy())
        live.num_stored = live.reserved = 0
        self._keep(stored)

    def _keep(self, stored: Stored) -> None:
        if not len(stored.tokens):
            self._free(stored.sequence_id)
            return
        for sequence_id in self._store.take_beginnings_of(stored):
            self._free(sequence_id)
        self._store.keep(stored)


def _id_of(live: _Live) -> int:
    if live.sequence_id is None:
        raise AssertionError(f"request {live.generation.order.request_id} holds no sequence")
    return live.sequence_id


def _check_counts(*, context_tokens: int, max_sequences: int, threads: int) -> None:
    if context_tokens < 2 * PAGE_TOKENS:
        raise ValueError(f"context_tokens must be >= {2 * PAGE_TOKENS}, not {context_tokens}")
    if not 1 <= max_sequences <= _MAX_SEQUENCE_IDS // 2:
        raise ValueError(f"max_sequences must be in 1 to {_MAX_SEQUENCE_IDS // 2}, not {max_sequences}")
    if threads < 1:
        raise ValueError(f"threads must be >= 1, not {threads}")
