"""ExLlamaV3's generator under our gate: its own `iterate`, over exactly the jobs we name.

Decides nothing. Admission by the library itself is switched off, and so is its taking turns of prefill and
decode: every job that is named gets its chunk or its token. What it does when it is idle waits until nobody
holds a page.

Source: `Generator` of exllamav3 1.6.5.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import torch
from exllamav3 import Generator

from engine_service.backends.exllamav3.job import GatedJob
from engine_service.backends.exllamav3.pages import GeneratorPages
from engine_service.backends.generation import Generation


class GatedGenerator(Generator):  # type: ignore[misc]
    """Runs one iteration at a time; starts, ends and forgets no job by itself."""

    def __init__(self, *, chunk_tokens: int, **options: Any) -> None:
        """Take the library's options; chunk_tokens is the longest forward pass of a prefill."""
        super().__init__(
            tokenizer=None,  # texts are ours
            max_chunk_size=chunk_tokens,
            shared_chunk_size=chunk_tokens,
            prefill_cooldown=0,
            **options,
        )
        self._abort = threading.Event()
        self.chunk_tokens = chunk_tokens
        self.pages = GeneratorPages(self)
        self.refusal = torch.zeros((1, 1), dtype=torch.long)  #: a token that nobody drafted in this iteration

    # -- called by the library's iteration ---------------------------------------------------------------

    def iterate_start_jobs(self, results: list[Any]) -> None:
        """Start nothing: who runs is decided elsewhere."""

    def iterate_gen(self, results: list[Any], draft_tokens: torch.Tensor | None = None) -> None:
        """Run the decode pass; draft_tokens has shape (rows, n)."""
        if draft_tokens is not None:
            drafted = set(draft_tokens.flatten().tolist())
            self.refusal.fill_(next(i for i in itertools.count() if i not in drafted))
        super().iterate_gen(results, draft_tokens)

    # -- an iteration ----------------------------------------------------------------------------------

    def new_job(self, generation: Generation) -> GatedJob:
        """Return a request's job, which holds nothing yet."""
        return GatedJob(generation, self)

    @property
    def is_aborted(self) -> bool:
        """Whether the iteration under way is to end early."""
        return self._abort.is_set()

    def abort(self) -> None:
        """End the prefill under way before its next forward pass (any thread)."""
        self._abort.set()

    def begin(self) -> None:
        """Forget an abort that came too late for the iteration before."""
        self._abort.clear()

    def advance(self, jobs: Sequence[GatedJob]) -> None:
        """Run one iteration over these; whatever it raises, the page table is right afterwards."""
        self.active_jobs = list(jobs)
        has_failed = True
        try:
            self.iterate()
            has_failed = False
        finally:
            self.active_jobs = []
            self.pages.resynchronise_after(jobs, has_failed=has_failed)
            for job in jobs:
                wait(job.filter_futures)
                job.filter_futures.clear()
                job.logit_masks.clear()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute_again(self, job: GatedJob, num_tokens: int) -> None:
        """Store the job's first num_tokens tokens, outside of an iteration."""
        job.begin(chunk_end=num_tokens, may_sample=False, room=0)
        job.compute_chunk([])

    def rest_if_idle(self) -> None:
        """Let the library tidy up, which moves pages, if nobody holds any: a job that sits out is unseen by
        it."""
        if not self.pagetable.referenced_pages:
            self.on_queue_drained()
