"""The library by itself: its own `iterate`, which starts, computes and ends as it sees fit."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from exllamav2.ext import none_tensor
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

from engine_service.backends.exllamav2.backend import Loaded
from gpucheck.work import Prompts, Watched, Work, voice_times


class _Job(ExLlamaV2DynamicJob):  # type: ignore[misc]
    """A job of the library that takes the best token: the choice costs both sides about the same."""

    asked_at = 0.0
    is_voice = False
    has_token = False
    computed = 0

    def receive_logits(self, logits: torch.Tensor) -> tuple[Any, ...]:
        return logits[0, 0].argmax().view(1, 1), none_tensor, none_tensor, none_tensor, False


class Library:
    """An ungated generator over a loaded model; whoever asks is served in the library's order."""

    def __init__(self, loaded: Loaded, *, work: Work, paged: bool) -> None:
        """Use the model's cache alone: nothing else may hold pages of it."""
        self._work = work
        self._generator = ExLlamaV2DynamicGenerator(
            model=loaded.model,
            cache=loaded.cache,
            tokenizer=loaded.tokenizer,
            max_batch_size=work.max_sequences if paged else 1,
            max_chunk_size=work.chunk_tokens,
            paged=paged,
        )
        self._prompts = Prompts(loaded.texts.vocab_size)
        self._watched = Watched()

    def run(self) -> Watched:
        """Keep the documents coming, ask as a voice now and then, and watch."""
        work, watched = self._work, self._watched
        started = time.perf_counter()
        voices = deque(started + at_s for at_s in voice_times(work))
        for _ in range(work.documents_in_flight):
            self._ask(work.document_tokens, work.document_output, at=started)
        while (now := time.perf_counter()) < started + work.seconds:
            while voices and voices[0] <= now:
                self._ask(work.voice_tokens, work.voice_output, at=voices.popleft(), is_voice=True)
            results = self._generator.iterate()
            ended = time.perf_counter()
            watched.iterations.append(ended - now)
            for result in results:
                self._note(result, ended)
        watched.seconds = time.perf_counter() - started
        jobs = [*self._generator.active_jobs, *self._generator.pending_jobs]
        watched.unanswered = len(voices) + sum(job.is_voice and not job.has_token for job in jobs)
        for job in jobs:
            self._generator.cancel(job)
        return watched

    def _ask(self, length: int, output: int, *, at: float, is_voice: bool = False) -> None:
        ids = torch.tensor([self._prompts.next(length)])
        job = _Job(input_ids=ids, max_new_tokens=output, gen_settings=ExLlamaV2Sampler.Settings.greedy())
        job.asked_at, job.is_voice = at, is_voice
        self._generator.enqueue(job)

    def _note(self, result: dict[str, Any], now: float) -> None:
        job, watched = result["job"], self._watched
        if result["stage"] == "prefill":
            watched.tokens += result["curr_progress"] - job.computed
            job.computed = result["curr_progress"]
        elif result["stage"] == "streaming":
            watched.tokens += 1
            if job.is_voice and not job.has_token:
                watched.waits.append(now - job.asked_at)
            job.has_token = True
            if result["eos"] and not job.is_voice:
                watched.documents += 1
                self._ask(self._work.document_tokens, self._work.document_output, at=now)
