"""Pictures at the door: refused by name where the model sees nothing, else carried to the backend."""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_service.backends.base import Eye, GenerationOrder, ModelInfo
from engine_service.backends.simulated import SimulatedBackend
from tests.chat.models import CountingEye
from tests.server.household import Household, household

SECRET = b"what the camera saw" * 5


def asking(file: bytes = SECRET, **more: Any) -> dict[str, Any]:
    url = "data:image/jpeg;base64," + base64.b64encode(file).decode()
    parts = [{"type": "text", "text": "Who is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 3, **more}


class SeeingBackend(SimulatedBackend):
    """A simulated model that is shown pictures; it notes what it was ordered."""

    def __init__(self) -> None:
        super().__init__()
        self._vocabulary = replace(self._vocabulary, can_see=True)
        self.orders: list[GenerationOrder] = []

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, can_see=True)

    @property
    def eye(self) -> Eye:
        return CountingEye()

    def admit(self, order: GenerationOrder, *, reserved_tokens: int) -> int:
        self.orders.append(order)
        return super().admit(order, reserved_tokens=reserved_tokens)


async def row(home: Household) -> Mapping[str, Any]:
    [found] = (await home.ask("GET", "/v1/models")).json()["data"]
    engine = (await home.ask("GET", "/v1/engine")).json()
    assert engine["can_see"] is found["fairhearth"]["can_see"]
    told: Mapping[str, Any] = found["fairhearth"]
    return told


async def test_a_model_that_sees_nothing_refuses_pictures_by_name(home: Household) -> None:
    assert (await row(home))["can_see"] is False
    for path, message in (("/v1/chat/completions", asking()), ("/v1/jobs", {"request": asking()})):
        refused = await home.ask("POST", path, message)
        assert (refused.status, refused.error["code"]) == (422, "not_supported")
        assert "'simulated' cannot look at pictures" in refused.error["message"]


async def test_a_picture_is_carried_to_the_model_with_its_place(tmp_path: Path) -> None:
    backend = SeeingBackend()
    async with household(tmp_path, backend) as home:
        assert (await row(home))["can_see"] is True
        answer = await home.ask("POST", "/v1/chat/completions", asking())
        assert answer.status == 200, answer.body
        [order] = [order for order in backend.orders if order.pictures]
        [placed] = order.pictures
        assert placed.picture.digest == SECRET
        assert order.prompt_ids[placed.start : placed.end] == (0,) * len(SECRET)
        assert answer.json()["usage"]["prompt_tokens"] == len(order.prompt_ids)
        seen = home.engine.snapshot().engine
        assert seen["pictures"] == 1
        assert seen["picture_s"] >= 0
        assert b"fairhearth_engine_picture_s" in (await home.ask("GET", "/metrics")).body


async def test_a_job_with_a_picture_is_done_like_any_other(tmp_path: Path) -> None:
    backend = SeeingBackend()
    async with household(tmp_path, backend) as home:
        job = (await home.ask("POST", "/v1/jobs", {"request": asking()})).json()
        async with home.stream("/v1/jobs/stream") as lines:
            async for line in lines:
                if line.startswith("data:") and '"state":"finished"' in line.replace(": ", ":").replace(
                    " ", ""
                ):
                    break
        done = (await home.ask("GET", f"/v1/jobs/{job['id']}")).json()
        assert done["state"] == "finished"
        assert base64.b64encode(SECRET).decode() not in str(done)
        assert len(backend.orders[-1].pictures) == 1


async def test_a_picture_that_cannot_be_read_is_the_callers_fault(tmp_path: Path) -> None:
    async with household(tmp_path, SeeingBackend()) as home:
        refused = await home.ask("POST", "/v1/chat/completions", asking(b"?"))
        assert (refused.status, refused.error["param"]) == (400, "messages[0].content")
        job = await home.ask("POST", "/v1/jobs", {"request": asking(b"?")})
        assert (job.status, job.error["param"]) == (400, "request.messages[0].content")


async def test_no_log_has_what_a_picture_shows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with household(tmp_path, SeeingBackend()) as home:
        await home.ask("POST", "/v1/chat/completions", asking())
    assert "camera saw" not in caplog.text
    assert base64.b64encode(SECRET).decode()[:20] not in caplog.text


async def test_pictures_count_to_the_size_of_a_body(home: Household) -> None:
    file = b"x" * home.settings.server.max_body_bytes
    body = io.BytesIO(json.dumps({"request": asking(file)}).encode())
    headers = {"Content-Type": "application/json"}
    refused = await home.ask("POST", "/v1/jobs", data=body, headers=headers)
    assert (refused.status, refused.error["code"]) == (413, "request_too_large")
