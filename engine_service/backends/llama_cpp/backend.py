"""One llama.cpp context driven iteration by iteration, as `base.Backend`.

Decides nothing about who runs. One `step` is one llama_decode over exactly the rows it was told: one row per
decoding request and a run of rows per chunk. An aborted step keeps what llama.cpp's finished micro-batches
stored and reports exactly that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

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
from engine_service.backends.generation import Matcher, Vocabulary
from engine_service.backends.grammar import GrammarCompiler
from engine_service.backends.holding import Part
from engine_service.backends.llama_cpp.binding import ABORTED, NO_ROOM
from engine_service.backends.llama_cpp.context import Context
from engine_service.backends.llama_cpp.model import Model, ModelTokenizer
from engine_service.backends.sequences import SequenceHolder
from engine_service.scheduling.model import Capacity, RequestId

PAGE_TOKENS: Final = 32
_MAX_SEQUENCE_IDS: Final = 256  # LLAMA_MAX_SEQ
_MIN_SEQUENCE_IDS: Final = 64
_IDLE_PART: Final = 8  # 3000 idle cells of 8192 make 8 decoding sequences a fifth slower (1 thread, measured)


class LlamaCppBackend(SequenceHolder):
    """One GGUF model on the CPU."""

    def __init__(
        self, model: Model, *, context_tokens: int, max_sequences: int, threads: int, micro_batch: int = 128
    ) -> None:
        """Allocate a cache of context_tokens slots (rounded up by llama.cpp) for an opened model.

        micro_batch is the work that an abort can lose (tokens); larger is a little faster. Raises ModelError
        if the cache cannot be had, ValueError for counts that cannot be.
        """
        _check_counts(context_tokens=context_tokens, max_sequences=max_sequences, threads=threads)
        num_ids = min(_MAX_SEQUENCE_IDS, max(_MIN_SEQUENCE_IDS, 3 * max_sequences))
        self._model = model
        self._micro_batch = micro_batch
        self._context = Context(
            model, num_cells=context_tokens, num_sequences=num_ids, micro_batch=micro_batch, threads=threads
        )
        self._tokenizer = ModelTokenizer(model)
        self._grammars = GrammarCompiler(model.vocab_size, model.grammar_tokenizer, in_use=model.in_use)
        self._capacity = self._describe_capacity(max_sequences)
        self._info = self._describe_model()
        vocabulary = Vocabulary(
            size=model.vocab_size,
            end_ids=model.end_ids,
            token_bytes=model.token_bytes,
            max_context_tokens=self._capacity.max_context_tokens,
        )
        super().__init__(
            self._context,
            vocabulary=vocabulary,
            num_sequence_ids=num_ids,
            max_sequences=max_sequences,
            max_idle_cells=self._context.num_cells // _IDLE_PART,
        )

    def _describe_capacity(self, max_sequences: int) -> Capacity:
        num_cells = self._context.num_cells
        trained = self._model.library.trained_context(self._model.handle)
        return Capacity(
            num_pages=num_cells // PAGE_TOKENS,
            page_tokens=PAGE_TOKENS,
            max_sequences=max_sequences,
            max_context_tokens=min(num_cells, trained) if trained > 0 else num_cells,
            row_multiple=self._micro_batch,
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

    def validate(self, order: GenerationOrder) -> None:
        """Raise InvalidConstraint for a grammar that cannot be compiled (any thread)."""
        if order.constraint is not None:
            self._grammars.compile(order.constraint)

    def _matcher_for(self, order: GenerationOrder) -> Matcher | None:
        return None if order.constraint is None else self._grammars.compile(order.constraint)

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
            self._context.append(sequence_id, num_tokens)
            self._context.cut(sequence_id, 0)
        self._free_ids.append(sequence_id)

    # -- an iteration ----------------------------------------------------------------------------------

    def step(self, decode_ids: Sequence[RequestId], prefills: Sequence[ChunkOrder]) -> StepOutcome:
        """Run one iteration over exactly these.

        Raises ValueError, before anything is computed, for an order that cannot be (unknown request, more
        tokens than reserved or left), BackendError when llama.cpp fails.
        """
        started = time.perf_counter()
        parts = self._plan(decode_ids, prefills)
        if not parts:
            return StepOutcome(outcomes=(), seconds=0.0)
        self._compose(parts)
        is_aborted = self._run(sum(part.num_tokens for part in parts)) == ABORTED
        outcomes = self._collect_aborted(parts) if is_aborted else self._collect(parts)
        return StepOutcome(
            outcomes=tuple(outcomes), seconds=time.perf_counter() - started, aborted=is_aborted
        )

    def _compose(self, parts: list[Part]) -> None:
        """Write the rows: prompts first, so that their whole micro-batches hold one sequence only.

        A micro-batch that mixes sequences computes attention over the cells of all of them for every row:
        61 prompt rows with 3 decodes beside 4,000 cells took 750 ms, 64 prompt rows and then 3 decodes 505.
        """
        context = self._context
        context.begin()
        for part in sorted(parts, key=lambda part: part.num_tokens == 1):
            live = part.live
            start, wants_logits = live.num_stored, part.wants_logits
            if part.num_tokens == 1 and wants_logits:
                part.output_row = context.add_token(live.sequence_id, live.generation.last_token, start)
            else:
                tokens = live.generation.tokens(start, start + part.num_tokens)
                part.output_row = context.add_chunk(
                    live.sequence_id, tokens, start, wants_logits=wants_logits
                )

    def _run(self, num_rows: int) -> int:
        context = self._context
        self._make_room(num_rows)
        code = context.run()
        while code == NO_ROOM and self._evict():
            code = context.run()
        if code == NO_ROOM:
            raise BackendError(
                f"llama.cpp has no room for {num_rows} tokens though {context.num_free} slots should be free"
            )
        if code not in (0, ABORTED):
            raise BackendError(f"llama_decode failed ({code}): {self._model.library.recent_log()}")
        return code

    def _collect(self, parts: list[Part]) -> list[SequenceOutcome]:
        for part in parts:
            self._context.append(part.live.sequence_id, part.num_tokens)
            part.live.num_stored += part.num_tokens
        logits = self._context.logits()
        if logits is None and any(part.output_row >= 0 for part in parts):
            raise BackendError("llama.cpp computed the iteration but returned no logits")
        return [self._settle(part, part.num_tokens, _row(logits, part)) for part in parts]

    def _collect_aborted(self, parts: list[Part]) -> list[SequenceOutcome]:
        """Keep what finished micro-batches stored; a last token whose logits are lost is taken back.

        llama.cpp itself rolls the micro-batch under way back and has copied the logits of finished ones.
        """
        context = self._context
        logits = context.logits() if self._model.library.provider.keeps_logits_on_abort else None
        outcomes = []
        for part in parts:
            live = part.live
            kept = context.length(live.sequence_id) - live.num_stored
            context.append(live.sequence_id, kept)
            if kept == part.num_tokens and part.output_row >= 0 and logits is None:
                kept -= 1
                context.cut(live.sequence_id, live.num_stored + kept)
            live.num_stored += kept
            outcomes.append(self._settle(part, kept, _row(logits, part)))
        return outcomes


def _row(logits: NDArray[np.float32] | None, part: Part) -> NDArray[np.float32] | None:
    return None if logits is None or part.output_row < 0 else logits[part.output_row]


def _check_counts(*, context_tokens: int, max_sequences: int, threads: int) -> None:
    if context_tokens < 2 * PAGE_TOKENS:
        raise ValueError(f"context_tokens must be >= {2 * PAGE_TOKENS}, not {context_tokens}")
    if not 1 <= max_sequences <= _MAX_SEQUENCE_IDS // 2:
        raise ValueError(f"max_sequences must be in 1 to {_MAX_SEQUENCE_IDS // 2}, not {max_sequences}")
    if threads < 1:
        raise ValueError(f"threads must be >= 1, not {threads}")
