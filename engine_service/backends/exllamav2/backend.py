"""ExLlamaV2's generator as a backend: which options it gets. What it does is `exllama.backend`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_service.backends.exllama import backend
from engine_service.backends.exllamav2.generator import GatedGenerator
from engine_service.backends.exllamav2.vision import Sight


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(backend.Loaded):
    """A model that is ready to compute: an ExLlamaV2, and an ExLlamaV2CacheBase of batch size 1."""

    tokenizer: Any  #: ExLlamaV2Tokenizer
    loras: tuple[Any, ...] = ()
    tower: Any = None  #: ExLlamaV2VisionTower; with `eye`


class ExLlamaV2Backend(backend.ExLlamaBackend):
    """One ExLlamaV2 model."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        max_sequences: int,
        chunk_tokens: int = 512,
        paged: bool = True,
        num_draft_tokens: int = 0,
        sampling_threads: int = 16,
        max_pinned: int = 48,
    ) -> None:
        """Take over a loaded model and its cache.

        chunk_tokens is the longest forward pass of a prefill, a multiple of 256. paged False needs no
        flash-attn and runs one request at a time. num_draft_tokens > 0 drafts: with the draft model if
        there is one, else by n-grams. Raises ValueError for what cannot be.
        """
        if loaded.eye is not None and loaded.draft_model is not None:
            raise ValueError("a model that looks at pictures cannot have another one draft for it")
        config = loaded.model.config
        backend.check_sizes(
            chunk_tokens=chunk_tokens, longest_chunk=config.max_input_len, max_sequences=max_sequences
        )
        max_sequences = max_sequences if paged else 1
        generator = GatedGenerator(
            model=loaded.model,
            cache=loaded.cache,
            tokenizer=loaded.tokenizer,
            max_batch_size=max_sequences,
            chunk_tokens=chunk_tokens,
            paged=paged,
            draft_model=loaded.draft_model if num_draft_tokens else None,
            draft_cache=loaded.draft_cache if num_draft_tokens else None,
            num_draft_tokens=num_draft_tokens,
            use_ngram_draft=bool(num_draft_tokens) and loaded.draft_model is None,
            max_sampling_threads=sampling_threads,
        )
        self._sight: Sight | None = None
        if loaded.eye is not None:
            self._sight = generator.sight = Sight(loaded.tower, loaded.model, loaded.tokenizer)
        if loaded.loras:
            generator.set_loras(list(loaded.loras))
        super().__init__(
            loaded,
            generator,
            backend="exllamav2",
            max_context_tokens=config.max_seq_len,
            max_sequences=max_sequences,
            num_draft_tokens=num_draft_tokens,
            max_pinned=max_pinned if paged else 0,
        )

    def close(self) -> None:
        """Free the device, of the vision tower too."""
        super().close()
        if self._sight is not None:
            self._sight.close()
