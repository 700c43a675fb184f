"""ExLlamaV3's generator as a backend: which options it gets. What it does is `exllama.backend`'s."""

from __future__ import annotations

from typing import Final

from engine_service.backends.exllama import backend
from engine_service.backends.exllama.backend import Loaded
from engine_service.backends.exllamav3.generator import GatedGenerator

_NGRAM_TOKENS: Final = 3  # so many of the latest tokens must have come before, to draft what followed


class ExLlamaV3Backend(backend.ExLlamaBackend):
    """One ExLlamaV3 model."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        max_sequences: int,
        chunk_tokens: int = 512,
        num_draft_tokens: int = 0,
        max_pinned: int = 48,
    ) -> None:
        """Take over a loaded model and its cache.

        chunk_tokens is the longest forward pass of a prefill, a multiple of 256. num_draft_tokens > 0 drafts:
        with the draft model if there is one, else by n-grams. Raises ValueError for what cannot be.
        """
        backend.check_sizes(chunk_tokens=chunk_tokens, max_sequences=max_sequences)
        by_model = num_draft_tokens > 0 and loaded.draft_model is not None
        generator = GatedGenerator(
            model=loaded.model,
            cache=loaded.cache,
            max_batch_size=max_sequences,
            chunk_tokens=chunk_tokens,
            draft_model=loaded.draft_model if by_model else None,
            draft_cache=loaded.draft_cache if by_model else None,
            num_draft_tokens=num_draft_tokens or None,
            ngram_match_min=_NGRAM_TOKENS if num_draft_tokens and not by_model else 0,
        )
        super().__init__(
            loaded,
            generator,
            backend="exllamav3",
            max_context_tokens=loaded.model.config.max_position_embeddings,
            max_sequences=max_sequences,
            num_draft_tokens=num_draft_tokens,
            max_pinned=max_pinned,
        )
