"""The engine's loop on both libraries' own generators: exact texts, no page lost, decisions that replay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_service.backends.base import Constraint, ConstraintKind, FinishReason, Sampling
from engine_service.engine import eventlog
from engine_service.engine.loop import Engine
from engine_service.engine.sessions import Delta, Finished, Order, Session, Timings
from engine_service.errors import GenerationFailed, InvalidRequest
from engine_service.scheduling.decisions import Compose, Preempt
from engine_service.scheduling.model import Policy, Resident, ResidentId, WorkloadClass
from engine_service.scheduling.scheduler import Scheduler
from tests.backends.conftest import AnyBackend, Library
from tests.backends.echo import PAGE, Echo

RESIDENTS = tuple(Resident(resident_id=ResidentId(name)) for name in ("alice", "bob"))


def prompt(length: int, *, kind: int) -> tuple[int, ...]:
    return tuple((n * 11 + kind * 37) % 250 for n in range(length))


@asynccontextmanager
async def running(
    library: Library, directory: Path, **options: Any
) -> AsyncIterator[tuple[Engine, AnyBackend, Echo]]:
    backend = library.make_backend(directory, cache_tokens=12 * PAGE, max_sequences=4)
    engine = Engine(backend, residents=RESIDENTS, policy=Policy(voice_headroom_pages=1), **options)
    await engine.start()
    try:
        yield engine, backend, backend._loaded.model
    finally:
        await engine.stop(drain_s=0)


async def submit(engine: Engine, resident: str, kind: str, ids: Iterable[int], max_tokens: int) -> Session:
    return await engine.submit(
        Order(
            resident_id=ResidentId(resident),
            class_id=WorkloadClass(kind),
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            sampling=Sampling(temperature=0.0),
            ignore_eos=True,
        )
    )


async def read(session: Session, *, leave_after: int | None = None) -> tuple[list[int], Timings | None]:
    """Read a session to its end, or go away after that many tokens."""
    ids: list[int] = []
    async for event in session.events():
        if isinstance(event, Delta):
            ids.extend(event.token_ids)
            if leave_after is not None and len(ids) >= leave_after:
                session.cancel()
                return ids, None
        elif isinstance(event, Finished):
            assert event.reason is FinishReason.LENGTH
            return ids, event.timings
    raise AssertionError("a session ended without Finished")


async def is_empty(engine: Engine, backend: AnyBackend) -> bool:
    """Wait until nobody holds a page any more; return whether the page table agrees."""
    async with asyncio.timeout(60):
        # The engine's thread forgets the last one after it said that something changed.
        while engine.snapshot().engine["kv_pages_used"] or backend._jobs:
            await asyncio.sleep(0.01)
    backend.check()
    return backend.num_pages_held == 0


async def test_a_voice_takes_a_documents_pages_and_the_document_goes_on_exactly(
    library: Library, echo_directory: Path, tmp_path: Path
) -> None:
    log = tmp_path / "events.jsonl"
    async with running(library, echo_directory, event_log=log) as (engine, backend, model):
        documents = [prompt(1100, kind=kind) for kind in (1, 2)]
        sessions = [await submit(engine, "bob", "background", ids, 120) for ids in documents]
        readers = [asyncio.create_task(read(session)) for session in sessions]
        async with asyncio.timeout(30):
            version = -1
            while engine.snapshot().engine["requests_running"] < 2:
                version = await engine.changed(after=version)
        spoken = prompt(900, kind=3)
        ids, timings = await read(await submit(engine, "alice", "voice", spoken, 20))
        assert ids == model.continuation(spoken, 20)
        assert timings is not None
        assert timings.preemptions == 0
        for document, reader in zip(documents, readers, strict=True):
            assert (await reader)[0] == model.continuation(document, 120)
        assert await is_empty(engine, backend)
    turns = list(eventlog.read(log))
    assert any(isinstance(d, Preempt) for _, _, decisions in turns for d in decisions)
    assert any(isinstance(d, Compose) for _, _, decisions in turns for d in decisions)
    scheduler = Scheduler(Policy(voice_headroom_pages=1))
    for now, event, decisions in turns:
        assert scheduler.handle(event, now=now) == decisions


@pytest.mark.parametrize("leave_after", [0, 1, 30])
async def test_who_goes_away_mid_stream_leaves_no_page_behind(
    library: Library, echo_directory: Path, leave_after: int
) -> None:
    async with running(library, echo_directory) as (engine, backend, model):
        stays = await submit(engine, "alice", "chat", prompt(300, kind=4), 60)
        leaves = await submit(engine, "bob", "chat", prompt(700, kind=5), 200)
        if leave_after:
            stayed, (left, _) = await asyncio.gather(read(stays), read(leaves, leave_after=leave_after))
            assert left == model.continuation(prompt(700, kind=5), len(left))
        else:
            leaves.cancel()
            stayed = await read(stays)
        assert stayed[0] == model.continuation(prompt(300, kind=4), 60)
        assert await is_empty(engine, backend)


async def test_a_prompt_that_fails_is_told_and_the_stream_beside_it_is_exact(
    library: Library, echo_directory: Path
) -> None:
    async with running(library, echo_directory) as (engine, backend, model):
        good = await submit(engine, "alice", "chat", prompt(200, kind=6), 150)
        reader = asyncio.create_task(read(good))
        async with asyncio.timeout(30):
            version = -1
            while not engine.snapshot().residents["alice"]["tokens_served"]:
                version = await engine.changed(after=version)
        model.fail_next = [("prefill", RuntimeError("out of memory"))]
        bad = await submit(engine, "bob", "chat", prompt(260, kind=7), 40)
        with pytest.raises(GenerationFailed, match="out of memory"):
            await read(bad)
        model.fail_next = [("decode", RuntimeError("a passing fault"))]
        assert (await reader)[0] == model.continuation(prompt(200, kind=6), 150)
        assert await is_empty(engine, backend)


async def test_a_pinned_prefix_is_computed_once_whatever_its_length(
    library: Library, echo_directory: Path
) -> None:
    system = prompt(300, kind=8)
    async with running(library, echo_directory) as (engine, backend, model):
        assert await engine.pin_prefix(system) == (300, 300)
        assert await engine.pin_prefix(system) == (300, 0)
        question = (*system, *prompt(40, kind=9))
        ids, timings = await read(await submit(engine, "alice", "voice", question, 10))
        assert ids == model.continuation(question, 10)
        assert timings is not None
        assert (timings.cached_tokens, timings.prefill_tokens) == (300, 40)
        backend.check()
        assert backend.num_pages_held == 2, "the prefix alone"


async def test_a_prompt_that_ends_in_a_word_is_healed(library: Library, echo_directory: Path) -> None:
    async with running(library, echo_directory) as (engine, backend, model):
        (begun,) = backend.tokenizer.encode(" l")
        asked = Order(
            resident_id=ResidentId("alice"),
            class_id=WorkloadClass.CHAT,
            prompt_ids=(*prompt(300, kind=10), begun),
            max_tokens=8,
            sampling=Sampling(temperature=0.0),
            ignore_eos=True,
            heal_prompt=True,
        )
        session = await engine.submit(asked)
        events = [event async for event in session.events() if isinstance(event, Delta)]
        ids = [token_id for event in events for token_id in event.token_ids]
        assert backend.tokenizer.decode(ids[:1]).startswith(" l")
        assert " l" + "".join(event.text for event in events) == backend.tokenizer.decode(ids)
        assert ids[1:] == model.continuation((*asked.prompt_ids[:-1], ids[0]), 7)
        grammar = Constraint(kind=ConstraintKind.REGEX, text="[a-z]+")
        with pytest.raises(InvalidRequest, match="token healing and a grammar exclude each other"):
            await engine.submit(replace(asked, constraint=grammar))
