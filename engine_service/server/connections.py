"""What is answered to bytes that are not HTTP: an error of the wire's own shape, hardly a word in the log.

Whoever reaches the port can send such bytes without a token, so they must not be able to fill the log.
Source: docs/wire.md; `RequestHandler.handle_error` of aiohttp, which answers in plain text with a traceback
in the log.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from engine_service.errors import EngineError, InvalidRequest

_LOGGER = logging.getLogger(__name__)

_QUIET_S: Final = 60.0
_QUOTED: Final = re.compile(r"""[:\s]*(\n|\bb?['"]).*""", re.DOTALL)

Refuse = Callable[[EngineError], web.Response]
"""Makes the answer of an error."""


class Complaints:
    """Warns of broken requests: of one a minute at most, and how many there were in between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Count on this clock (seconds)."""
        self._clock = clock
        self._next_at: float | None = None
        self._num_unsaid = 0

    def hear(self, remote: str | None, reason: str) -> None:
        """Note one broken request of an address."""
        now = self._clock()
        if self._next_at is not None and now < self._next_at:
            self._num_unsaid += 1
            return
        more = f"; {self._num_unsaid} more since the last such line" if self._num_unsaid else ""
        _LOGGER.warning("A request from %s is not right HTTP: %s%s", remote, reason, more)
        self._next_at, self._num_unsaid = now + _QUIET_S, 0


class Connection(web.RequestHandler):
    """One connection of a caller."""

    __slots__ = ("_complaints", "_refuse")

    def __init__(self, server: web.Server, *, complaints: Complaints, refuse: Refuse, **options: Any):
        """Serve by aiohttp's server and its options; what cannot be read is refused by refuse."""
        super().__init__(server, **options)
        self._complaints = complaints
        self._refuse = refuse

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be read as HTTP; leave everything else to aiohttp."""
        if status != HTTPStatus.BAD_REQUEST or not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        reason = self._reason(exc)
        self._complaints.hear(request.remote, reason)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        response = self._refuse(InvalidRequest(f"the request is not right HTTP: {reason}"))
        response.force_close()  # where the next request would begin is not known
        return response

    def _reason(self, exc: HttpProcessingError) -> str:
        """Return what is wrong without what was sent: a token may be in it."""
        if isinstance(exc, LineTooLong):
            return f"its address or a header is longer than {self.max_line_size} bytes"
        return _QUOTED.sub("", exc.message).strip()[:100] or "it cannot be read"
