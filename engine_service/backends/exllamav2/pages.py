"""ExLlamaV2's own ways with pages: the generator itself is the page table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from exllamav2.ext import exllamav2_ext
from exllamav2.generator import dynamic

from engine_service.backends.exllama.job import GatedState
from engine_service.backends.exllama.pages import PageTable

if TYPE_CHECKING:
    from engine_service.backends.exllamav2.generator import GatedGenerator


def page_name(token_ids: torch.Tensor, previous: bytes | None) -> bytes:
    """Return the name of a page that holds token_ids, shape (1, page size), after the page named previous."""
    name: bytes = dynamic._tensor_hash_checksum(token_ids, previous)
    return name


class GeneratorPages(PageTable):
    """The pages of one ExLlamaV2 generator."""

    def __init__(self, generator: GatedGenerator) -> None:
        """Work on the generator's own page table."""
        super().__init__(generator, page_tokens=generator.page_size)
        self._generator = generator
        self.is_paged = bool(generator.paged)

    def name_of(self, token_ids: Any, previous: bytes | None) -> bytes:
        """Return the name of a page that holds token_ids, shape (1, page size), after the page `previous`."""
        return page_name(token_ids, previous)

    def _new_name(self) -> bytes:
        name: bytes = dynamic._randomhash()
        return name

    def _num_equal(self, page: Any, wanted: Any) -> int:
        return int(exllamav2_ext.count_match(page.sequence, wanted, page.kv_position))

    def _copy(self, source: Any, target: Any, num_tokens: int) -> None:
        generator, size = self._generator, self.page_tokens
        rows = (source.page_index * size, num_tokens, target.page_index * size, num_tokens)
        for cache in (generator.cache, generator.draft_cache):
            if cache is not None:
                cache.copy_states(cache, *rows, 0, 1, 0, 1)

    def _pages_changed(self, job: GatedState) -> None:
        job.sequence.block_index_tensor = None  # built again when it is needed

    def _tidy(self) -> None:
        self._generator.defrag_cache()
