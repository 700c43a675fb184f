"""One generator of ExLlamaV2 or ExLlamaV3 driven iteration by iteration, as `base.Backend`.

Decides nothing about who runs. One `step` is one `iterate` of the library over exactly the requests it was
told: a forward pass per prefill chunk, then one pass over all that decode.

Rules: a fault of one request releases only that one; what others got out of an iteration that failed is
delivered; after an iteration that raised, the page table is right; repeated failures end in an empty page
table, from which every request goes on with its tokens computed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from engine_service.backends.base import (
    BackendError,
    ChunkOrder,
    Eye,
    FinishReason,
    GenerationOrder,
    ModelInfo,
    SequenceOutcome,
    StepOutcome,
    Tokenizer,
)
from engine_service.backends.exllama.job import GatedState
from engine_service.backends.exllama.masks import PreparedMatcher
from engine_service.backends.exllama.pages import PageTable
from engine_service.backends.exllama.tokenizer import DirectoryTokenizer
from engine_service.backends.generation import Generation, Matcher, Vocabulary
from engine_service.backends.grammar import GrammarCompiler
from engine_service.backends.holding import Live, Part, RequestHolder
from engine_service.backends.prefixes import Stored
from engine_service.scheduling.model import Capacity, RequestId

_LOGGER = logging.getLogger(__name__)
_FAILURES_BEFORE_RESET: Final = 3
_NO_SEQUENCE: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to compute, in the library's own objects."""

    name: str
    model: Any  #: the library's, or what computes like it
    cache: Any
    texts: DirectoryTokenizer
    draft_model: Any = None
    draft_cache: Any = None
    eye: Eye | None = None  #: reads pictures for the model


class Gate(Protocol):
    """A library's generator under our gate. One thread, except `abort`."""

    pages: PageTable
    chunk_tokens: int  #: longest forward pass of a prefill

    def new_job(self, generation: Generation) -> GatedState:
        """Return a request's job, which holds nothing yet."""
        ...

    @property
    def is_aborted(self) -> bool:
        """Whether the iteration under way is to end early."""
        ...

    def begin(self) -> None:
        """Forget an abort that came too late for the iteration before."""
        ...

    def advance(self, jobs: Sequence[Any]) -> None:
        """Run one iteration over these; whatever it raises, the page table is right afterwards."""
        ...

    def compute_again(self, job: Any, num_tokens: int) -> None:
        """Store the job's first num_tokens tokens, outside of an iteration."""
        ...

    def abort(self) -> None:
        """End the prefill under way early (any thread)."""
        ...

    def close(self) -> None:
        """Stop the workers."""
        ...


@dataclass(slots=True)
class _Pinned:
    """A prompt that is kept: who computed it, and the pages held for it."""

    job: GatedState
    num_tokens: int
    pages: list[Any]


