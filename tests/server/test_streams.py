"""Streams: their order, their end, and what becomes of a request whose reader goes away."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from engine_service.server.handlers import fairness
from engine_service.server.streaming import EventStream, ReaderGone
from tests.server.household import ADMIN, Household, bearer, payloads

LONG = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 2000, "ignore_eos": True}


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], "stream": True, **more}


async def test_a_stream_begins_with_the_role_and_ends_with_what_was_measured(home: Household) -> None:
    message = chat(max_tokens=5, ignore_eos=True, stream_options={"include_usage": True})
    message["fairhearth"] = {"resident": "alice", "workload_class": "voice"}
    async with home.stream("/v1/chat/completions", message) as lines:
        said = payloads([line async for line in lines])
    first, last, usage, done = said[0], said[-3], said[-2], said[-1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["fairhearth"]["resident"] == "alice"
    assert first["fairhearth"]["num_ahead"] == 0
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["fairhearth"]["tokens"]["decode"] == 5
    assert last["fairhearth"]["workload_class"] == "voice"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 5
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in said[:-1]}) == 1


async def test_usage_comes_only_when_asked_for(home: Household) -> None:
    async with home.stream("/v1/chat/completions", chat(max_tokens=2)) as lines:
        said = payloads([line async for line in lines])
    assert not [chunk for chunk in said[:-1] if chunk.get("usage")]


async def test_a_stream_says_what_the_whole_answer_says(home: Household) -> None:
    message = chat(max_tokens=20, temperature=0, ignore_eos=True)
    async with home.stream("/v1/chat/completions", message) as lines:
        said = payloads([line async for line in lines])
    streamed = "".join(c["choices"][0]["delta"].get("content", "") for c in said[:-1])
    whole = await home.ask("POST", "/v1/chat/completions", {**message, "stream": False})
    assert streamed == whole.json()["choices"][0]["message"]["content"]
    assert streamed


async def test_a_text_completion_streams_likewise(home: Household) -> None:
    message = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    async with home.stream("/v1/completions", {**message, "stream": True}) as lines:
        said = payloads([line async for line in lines])
    streamed = "".join(c["choices"][0]["text"] for c in said[:-1])
    whole = (await home.ask("POST", "/v1/completions", message)).json()
    assert streamed == whole["choices"][0]["text"]
    assert said[-2]["fairhearth"]["tokens"]["decode"] == whole["fairhearth"]["tokens"]["decode"] == 20


async def test_many_streams_run_side_by_side(home: Household) -> None:
    async def one(number: int) -> int:
        message = chat(max_tokens=8, ignore_eos=True)
        message["messages"] = [{"role": "user", "content": f"Say {number}"}]
        async with home.stream("/v1/chat/completions", message) as lines:
            said = payloads([line async for line in lines])
        assert said[-1] == "[DONE]"
        return int(said[-2]["fairhearth"]["tokens"]["decode"])

    assert await asyncio.gather(*(one(number) for number in range(12))) == [8] * 12


async def test_a_reader_that_leaves_while_the_answer_runs_frees_its_request(home: Household) -> None:
    async with home.stream("/v1/chat/completions", {**LONG, "stream": True}) as lines:
        seen = [await anext(lines) for _ in range(3)]
    assert len(seen) == 3
    await home.until_idle()
    engine = home.engine.snapshot().engine
    assert engine["kv_pages_used"] == engine["kv_pages_pinned"]
    guest = home.engine.snapshot().residents["guest"]
    assert (guest["finished"], guest["cancelled"]) == (0, 1)


async def test_a_caller_that_leaves_before_a_whole_answer_frees_its_request(home: Household) -> None:
    asking = asyncio.create_task(home.ask("POST", "/v1/chat/completions", LONG))
    await home.engine.changed(after=home.engine.snapshot().version)
    while not home.engine.snapshot().engine["requests_running"]:
        await asyncio.sleep(0.005)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await home.until_idle()
    assert home.engine.snapshot().residents["guest"]["cancelled"] == 1


async def test_a_caller_that_leaves_while_waiting_frees_its_place(crowded_home: Household) -> None:
    """One request runs at a time here: the second has never been admitted when its caller goes."""
    home = crowded_home
    running = asyncio.create_task(home.ask("POST", "/v1/chat/completions", LONG))
    while not home.engine.snapshot().engine["requests_running"]:
        await asyncio.sleep(0.005)
    async with home.stream("/v1/chat/completions", {**LONG, "stream": True}) as lines:
        first = payloads([await anext(lines)])[0]
        assert "fairhearth" in first
        assert home.engine.snapshot().engine["requests_waiting"] == 1
    while home.engine.snapshot().engine["requests_waiting"]:
        await asyncio.sleep(0.005)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await home.until_idle()


async def test_a_connection_torn_down_without_goodbye_frees_its_request(home: Household) -> None:
    host, port = home.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**LONG, "stream": True}).encode()
    headers = bearer(ADMIN) | {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Host": host,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
    assert b"200 OK" in await reader.readline()
    # Linger 0: the kernel sends a reset instead of a farewell, as when a machine loses power.
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()
    await home.until_idle()
    assert home.engine.snapshot().residents["guest"]["cancelled"] == 1


async def test_the_stream_of_an_engine_that_nobody_uses_says_nothing_new(
    home: Household, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairness, "MIN_INTERVAL_S", 0.0)
    async with home.stream("/v1/fairness/stream") as lines:
        first = await _engine_told(lines)
        second = asyncio.create_task(_engine_told(lines))
        await asyncio.wait({second}, timeout=0.2)
        change = {"policy": {"classes": {"chat": {"max_context_tokens": 300}}}}
        assert (await home.ask("PATCH", "/v1/policy", change)).status == 200
        assert (await second)["max_context_tokens"] == 300 < first["max_context_tokens"]


async def _engine_told(lines: AsyncGenerator[str, None]) -> Any:
    """Return the part on the engine of the next snapshot."""
    assert await anext(lines) == "event: fairness"
    return payloads([await anext(lines)])[0]["engine"]


async def _one_stream(handler: Any) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/"


async def test_a_reader_gone_before_the_headers_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """As when a client starts to listen and is closed at once."""
    ended: list[str] = []

    async def late(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request)
        assert request.transport is not None
        request.transport.close()
        try:
            async with stream:
                ended.append("as if somebody were there")
        except ReaderGone:
            ended.append("gone")
        return stream.response

    runner, url = await _one_stream(late)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(url)
    await runner.cleanup()
    assert set(ended) == {"gone"}
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_reader_that_takes_nothing_is_given_up() -> None:
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    async def endless(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request, write_timeout_s=0.2)
        try:
            async with stream:
                while True:
                    await stream.send("x" * 100_000)
        except ReaderGone as error:
            ended.set_result(error)
        return stream.response

    runner, url = await _one_stream(endless)
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")  # and never reads
    assert "took nothing for 0.2 s" in str(await ended)
    client.close()
    await runner.cleanup()


async def test_a_silent_stream_says_that_it_is_alive() -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request, keepalive_s=0.05)
        async with stream:
            await asyncio.Event().wait()
        return stream.response

    runner, url = await _one_stream(silent)
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        assert await response.content.readline() == b": keepalive\n"
        assert await response.content.readline() == b"\n"
        assert await response.content.readline() == b": keepalive\n"
    await runner.cleanup()


async def test_what_ends_a_stream_goes_out_in_one_write(home: Household) -> None:
    message = chat(max_tokens=3, ignore_eos=True, stream_options={"include_usage": True})
    writes: list[str] = []
    piece = b""
    async with home.http.post(
        f"{home.url}/v1/chat/completions", json=message, headers=bearer(ADMIN)
    ) as response:
        async for data, ends in response.content.iter_chunks():
            piece += data
            if ends:
                writes.append(piece.decode())
                piece = b""
    *_, last = (found for write in writes if (found := payloads(write.split("\n"))))
    assert [one if one == "[DONE]" else bool(one.get("usage")) for one in last[-2:]] == [True, "[DONE]"]
    assert last[-3]["choices"][0]["finish_reason"] == "length"
    assert len(writes) <= 1 + 3, "the role, and at most one write a token"
