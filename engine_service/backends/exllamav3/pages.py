"""ExLlamaV3's own ways with pages: the generator has a page table, with a block index made at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from exllamav3.ext import exllamav3_ext
from exllamav3.generator import pagetable

from engine_service.backends.exllama.job import GatedState
from engine_service.backends.exllama.pages import PageTable

if TYPE_CHECKING:
    from engine_service.backends.exllamav3.generator import GatedGenerator


class GeneratorPages(PageTable):
    """The pages of one ExLlamaV3 generator."""

    def __init__(self, generator: GatedGenerator) -> None:
        """Work on the generator's page table."""
        super().__init__(generator.pagetable, page_tokens=pagetable.PAGE_SIZE)
        self._generator = generator

    def name_of(self, token_ids: Any, previous: bytes | None) -> bytes:
        """Return the name of a page that holds token_ids, shape (1, page size), after the page `previous`."""
        name: bytes = pagetable.tensor_hash_checksum(token_ids, previous)
        return name

    def reuse(self, job: GatedState, start: int, end: int) -> int:
        """Copy the beginning of a page of [start, end) that another page has; return what is stored then.

        What is behind a page that had to be computed was not looked for when the pages were taken.
        """
        index, offset = divmod(start, self.page_tokens)
        if not offset:
            wanted = job.token_ids[:, start : min(end, start + self.page_tokens)]
            previous = job.pages[index - 1].phash if index else None
            source, matched = self._longest_match(previous, wanted)
            if matched:
                self.give_up_old(job, start, start + matched)
                self._copy(source, job.pages[index], matched)
                self.store(job, start, start + matched)
        return job.num_stored

    def give_up_old(self, job: GatedState, start: int, end: int) -> None:
        """Forget what the pages of [start, end) had before the job: it is about to be overwritten.

        A page that was taken and not written to gets its old name back; a pass that fails has written to some
        layers.
        """
        for page in job.pages[start // self.page_tokens : self.pages_for(end)]:
            page.can_revert = False

    def store(self, job: GatedState, start: int, end: int) -> None:
        """Note that the job's tokens [start, end) are in its pages now."""
        ids, size = job.token_ids, self.page_tokens
        for index in range(start // size, self.pages_for(end)):
            page, first = job.pages[index], index * size
            begin, stop = max(start, first), min(end, first + size)
            page.sequence[:, begin - first : stop - first].copy_(ids[:, begin:stop])
            page.kv_position = max(page.kv_position, stop - first)
            page.prev_hash = job.pages[index - 1].phash if index else None
        job.sequence.kv_position = end
        self._link(job)

    def _new_name(self) -> bytes:
        name: bytes = pagetable.random_hash()
        return name

    def _num_equal(self, page: Any, wanted: Any) -> int:
        return int(exllamav3_ext.count_match_tensor(page.sequence, wanted, page.kv_position))

    def _copy(self, source: Any, target: Any, num_tokens: int) -> None:
        generator = self._generator
        with torch.inference_mode():  # in which the caches were made
            for cache in (generator.cache, generator.draft_cache):
                if cache is not None:
                    cache.copy_page(cache, source.page_index, target.page_index, num_tokens)

    def _pages_changed(self, job: GatedState) -> None:
        job.sequence.build_block_index_tensor()

    def _tidy(self) -> None:
        self._generator.rest_if_idle()
