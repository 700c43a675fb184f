"""Embeddings of the embedded model: near for near texts, scheduled in their class, paid for, or refused."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine_service.server.openapi import ANSWERS
from tests.server.household import ADMIN, Household, embedded_model, household

TEXTS = [
    "The kitchen light is on.",
    "The lamp in the kitchen burns.",
    "Quarterly revenue grew by ten percent.",
    "The company earned more money this quarter.",
]
SIZE = 576


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Household]:
    """The embedded model with room for three requests at once."""
    backend = embedded_model(context_tokens=2048, max_sequences=3)
    async with household(tmp_path, backend) as running:
        yield running


async def embeddings(home: Household, texts: Any, **more: Any) -> dict[str, Any]:
    answer = await home.ask("POST", "/v1/embeddings", {"input": texts, **more})
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json()
    ANSWERS["Embeddings"](body)
    return body


def vectors(body: dict[str, Any]) -> list[list[float]]:
    assert [entry["index"] for entry in body["data"]] == list(range(len(body["data"])))
    return [entry["embedding"] for entry in body["data"]]


def cosine(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


async def test_texts_of_one_meaning_are_nearer_than_others_and_all_are_of_length_one(home: Household) -> None:
    assert (await home.ask("GET", "/v1/engine")).json()["can_embed"] is True
    body = await embeddings(home, TEXTS)
    light, lamp, revenue, money = vectors(body)
    assert {len(vector) for vector in (light, lamp, revenue, money)} == {SIZE}
    assert math.isclose(cosine(light, light), 1.0, abs_tol=1e-4)
    assert cosine(light, lamp) > max(cosine(light, revenue), cosine(light, money))
    assert cosine(revenue, money) > max(cosine(revenue, light), cosine(revenue, lamp))


async def test_embeddings_are_scheduled_in_their_class_and_charged_as_prefill(home: Household) -> None:
    body = await embeddings(home, TEXTS, fairhearth={"resident": "alice"})
    tokens = body["usage"]["prompt_tokens"]
    assert body["usage"]["total_tokens"] == tokens > 0
    assert body["fairhearth"]["workload_class"] == "embedding"
    assert body["fairhearth"]["tokens"]["prefill"] == tokens
    snapshot = (await home.ask("GET", "/v1/fairness")).json()
    assert snapshot["classes"]["embedding"]["finished"] == len(TEXTS)
    assert snapshot["residents"]["alice"]["tokens"] == {"prefill": tokens, "cached": 0, "decode": 0}


async def test_what_is_cached_or_computed_beside_changes_no_embedding(home: Household) -> None:
    long = " ".join(TEXTS * 12)
    [alone] = vectors(await embeddings(home, long))
    assert (await home.chat(long, max_tokens=4, temperature=0)).status == 200  # its beginning is cached now
    beside, *again = await asyncio.gather(
        home.chat("Say hello", max_tokens=8, temperature=0), *[embeddings(home, long) for _ in range(3)]
    )
    for body in again:
        [vector] = vectors(body)
        assert cosine(alone, vector) > 0.9999
        assert body["fairhearth"]["tokens"]["prefill"] == body["usage"]["prompt_tokens"]
    assert beside.json()["usage"]["completion_tokens"] > 0


async def test_speech_goes_ahead_of_a_batch_and_a_batch_given_up_frees_everything(home: Household) -> None:
    batch = asyncio.create_task(embeddings(home, [" ".join(TEXTS * 12)] * 40))
    while not home.engine.snapshot().classes["embedding"]["requests_running"]:
        await asyncio.sleep(0.01)
    spoken = await home.chat("Light on", max_tokens=4, fairhearth={"workload_class": "voice"})
    assert spoken.status == 200
    assert not batch.done(), "the batch is far from its end"
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    await home.until_idle()
    assert home.engine.snapshot().engine["kv_pages_used"] == 0


async def test_the_official_client_gets_the_same_in_both_encodings(home: Household) -> None:
    async with openai.AsyncOpenAI(base_url=home.url + "/v1", api_key=ADMIN, max_retries=0) as client:
        found = await client.embeddings.create(model=home.engine.info.name, input=TEXTS[:2])
    plain = vectors(await embeddings(home, TEXTS[:2]))
    assert cosine(found.data[1].embedding, plain[1]) > 0.9999
    coded = await embeddings(home, TEXTS[0], encoding_format="base64", dimensions=SIZE)
    raw = base64.b64decode(coded["data"][0]["embedding"])
    assert cosine(list(struct.unpack(f"<{SIZE}f", raw)), plain[0]) > 0.9999


async def test_token_ids_are_embedded_like_the_text_they_stand_for(home: Household) -> None:
    ids = home.service.models.choose(None).conversation.text_ids(TEXTS[0])
    of_ids, of_text = vectors(await embeddings(home, [list(ids), TEXTS[0]]))
    assert cosine(of_ids, of_text) > 0.9999


@pytest.mark.parametrize(
    ("message", "status", "code", "param"),
    [
        ({"input": "x", "dimensions": 64}, 400, "invalid_request", "dimensions"),
        ({"input": "x", "model": "other"}, 404, "unknown_model", "model"),
        ({"input": [[1, 10_000_000]]}, 400, "invalid_request", "input"),
        ({"input": "word " * 3000}, 413, "prompt_too_long", "input"),
        ({"input": ["x", "word " * 3000]}, 413, "prompt_too_long", "input"),
        (
            {"input": "x", "fairhearth": {"resident": "nobody"}},
            404,
            "unknown_resident",
            "fairhearth.resident",
        ),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(
    home: Household, message: dict[str, Any], status: int, code: str, param: str
) -> None:
    answer = await home.ask("POST", "/v1/embeddings", message)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param), answer.body
    await home.until_idle()
