"""Random lives of many requests in a store that is too small for them, against an oracle.

The oracle keeps what the engine's ledger keeps (reservations, pinned prefixes) and never orders what would
not fit; the backend must then never run out of cells, never lose a sequence, and every text that came to its
end must be the text the request gives alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from engine_service.backends.base import GenerationOrder, Sampling
from engine_service.backends.divided import DividedHolder
from engine_service.backends.llama_cpp.backend import DividedLlamaCppBackend, LlamaCppBackend
from engine_service.backends.llama_cpp.model import Model
from engine_service.backends.simulated import SimulatedBackend
from engine_service.scheduling.model import PreemptionMode, RequestId
from tests.backends.driver import Driver, Output, assert_same_but_near_ties

CELLS = 512
MAX_SEQUENCES = 6
WITH_GAPS = Sampling(temperature=0.0, num_logprobs=2)


@dataclass
class Promise:
    """What the oracle knows of one request."""

    order: GenerationOrder
    reserved: int
    shared: int
    is_preempted: bool = False


class Fuzz:
    """One random life of a backend."""

    def __init__(self, driver: Driver, *, seed: int) -> None:
        self.driver = driver
        self.random = random.Random(seed)
        self.promises: dict[RequestId, Promise] = {}
        self.pinned: dict[RequestId, int] = {}
        self.finished: list[GenerationOrder] = []
        self.count = 0

    @property
    def backend(self) -> LlamaCppBackend | SimulatedBackend:
        return self.driver.backend  # type: ignore[return-value]

    # -- the ledger

    def room(self) -> int:
        """Return the cells that nothing is promised to."""
        held = sum(p.reserved - p.shared for p in self.promises.values() if not p.is_preempted)
        if isinstance(self.backend, DividedHolder):  # everybody has a copy of what is pinned
            held = sum(p.reserved for p in self.promises.values() if not p.is_preempted)
        return CELLS - held - sum(self.pinned.values())

    def num_running(self) -> int:
        return sum(not p.is_preempted for p in self.promises.values())

    # -- events

    def new_prompt(self) -> tuple[int, ...]:
        start = [300 + self.random.randrange(3)] * 4 + [260 + n for n in range(self.random.randrange(20))]
        return (*start, *(self.random.randrange(256, 320) for _ in range(self.random.randrange(1, 20))))

    def arrive(self) -> None:
        prompt = self.new_prompt()
        keeps = self.random.random() < 0.15 and len(self.pinned) < 3
        max_tokens = 0 if keeps else self.random.randrange(1, 9)
        self.count += 1
        order = self.driver.order(
            f"r{self.count}", prompt, max_tokens, sampling=WITH_GAPS, ignore_eos=True, keep_prefix=keeps
        )
        shared = 0 if keeps else self.backend.shared_prefix_tokens(prompt)
        reserved = len(prompt) + self.random.randrange(max_tokens + 1)
        if reserved - shared > self.room() or self.num_running() == MAX_SEQUENCES:
            return
        cached = self.driver.admit(order, reserved_tokens=reserved)
        assert shared <= cached < len(prompt)
        self.promises[order.request_id] = Promise(order, reserved, shared)

    def iterate(self) -> None:
        decodes, chunks = [], {}
        for request_id, promise in list(self.promises.items()):
            if promise.is_preempted or self.random.random() < 0.2:
                continue
            need = 1 if self.driver.decodes(request_id) else self.random.randrange(1, 24)
            need = min(need, self.driver.left[request_id])
            if not self.grown(request_id, promise, need):
                continue
            if self.driver.decodes(request_id):
                decodes.append(request_id)
            else:
                chunks[request_id] = need
        outcome = self.driver.step(decodes=decodes, chunks=chunks)
        assert [o.request_id for o in outcome.outcomes] == [*decodes, *chunks]
        for request_id in [*decodes, *chunks]:
            output = self.driver.outputs[request_id]
            assert output.error is None
            if output.is_over:
                order = self.promises.pop(request_id).order
                if order.keep_prefix:
                    self.pinned[request_id] = len(order.prompt_ids)
                else:
                    self.finished.append(order)

    def grown(self, request_id: RequestId, promise: Promise, need: int) -> bool:
        """Make sure the request may store need more tokens; return whether it may."""
        order, output = promise.order, self.driver.outputs[request_id]
        stored = len(order.prompt_ids) + len(output.token_ids) - self.driver.left[request_id]
        if stored + need <= promise.reserved:
            return True
        wanted = stored + need - promise.reserved
        if wanted > self.room():
            return False
        promise.reserved += wanted
        self.backend.grow(request_id, reserved_tokens=promise.reserved)
        return True

    def preempt(self) -> None:
        running = [r for r, p in self.promises.items() if not p.is_preempted]
        if running:
            request_id = self.random.choice(running)
            self.backend.preempt(request_id, PreemptionMode.RELEASE)
            self.promises[request_id].is_preempted = True

    def resume(self) -> None:
        for request_id, promise in self.promises.items():
            length = len(promise.order.prompt_ids) + len(self.driver.outputs[request_id].token_ids)
            shared = self.backend.shared_prefix_tokens(promise.order.prompt_ids)
            if promise.order.keep_prefix:
                shared = 0
            if (
                promise.is_preempted
                and length - shared <= self.room()
                and self.num_running() < MAX_SEQUENCES
                and self.random.random() < 0.5
            ):
                promise.reserved, promise.shared, promise.is_preempted = length, shared, False
                cached = self.backend.resume(request_id, reserved_tokens=length)
                assert shared <= cached < length
                self.driver.left[request_id] = length - cached

    def cancel(self) -> None:
        if self.promises:
            request_id = self.random.choice(list(self.promises))
            self.backend.release(request_id)
            del self.promises[request_id]

    def drop(self) -> None:
        if self.pinned and not any(p.shared for p in self.promises.values() if not p.is_preempted):
            request_id = self.random.choice(list(self.pinned))
            self.backend.drop_prefix(request_id)
            del self.pinned[request_id]

    # -- the run

    def run(self, num_steps: int) -> None:
        events: list[tuple[Callable[[], None], int]] = [
            (self.iterate, 10),
            (self.arrive, 5),
            (self.preempt, 1),
            (self.resume, 2),
            (self.cancel, 1),
            (self.drop, 1),
        ]
        actions, weights = zip(*events, strict=True)
        for _ in range(num_steps):
            self.random.choices(actions, weights)[0]()
            self.backend.check()
            promised = CELLS - self.room()
            assert self.backend.num_cells_held <= promised
            assert set(self.backend.request_ids) == set(self.promises)
            assert set(self.backend.pinned_ids) == set(self.pinned)

    def alone(self, order: GenerationOrder, *, name: str) -> Output:
        self.backend.drop_cache()
        again = self.driver.order(
            name, order.prompt_ids, order.max_tokens, sampling=order.sampling, ignore_eos=True
        )
        return self.driver.run(again)

    def end(self) -> None:
        for request_id in list(self.promises):
            self.backend.release(request_id)
        for request_id in list(self.pinned):
            self.backend.drop_prefix(request_id)
        self.promises.clear()


@pytest.mark.parametrize("seed", range(4))
def test_no_random_life_breaks_a_promise_simulated(seed: int) -> None:
    live_simulated(seed, num_steps=300)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 160))
def test_no_random_life_breaks_a_promise_simulated_long(seed: int) -> None:
    live_simulated(seed, num_steps=2000)


def live_simulated(seed: int, *, num_steps: int) -> None:
    """Random aborts too: every advance of time may stop short."""
    chance = random.Random(seed)
    backend = SimulatedBackend(
        context_tokens=CELLS,
        max_sequences=MAX_SEQUENCES,
        micro_batch=8,
        advance=lambda seconds: seconds * (chance.random() if chance.random() < 0.2 else 1),
    )
    fuzz = Fuzz(Driver(backend), seed=seed)
    fuzz.run(num_steps)
    fuzz.end()
    assert len(fuzz.finished) > num_steps / 30
    for number, order in enumerate(fuzz.finished):
        alone = fuzz.alone(order, name=f"alone{number}")
        assert fuzz.driver.outputs[order.request_id].token_ids == alone.token_ids
        assert fuzz.driver.outputs[order.request_id].text == alone.text


KINDS = (LlamaCppBackend, DividedLlamaCppBackend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1])
def test_no_random_life_breaks_a_promise_llama_cpp(
    model: Model, kind: type[LlamaCppBackend], seed: int
) -> None:
    live_llama_cpp(model, kind, seed, num_steps=140)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(200, 206))
def test_no_random_life_breaks_a_promise_llama_cpp_long(
    model: Model, kind: type[LlamaCppBackend], seed: int
) -> None:
    live_llama_cpp(model, kind, seed, num_steps=800)


def live_llama_cpp(model: Model, kind: type[LlamaCppBackend], seed: int, *, num_steps: int) -> None:
    """Cells are refilled in any order here, which changes rounding: texts are compared up to near ties."""
    backend = kind(
        Model(model.library, model.path),
        context_tokens=CELLS,
        max_sequences=MAX_SEQUENCES,
        threads=1,
        micro_batch=32,
    )
    fuzz = Fuzz(Driver(backend), seed=seed)
    fuzz.run(num_steps)
    fuzz.end()
    assert len(fuzz.finished) > num_steps / 30
    for number, order in enumerate(fuzz.finished):
        alone = fuzz.alone(order, name=f"alone{number}")
        assert_same_but_near_ties(alone, fuzz.driver.outputs[order.request_id])
    backend.close()
