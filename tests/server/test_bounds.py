"""Callers that mean harm: what they send is cut off, and the household is served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from engine_service.backends.simulated import SimulatedBackend
from tests.server.household import ADMIN, Household, household

MEBI = 2**20


@asynccontextmanager
async def connection(home: Household) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = home.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def head(*more: str, path: str = "/v1/chat/completions") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {ADMIN}", *more)
    return "\r\n".join((*lines, "", "")).encode()


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def pushed(writer: asyncio.StreamWriter, piece: bytes, count: int) -> int:
    """Send a piece again and again until the other side has had enough; return how often it was taken."""
    for number in range(count):
        try:
            writer.write(piece)
            await writer.drain()
        except ConnectionError:
            return number
    return count


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_of_a_hundred_megabytes_is_refused_and_never_held(
    home: Household, is_chunked: bool
) -> None:
    before = peak_memory()
    size = f"{MEBI:x}".encode()
    how = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {100 * MEBI}"
    piece = b"x" * MEBI
    async with asyncio.timeout(60), connection(home) as (reader, writer):
        writer.write(head("Content-Type: application/json", how))
        pushing = asyncio.create_task(
            pushed(writer, size + b"\r\n" + piece + b"\r\n" if is_chunked else piece, 100)
        )
        answer = await reader.readline()
        assert b" 413 " in answer
        assert (await home.chat(max_tokens=1)).status == 200
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
    assert peak_memory() - before < 60 * MEBI


@pytest.mark.parametrize(
    "flood",
    [
        [f"X-{number}: {number}" for number in range(10_000)],
        ["X-Long: " + "x" * MEBI],
        ["X-Cookie: " + ";".join("a=b" for _ in range(100_000))],
    ],
)
async def test_a_flood_of_headers_is_cut_off(home: Household, flood: list[str]) -> None:
    async with asyncio.timeout(60), connection(home) as (reader, writer):
        await pushed(writer, head(*flood), 1)
        try:
            answer = await reader.read()
        except ConnectionError:
            answer = b""
    assert answer == b"" or b" 400 " in answer.partition(b"\r\n")[0]
    assert (await home.chat(max_tokens=1)).status == 200


async def is_served(home: Household) -> bool:
    """Ask again where a busy machine kept this caller silent for too long as well."""
    for _ in range(20):
        with contextlib.suppress(aiohttp.ClientConnectionError):
            return (await home.chat(max_tokens=1)).status == 200
    return False


@pytest.mark.parametrize("beginning", [b"", b"POST /v1/chat/comp", head()[:-2]])
async def test_whoever_dribbles_a_request_is_put_out(tmp_path: Path, beginning: bytes) -> None:
    async with household(tmp_path, SimulatedBackend(), silence_s=0.5) as home:
        async with asyncio.timeout(30), connection(home) as (reader, writer):
            writer.write(beginning)

            async def dribble() -> None:
                while beginning:
                    await asyncio.sleep(0.05)
                    writer.write(b"X-A: b\r\n" if beginning.endswith(b"\n") else b"l")
                    await writer.drain()

            dribbling = asyncio.create_task(dribble())
            try:
                assert await reader.read() == b""
            except ConnectionError:
                pass
            finally:
                dribbling.cancel()
                await asyncio.gather(dribbling, return_exceptions=True)
        assert await is_served(home)


async def test_many_silent_connections_leave_the_household_served(home: Household) -> None:
    async with asyncio.timeout(60):
        opened = [
            await asyncio.open_connection(*home.url.removeprefix("http://").split(":")) for _ in range(200)
        ]
        try:
            assert (await home.chat(max_tokens=2)).status == 200
        finally:
            for _, writer in opened:
                writer.close()
