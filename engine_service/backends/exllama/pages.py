"""Who holds which page of a generator's cache, and what of it can be reused.

Decides where a job's tokens are stored; never who runs. A page is 256 token slots (one page of everything
where the cache is not paged). A *named* page is known by the hash of all tokens up to its end; a page may
be named before it is filled, and whoever holds it first fills it for all. How a library names, compares and
copies pages is told by a subclass.

Rules: the first `kv_position` slots of a job's page k hold the job's own tokens from k * page size on,
always; every filled page of a prompt has its right name, so that what is pinned is found; a page is given
up only when nobody holds it, oldest first, and a sequence's end before its beginning.

Source: `CachePage` and `ExLlamaV2DynamicJob.allocate_pages` of exllamav2 0.3.2; `CachePage` and `PageTable`
of exllamav3 1.6.5, which have the same fields. Differs: pages can be added to a live job, a prompt's own
cache hits are not evicted for its other pages, and a partly filled page is reused at admission.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from engine_service.backends.exllama.job import GatedState

_NOTHING: Final = (None, 0)


@dataclass(frozen=True, slots=True, eq=False)
class PageState:
    """What a page claimed before a computation that may fail."""

    page: Any
    kv_position: int
    prev_hash: bytes | None


class PageTable:
    """The pages of one generator."""

    is_paged = True  #: False: one page of everything

    def __init__(self, table: Any, *, page_tokens: int) -> None:
        """Work on the library's own page table."""
        self._table = table
        self.page_tokens = page_tokens

    # -- what each library does in its own way ---------------------------------------------------------

    def name_of(self, token_ids: Any, previous: bytes | None) -> bytes:
        """Return the name of a page that holds token_ids, shape (1, page size), after the page `previous`."""
        raise NotImplementedError

    def _new_name(self) -> bytes:
        """Return a name that no page has, and that says nothing."""
        raise NotImplementedError

    def _num_equal(self, page: Any, wanted: Any) -> int:
        """Return how many leading tokens a page stores of those wanted, shape (1, n)."""
        raise NotImplementedError

    def _copy(self, source: Any, target: Any, num_tokens: int) -> None:
        """Copy the first slots of a page, in every cache."""
        raise NotImplementedError

    def _pages_changed(self, job: GatedState) -> None:
        """Let the library see which pages a job holds now."""
        raise NotImplementedError

    def _tidy(self) -> None:
        """Do what the library does when a page was given back; it moves pages only if nobody holds any."""
        raise NotImplementedError

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Pages nobody holds, cached ones included."""
        return len(self._table.unreferenced_pages)

    @property
    def num_held(self) -> int:
        """Pages held by jobs and pinned prefixes; shared ones once."""
        return len(self._table.referenced_pages)

    @property
    def num_tokens_held(self) -> int:
        """Tokens stored in held pages; shared ones once."""
        return sum(page.kv_position for page in self._table.referenced_pages.values())

    @property
    def num_tokens_cached(self) -> int:
        """Tokens stored in pages that nobody holds."""
        return sum(page.kv_position for page in self._table.unreferenced_pages.values())

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages that many tokens take."""
        return -(-num_tokens // self.page_tokens)

    def charge(self, job: GatedState) -> float:
        """Return the pages a job holds, those it shares divided by their holders."""
        return float(sum(1 / page.ref_count for page in job.pages))

    def check(self, jobs: Sequence[GatedState], pinned: Sequence[Sequence[Any]]) -> None:
        """Compare the page table with those who hold pages; raise AssertionError where they differ."""
        table = self._table
        holders: dict[int, int] = {}
        for pages in [*(job.pages for job in jobs), *pinned]:
            for page in pages:
                holders[id(page)] = holders.get(id(page), 0) + 1
        for page in table.all_pages:
            assert page.ref_count == holders.get(id(page), 0), f"page {page.page_index} was leaked or lost"
            home = table.referenced_pages if page.ref_count else table.unreferenced_pages
            assert home.get(page.phash) is page, f"page {page.page_index} is not where its name says"
        assert self.num_free + self.num_held == len(table.all_pages)
        for job in jobs:
            self._check_contents(job)

    def _check_contents(self, job: GatedState) -> None:
        ids, size = job.token_ids, self.page_tokens
        for index, page in enumerate(job.pages):
            own = ids[0, index * size : index * size + page.kv_position]
            assert np.array_equal(page.sequence[0, : len(own)], own), (
                f"page {page.page_index} has other tokens"
            )
            needed = min(size, job.num_stored - index * size)
            assert page.kv_position >= needed, f"page {page.page_index} has less than its job stored"

    # -- a job's pages ---------------------------------------------------------------------------------

    def place(self, job: GatedState, *, num_pages: int, limit: int) -> None:
        """Give a job that holds nothing num_pages, with at most limit of its tokens stored there already.

        Raises ValueError if there are not as many.
        """
        job.forget_pages()
        job.page_names = self._names(job)
        found = self._beginning(job, limit)
        self._keep_for_last(job, found[0])
        try:
            self.grow(job, num_pages=num_pages)
        except ValueError:
            self.give_back(job)
            raise
        self.adopt(job, limit)
        self._copy_beginning(job, found, limit)
        self._link(job)

    def grow(self, job: GatedState, *, num_pages: int) -> None:
        """Let a job hold num_pages; raise ValueError, with nothing changed, if there are not as many."""
        names = job.page_names[len(job.pages) : num_pages]
        blank = num_pages - len(job.pages) - len(names)
        if blank <= 0 and not names:
            return
        table = self._table
        new = sum(name not in table.referenced_pages for name in names) + max(0, blank)
        if new > self.num_free:
            raise ValueError(f"{job} needs {new} more pages and {self.num_free} are free; the rest is held")
        oldest = self._oldest_first()
        for name in names:
            job.pages.append(self._take_named(name, oldest))
        for _ in range(blank):
            page = next(oldest)
            page.add_ref_unique(self._next_serial())
            job.pages.append(page)
        self._pages_changed(job)
        self._link(job)

    def adopt(self, job: GatedState, limit: int) -> None:
        """Count what others have stored in the job's pages as the job's own, up to limit tokens."""
        sequence, size = job.sequence, self.page_tokens
        while sequence.kv_position < limit:
            index, offset = divmod(sequence.kv_position, size)
            more = job.pages[index].kv_position - offset
            if more <= 0:
                break
            job.pages[index].can_revert = not self.is_paged
            sequence.kv_position = min(limit, sequence.kv_position + more)

    def give_back(self, job: GatedState) -> None:
        """Take all pages from a job; they stay cached, the beginning for longer than the end."""
        if not self.is_paged and job.pages:
            job.pages[0].backup()
        self._drop(job.pages)
        job.forget_pages()

    def pin(self, job: GatedState, num_tokens: int) -> list[Any]:
        """Hold the pages of the job's first num_tokens tokens, besides the job; return them for `unpin`."""
        self.settle_names(job)
        pages: list[Any] = job.pages[: self.pages_for(num_tokens)]
        serial = self._next_serial()
        for page in pages:
            page.add_ref(serial)
        left = num_tokens % self.page_tokens
        if left and pages[-1].kv_position > left and pages[-1].ref_count == 2:
            self._rename(pages[-1])
            pages[-1].kv_position = left
        return pages

    def unpin(self, pages: Sequence[Any]) -> None:
        """Let go of pages that were pinned."""
        self._drop(pages)

    def drop_cache(self) -> None:
        """Forget what is stored in pages that nobody holds."""
        for page in list(self._table.unreferenced_pages.values()):
            page.clear()
            page.kv_position_revert = 0

    def forget_everything(self) -> None:
        """Begin with an empty page table, whatever state it is in; nobody holds anything any more."""
        self._table.reset_page_table()

    # -- around a computation ----------------------------------------------------------------------------

    def remember(self, job: GatedState, start: int, end: int) -> list[PageState]:
        """Note the state of the pages that a chunk [start, end) may touch, the one behind it included."""
        first, last = start // self.page_tokens, self.pages_for(end) + 1
        return [PageState(p, p.kv_position, p.prev_hash) for p in job.pages[first:last]]

    def keep_what_was_stored(self, before: Sequence[PageState]) -> None:
        """Undo that the library takes less to be stored after a chunk than before it.

        It clears the page behind a chunk that ends with its page, even one that others filled already.
        """
        for state in before:
            if state.page.kv_position < state.kv_position:
                state.page.kv_position, state.page.prev_hash = state.kv_position, state.prev_hash

    def undo(self, before: Sequence[PageState]) -> None:
        """Take a chunk back that was not computed to its end.

        A page whose old content was still claimed (it was taken, but not yet written) has lost it: some
        layers may have been overwritten.
        """
        for state in before:
            state.page.kv_position, state.page.prev_hash = state.kv_position, state.prev_hash
            state.page.can_revert = False

    def resynchronise(self, job: GatedState) -> None:
        """Let the pages of a decoding job say what the job itself has stored.

        The library counts a token into its page before the forward pass; left so after a failure, a page
        that is full one token early makes it loop for ever.
        """
        stored, size = job.num_stored, self.page_tokens
        for index in range(stored // size, len(job.pages)):
            job.pages[index].kv_position = max(0, min(size, stored - index * size))

    def resynchronise_after(self, jobs: Sequence[GatedState], *, has_failed: bool) -> None:
        """Let pages say what jobs have stored, after an iteration that raised, or in which outputs ended.

        The token of a pass that failed was counted, and so was what was drafted behind an output's end.
        """
        for job in jobs:
            if (has_failed or job.is_over) and job.may_sample and job.num_stored >= job.chunk_end:
                self.resynchronise(job)

    def make_way(self, name: bytes) -> None:
        """Take the name from a page that was named but is not filled, so that a filled page can have it.

        The library assumes that whoever has the name is filled.
        """
        page = self._table.referenced_pages.get(name)
        if page is not None and page.kv_position != self.page_tokens:
            self._rename(page)

    def settle_names(self, job: GatedState) -> None:
        """Give the filled pages of a prompt their names back, or swap them for the pages that have them."""
        num_filled = job.num_stored // self.page_tokens
        for index, name in enumerate(job.page_names[:num_filled]):
            page = job.pages[index]
            if page.phash != name and page.kv_position == self.page_tokens:
                self._settle_name(job, index, name)

    # -- inside ----------------------------------------------------------------------------------------

    def _settle_name(self, job: GatedState, index: int, name: bytes) -> None:
        table, page = self._table, job.pages[index]
        self.make_way(name)
        if name in table.referenced_pages:
            serial = page.access_serial
            page.sub_ref()
            job.pages[index] = table.referenced_pages[name]
            job.pages[index].add_ref(serial)
            self._pages_changed(job)
        else:
            if name in table.unreferenced_pages:
                table.unreferenced_pages[name].clear()
            page.update_hash(name)
        if index + 1 < len(job.pages) and job.pages[index + 1].prev_hash is not None:
            job.pages[index + 1].prev_hash = name

    def _names(self, job: GatedState) -> list[bytes]:
        """Return the names of the pages that the job's tokens fill, the newest token not counted."""
        ids, size = job.token_ids, self.page_tokens
        names: list[bytes] = []
        for index in range((ids.shape[-1] - 1) // size):
            previous = names[-1] if names else None
            names.append(self.name_of(ids[:, index * size : (index + 1) * size], previous))
        return names

    def _beginning(self, job: GatedState, limit: int) -> tuple[Any, int]:
        """Return the page that shares most of what follows the filled pages, and how many tokens."""
        table, size, names = self._table, self.page_tokens, job.page_names
        num_filled = 0
        for name in names:
            page = table.referenced_pages.get(name) or table.unreferenced_pages.get(name)
            if page is None or page.kv_position != size:
                break
            num_filled += 1
        start = num_filled * size
        wanted = job.token_ids[:, start : min(limit, start + size)]
        if not wanted.numel():
            return _NOTHING
        return self._longest_match(names[num_filled - 1] if num_filled else None, wanted)

    def _longest_match(self, previous: bytes | None, wanted: Any) -> tuple[Any, int]:
        """Return the page that stores most of the tokens wanted after the page `previous`, and how many."""
        best: tuple[Any, int] = _NOTHING
        for page in self._table.all_pages:
            if page.prev_hash == previous and page.kv_position > best[1]:
                matched = self._num_equal(page, wanted)
                if matched > best[1]:
                    best = (page, matched)
        return best

    def _copy_beginning(self, job: GatedState, found: tuple[Any, int], limit: int) -> None:
        """Store the tokens that `_beginning` found, if the job's page has fewer.

        Taking pages may have given the found page to this very job: what it stores is still there.
        """
        source, matched = found
        index, offset = divmod(job.num_stored, self.page_tokens)
        if source is None or matched <= offset or job.num_stored >= limit:
            return
        page, start = job.pages[index], index * self.page_tokens
        if source is not page:
            self._copy(source, page, matched)
        page.sequence[:, :matched].copy_(job.token_ids[:, start : start + matched])
        page.kv_position = max(page.kv_position, matched)
        page.prev_hash = job.pages[index - 1].phash if index else None
        page.can_revert = not self.is_paged
        job.sequence.kv_position = min(limit, start + matched)

    def _link(self, job: GatedState) -> None:
        """Tell the page that is written next what comes before it; the library does so only after a chunk."""
        index, offset = divmod(job.num_stored, self.page_tokens)
        if index and not offset and index < len(job.pages) and not job.pages[index].kv_position:
            job.pages[index].prev_hash = job.pages[index - 1].phash

    def _keep_for_last(self, job: GatedState, partial: Any) -> None:
        """Let what the job can reuse be the last to be given up, its end before its beginning."""
        table = self._table
        if partial is not None and not partial.ref_count:
            partial.access_serial = self._next_serial()
        for name in reversed(job.page_names):
            page = table.unreferenced_pages.get(name)
            if page is not None:
                page.access_serial = self._next_serial()

    def _take_named(self, name: bytes, oldest: Iterator[Any]) -> Any:
        table, serial = self._table, self._next_serial()
        page = table.referenced_pages.get(name) or table.unreferenced_pages.get(name)
        if page is not None:
            page.add_ref(serial)
            return page
        page = next(oldest)
        page.add_ref_clear(serial, name)
        return page

    def _oldest_first(self) -> Iterator[Any]:
        """Yield pages that nobody holds, also if some are taken in between."""
        order = sorted(self._table.unreferenced_pages.values(), key=lambda page: page.access_serial)
        return (page for page in order if not page.ref_count)

    def _drop(self, pages: Sequence[Any]) -> None:
        for page in reversed(pages):
            page.access_serial = self._next_serial()
        for page in pages:
            page.sub_ref()
        self._tidy()

    def _rename(self, page: Any) -> None:
        """Give a held page a name that says nothing."""
        referenced = self._table.referenced_pages
        del referenced[page.phash]
        page.phash = self._new_name()
        referenced[page.phash] = page

    def _next_serial(self) -> int:
        self._table.access_serial += 1
        serial: int = self._table.access_serial
        return serial
