"""One request inside a library's generator: what is stored of it, and what the next iteration does with it.

The library runs the passes and keeps pages and token ids; the next token, the text and the end come from a
`Generation`, as on every other backend. Decides nothing about who runs. A library's own job inherits from
this first and from the library's job second.

Rules: nothing here raises into the library's iteration, where an exception would cost every other request
its token; a chunk ends exactly where it was ordered to; the library never gives a job's pages back by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine_service.backends.base import SequenceOutcome
from engine_service.backends.generation import Generation

if TYPE_CHECKING:
    from engine_service.backends.exllama.pages import PageTable

NEVER: Final = 1 << 30  #: more tokens than any request has
NO_TOKEN: Final = -1  #: differs from every drafted token


class GatedState:
    """What every library's job has under the gate. Created once for a request; survives preemption."""

    sequences: list[Any]  # of the library; there is always exactly one
    generator: Any

    def gate(self, generation: Generation) -> None:
        """Begin with the prompt and no pages."""
        self.generation = generation
        self.page_names: list[bytes] = []
        self.chunk_end = 0  #: tokens that are to be stored before anything is sampled
        self.may_sample = False
        self.room = 0  #: tokens that may be chosen in this iteration
        self.outcomes: list[SequenceOutcome] = []
        self.fault: Exception | None = None
        self.forget_pages()

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def sequence(self) -> Any:
        """The library's sequence."""
        return self.sequences[0]

    @property
    def samples_nothing(self) -> bool:
        """Whether only the prompt is computed; then a token that never is stands behind it."""
        return self.generation.order.max_tokens == 0

    @property
    def num_stored(self) -> int:
        """Tokens whose keys and values are in the cache."""
        stored: int = self.sequence.kv_position
        return stored

    @property
    def token_ids(self) -> Any:
        """Prompt and output, an int64 tensor of shape (1, n); do not write."""
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

    @property
    def is_over(self) -> bool:
        """Whether this iteration's tokens ended the output, or failed."""
        return self.fault is not None or bool(self.outcomes and self.outcomes[-1].finish_reason)

    def forget_pages(self) -> None:
        """Hold nothing and have nothing stored."""
        sequence = self.sequence
        sequence.allocated_pages, sequence.block_index_tensor = [], None
        sequence.kv_position, sequence.prefill_complete = 0, False

    def find_positions(self) -> None:
        """Compute where tokens stand, for a model that places pictures in rows and columns; others do not."""

    def begin(self, *, chunk_end: int, may_sample: bool, room: int) -> None:
        """Say what the next iteration does with this job."""
        self.chunk_end, self.may_sample, self.room = chunk_end, may_sample, room
        self.outcomes, self.fault = [], None

    # -- called by the library's iteration ---------------------------------------------------------------

    def prefill(self, results: list[Any], chunk_size: int | None = None) -> None:
        """Compute up to chunk_end; what fails is this job's fault alone."""
        start = self.num_stored
        try:
            self.compute_chunk(results)
        except Exception as error:
            self.sequence.kv_position = start
            self.fault = error

    def is_prefill_done(self) -> bool:
        """Return whether the job takes part in the decode pass."""
        return self.may_sample and self.fault is None and self.num_stored == self.token_ids.shape[-1] - 1

    def deallocate_pages(self) -> None:
        """Keep the pages: the gate gives them back, after a prompt was pinned if need be."""

    # -- inside ----------------------------------------------------------------------------------------

    def compute_chunk(self, results: list[Any]) -> None:
        """Compute up to chunk_end, piece by piece; stop early when aborted, with what is stored kept."""
        generator, sequence = self.generator, self.sequence
        pages: PageTable = generator.pages
        while sequence.kv_position < self.chunk_end:
            pages.adopt(self, self.chunk_end)
            start = sequence.kv_position
            end = min(self.chunk_end, start + generator.chunk_tokens)
            if start < end and (generator.is_aborted or not self._compute_piece(start, end, results)):
                break
        pages.settle_names(self)

    def _compute_piece(self, start: int, end: int, results: list[Any]) -> bool:
        """Compute [start, end) or the first part of it; return False if nothing was, as it was aborted."""
        raise NotImplementedError

    def _make_way(self, index: int) -> None:
        """See that no page that is only named stands where this job is about to complete page index.

        The page ends with the token computed now, which is the sequence's newest before the next is added.
        """
        pages: PageTable = self.generator.pages
        ids = self.token_ids[:, index * pages.page_tokens : (index + 1) * pages.page_tokens]
        pages.make_way(pages.name_of(ids, self.pages[index - 1].phash if index else None))
