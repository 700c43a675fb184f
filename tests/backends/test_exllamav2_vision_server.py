"""A picture from the door to the library's own vision tower, through the engine's loop and back as text."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.exllamav2_cpu import ExLlamaV2Backend
from tests.backends.exllamav2_eye import (
    drawing,
    lend_a_processor,
    make_seeing_backend,
    make_seeing_directory,
)
from tests.server.household import Household, household

CAT, DOG = drawing(640, 320, seed=1), drawing(640, 320, seed=2)


@pytest.fixture
def seeing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2Backend:
    """A small model that sees."""
    lend_a_processor(monkeypatch)
    folder = tmp_path / "model"
    folder.mkdir()
    return make_seeing_backend(make_seeing_directory(folder))


@pytest.fixture
async def home(seeing: ExLlamaV2Backend, tmp_path: Path) -> AsyncIterator[Household]:
    """An engine with it."""
    async with household(tmp_path, seeing) as running:
        yield running


async def ask(home: Household, file: bytes, **more: Any) -> Any:
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    message = {"messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0, **more}
    return await home.ask("POST", "/v1/chat/completions", message)


async def test_a_picture_is_answered_and_found_again(home: Household, seeing: ExLlamaV2Backend) -> None:
    assert (await home.ask("GET", "/v1/engine")).json()["can_see"] is True
    first, again, other = [(await ask(home, file)).json() for file in (CAT, CAT, DOG)]
    told = [answer["choices"][0]["message"]["content"] for answer in (first, again, other)]
    assert told[0] == told[1] != told[2]
    tokens = [answer["fairhearth"]["tokens"] for answer in (first, again, other)]
    assert tokens[0]["cached"] == 0
    assert tokens[0]["prefill"] > 821, "the picture's tokens are charged as any prompt's"
    assert tokens[1]["prefill"] == 1
    assert 0 < tokens[2]["cached"] < 60, "the text before the picture"
    assert seeing._loaded.tower.num_encoded == 2
    seen = home.engine.snapshot().engine
    assert seen["pictures"] == 3
    assert seen["picture_s"] > 0


async def test_a_tower_that_fails_fails_one_request(home: Household, seeing: ExLlamaV2Backend) -> None:
    seeing._loaded.tower.fail_next = RuntimeError("out of memory")
    failed = await ask(home, CAT)
    assert (failed.status, failed.error["code"]) == (500, "generation_failed")
    assert (await ask(home, CAT)).status == 200
    seeing.check()


async def test_a_damaged_picture_never_reaches_the_model(home: Household, seeing: ExLlamaV2Backend) -> None:
    refused = await ask(home, CAT[:5000])
    assert (refused.status, refused.error["param"]) == (400, "messages[0].content")
    assert "damaged or cut short" in refused.error["message"]
    assert seeing._loaded.tower.num_encoded == 0
