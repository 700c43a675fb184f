"""One llama.cpp context driven iteration by iteration, as `base.Backend`.

Decides nothing about who runs. One `step` computes exactly the rows it was told: first the requests that
decode (one row each, in one llama_decode or in several where that is faster), then the chunks of prompts in
one llama_decode per micro-batch. An aborted step keeps what was decoded and the micro-batches that were over,
and reports exactly that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.base import (
    BackendError,
    ChunkOrder,
    GenerationOrder,
    ModelInfo,
    SequenceOutcome,
    StepOutcome,
    Tokenizer,
)
from engine_service.backends.divided import DividedHolder
from engine_service.backends.generation import Matcher
from engine_service.backends.holding import Part
from engine_service.backends.llama_cpp.binding import ABORTED, NO_ROOM
from engine_service.backends.llama_cpp.context import Context
from engine_service.backends.llama_cpp.model import Model, Words
from engine_service.backends.llama_cpp.passes import MOST_MEASURED, PassSizes
from engine_service.backends.parking import PARKING_BYTES
from engine_service.backends.sequences import SequenceHolder
from engine_service.scheduling.model import Capacity, RequestId

PAGE_TOKENS: Final = 32
_MAX_SEQUENCE_IDS: Final = 256  # LLAMA_MAX_SEQ
_MIN_SEQUENCE_IDS: Final = 64
# What nobody uses slows everybody: 750 idle cells make 8 decoding sequences a seventh slower (measured).
_IDLE_PART: Final = 32
_PREPARED: Final = 5  #: part of the parking memory that is mapped at a time before it is needed
_FIRST_ROW_S: Final = 0.01  # a guess until a prompt was computed


class _Pace:
    """How long a row of a pass takes, in seconds, as last measured."""

    __slots__ = ("row_s",)

    def __init__(self) -> None:
        self.row_s = _FIRST_ROW_S


class LlamaCppBackend(SequenceHolder):
    """One GGUF model on the CPU; requests share one cache."""

    _is_divided: ClassVar = False

    def __init__(
        self,
        model: Model,
        *,
        context_tokens: int,
        max_sequences: int,
        threads: int,
        micro_batch: int = 128,
        parking_bytes: int = PARKING_BYTES,
        words: Words | None = None,
    ) -> None:
        """Allocate a cache of context_tokens slots (rounded up by llama.cpp) for an opened model.

        micro_batch is the work that an abort can lose (tokens); larger is a little faster. Finished sequences
        are kept in at most parking_bytes of host memory, to be fetched by who asks on. words (None: the
        model's own) are those of the same vocabulary that outlive the model. Raises ModelError if the cache
        cannot be had, ValueError for counts that cannot be.
        """
        _check_counts(context_tokens=context_tokens, max_sequences=max_sequences, threads=threads)
        num_ids = max_sequences if self._is_divided else _num_shared_ids(max_sequences)
        self._model = model
        self._micro_batch = micro_batch
        self._pass_sizes = PassSizes()
        self._parking_bytes = parking_bytes
        self._prompt_pace, self._embedding_pace = _Pace(), _Pace()
        self._context = Context(
            model,
            num_cells=context_tokens,
            num_sequences=num_ids,
            micro_batch=micro_batch,
            threads=threads,
            is_divided=self._is_divided,
        )
        self._words = words or Words(model)
        self._capacity = capacity_of(
            model,
            self._context.num_cells,
            longest=self._context.longest,
            max_sequences=max_sequences,
            micro_batch=micro_batch,
        )
        self._info = self._words.info(self._capacity.max_context_tokens, parking_bytes=parking_bytes)
        super().__init__(
            self._context,
            vocabulary=self._words.vocabulary(self._capacity.max_context_tokens),
            num_sequence_ids=num_ids,
            max_sequences=max_sequences,
            max_pinned=_num_shared_ids(max_sequences) - max_sequences,
            max_idle_cells=self._context.num_cells // (1 if self._is_divided else _IDLE_PART),
            parking_bytes=parking_bytes,
        )

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """What is loaded (any thread)."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer (any thread)."""
        return self._words.tokenizer

    @property
    def capacity(self) -> Capacity:
        """What requests may hold in all."""
        return self._capacity

    def validate(self, order: GenerationOrder) -> None:
        """Raise InvalidConstraint for a grammar that cannot be compiled (any thread)."""
        self._words.validate(order)

    def _matcher_for(self, order: GenerationOrder) -> Matcher | None:
        return None if order.constraint is None else self._words.grammars.compile(order.constraint)

    def close(self) -> None:
        """Free the cache and the model."""
        self._context.close()
        self._model.close()

    def abort(self) -> None:
        """Stop the prompts of the step under way, at once or 0.1 s later (any thread); no-op when idle."""
        self._context.abort()

    def set_threads(self, threads: int) -> None:
        """Compute with that many threads from the next step on."""
        self._context.set_threads(threads)
        self._pass_sizes = PassSizes()

    def warm_up(self) -> None:
        """Compute a few tokens and forget them, so that the first request does not pay for page faults.

        What is measured meanwhile decides how later iterations are divided over passes.
        """
        most = min(MOST_MEASURED, self._capacity.max_sequences)
        ids = [self._take_id() for _ in range(most)]
        self._warm_pass(ids[:1])
        self._prepare_parking(self._context.save(ids[0]).nbytes)
        self._pass_sizes = PassSizes(
            [min(self._warm_pass(ids[:num_rows]) for _ in range(3)) for num_rows in range(1, most + 1)]
        )
        for sequence_id in ids:
            self._free(sequence_id)

    def _warm_pass(self, ids: list[int]) -> float:
        """Compute one token in each of these sequences, and nothing beside; return the seconds."""
        self._context.begin()
        for sequence_id in ids:
            self._context.cut(sequence_id, 0)
            self._context.add_token(sequence_id, max(self._model.eos_id, 0), 0)
        started = time.perf_counter()
        self._run(len(ids))
        seconds = time.perf_counter() - started
        for sequence_id in ids:
            self._context.append(sequence_id, 1)
        return seconds

    def _prepare_parking(self, token_bytes: int) -> None:
        """Map memory for two long requests that have to make room for somebody who speaks."""
        num_bytes = min(self._capacity.max_context_tokens * token_bytes, self._parking_bytes // _PREPARED)
        self._parking.reserve(num_bytes)
        self._parking.prepare(num_bytes)

    # -- an iteration ----------------------------------------------------------------------------------

    def step(self, decode_ids: Sequence[RequestId], prefills: Sequence[ChunkOrder]) -> StepOutcome:
        """Run one iteration over exactly these.

        Raises ValueError, before anything is computed, for an order that cannot be (unknown request, more
        tokens than reserved or left), BackendError when llama.cpp fails.
        """
        started = time.perf_counter()
        parts = self._plan(decode_ids, prefills)
        with self._context.step():
            outcomes = self._decode([part for part in parts if _is_one_row(part)])
            chunks = [part for part in parts if not _is_one_row(part)]
            outcomes += self._prefill([p for p in chunks if not p.live.generation.order.wants_embedding])
            outcomes += self._embed([p for p in chunks if p.live.generation.order.wants_embedding])
        found = {outcome.request_id: outcome for outcome in outcomes}
        return StepOutcome(
            outcomes=tuple([found[part.live.request_id] for part in parts]),
            seconds=time.perf_counter() - started,
            aborted=any(part.num_done < part.num_tokens for part in chunks),
        )

    def _decode(self, parts: list[Part]) -> list[SequenceOutcome]:
        """Compute the next token of each, in a pass of their own that is over before the prompts' begins.

        A micro-batch that mixes sequences computes attention over the cells of all of them for every row: 62
        prompt rows with 3 decodes beside 2,000 cells took 411 ms, 62 prompt rows and then 3 decodes 245. And
        what was decoded is not lost when speech stops the prompts.
        """
        outcomes: list[SequenceOutcome] = []
        rows = _by_sequence([(part, 1) for part in parts])
        for size in self._pass_sizes.of(len(rows)):
            now, rows = rows[:size], rows[size:]
            self._compute(now)
            outcomes += [self._settle(part, 1, self._row(part)) for part, _ in now]
        return outcomes

    def _prefill(self, parts: list[Part]) -> list[SequenceOutcome]:
        """Compute chunks until they are done or the step is aborted."""
        outcomes = []
        for pieces in self._passes(parts, self._prompt_pace):
            done = [part for part, _ in pieces if part.num_done == part.num_tokens]
            outcomes += [self._settle(part, part.num_done, self._row(part)) for part in done]
        left = [part for part in parts if part.num_done < part.num_tokens]
        return outcomes + [self._settle(part, part.num_done, None) for part in left]

    def _embed(self, parts: list[Part]) -> list[SequenceOutcome]:
        """Compute chunks as `_prefill`, in passes of their own that keep what the model makes of each token.

        An embedding is the mean of that over the whole text, brought to length 1.
        """
        if not parts:
            return []
        with self._context.keeping_hidden():
            for pieces in self._passes(parts, self._embedding_pace):
                self._add_up(pieces)
        return [self._settle_embedding(part) for part in parts]

    def _passes(self, parts: list[Part], pace: _Pace) -> Iterator[list[tuple[Part, int]]]:
        """Compute the parts micro-batch by micro-batch, yield each when it is over; end where aborted."""
        for pieces in _micro_batches(parts, self._micro_batch):
            num_rows = sum([size for _, size in pieces])
            started = time.perf_counter()
            if self._compute(pieces, expected_s=num_rows * pace.row_s) == ABORTED:
                return
            pace.row_s = (time.perf_counter() - started) / num_rows
            yield pieces

    def _add_up(self, pieces: list[tuple[Part, int]]) -> None:
        hidden = self._context.hidden()
        if hidden is None:
            raise BackendError("llama.cpp computed the iteration but returned no embeddings")
        row = 0
        for part, size in _by_sequence(pieces):
            total = hidden[row : row + size].sum(axis=0, dtype=np.float64)
            before = part.live.hidden_sum
            part.live.hidden_sum = total if before is None else before + total
            row += size

    def _settle_embedding(self, part: Part) -> SequenceOutcome:
        total = part.live.hidden_sum
        outcome = self._settle(part, part.num_done, None)
        if outcome.finish_reason is None or total is None:
            return outcome
        length = float(np.linalg.norm(total))
        if not (np.isfinite(length) and length > 0):
            return self._fault(part, part.num_done, ValueError("the model makes nothing of this text"))
        return replace(outcome, embedding=tuple((total / length).tolist()))

    def _compute(self, pieces: list[tuple[Part, int]], *, expected_s: float | None = None) -> int:
        """Compute so many more tokens of each part in one llama_decode; return 0 or ABORTED."""
        self._compose(_by_sequence(pieces))
        code = self._run(sum([size for _, size in pieces]), expected_s=expected_s)
        if code == 0:
            for part, size in pieces:
                self._context.append(part.live.sequence_id, size)
                part.live.num_stored += size
                part.num_done += size
        return code

    def _compose(self, pieces: list[tuple[Part, int]]) -> None:
        context = self._context
        context.begin()
        for part, size in pieces:
            live = part.live
            start = live.num_stored
            wants_logits = part.wants_logits and part.num_done + size == part.num_tokens
            wants_hidden = live.generation.order.wants_embedding
            if size == 1 and wants_logits:
                part.output_row = context.add_token(live.sequence_id, live.generation.last_token, start)
            else:
                tokens = live.generation.tokens(start, start + size)
                part.output_row = context.add_chunk(
                    live.sequence_id, tokens, start, wants_logits=wants_logits, wants_hidden=wants_hidden
                )

    def _row(self, part: Part) -> NDArray[np.float32] | None:
        """Return the logits behind the part's last token, valid until the next pass; None if not wanted."""
        if part.output_row < 0:
            return None
        logits = self._context.logits()
        if logits is None:
            raise BackendError("llama.cpp computed the iteration but returned no logits")
        row: NDArray[np.float32] = logits[part.output_row]
        return row

    def _run(self, num_rows: int, *, expected_s: float | None = None) -> int:
        context = self._context
        self._make_room(num_rows)
        code = context.run(expected_s=expected_s)
        while code == NO_ROOM and self._evict():
            code = context.run(expected_s=expected_s)
        if code == NO_ROOM:
            raise BackendError(
                f"llama.cpp has no room for {num_rows} tokens though {context.num_free} slots should be free"
            )
        if code not in (0, ABORTED):
            raise BackendError(f"llama_decode failed ({code}): {self._model.library.recent_log()}")
        return code


class DividedLlamaCppBackend(DividedHolder, LlamaCppBackend):
    """One GGUF model on the CPU; each request that runs has an equal part of the cache."""

    _is_divided = True


def _is_one_row(part: Part) -> bool:
    """Return whether a part is computed beside those that decode: what comes back has one token left."""
    return not part.is_chunk or (part.num_tokens == 1 and part.wants_logits)


def _num_shared_ids(max_sequences: int) -> int:
    return min(_MAX_SEQUENCE_IDS, max(_MIN_SEQUENCE_IDS, 3 * max_sequences))


def _by_sequence(pieces: list[tuple[Part, int]]) -> list[tuple[Part, int]]:
    """Return the pieces in the order of their rows.

    llama.cpp computes sequences of a divided cache together only where each number follows the last.
    """
    return sorted(pieces, key=lambda piece: piece[0].live.sequence_id)


def _micro_batches(parts: list[Part], size: int) -> Iterator[list[tuple[Part, int]]]:
    """Divide the parts' tokens, in order, into lists of (part, tokens) of at most size tokens together.

    What fits in one list is not divided over two: rows of unequally long pieces are computed apart.
    """
    pieces: list[tuple[Part, int]] = []
    room = size
    for part in parts:
        left = part.num_tokens
        if room < left <= size:
            yield pieces
            pieces, room = [], size
        while left:
            taken = min(left, room)
            pieces.append((part, taken))
            left -= taken
            room -= taken
            if not room:
                yield pieces
                pieces, room = [], size
    if pieces:
        yield pieces


def capacity_of(
    model: Model, num_cells: int, *, longest: int, max_sequences: int, micro_batch: int
) -> Capacity:
    """Return what a cache of num_cells slots, longest for one request, offers with a model.

    The model need not be loaded.
    """
    trained = model.trained_context
    return Capacity(
        num_pages=num_cells // PAGE_TOKENS,
        page_tokens=PAGE_TOKENS,
        max_sequences=max_sequences,
        max_context_tokens=min(longest, trained) if trained > 0 else longest,
        row_multiple=micro_batch,
        can_abort=True,
    )


def _check_counts(*, context_tokens: int, max_sequences: int, threads: int) -> None:
    if context_tokens < 2 * PAGE_TOKENS:
        raise ValueError(f"context_tokens must be >= {2 * PAGE_TOKENS}, not {context_tokens}")
    if not 1 <= max_sequences <= _MAX_SEQUENCE_IDS // 2:
        raise ValueError(f"max_sequences must be in 1 to {_MAX_SEQUENCE_IDS // 2}, not {max_sequences}")
    if threads < 1:
        raise ValueError(f"threads must be >= 1, not {threads}")
