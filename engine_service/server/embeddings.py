"""Embeddings: every text is a request of its own; a batch waits, is charged and gives way like all work.

Decides that few texts of a batch are ordered at once: the rest of it must not fill the resident's queue.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine_service.chat.chosen import Chosen
from engine_service.engine.sessions import Finished, Order, Timings
from engine_service.errors import EngineError, GenerationFailed, InvalidRequest, NotSupported
from engine_service.protocol import EmbeddingsRequest, Extension
from engine_service.server.plans import Running, check_token_ids, off_loop
from engine_service.server.service import Service

_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """What became of one text."""

    vector: tuple[float, ...]
    num_tokens: int
    timings: Timings


async def embedded(
    service: Service, message: EmbeddingsRequest, caller: Extension, model: Chosen
) -> list[Embedded]:
    """Return the embeddings of all texts, in their order; raise EngineError for what cannot be served."""
    _check(service, message, caller, model)
    prompts = [await _tokens(model, text) for text in message.texts]
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(prompt_ids: tuple[int, ...]) -> Embedded:
        async with slots:
            return await _embed(service, prompt_ids, caller, model)

    tasks = [asyncio.create_task(one(prompt_ids)) for prompt_ids in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _check(service: Service, message: EmbeddingsRequest, caller: Extension, model: Chosen) -> None:
    """Refuse what this engine cannot do before any work is done."""
    info = model.info
    if not info.can_embed:
        raise NotSupported(
            f"the backend {info.backend!r} makes no embeddings of {info.name!r}; "
            "GET /v1/engine says `can_embed`"
        )
    if message.dimensions not in (None, info.embedding_size):
        raise InvalidRequest(
            f"{info.name!r} makes embeddings of {info.embedding_size} dimensions, which cannot be shortened",
            param="dimensions",
        )
    service.residents.check(caller.resident_id, param="fairhearth.resident")


async def _tokens(model: Chosen, text: str | tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(text, str):
        return await off_loop(len(text), lambda: model.conversation.text_ids(text))
    check_token_ids(model, text, "input")
    return text


async def _embed(service: Service, prompt_ids: tuple[int, ...], caller: Extension, model: Chosen) -> Embedded:
    order = Order(
        resident_id=caller.resident_id,
        class_id=caller.class_id,
        prompt_ids=prompt_ids,
        program_id=caller.program_id,
        wants_embedding=True,
        model_id=model.model_id,
    )
    try:
        session = await service.engine.submit(order)
    except EngineError as error:
        service.meters.ended(caller, "refused")
        error.param = "input" if error.param == "messages" else error.param
        raise
    run = Running(session, caller, service.meters)
    try:
        async for event in run.events():
            if isinstance(event, Finished) and event.embedding is not None:
                return Embedded(vector=event.embedding, num_tokens=len(prompt_ids), timings=event.timings)
    finally:
        run.close()
    raise GenerationFailed("the engine made no embedding of a text")


def embeddings_body(
    found: Sequence[Embedded], model: str, caller: Extension, *, encoding: str
) -> dict[str, Any]:
    """Return OpenAI's list of embeddings; encoding is float or base64 (float32, little-endian)."""
    total = sum(one.num_tokens for one in found)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(one.vector, encoding)}
            for index, one in enumerate(found)
        ],
        "model": model,
        "usage": {"prompt_tokens": total, "total_tokens": total},
        "fairhearth": {
            "resident": caller.resident_id,
            "workload_class": caller.class_id.value,
            "tokens": {
                "prefill": sum(one.timings.prefill_tokens for one in found),
                "recomputed": sum(one.timings.recomputed_tokens for one in found),
            },
        },
    }


def _encoded(vector: tuple[float, ...], encoding: str) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
    return [round(number, 8) for number in vector]
