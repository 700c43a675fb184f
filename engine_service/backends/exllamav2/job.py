"""A request inside ExLlamaV2's generator.

The library never ends a job by itself here; what is sampled, and when an output is over, is told by us.

Source: `ExLlamaV2DynamicJob` of exllamav2 0.3.2. Overridden: `prefill` (chunks of any size, ended by us),
`is_prefill_done` (who samples), `receive_logits` (sampling), `receive_sample` (two guards),
`deallocate_pages`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from exllamav2 import mrope
from exllamav2.ext import none_tensor
from exllamav2.generator import ExLlamaV2Sampler
from exllamav2.generator.dynamic import ExLlamaV2DynamicJob

from engine_service.backends.exllama.job import NEVER, NO_TOKEN, GatedState
from engine_service.backends.exllama.masks import matcher_to_prepare
from engine_service.backends.exllamav2.masks import MaskFilter
from engine_service.backends.generation import Generation

if TYPE_CHECKING:
    from engine_service.backends.exllamav2.generator import GatedGenerator


class _NoPage:
    """Stands where the page after the last reserved one would be: the library writes two fields of it."""

    prev_hash: bytes | None = None
    can_revert = False


class GatedJob(GatedState, ExLlamaV2DynamicJob):  # type: ignore[misc]
    """A request's sequence in the generator."""

    def __init__(
        self, generation: Generation, generator: GatedGenerator, encoded: Sequence[Any] = ()
    ) -> None:
        """Begin with all tokens so far and no pages; encoded are the prompt's pictures, in their order."""
        prompt = torch.from_numpy(generation.tokens(0, generation.num_tokens)).long()[None]
        for placed, embedding in zip(generation.order.pictures, encoded, strict=True):
            prompt[:, placed.start : placed.end] = embedding.get_ids_tensor()
        samples_nothing = generation.order.max_tokens == 0
        if samples_nothing:
            # The library leaves a sequence's last token to the decode pass; where there is none, a token
            # that is never computed stands behind the prompt.
            prompt = torch.cat((prompt, torch.zeros((1, 1), dtype=torch.long)), dim=-1)
        matcher = matcher_to_prepare(generation)
        self._mask = None if matcher is None else MaskFilter(generator.model, generator.tokenizer, matcher)
        super().__init__(
            input_ids=prompt,
            max_new_tokens=-1 if samples_nothing else 0,
            gen_settings=ExLlamaV2Sampler.Settings.greedy(),
            filters=None if self._mask is None else [self._mask],
            embeddings=list({id(embedding): embedding for embedding in encoded}.values()),
        )
        self.prepare_for_queue(generator, generator.job_serial)
        generator.job_serial += 1
        self.max_new_tokens = NEVER
        self.gate(generation)

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

    # -- called by the library's iteration ---------------------------------------------------------------

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
            self._make_way(index)
            if index + 1 == len(self.pages):
                self.pages.append(_NoPage())
        try:
            super().receive_sample(logits, next_token, *rest)
        finally:
            if isinstance(self.pages[-1], _NoPage):
                self.pages.pop()
        if len(self.outcomes) >= self.room:
            return self.is_over, torch.full_like(next_token, NO_TOKEN)
        return self.is_over, next_token

    # -- inside ----------------------------------------------------------------------------------------

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
            ExLlamaV2DynamicJob.prefill(self, results)
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


def _beginning_of(sequence_ids: Any, length: int) -> Any:
    """Return a view of the first length tokens; it shares the memory."""
    view = copy.copy(sequence_ids)
    view.seq_len = min(length, sequence_ids.seq_len)
    return view
