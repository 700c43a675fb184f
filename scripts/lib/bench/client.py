"""A streaming HTTP client that costs the measured machine almost nothing.

Knows HTTP/1.1 answers (sized, chunked, or ended by closing) and server-sent events; decides nothing. Both
servers are read by it, so that what it costs falls out of every ratio.

Source: RFC 9112 section 7.1 (chunked), WHATWG HTML (server-sent events; only `data` lines are read).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

_MAX_LINE_BYTES = 2**20


class ServerFailed(Exception):
    """A server refused a request or broke an answer off; the text says which and what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens, and the bearer token it wants, if any."""

    host: str
    port: int
    token: str | None = None

    def head(self, method: str, path: str, body: bytes) -> bytes:
        """Return the request up to and including its body."""
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Connection: close",
            f"Content-Length: {len(body)}",
        ]
        if body:
            lines.append("Content-Type: application/json")
        if self.token:
            lines.append(f"Authorization: Bearer {self.token}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def events(address: Address, path: str, message: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Post the message and yield the JSON of every event as it comes; raises ServerFailed."""
    reader, writer = await _sent(address, "POST", path, json.dumps(message).encode())
    try:
        pieces = await _body(reader, f"POST {path}")
        async for line in _lines(pieces):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])
    finally:
        writer.close()


async def call(
    address: Address, method: str, path: str, message: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON that answers one request; raises ServerFailed for any status but 200."""
    body = b"" if message is None else json.dumps(message).encode()
    reader, writer = await _sent(address, method, path, body)
    try:
        whole = await _whole(await _body(reader, f"{method} {path}"))
        try:
            answer: dict[str, Any] = json.loads(whole)
        except ValueError as error:
            raise ServerFailed(f"{method} {path}: the answer is not JSON: {whole[:80]!r}") from error
        return answer
    finally:
        writer.close()


async def _sent(
    address: Address, method: str, path: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=_MAX_LINE_BYTES)
    writer.write(address.head(method, path, body))
    await writer.drain()
    return reader, writer


async def _body(reader: asyncio.StreamReader, what: str) -> AsyncIterator[bytes]:
    """Read the head of an answer; return its body, piece by piece. Raises ServerFailed."""
    status = await reader.readline()
    fields = status.split(None, 2)
    if len(fields) < 2 or not fields[1].isdigit():
        raise ServerFailed(f"{what}: the answer does not begin like HTTP: {status[:80]!r}")
    headers: dict[bytes, bytes] = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    pieces = body_pieces(reader, headers)
    if fields[1] != b"200":
        said = (await _whole(pieces)).decode("utf-8", "replace")
        raise ServerFailed(f"{what}: status {fields[1].decode()}: {said[:500]}")
    return pieces


async def body_pieces(reader: asyncio.StreamReader, headers: Mapping[bytes, bytes]) -> AsyncIterator[bytes]:
    """Yield a body's bytes as they come, freed of the framing that the headers announce.

    A body that is cut short ends early; whoever reads it knows by what is missing.
    """
    if headers.get(b"transfer-encoding") == b"chunked":
        while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
            try:
                yield (await reader.readexactly(size + 2))[:-2]
            except asyncio.IncompleteReadError:
                return
    elif (length := headers.get(b"content-length")) is not None:
        yield await reader.readexactly(int(length))
    else:
        while piece := await reader.read(65536):
            yield piece


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield whole lines, however the pieces cut them."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


async def _whole(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])
