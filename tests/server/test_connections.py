"""Bytes that are not HTTP: answered in the wire's own words, hardly a line in the log, others served on."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from engine_service.server.connections import Complaints
from tests.server.household import ADMIN, Household

SECRET = "not-for-the-log"
POST = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN}\r\n"
JSON = "Content-Type: application/json\r\n"
CHUNKED = f"{POST}{JSON}Transfer-Encoding: chunked\r\n\r\n"
BROKEN = {
    "a length that is no number": f"{POST}Content-Length: abc\r\n\r\n",
    "a negative length": f"{POST}Content-Length: -5\r\n\r\n",
    "two lengths": f"{POST}Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a long header": f"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: {SECRET * 7000}\r\n\r\n",
    "a long address": f"GET /{SECRET * 7000} HTTP/1.1\r\nHost: x\r\n\r\n",
    "a bad header": f"GET /health HTTP/1.1\r\nHost: x\r\n{SECRET} bad\r\n\r\n",
    "a bad chunk": f"{CHUNKED}{SECRET}\r\n",
    "garbage": f"\x01\x02{SECRET}\r\n\r\n",
    "another protocol": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


async def answered(home: Household, *pieces: str) -> tuple[int, str, bytes]:
    """Send pieces on a connection of their own; return status, head and body of the answer."""
    host, port = home.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(20):
            for piece in pieces:
                writer.write(piece.encode("latin-1"))
                await writer.drain()
                await asyncio.sleep(0.1)
            answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), body


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
async def test_broken_http_is_refused_as_everything_else_is(
    home: Household, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    for _ in range(3):
        status, head, body = await answered(home, broken)
        assert status == 400
        assert "content-type: application/json" in head.lower()
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("invalid_request", "invalid_request_error")
        assert error["message"].startswith("the request is not right HTTP: ")
        assert SECRET not in body.decode()
    (said,) = [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert (said.levelno, said.exc_info) == (logging.WARNING, None)
    assert "\n" not in said.getMessage()
    assert SECRET not in said.getMessage()
    assert (await home.chat(max_tokens=1)).status == 200


def test_many_broken_requests_are_one_line_a_minute_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    complaints = Complaints(lambda: now)
    for _ in range(100):
        complaints.hear("192.0.2.1", "it cannot be read")
    now = 61.0
    complaints.hear("192.0.2.1", "it cannot be read")
    first, second = [entry.getMessage() for entry in caplog.records]
    assert first == "A request from 192.0.2.1 is not right HTTP: it cannot be read"
    assert second == f"{first}; 99 more since the last such line"
