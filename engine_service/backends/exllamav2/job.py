"""One request inside the generator: the library's job, told by us what to compute and what to sample.

The library runs the forward passes and keeps pages and token ids; the next token, the text and the end come
from a `Generation`, as on every other backend. Decides nothing about who runs.

Rules: nothing here raises into the library's iteration, where an exception would cost every other request
its token; a chunk ends exactly where it was ordered to; the library never ends a job or gives its pages
back by itself.

Source: `ExLlamaV2DynamicJob` of exllamav2 0.3.2. Overridden: `prefill` (chunks of any size, ended by us),
`is_prefill_done` (who samples), `receive_logits` (sampling), `receive_sample` (two guards),
`deallocate_pages`. Where the prompt has placeholders for a picture, the sequence has that picture's ids.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from exllamav2 import mrope
from exllamav2.ext import none_tensor
from exllamav2.generator import ExLlamaV2Sampler
from exllamav2.generator.dynamic import ExLlamaV2DynamicJob

from engine_service.backends.base import SequenceOutcome
from engine_service.backends.exllamav2.masks import MaskFilter
from engine_service.backends.exllamav2.pages import page_name
from engine_service.backends.generation import Generation

if TYPE_CHECKING:
    from engine_service.backends.exllamav2.generator import GatedGenerator

_NEVER: Final = 1 << 30
_NO_TOKEN: Final = -1  # differs from every drafted token


class _NoPage:
    """Stands where the page after the last reserved one would be: the library writes two fields of it."""

    prev_hash: bytes | None = None
    can_revert = False


class GatedJob(ExLlamaV2DynamicJob):  # type: ignore[misc]
    """A request's sequence in the generator. Created once; survives preemption."""

    def __init__(
        self,
        generation: Generation,
        generator: GatedGenerator,
        mask: MaskFilter | None = None,
        encoded: Sequence[Any] = (),
    ) -> None:
        """Begin with all tokens so far and no pages; encoded are the prompt's pictures, in their order."""
        prompt = torch.from_numpy(generation.tokens(0, generation.num_tokens)).long()[None]
        for placed, embedding in zip(generation.order.pictures, encoded, strict=True):
            prompt[:, placed.start : placed.end] = embedding.get_ids_tensor()
        self.samples_nothing = generation.order.max_tokens == 0
        if self.samples_nothing:
            # The library leaves a sequence's last token to the decode pass; where there is none, a token
            # that is never computed stands behind the prompt.
            prompt = torch.cat((prompt, torch.zeros((1, 1), dtype=torch.long)), dim=-1)
        super().__init__(
            input_ids=prompt,
            max_new_tokens=-1 if self.samples_nothing else 0,
            gen_settings=ExLlamaV2Sampler.Settings.greedy(),
            filters=[mask] if mask is not None else None,
            embeddings=list({id(embedding): embedding for embedding in encoded}.values()),
        )
        self.prepare_for_queue(generator, generator.job_serial)
        generator.job_serial += 1
        self.max_new_tokens = _NEVER
        self.generation = generation
        self.page_names: list[bytes] = []
        self.chunk_end = 0  #: tokens that are to be stored before anything is sampled
        self.may_sample = False
        self.room = 0  #: tokens that may be stored in this iteration
        self.outcomes: list[SequenceOutcome] = []
        self.fault: Exception | None = None
        self._mask = mask
        self.forget_pages()

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def sequence(self) -> Any:
        """The library's sequence; there is always exactly one."""
        return self.sequences[0]

    @property
    def num_stored(self) -> int:
        """Tokens whose keys and values are in the cache."""
        stored: int = self.sequence.kv_position
        return stored

    @property
    def token_ids(self) -> torch.Tensor:
        """Prompt and output, int64 of shape (1, n); do not write."""
        return self.sequence.sequence_ids.torch()

    @property
    def most_reusable(self) -> int:
        """Tokens that need not be computed if they are found stored: one must be, for its logits."""
        return int(self.token_ids.shape[-1]) - (2 if self.samples_nothing else 1)

    @property
    def pages(self) -> list[Any]:
        """The pages it holds, in order."""
        pages: list[Any] = self.sequence.allocated_pages
        return pages

    def forget_pages(self) -> None:
        """Hold nothing and have nothing stored."""
        sequence = self.sequence
        sequence.allocated_pages, sequence.block_index_tensor = [], None
        sequence.kv_position, sequence.prefill_complete = 0, False

    def find_positions(self) -> None:
        """Compute where every token stands for a model that places pictures in rows and columns.

        The library does so for a prompt only; one that is computed again may have output behind it.
        """
        config = self.generator.model.config
        if not self.embeddings or not config.arch.lm.mrope:
            return
        length = int(self.token_ids.shape[-1])
        tables, end = mrope.gen_mrope_embed(config, self.token_ids, self.embeddings, length)
        self.alt_rope_embed = {"cpu": tables}
        self.alt_rope_offset = end - length

    def begin(self, *, chunk_end: int, may_sample: bool, room: int) -> None:
        """Say what the next iteration does with this job."""
        self.chunk_end, self.may_sample, self.room = chunk_end, may_sample, room
        self.outcomes, self.fault = [], None

    # -- called by the library's iteration ---------------------------------------------------------------

    def prefill(self, results: list[Any]) -> None:
        """Compute up to chunk_end; what fails is this job's fault alone."""
        start = self.num_stored
        try:
            self.compute_chunk(results)
        except Exception as error:
            self.sequence.kv_position = start
            self.fault = error

    def is_prefill_done(self) -> bool:
        """Return whether the job takes part in the decode pass."""
        return self.may_sample and self.fault is None and bool(super().is_prefill_done())

    def receive_logits(self, logits: torch.Tensor) -> tuple[Any, ...]:
        """Choose the next token by ourselves (logits: float32 of shape (1, 1, padded vocabulary)); never
        raise."""
        token_id = 0
        try:
            if self._mask is not None:
                self._mask.get_next(mask=True)
            row = logits[0, 0, : self.generation.vocab_size].numpy()
            self.outcomes.append(self.generation.choose_next(row))
            token_id = self.generation.last_token
        except Exception as error:
            self.fault = error
        return torch.tensor([[token_id]]), none_tensor, none_tensor, none_tensor, False

    def receive_sample(self, logits: Any, next_token: torch.Tensor, *rest: Any) -> tuple[bool, torch.Tensor]:
        """Let the library keep the token; return whether the output is over, and the token.

        A token that differs from the drafted one makes the library throw the other drafted ones away.
        """
        if self.fault is not None:
            return True, next_token
        sequence, size = self.sequence, self.generator.page_size
        index = sequence.kv_position // size
        fills_page = (sequence.kv_position + 1) % size == 0
        if fills_page:
            self._make_way(index, next_token)
            if index + 1 == len(self.pages):
                self.pages.append(_NoPage())
        try:
            super().receive_sample(logits, next_token, *rest)
        finally:
            if isinstance(self.pages[-1], _NoPage):
                self.pages.pop()
        is_over = self.outcomes[-1].finish_reason is not None
        if len(self.outcomes) >= self.room:
            return is_over, torch.full_like(next_token, _NO_TOKEN)
        return is_over, next_token

    def deallocate_pages(self) -> None:
        """Keep the pages: the gate gives them back, after a prompt was pinned if need be."""

    # -- inside ----------------------------------------------------------------------------------------

    def compute_chunk(self, results: list[Any]) -> None:
        """Compute up to chunk_end, piece by piece; stop early when aborted, with what is stored kept."""
        generator, sequence = self.generator, self.sequence
        while sequence.kv_position < self.chunk_end:
            generator.pages.adopt(self, self.chunk_end)
            start = sequence.kv_position
            end = min(self.chunk_end, start + generator.chunk_tokens)
            if start < end and (generator.is_aborted or not self._compute_piece(start, end, results)):
                break
        generator.pages.settle_names(self)

    def _compute_piece(self, start: int, end: int, results: list[Any]) -> bool:
        """Let the library prefill [start, end) or the first part of it; return False if it was aborted.

        The library cuts chunks at multiples of the page size and before the sequence's last token. It is
        shown the sequence up to one token past the end, and ends there.
        """
        generator, sequence, pages = self.generator, self.sequence, self.generator.pages
        whole, most = sequence.sequence_ids, generator.max_chunk_size
        before = pages.remember(self, start, end)
        if not generator.paged:
            self.pages[0].can_revert = True  # the library expects it during a prefill
        sequence.sequence_ids = _beginning_of(whole, end + 1)
        sequence.prefill_complete = False
        generator.max_chunk_size = end - start + generator.page_size
        try:
            super().prefill(results)
            was_cut = generator.was_cut()
        except BaseException:
            pages.undo(before)
            raise
        finally:
            sequence.sequence_ids, generator.max_chunk_size = whole, most
        if was_cut:
            sequence.kv_position = start
            pages.undo(before)
            return False
        pages.keep_what_was_stored(before)
        return True

    def _make_way(self, index: int, next_token: torch.Tensor) -> None:
        """See that no page that is only named stands where this job is about to complete page index.

        The page ends with the token computed now, which is the sequence's newest before next_token is added.
        """
        size = self.generator.page_size
        ids = self.token_ids[:, index * size : (index + 1) * size]
        previous = self.pages[index - 1].phash if index else None
        self.generator.pages.make_way(page_name(ids, previous))


def _beginning_of(sequence_ids: Any, length: int) -> Any:
    """Return a view of the first length tokens; it shares the memory."""
    view = copy.copy(sequence_ids)
    view.seq_len = min(length, sequence_ids.seq_len)
    return view
