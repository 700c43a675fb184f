"""Random lives of many requests on the libraries' own generators, in a cache that is too small for them.

The oracle keeps what the engine's ledger keeps (pages reserved and pinned) and never orders what would not
fit. Whatever happens (odd chunks, pauses, growth, preemption, cancellation, aborts, grammars and forward
passes that fail, prefixes that are shared, drafts), every output must be, token by token, what a model
without any cache gives, and no page may be lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_service.backends.base import (
    FinishReason,
    GenerationOrder,
    ModelInfo,
    PlacedPicture,
    Sampling,
    SequenceOutcome,
)
from engine_service.backends.exllama.masks import PreparedMatcher
from engine_service.backends.generation import Generation, Matcher
from engine_service.backends.sampling import TokenIds
from engine_service.scheduling.model import PreemptionMode, RequestId, pages_for
from tests.backends.conftest import AnyBackend, Library
from tests.backends.driver import Driver
from tests.backends.echo import PAGE

NUM_PAGES = 24
MAX_SEQUENCES = 5


class FailingMatcher:
    """Allows everything, until it fails."""

    is_complete = False

    def __init__(self, vocab_size: int, *, fails_at: int) -> None:
        self._ids = np.arange(vocab_size)
        self._left = fails_at

    def allows(self, token_id: int) -> bool:
        return len(self.allowed_ids()) > token_id

    def allowed_ids(self) -> TokenIds:
        if self._left == 0:
            raise ValueError("the grammar failed on purpose")
        return self._ids

    def accept(self, token_id: int) -> None:
        self._left -= 1


class Fuzzed:
    """Gives some requests of the backend it is mixed into a grammar that fails."""

    fails_at: dict[RequestId, int]
    info: ModelInfo

    def _matcher_for(self, order: GenerationOrder) -> Matcher | None:
        fails_at = self.fails_at.get(order.request_id)
        if fails_at is None:
            return None
        return PreparedMatcher(FailingMatcher(self.info.vocab_size, fails_at=fails_at))


@dataclass
class Promise:
    """What the oracle knows of one request."""

    order: GenerationOrder
    reserved: int
    shared: int
    is_preempted: bool = False


class Life:
    """One random life of a backend."""

    def __init__(
        self, library: Library, directory: Path, *, seed: int, num_draft_tokens: int = 0, drafts: bool = False
    ) -> None:
        self.random = random.Random(seed)
        loaded = self.load(library, directory, drafts=drafts)
        self.model: Any = loaded.model
        chunk_tokens, threads = self.random.choice([256, 512, 1024]), self.random.choice([1, 4])
        self.backend: AnyBackend = type("FuzzedBackend", (Fuzzed, library.Backend), {})(
            loaded,
            max_sequences=MAX_SEQUENCES,
            chunk_tokens=chunk_tokens,
            num_draft_tokens=num_draft_tokens,
            **library.with_threads(threads),
        )
        self.backend.fails_at = {}
        self.driver = Driver(self.backend)
        self.promises: dict[RequestId, Promise] = {}
        self.pinned: dict[RequestId, int] = {}
        self.counts: dict[str, int] = {}
        self.recent: list[tuple[int, ...]] = []
        self.num_arrived = 0
        self.model.on_prefill = self.perhaps_abort
        self.bases = [self.tokens(self.random.randrange(200, 1500)) for _ in range(3)]

    def load(self, library: Library, directory: Path, *, drafts: bool) -> Any:
        cache_tokens = NUM_PAGES * PAGE
        return library.make_loaded(directory, cache_tokens=cache_tokens, context_tokens=2560, drafts=drafts)

    def shown(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
        """Return the prompt with the pictures that stand in it."""
        return prompt, ()

    def read(self, order: GenerationOrder) -> list[int]:
        """Return what the model reads of a prompt."""
        return list(order.prompt_ids)

    def tokens(self, num: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(300) for _ in range(num))

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def perhaps_abort(self) -> None:
        if self.random.random() < 0.05:
            self.backend.abort()

    # -- the ledger

    def pages(self, promise: Promise) -> int:
        return pages_for(promise.reserved - promise.shared, PAGE)

    def room(self) -> int:
        """Return the pages that nothing is promised to."""
        held = sum(self.pages(p) for p in self.promises.values() if not p.is_preempted)
        pinned = sum(pages_for(length, PAGE) for length in self.pinned.values())
        return self.backend.capacity.num_pages - held - pinned

    def num_running(self) -> int:
        return sum(not p.is_preempted for p in self.promises.values())

    # -- events

    def new_prompt(self) -> tuple[int, ...]:
        base = self.random.choice(self.bases + self.recent[-3:])
        if self.random.random() < 0.5:
            base = base[: self.random.randrange(1, len(base) + 1)]
        if self.random.random() < 0.7:
            base = (*base, *self.tokens(self.random.randrange(1, 300)))
        return base[:1800]

    def arrive(self) -> None:
        self.num_arrived += 1
        prompt = self.new_prompt()
        keeps = self.random.random() < 0.08 and len(self.pinned) < 3
        prompt, pictures = (prompt, ()) if keeps else self.shown(prompt)
        max_tokens = self.random.randrange(1, self.random.choice([2, 30, 100, 600]))
        if keeps and self.random.random() < 0.7:
            max_tokens = 0
        temperature = self.random.choice([0.0, 0.0, 1.0])
        sampling = Sampling(temperature=temperature, seed=self.random.randrange(1000), top_k=5)
        order = self.driver.order(
            f"r{self.num_arrived}",
            prompt,
            max_tokens,
            sampling=sampling,
            ignore_eos=self.random.random() < 0.5,
            keep_prefix=keeps,
            pictures=pictures,
        )
        shared = 0 if keeps else self.backend.shared_prefix_tokens(prompt)
        promise = Promise(
            order, min(len(prompt) + max_tokens, len(prompt) + self.random.randrange(64)), shared
        )
        if self.pages(promise) > self.room() or self.num_running() == MAX_SEQUENCES:
            return
        if not keeps and max_tokens and self.random.random() < 0.1:
            self.backend.fails_at[order.request_id] = self.random.randrange(60)
        cached = self.driver.admit(order, reserved_tokens=promise.reserved)
        assert shared <= cached < len(prompt)
        self.promises[order.request_id] = promise

    def iterate(self) -> None:
        decodes, chunks = self.compose()
        self.perhaps_fail()
        try:
            outcome = self.driver.step(decodes=decodes, chunks=chunks)
        except RuntimeError as error:
            if str(error) != "out of memory":
                raise
            self.count("iterations that failed")
            return
        finally:
            self.model.fail_next.clear()
        assert [o.request_id for o in outcome.outcomes] == [*decodes, *chunks]
        for one in outcome.outcomes:
            self.note(one)

    def compose(self) -> tuple[list[str], dict[str, int]]:
        decodes, chunks = [], {}
        for request_id, promise in self.promises.items():
            if promise.is_preempted or self.random.random() < 0.2:
                continue
            is_decoding = self.driver.decodes(request_id)
            need = 1 if is_decoding else self.random.choice([1, 100, 256, 300, 512, 777, 1024])
            need = min(need, self.driver.left[request_id])
            if self.grown(request_id, promise, need):
                if is_decoding:
                    decodes.append(request_id)
                elif self.random.random() < 0.4:
                    chunks[request_id] = need
        return decodes, chunks

    def perhaps_fail(self) -> None:
        if self.random.random() < 0.02:
            kind = self.random.choice(["prefill", "decode"])
            self.model.fail_next = [(kind, RuntimeError("out of memory"))]

    def note(self, one: SequenceOutcome) -> None:
        if one.error is not None:
            text = str(one.error)
            assert text == "out of memory" or one.request_id in self.backend.fails_at, text
            self.count("requests that failed")
            self.compare(self.promises.pop(one.request_id).order, None)
        elif one.finish_reason is not None:
            order = self.promises.pop(one.request_id).order
            self.compare(order, one.finish_reason)
            if order.keep_prefix:
                self.pinned[one.request_id] = len(order.prompt_ids)
            self.recent.append((*order.prompt_ids, *self.driver.outputs[one.request_id].token_ids))

    def compare(self, order: GenerationOrder, reason: FinishReason | None) -> None:
        """Compare an output, finished or not, with what the model says when nothing is cached."""
        output = self.driver.outputs[order.request_id]
        if reason is FinishReason.PREFIX:
            assert not output.token_ids
            self.count("prefixes")
            return
        # As everywhere, a grammar decides by itself whether the end token may come.
        has_grammar = order.request_id in self.backend.fails_at
        matcher = FailingMatcher(self.backend.info.vocab_size, fails_at=-1) if has_grammar else None
        alone = Generation(order, vocabulary=self.backend._vocabulary, matcher=matcher)
        texts, ids, ended = [], self.read(order), None
        while ended is None and len(texts) < len(output.token_ids):
            one = alone.choose_next(self.model.scores(np.array(ids)))
            ids.extend(one.token_ids)
            texts.append(one.text)
            ended = one.finish_reason
        assert output.token_ids == ids[len(order.prompt_ids) :]
        assert output.text == "".join(texts)
        assert reason is ended
        self.count("outputs" if reason else "outputs cut off")

    def grown(self, request_id: RequestId, promise: Promise, need: int) -> bool:
        """Make sure the request may store need more tokens; return whether it may."""
        output = self.driver.outputs[request_id]
        stored = len(promise.order.prompt_ids) + len(output.token_ids) - self.driver.left[request_id]
        if stored + need <= promise.reserved:
            return True
        bigger = Promise(promise.order, stored + need + self.random.randrange(100), promise.shared)
        if self.pages(bigger) - self.pages(promise) > self.room():
            return False
        promise.reserved = bigger.reserved
        self.backend.grow(request_id, reserved_tokens=promise.reserved)
        self.count("grown")
        return True

    def preempt(self) -> None:
        running = [r for r, p in self.promises.items() if not p.is_preempted]
        if running:
            request_id = self.random.choice(running)
            self.backend.preempt(request_id, PreemptionMode.RELEASE)
            self.promises[request_id].is_preempted = True
            self.count("preempted")

    def resume(self) -> None:
        for request_id, promise in self.promises.items():
            if not promise.is_preempted or self.random.random() < 0.5:
                continue
            order = promise.order
            length = len(order.prompt_ids) + len(self.driver.outputs[request_id].token_ids)
            shared = 0 if order.keep_prefix else self.backend.shared_prefix_tokens(order.prompt_ids)
            again = Promise(order, length, shared)
            if self.pages(again) > self.room() or self.num_running() == MAX_SEQUENCES:
                continue
            promise.reserved, promise.shared, promise.is_preempted = length, shared, False
            cached = self.backend.resume(request_id, reserved_tokens=length)
            assert shared <= cached < length
            self.driver.left[request_id] = length - cached
            self.count("resumed")

    def cancel(self) -> None:
        if self.promises:
            request_id = self.random.choice(list(self.promises))
            self.backend.release(request_id)
            self.compare(self.promises.pop(request_id).order, None)
            self.count("cancelled")

    def drop(self) -> None:
        if self.pinned and not any(p.shared for p in self.promises.values() if not p.is_preempted):
            request_id = self.random.choice(list(self.pinned))
            self.backend.drop_prefix(request_id)
            del self.pinned[request_id]

    # -- the run

    def run(self, num_steps: int) -> None:
        events: list[tuple[Callable[[], None], int]] = [
            (self.iterate, 40),
            (self.arrive, 6),
            (self.preempt, 1),
            (self.resume, 4),
            (self.cancel, 1),
            (self.drop, 1),
        ]
        actions, weights = zip(*events, strict=True)
        for _ in range(num_steps):
            self.random.choices(actions, weights)[0]()
            self.backend.check()
            assert (
                self.backend.num_pages_held
                <= self.backend.capacity.num_pages - self.room() + self.num_spare()
            )
            assert set(self.backend.request_ids) == set(self.promises)
            assert set(self.backend.pinned_ids) == set(self.pinned)

    def num_spare(self) -> int:
        """Return the pages that drafted tokens may take besides what is promised."""
        return self.num_running() if self.backend._num_draft else 0

    def end(self) -> None:
        for request_id in list(self.promises):
            self.backend.release(request_id)
            self.compare(self.promises[request_id].order, None)
        for request_id in list(self.pinned):
            self.backend.drop_prefix(request_id)
        self.backend.check()
        assert self.backend.num_pages_held == 0
        self.backend.drop_cache()
        assert self.backend.num_cells_cached == 0
        self.backend.close()


def live(
    library: Library,
    directory: Path,
    seed: int,
    num_steps: int,
    *,
    num_draft_tokens: int = 0,
    drafts: bool = False,
) -> None:
    life = Life(library, directory, seed=seed, num_draft_tokens=num_draft_tokens, drafts=drafts)
    life.run(num_steps)
    life.end()
    assert life.counts["outputs"] >= num_steps / 50, life.counts
    for what in ("grown", "preempted", "resumed", "cancelled"):
        assert life.counts.get(what), f"nothing was {what}: {life.counts}"


DRAFTS = pytest.mark.parametrize("drafts", [False, True], ids=["n-grams", "draft model"])


@pytest.mark.parametrize("seed", range(4))
def test_no_random_life_loses_a_token_or_a_page(library: Library, echo_directory: Path, seed: int) -> None:
    live(library, echo_directory, seed, 1000)


@DRAFTS
def test_no_random_life_loses_a_token_or_a_page_while_drafting(
    library: Library, echo_directory: Path, drafts: bool
) -> None:
    live(library, echo_directory, 7, 500, num_draft_tokens=3, drafts=drafts)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 120))
def test_no_random_life_loses_a_token_or_a_page_long(
    library: Library, echo_directory: Path, seed: int
) -> None:
    live(library, echo_directory, seed, 2500)


@pytest.mark.nightly
@DRAFTS
@pytest.mark.parametrize("seed", range(200, 204))
def test_no_random_life_loses_a_token_or_a_page_while_drafting_long(
    library: Library, echo_directory: Path, seed: int, drafts: bool
) -> None:
    live(library, echo_directory, seed, 2000, num_draft_tokens=3, drafts=drafts)
