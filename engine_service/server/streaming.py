"""Server-sent events: one writer with time limits, keep-alive comments and an end.

Decides when a reader counts as gone. Knows no message. Source: WHATWG HTML, server-sent events.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from aiohttp import web

KEEPALIVE_S: Final = 15.0
WRITE_TIMEOUT_S: Final = 30.0
"""A reader that takes nothing for this long is gone, whatever its socket says."""

DONE: Final = "[DONE]"


class ReaderGone(ConnectionError):
    """Nobody reads the stream any more."""


def dumps(message: Any) -> str:
    """Return JSON on one line, as UTF-8 text."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class EventStream:
    """An open stream of events. Use as a context manager; writes raise ReaderGone."""

    def __init__(
        self,
        request: web.Request,
        *,
        keepalive_s: float = KEEPALIVE_S,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ):
        """Answer this request with a stream."""
        self._request = request
        self._keepalive_s = keepalive_s
        self._write_timeout_s = write_timeout_s
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache, no-transform",
                "X-Accel-Buffering": "no",
            }
        )
        self._lock = asyncio.Lock()
        self._keepalive: asyncio.Task[None] | None = None
        self._last_write = 0.0

    async def __aenter__(self) -> Self:
        """Send the headers; raise ReaderGone where nobody waits for them any more."""
        await self._within_limit(self.response.prepare(self._request))
        self._last_write = asyncio.get_running_loop().time()
        self._keepalive = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the stream."""
        if self._keepalive is not None:
            self._keepalive.cancel()
        if error is None:
            await self._within_limit(self.response.write_eof())

    async def send(self, *messages: Mapping[str, Any] | str, event: str | None = None) -> None:
        """Send each message as an event, all in one write; text goes out as it is.

        Under load the event loop spends more on writes than on all else, so what is there goes out together.
        """
        name = f"event: {event}\n" if event else ""
        data = (message if isinstance(message, str) else dumps(message) for message in messages)
        await self._write("".join(f"{name}data: {one}\n\n" for one in data))

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            idle_s = loop.time() - self._last_write
            if idle_s < self._keepalive_s:
                await asyncio.sleep(self._keepalive_s - idle_s)
                continue
            try:
                await self._write(": keepalive\n\n")
            except ReaderGone:
                return  # the next event, or aiohttp's cancellation, ends the stream

    async def _write(self, text: str) -> None:
        async with self._lock:
            await self._within_limit(self.response.write(text.encode()))
            self._last_write = asyncio.get_running_loop().time()

    async def _within_limit(self, writing: Any) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await writing
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ReaderGone(f"the reader took nothing for {self._write_timeout_s:g} s") from None
        except ConnectionError as error:
            raise ReaderGone("the reader closed the connection") from error
