"""The library's generator under our gate: its own `iterate`, over exactly the jobs we name.

Decides nothing. Admission by the library itself, and its defragmentation while pages are held outside of
its sight, are switched off.

Source: `ExLlamaV2DynamicGenerator` of exllamav2 0.3.2.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from exllamav2.generator.dynamic import ExLlamaV2DynamicGenerator

from engine_service.backends.exllamav2.job import GatedJob
from engine_service.backends.exllamav2.pages import GeneratorPages
from engine_service.backends.exllamav2.vision import Sight
from engine_service.backends.generation import Generation


class _Abortable:
    """A model whose prefill passes can be stopped between two layers."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.abort_event = threading.Event()
        self.was_cut = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward_chunk(self, *arguments: Any, **options: Any) -> Any:
        if not options.get("preprocess_only"):
            return self._model.forward_chunk(*arguments, **options)
        result = self._model.forward_chunk(*arguments, abort_event=self.abort_event, **options)
        # The library returns a pair of nothing where it stopped early, otherwise a dictionary.
        self.was_cut = self.was_cut or isinstance(result, tuple)
        return result


class GatedGenerator(ExLlamaV2DynamicGenerator):  # type: ignore[misc]
    """Runs one iteration at a time; starts, ends and forgets no job by itself."""

    def __init__(self, *, chunk_tokens: int, **options: Any) -> None:
        """Take the library's options; chunk_tokens is the longest forward pass of a prefill."""
        self._abortable = _Abortable(options.pop("model"))
        super().__init__(model=self._abortable, max_chunk_size=chunk_tokens, **options)
        self.chunk_tokens = chunk_tokens
        self.pages = GeneratorPages(self)
        self.sight: Sight | None = None  #: encodes pictures, for a model that sees

    # -- called by the library's iteration ---------------------------------------------------------------

    def iterate_start_jobs(self, results: list[Any]) -> None:
        """Start nothing: who runs is decided elsewhere."""

    def defrag_cache(self) -> None:
        """Move pages only while nobody holds any: a job that sits out is unseen by the library."""
        if not self.referenced_pages:
            super().defrag_cache()

    # -- an iteration ----------------------------------------------------------------------------------

    def new_job(self, generation: Generation) -> GatedJob:
        """Return a request's job, which holds nothing yet."""
        sight = self.sight
        encoded = [] if sight is None else [sight.encoded(p.picture) for p in generation.order.pictures]
        return GatedJob(generation, self, encoded)

    @property
    def is_aborted(self) -> bool:
        """Whether the iteration under way is to end early."""
        return self._abortable.abort_event.is_set()

    def abort(self) -> None:
        """End the prefill under way early (any thread)."""
        self._abortable.abort_event.set()

    def was_cut(self) -> bool:
        """Return whether a forward pass was stopped since the last call."""
        was_cut, self._abortable.was_cut = self._abortable.was_cut, False
        return was_cut

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
            if has_failed and self.filter_queue:
                self.filter_queue.clear()

    def begin(self) -> None:
        """Forget an abort that came too late for the iteration before."""
        self._abortable.abort_event.clear()
        self._abortable.was_cut = False

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute_again(self, job: GatedJob, num_tokens: int) -> None:
        """Store the job's first num_tokens tokens, outside of an iteration."""
        job.begin(chunk_end=num_tokens, may_sample=False, room=0)
        job.compute_chunk([])

    def close(self) -> None:
        """Stop the workers."""
        for pool in (getattr(self, "sampling_pool", None), self.filter_pool):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
