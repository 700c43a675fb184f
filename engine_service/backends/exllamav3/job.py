"""A request inside ExLlamaV3's generator.

The library never ends or requeues a job by itself here; what is sampled, and when an output is over, is told
by us.

Source: `Job` of exllamav3 1.6.5. Overridden: `prefill` (the library's own begins at whole pages only, and
clears the page behind a chunk), `is_prefill_done` (who samples), `prepare_logit_mask`, `receive_logits` and
`receive_sample` (sampling), `deallocate_pages`.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from exllamav3 import Job
from exllamav3.generator.pagetable import Sequence

from engine_service.backends.exllama.job import NEVER, GatedState
from engine_service.backends.exllama.masks import matcher_to_prepare
from engine_service.backends.exllamav3.masks import MaskFilter
from engine_service.backends.generation import Generation
from engine_service.backends.sampling import Floats

if TYPE_CHECKING:
    from engine_service.backends.exllamav3.generator import GatedGenerator

_ANY_TOKEN = torch.zeros((1, 1), dtype=torch.long)


class GatedJob(GatedState, Job):  # type: ignore[misc]
    """A request's sequence in the generator."""

    def __init__(self, generation: Generation, generator: GatedGenerator) -> None:
        """Begin with the prompt, and what was generated elsewhere, and no pages."""
        tokens = torch.from_numpy(generation.tokens(0, generation.num_tokens)).long()[None]
        if generation.order.max_tokens == 0:
            # The library leaves a sequence's last token to the decode pass; where there is none, a token
            # that is never computed stands behind the prompt.
            tokens = torch.cat((tokens, _ANY_TOKEN), dim=-1)
        matcher = matcher_to_prepare(generation)
        # Introduced to the library with one token only: it would refuse a prompt that fills the cache, as it
        # counts on room for an output, and hash what the page table hashes.
        filters = [] if matcher is None else [MaskFilter(matcher)]
        super().__init__(input_ids=_ANY_TOKEN, max_new_tokens=1, filters=filters)
        self.prepare_for_queue(generator, generator.job_serial)
        generator.job_serial += 1
        self.sequences = [Sequence(tokens, tokens)]
        self.max_new_tokens = self.max_rq_tokens = NEVER
        # The library waits for the GPU once, to measure when the first token came.
        self.time_first_prefill = self.time_first_token = time.time()
        self._rows: deque[_Row] = deque()  # scores of this iteration that nothing was chosen from yet
        self.gate(generation)

    def begin(self, *, chunk_end: int, may_sample: bool, room: int) -> None:
        """Say what the next iteration does with this job."""
        super().begin(chunk_end=chunk_end, may_sample=may_sample, room=room)
        self._rows.clear()

    # -- called by the library's iteration ---------------------------------------------------------------

    def prepare_logit_mask(self) -> None:
        """Wait for the grammar; its answer is asked for when a token is chosen."""
        for future in self.filter_futures:
            future.result()
        self.filter_futures.clear()
        self.logit_masks.clear()

    def prepare_sampling_past_ids(self) -> None:
        """Do nothing: the sampler knows the tokens."""

    def receive_logits(self, logits: torch.Tensor) -> tuple[Any, ...]:
        """Keep the scores, of shape (1, 1, padded vocabulary), until the library asks for the token.

        It asks for several of one job ahead when it drafts, of which not all need come to be.
        """
        self._rows.append(_Row(logits[0, 0, : self.generation.vocab_size]))
        return _ANY_TOKEN, None, None, None

    def receive_sample(
        self, logits: Any, next_token: torch.Tensor, *rest: Any
    ) -> tuple[bool, torch.Tensor, bool]:
        """Choose and keep the next token; never raise. Tell the library neither to end nor to requeue.

        A token that differs from the drafted one makes the library throw the other drafted ones away, and
        count the pages back.
        """
        refusal: torch.Tensor = self.generator.refusal
        try:
            self.outcomes.append(self.generation.choose_next(self._rows.popleft().scores()))
        except Exception as error:
            self.fault = error
            return False, refusal, False
        next_token = torch.tensor([[self.generation.last_token]])
        self._keep(next_token)
        if self.is_over or len(self.outcomes) >= self.room:
            return False, refusal, False
        return False, next_token, False

    # -- inside ----------------------------------------------------------------------------------------

    def _keep(self, next_token: torch.Tensor) -> None:
        """Add the token, and count the one before it as stored."""
        sequence, size = self.sequence, self.generator.pages.page_tokens
        index, offset = divmod(sequence.kv_position, size)
        if offset + 1 == size:
            self._make_way(index)
        sequence.sequence_ids.append(next_token)
        sequence.kv_position += 1
        self.new_tokens += 1
        if offset + 1 == size:
            self.hash_completed_page(sequence, index)

    def _compute_piece(self, start: int, end: int, results: list[Any]) -> bool:
        """Compute [start, end) in one pass, by the model and by the one that drafts; always all of it.

        What a page has the beginning of already is copied.
        """
        generator = self.generator
        start = generator.pages.reuse(self, start, end)
        if start == end:
            return True
        generator.pages.give_up_old(self, start, end)
        ids = self.token_ids[:, start:end]
        generator.model.prefill(input_ids=ids, params=self._params(generator.cache, start))
        if generator.draft_model is not None:
            generator.draft_model.prefill(input_ids=ids, params=self._params(generator.draft_cache, start))
        generator.pages.store(self, start, end)
        return True

    def _params(self, cache: Any, start: int) -> dict[str, Any]:
        return {
            "attn_mode": "flash_attn",
            "block_table": self.sequence.block_index_tensor,
            "cache": cache,
            "cache_seqlens": torch.tensor([start], dtype=torch.int32),
            "recurrent_states": None,
            "indexed_embeddings": [],
            "inv_freq": None,
            "mm_span_prefix": 0,
        }


class _Row:
    """One row of scores on its way from the device."""

    __slots__ = ("_arrived", "_scores")

    def __init__(self, scores: torch.Tensor) -> None:
        """Begin to copy the row, of shape (vocabulary,), unless it is in the host's memory."""
        self._scores, self._arrived = scores, None
        if scores.is_cuda:
            with torch.cuda.device(scores.device):
                self._scores = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
                self._scores.copy_(scores, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def scores(self) -> Floats:
        """Wait for the row and return it, float32."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: Floats = self._scores.float().numpy()
        return values
