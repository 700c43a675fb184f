"""The engine's own loop on the gated generator, with the same work; and what must hold of the gate."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_service.backends.base import ChunkOrder, GenerationOrder, Sampling
from engine_service.backends.exllamav2.backend import ExLlamaV2Backend
from engine_service.engine import eventlog
from engine_service.engine.loop import Engine
from engine_service.engine.sessions import Delta, Order, Session
from engine_service.scheduling.events import IterationDone
from engine_service.scheduling.model import (
    Policy,
    PreemptionMode,
    RequestId,
    Resident,
    ResidentId,
    WorkloadClass,
)
from engine_service.simulator import fit
from gpucheck.work import Prompts, Watched, Work, voice_times

_GREEDY = Sampling(temperature=0.0)
_RESIDENTS = tuple(Resident(resident_id=ResidentId(name)) for name in ("speaker", "reader", "writer"))


class Gate:
    """An engine on one backend, asked like the library."""

    def __init__(self, backend: ExLlamaV2Backend, *, work: Work, log: Path) -> None:
        """Take the backend over; log is where the engine writes its decisions."""
        self._backend, self._work, self._log = backend, work, log
        pages = backend.capacity.num_pages
        policy = Policy(voice_headroom_pages=min(Policy().voice_headroom_pages, pages // 8))
        self._engine = Engine(backend, residents=_RESIDENTS, policy=policy, event_log=log)
        self._prompts = Prompts(backend.info.vocab_size)
        self._watched = Watched()
        self._idle = Watched()

    async def run(self) -> tuple[Watched, Watched, int]:
        """Return what was seen idle and under load, and how many pages were held when all had gone."""
        await self._engine.start()
        try:
            started = time.perf_counter()
            for _ in range(self._work.idle_voices):
                await self._voice(self._idle)
            self._idle.seconds = time.perf_counter() - started
            await self._load()
            await self._all_gone()
        finally:
            await self._engine.stop(drain_s=0)
        # Looked at when the engine's thread has ended, which would otherwise be in the middle of something.
        self._backend.check()
        self._read_log()
        return self._idle, self._watched, self._backend.num_pages_held

    async def _load(self) -> None:
        started = time.perf_counter()
        self._loaded_from = time.monotonic()
        documents = [
            asyncio.create_task(self._documents(number)) for number in range(self._work.documents_in_flight)
        ]
        voices = [asyncio.create_task(self._voice_at(at_s)) for at_s in voice_times(self._work)]
        done, late = await asyncio.wait([*documents, *voices], timeout=self._work.seconds)
        self._watched.seconds = time.perf_counter() - started
        self._loaded_until = time.monotonic()
        self._watched.unanswered = len(voices) - len(self._watched.waits)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task in done:
            task.result()

    async def _documents(self, number: int) -> None:
        """Ask for one document after the other."""
        resident = _RESIDENTS[1 + number % 2].resident_id
        while True:
            await self._ask(
                resident, WorkloadClass.BACKGROUND, self._work.document_tokens, self._work.document_output
            )
            self._watched.documents += 1

    async def _voice_at(self, at_s: float) -> None:
        await asyncio.sleep(at_s)
        await self._voice(self._watched)

    async def _voice(self, watched: Watched) -> None:
        asked = time.perf_counter()
        await self._ask(
            _RESIDENTS[0].resident_id,
            WorkloadClass.VOICE,
            self._work.voice_tokens,
            self._work.voice_output,
            first=lambda: watched.waits.append(time.perf_counter() - asked),
        )

    async def _ask(
        self, resident: ResidentId, kind: WorkloadClass, length: int, output: int, first: Any = None
    ) -> None:
        session = await self._engine.submit(
            Order(
                resident_id=resident,
                class_id=kind,
                prompt_ids=self._prompts.next(length),
                max_tokens=output,
                sampling=_GREEDY,
                ignore_eos=True,
            )
        )
        try:
            await _read(session, first)
        except asyncio.CancelledError:
            session.cancel()
            raise

    async def _all_gone(self) -> None:
        """Wait until every request is over, at most half a minute."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                # The last one is forgotten after the engine said that something changed.
                while self._engine.snapshot().engine["kv_pages_used"] or self._backend.request_ids:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    def _read_log(self) -> None:
        for now, event, _ in eventlog.read(self._log):
            if isinstance(event, IterationDone) and self._loaded_from <= now <= self._loaded_until:
                self._watched.iterations.append(event.seconds)
                self._watched.tokens += sum(r.prefill_tokens + r.decode_tokens for r in event.results)

    def cost_model(self) -> dict[str, Any]:
        """Return the cost model that fits the iterations best, and how well."""
        turns = list(eventlog.read(self._log))
        try:
            cost = fit.fitted(turns, name="this machine").cost
        except fit.FitError as error:
            return {"error": str(error)}
        seen = list(fit.observations(turns, self._backend.capacity))
        return {
            **{name: round(value, 9) for name, value in asdict(cost).items()},
            "iterations": len(seen),
            "median_relative_error": round(fit.relative_error(cost, seen), 4),
        }


async def _read(session: Session, first: Any) -> None:
    async for event in session.events():
        if isinstance(event, Delta) and event.token_ids and first is not None:
            first()
            first = None


def preempts_exactly(backend: ExLlamaV2Backend, *, num_tokens: int) -> dict[str, Any]:
    """Generate a text alone, then again, preempted three times with others in between; compare."""
    prompts = Prompts(backend.info.vocab_size)
    prompt, others = prompts.next(300), [prompts.next(150) for _ in range(3)]
    alone = _generate(backend, "alone", prompt, num_tokens)
    backend.drop_cache()
    name = RequestId("preempted")
    again = _begin(backend, name, prompt, num_tokens)
    for number, other in enumerate(others):
        again += _decode(backend, name, num_tokens // 4)
        backend.preempt(name, PreemptionMode.RELEASE)
        _generate(backend, f"other{number}", other, 4)
        length = len(prompt) + len(again)
        cached = backend.resume(name, reserved_tokens=len(prompt) + num_tokens)
        if length - cached > 0:
            again += _prefill(backend, name, length - cached)
    again += _decode(backend, name, num_tokens - len(again))
    backend.check()
    differs = [index for index, (a, b) in enumerate(zip(alone, again, strict=True)) if a != b]
    return {
        "is_exact": not differs,
        "tokens": num_tokens,
        "preemptions": len(others),
        "first_difference": differs[0] if differs else None,
    }


def _generate(backend: ExLlamaV2Backend, name: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    request_id = RequestId(name)
    ids = _begin(backend, request_id, prompt, num_tokens)
    return ids + _decode(backend, request_id, num_tokens - len(ids))


def _begin(backend: ExLlamaV2Backend, name: RequestId, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    order = GenerationOrder(
        request_id=name, prompt_ids=prompt, max_tokens=num_tokens, sampling=_GREEDY, ignore_eos=True
    )
    cached = backend.admit(order, reserved_tokens=len(prompt) + num_tokens)
    return _prefill(backend, name, len(prompt) - cached)


def _prefill(backend: ExLlamaV2Backend, name: RequestId, num_tokens: int) -> list[int]:
    outcome = backend.step([], [ChunkOrder(request_id=name, num_tokens=num_tokens)])
    return list(outcome.outcomes[0].token_ids)


def _decode(backend: ExLlamaV2Backend, name: RequestId, num_tokens: int) -> list[int]:
    ids: list[int] = []
    for _ in range(num_tokens):
        ids.extend(backend.step([name], []).outcomes[0].token_ids)
    return ids