class ExLlamaBackend(RequestHolder):
    """One model on a GPU (or on whatever computes like it); a subclass makes the library's generator."""

    def __init__(
        self,
        loaded: Loaded,
        gate: Gate,
        *,
        backend: str,
        max_context_tokens: int,
        max_sequences: int,
        num_draft_tokens: int,
        max_pinned: int,
    ) -> None:
        """Take over a loaded model, and its generator, which has an empty cache.

        max_context_tokens is the model's own limit. Raises ValueError for what cannot be.
        """
        self._loaded = loaded
        self._generator = gate
        self._pages = gate.pages
        self._num_draft = num_draft_tokens
        self._num_pages = self._pages.num_free
        self._capacity = self._describe_capacity(max_sequences, max_context_tokens)
        self._info = self._describe_model(backend)
        self._grammars = GrammarCompiler(loaded.texts.vocab_size, loaded.texts.grammar_tokenizer)
        self._jobs: dict[RequestId, GatedState] = {}
        self._pinned: dict[RequestId, _Pinned] = {}
        self._free_ids = list(range(self._capacity.max_sequences - 1, -1, -1))
        self._num_failures = 0
        vocabulary = Vocabulary(
            size=loaded.texts.vocab_size,
            end_ids=loaded.texts.end_ids,
            token_bytes=loaded.texts.token_bytes,
            max_context_tokens=self._capacity.max_context_tokens,
            can_see=loaded.eye is not None,
        )
        super().__init__(
            vocabulary=vocabulary,
            num_slots=self._capacity.num_pages * self._capacity.page_tokens,
            max_sequences=self._capacity.max_sequences,
            max_pinned=max_pinned,
        )

    def _describe_capacity(self, max_sequences: int, max_context_tokens: int) -> Capacity:
        page_tokens = self._pages.page_tokens
        # Drafted tokens are stored before it is known whether they stay: each request may need one page more.
        num_pages = self._num_pages - (max_sequences if self._num_draft else 0)
        if num_pages < 1:
            raise ValueError(
                f"a cache of {self._num_pages * page_tokens} tokens is too small to draft for "
                f"{max_sequences} requests"
            )
        return Capacity(
            num_pages=num_pages,
            page_tokens=page_tokens,
            max_sequences=max_sequences,
            max_context_tokens=min(num_pages * page_tokens, max_context_tokens),
            can_abort=True,
            mixes_prefill_and_decode=False,
        )

    def _describe_model(self, backend: str) -> ModelInfo:
        texts = self._loaded.texts
        return ModelInfo(
            name=self._loaded.name,
            architecture=texts.architecture,
            max_context_tokens=self._capacity.max_context_tokens,
            vocab_size=texts.vocab_size,
            chat_template=texts.chat_template,
            bos_text=texts.bos_text,
            eos_text=texts.eos_text,
            backend=backend,
            can_see=self._loaded.eye is not None,
        )

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """What is loaded (any thread)."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer (any thread)."""
        return self._loaded.texts

    @property
    def eye(self) -> Eye | None:
        """What reads pictures for the model (any thread)."""
        return self._loaded.eye

    @property
    def capacity(self) -> Capacity:
        """What requests may hold in all."""
        return self._capacity

    @property
    def num_pages_held(self) -> int:
        """Pages held by requests and pinned prefixes; shared ones count once."""
        return self._pages.num_held

    @property
    def num_cells_held(self) -> int:
        """Tokens stored in pages that are held; what is only cached does not count."""
        return self._pages.num_tokens_held

    @property
    def num_cells_cached(self) -> int:
        """Tokens stored in pages that nobody holds."""
        return self._pages.num_tokens_cached

    @property
    def num_parked(self) -> int:
        """Sequences kept in host memory: none, pages are kept on the device only."""
        return 0

    @property
    def num_sequence_ids(self) -> int:
        """Requests that may hold pages at once, and prefixes that may be pinned."""
        return self._max_sequences + self._max_pinned

    def charge(self, request_id: RequestId) -> float:
        """Return the pages the request holds; a page it shares counts as a fraction."""
        return self._pages.charge(self._jobs[self._known(request_id).request_id])

    def check(self) -> None:
        """Compare these accounts with the page table; raise AssertionError where they differ."""
        jobs = []
        for live in self._live.values():
            job = self._jobs[live.request_id]
            if live.holds_cells:
                jobs.append(job)
                assert job.num_stored == live.num_stored
            else:
                assert not job.pages
            ids = live.generation.tokens(0, live.generation.num_tokens).tolist()
            stored = job.token_ids[0, : len(ids)].tolist()
            for placed in live.generation.order.pictures:
                stored[placed.start : placed.end] = ids[placed.start : placed.end]
            assert stored == ids
        self._pages.check(jobs, [pinned.pages for pinned in self._pinned.values()])
        assert self._jobs.keys() == self._live.keys()
        used = [live.sequence_id for live in self._live.values() if live.holds_cells]
        assert sorted(used + self._free_ids) == list(range(self._max_sequences))

    def drop_cache(self) -> None:
        """Forget what is stored in pages that nobody holds."""
        self._pages.drop_cache()

    def shared_prefix_tokens(self, prompt_ids: Sequence[int]) -> int:
        """Return how many leading tokens are in whole pages of a pinned prefix (any thread).

        The rest of such a prefix is copied, so it need not be computed, but it takes slots of the request's
        own.
        """
        shared = super().shared_prefix_tokens(prompt_ids)
        return shared - shared % self._capacity.page_tokens

    def validate(self, order: GenerationOrder) -> None:
        """Raise InvalidConstraint for a grammar that cannot be compiled (any thread)."""
        if order.constraint is not None:
            self._grammars.compile(order.constraint)

    def abort(self) -> None:
        """Make a prefill under way end as soon as the library can (any thread); no-op when idle."""
        self._generator.abort()

    def close(self) -> None:
        """Free the device, of the model that drafts too."""
        self._generator.close()
        for model in (self._loaded.model, self._loaded.draft_model):
            unload = getattr(model, "unload", None)
            if unload is not None:
                unload()

    def warm_up(self) -> None:
        """Compute a few tokens and forget them, so that the first request does not pay for the kernels'
        choice."""
        request_id = RequestId("warm-up")
        prompt = (self._loaded.texts.eos_id,) * 32
        order = GenerationOrder(request_id=request_id, prompt_ids=prompt, max_tokens=2, ignore_eos=True)
        self.admit(order, reserved_tokens=len(prompt) + 2)
        self.step([], [ChunkOrder(request_id=request_id, num_tokens=len(prompt))])
        self.step([request_id], [])
        self.release(request_id)
        self.drop_cache()

    # -- a request's life ------------------------------------------------------------------------------

    def grow(self, request_id: RequestId, *, reserved_tokens: int) -> None:
        """Let the request fill up to reserved_tokens slots."""
        live = self._holding(request_id)
        self._check_reservation(live, reserved_tokens)
        self._pages.grow(self._jobs[request_id], num_pages=self._pages_for(reserved_tokens))
        live.reserved = max(live.reserved, reserved_tokens)

    def release(self, request_id: RequestId) -> None:
        """Forget the request in whatever state it is; unknown ids are ignored."""
        super().release(request_id)
        self._jobs.pop(request_id, None)

    def drop_prefix(self, request_id: RequestId) -> None:
        """Give up the prefix pinned by that request; sequences that share it keep their pages."""
        self._prefixes.unpin(request_id)
        pinned = self._pinned.pop(request_id, None)
        if pinned is not None:
            self._pages.unpin(pinned.pages)

    def _matcher_for(self, order: GenerationOrder) -> Matcher | None:
        return None if order.constraint is None else PreparedMatcher(self._grammars.compile(order.constraint))

    def _place(self, live: Live, reserved_tokens: int) -> None:
        self._check_reservation(live, reserved_tokens)
        if not self._free_ids:
            raise ValueError(f"{self._max_sequences} requests hold a sequence already")
        job = self._jobs.get(live.request_id) or self._generator.new_job(live.generation)
        job.find_positions()
        limit = min(job.most_reusable, reserved_tokens)
        self._pages.place(job, num_pages=self._pages_for(reserved_tokens), limit=limit)
        self._jobs[live.request_id] = job
        live.sequence_id, live.reserved = self._free_ids.pop(), reserved_tokens
        live.num_stored = job.num_stored

    def _pages_for(self, reserved_tokens: int) -> int:
        return min(self._pages.pages_for(reserved_tokens + self._num_draft), self._num_pages)

    def _retire(self, live: Live, *, owner: RequestId | None) -> None:
        self._pages.give_back(self._jobs[live.request_id])
        self._free_ids.append(live.sequence_id)
        live.sequence_id = _NO_SEQUENCE
        live.num_stored = live.reserved = 0

    def _pin(self, live: Live) -> None:
        job, num_prompt = self._jobs[live.request_id], live.generation.num_prompt
        tokens = live.generation.tokens(0, num_prompt).copy()
        self._pinned[live.request_id] = _Pinned(job, num_prompt, self._pages.pin(job, num_prompt))
        self._prefixes.pin(live.request_id, Stored(sequence_id=_NO_SEQUENCE, tokens=tokens))

    # -- an iteration ----------------------------------------------------------------------------------

    def step(self, decode_ids: Sequence[RequestId], prefills: Sequence[ChunkOrder]) -> StepOutcome:
        """Run one iteration over exactly these.

        Raises ValueError, before anything is computed, for an order that cannot be (unknown request, more
        tokens than reserved or left), BackendError when nothing can be computed any more.
        """
        started = time.perf_counter()
        parts = self._plan(decode_ids, prefills)
        if not parts:
            return StepOutcome(outcomes=(), seconds=0.0)
        failure = self._run(parts)
        outcomes = self._collect(parts)
        if failure is not None:
            if not any(one.prefill_tokens or one.token_ids or one.error for one in outcomes):
                raise failure
            _LOGGER.warning("an iteration broke off (%s); what it had computed is kept", failure)
        is_aborted = self._generator.is_aborted or failure is not None
        return StepOutcome(
            outcomes=tuple(outcomes), seconds=time.perf_counter() - started, aborted=is_aborted
        )

    def _run(self, parts: list[Part]) -> Exception | None:
        """Compute; return what went wrong with the iteration as a whole."""
        failure = self._try(parts)
        if failure is None:
            self._num_failures = 0
            return None
        self._num_failures += 1
        if self._num_failures < _FAILURES_BEFORE_RESET:
            return failure
        _LOGGER.error("%d iterations in a row failed (%s); beginning anew", self._num_failures, failure)
        try:
            self._compute_everything_again()
        except Exception as error:
            raise BackendError(f"the device computes nothing any more: {error}") from error
        failure = self._try(parts)
        if failure is None:
            self._num_failures = 0
        return failure

    def _try(self, parts: list[Part]) -> Exception | None:
        jobs = [self._begin(part) for part in parts]
        self._generator.begin()
        try:
            self._generator.advance(jobs)
        except Exception as error:
            return error
        return None

    def _begin(self, part: Part) -> GatedState:
        live, job = part.live, self._jobs[part.live.request_id]
        end = live.num_stored + part.num_tokens
        samples = part.wants_logits
        # All chosen tokens but the last are stored, and behind the chunk.
        job.begin(chunk_end=end - samples, may_sample=samples, room=live.reserved - end + 1)
        return job

    def _collect(self, parts: list[Part]) -> list[SequenceOutcome]:
        return [self._conclude(part.live, self._outcome(part)) for part in parts]

    def _outcome(self, part: Part) -> SequenceOutcome:
        """Describe what one request got; what it stored is counted."""
        live, job = part.live, self._jobs[part.live.request_id]
        kept = min(job.num_stored - live.num_stored, part.num_tokens)
        live.num_stored = job.num_stored
        prefill_tokens = kept if part.is_chunk else 0
        if job.fault is not None:
            return self._fault(part, kept, job.fault)
        if job.outcomes:
            return _merged(job.outcomes, prefill_tokens)
        reason = None
        if job.samples_nothing and part.is_last and kept == part.num_tokens:
            reason = FinishReason.PREFIX
        return SequenceOutcome(
            request_id=live.request_id, prefill_tokens=prefill_tokens, finish_reason=reason
        )

    def _compute_everything_again(self) -> None:
        """Empty the page table and store the tokens of everything that held pages, pinned prefixes first."""
        self._pages.forget_everything()
        for pinned in self._pinned.values():
            pinned.job.forget_pages()
            self._restore(pinned.job, pinned.num_tokens, self._pages.pages_for(pinned.num_tokens))
            pinned.pages = self._pages.pin(pinned.job, pinned.num_tokens)
            self._pages.give_back(pinned.job)
        for live in self._live.values():
            if live.holds_cells:
                self._jobs[live.request_id].forget_pages()
                self._restore(self._jobs[live.request_id], live.num_stored, self._pages_for(live.reserved))

    def _restore(self, job: GatedState, num_tokens: int, num_pages: int) -> None:
        job.find_positions()
        self._pages.place(job, num_pages=num_pages, limit=num_tokens)
        self._generator.compute_again(job, num_tokens)


def _merged(outcomes: list[SequenceOutcome], prefill_tokens: int) -> SequenceOutcome:
    """Return what several tokens of one request in one iteration come to."""
    last = outcomes[-1]
    return SequenceOutcome(
        request_id=last.request_id,
        prefill_tokens=prefill_tokens,
        token_ids=tuple(i for one in outcomes for i in one.token_ids),
        text="".join(one.text for one in outcomes),
        logprobs=tuple(entry for one in outcomes for entry in one.logprobs),
        finish_reason=last.finish_reason,
    )


def check_sizes(*, chunk_tokens: int, max_sequences: int, longest_chunk: int | None = None) -> None:
    """Raise ValueError for a chunk or a number of requests that cannot be."""
    if max_sequences < 1:
        raise ValueError(f"max_sequences must be >= 1, not {max_sequences}")
    if chunk_tokens < 256 or chunk_tokens % 256:
        raise ValueError(f"chunk_tokens must be a multiple of 256, at least 256, not {chunk_tokens}")
    if longest_chunk is not None and chunk_tokens > longest_chunk:
        raise ValueError(
            f"chunk_tokens is {chunk_tokens}, but the model was loaded for at most {longest_chunk} tokens"
        )
