"""When something breaks behind the server: the guilty request is told, the others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine_service.backends.base import Tokenizer
from engine_service.backends.simulated import SimulatedBackend, SimulatedTokenizer
from engine_service.scheduling.model import RequestId
from tests.server.household import Household, household, payloads

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
FIRST = RequestId("r000001")


async def test_a_stream_whose_request_fails_ends_with_the_error_and_others_go_on(tmp_path: Path) -> None:
    backend = SimulatedBackend()
    async with household(tmp_path, backend) as home:
        message = {**HELLO, "max_tokens": 200, "stream": True}
        async with (
            home.stream("/v1/chat/completions", message) as guilty,
            home.stream("/v1/chat/completions", message) as innocent,
        ):
            await anext(innocent)
            request_id = payloads([await anext(guilty)])[0]["fairhearth"]["request_id"]
            backend.fail_request(request_id, RuntimeError("no such expert"))
            said = payloads([line async for line in guilty])
            others = payloads([line async for line in innocent])
    assert said[-1]["error"]["code"] == "generation_failed"
    assert said[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in said
    assert others[-1] == "[DONE]"
    assert others[-2]["fairhearth"]["tokens"]["decode"] == 200


async def test_a_whole_answer_whose_request_fails_is_an_error(tmp_path: Path) -> None:
    backend = SimulatedBackend()
    async with household(tmp_path, backend) as home:
        backend.fail_request(FIRST, RuntimeError("no such expert"))
        failed = await home.ask("POST", "/v1/chat/completions", {**HELLO, "max_tokens": 5})
        assert (failed.status, failed.error["code"]) == (500, "generation_failed")
        assert (await home.ask("POST", "/v1/chat/completions", {**HELLO, "max_tokens": 5})).status == 200


async def test_a_backend_that_is_lost_for_good_makes_the_engine_say_so(tmp_path: Path) -> None:
    backend = SimulatedBackend()
    async with household(tmp_path, backend) as home:
        backend.lose_everything()
        failed = await home.ask("POST", "/v1/chat/completions", {**HELLO, "max_tokens": 5})
        assert failed.error["code"] in ("generation_failed", "engine_unavailable")
        while (await home.ask("GET", "/ready")).status == 200:
            await asyncio.sleep(0.01)
        refused = await home.ask("POST", "/v1/chat/completions", HELLO)
        assert (refused.status, refused.error["code"]) == (503, "engine_unavailable")
        assert (await home.ask("GET", "/health")).status == 200


async def test_a_backend_that_is_lost_and_built_again_serves_on(tmp_path: Path) -> None:
    backend = SimulatedBackend()
    async with household(tmp_path, backend, rebuild=SimulatedBackend) as home:
        backend.lose_everything()
        await home.ask("POST", "/v1/chat/completions", {**HELLO, "max_tokens": 5})
        answer = await home.ask("POST", "/v1/chat/completions", {**HELLO, "max_tokens": 5})
        assert answer.status == 200
        assert (await home.ask("GET", "/ready")).status == 200


class _BrokenTokenizer(SimulatedTokenizer):
    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        raise RuntimeError(f"cannot encode {text!r}")


class _BrokenBackend(SimulatedBackend):
    @property
    def tokenizer(self) -> Tokenizer:
        return _BrokenTokenizer()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_mistake_of_ours_is_logged_and_its_inside_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    async with household(tmp_path, _BrokenBackend()) as home:
        answer = await home.ask("POST", "/v1/chat/completions", {**HELLO, "stream": stream})
    assert (answer.status, answer.error["code"]) == (500, "engine_error")
    assert "encode" not in answer.error["message"]
    assert "POST /v1/chat/completions failed" in caplog.text


async def test_the_household_keeps_its_promises_while_callers_come_and_go(home: Household) -> None:
    """Fifty callers, every third of which leaves early: nothing is left held, and every answer is whole."""

    async def caller(number: int) -> None:
        message = {**HELLO, "max_tokens": 5 + number % 7, "stream": True}
        message["fairhearth"] = {"resident": "alice" if number % 2 else "guest"}
        async with home.stream("/v1/chat/completions", message) as lines:
            if number % 3 == 0:
                await anext(lines)
                return
            said = payloads([line async for line in lines])
            assert said[-2]["fairhearth"]["tokens"]["decode"] == 5 + number % 7

    await asyncio.gather(*(caller(number) for number in range(50)))
    await home.until_idle()
    engine = home.engine.snapshot().engine
    assert engine["kv_pages_used"] == engine["kv_pages_pinned"]
    assert engine["policy_met"], engine["policy_notes"]
