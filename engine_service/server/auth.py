"""Who may do what: bearer tokens with scopes.

Decides from the request's headers and address alone. Tokens are compared by their SHA-256 in constant time,
all of them every time. A known token always passes: tokens are too long to be guessed, and a household must
not lose its voice because something else behind the same address keeps trying; only failures are limited.
"""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final

from aiohttp import web

from engine_service.errors import NotAllowed, NotAuthenticated, TooManyFailures
from engine_service.identity.caller import Caller
from engine_service.identity.tokens import TokenBook, digest_of
from engine_service.settings import Scope, TokenSetting

MAX_FAILURES: Final = 10
FAILURE_WINDOW_S: Final = 60.0
_MAX_ADDRESSES: Final = 1024

_FORWARDED: Final = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")


_LOOPBACK_CALLER: Final = Caller(name="loopback", scopes=frozenset({Scope.ADMIN}))


class Guard:
    """Checks tokens and remembers failures."""

    def __init__(
        self,
        tokens: Iterable[TokenSetting],
        *,
        book: TokenBook | None = None,
        allow_loopback_without_token: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Know these tokens and those of the book; clock gives monotonic seconds."""
        self._tokens = [(digest_of(token.token), _caller(token)) for token in tokens]
        self._book = book
        self._allow_loopback = allow_loopback_without_token
        self._failures = _Failures(clock)

    def check(self, request: web.Request, scope: Scope | None) -> Caller:
        """Return who calls; raise NotAuthenticated, TooManyFailures or NotAllowed."""
        caller = self._caller(request)
        if scope is not None and not caller.may(scope):
            raise NotAllowed(f"the token {caller.name!r} lacks the scope {scope.value!r}")
        return caller

    def note_failure(self, request: web.Request) -> None:
        """Count a wrong guess against its address; raise TooManyFailures if there were too many."""
        self._failures.add(request.remote or "")

    def _caller(self, request: web.Request) -> Caller:
        header = request.headers.get("Authorization")
        if header is None and self._allow_loopback and _is_local(request):
            return _LOOPBACK_CALLER
        scheme, _, token = (header or "").partition(" ")
        caller = self._known(token.strip()) if scheme.lower() == "bearer" else None
        if caller is None:
            self.note_failure(request)
            raise NotAuthenticated(
                "no token: send Authorization: Bearer <token>"
                if not header
                else "the token is not known here"
            )
        return caller

    def _known(self, token: str) -> Caller | None:
        digest = digest_of(token)
        found = None
        made = [(entry.digest, entry.caller) for entry in self._book.all()] if self._book else []
        for known, caller in (*self._tokens, *made):
            if hmac.compare_digest(digest, known):
                found = caller
        return found


def _caller(token: TokenSetting) -> Caller:
    return Caller(
        name=token.name, scopes=token.scopes, resident_id=token.resident_id, most_urgent=token.most_urgent
    )


def _is_local(request: web.Request) -> bool:
    """Return whether a program on this machine calls by itself.

    A page in a browser here, or a proxy in front, would come from loopback too: the first sends Origin or
    names another host, the second says whom it forwards for.
    """
    if "Origin" in request.headers or any(name in request.headers for name in _FORWARDED):
        return False
    return _is_loopback(request.remote or "") and _is_loopback(request.url.host or "")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Failures:
    """Counts unknown tokens by address, over a sliding window; forgets the least recent addresses."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._by_address: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, address: str) -> None:
        """Note a failure; raise TooManyFailures if there were too many."""
        now = self._clock()
        times = self._by_address.setdefault(address, deque(maxlen=MAX_FAILURES))
        self._by_address.move_to_end(address)
        if len(self._by_address) > _MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        if len(times) == MAX_FAILURES and now - times[0] < FAILURE_WINDOW_S:
            raise TooManyFailures(
                f"{MAX_FAILURES} requests without a known token came from this address within a minute",
                retry_after_s=round(FAILURE_WINDOW_S - (now - times[0]), 3),
            )
        times.append(now)
