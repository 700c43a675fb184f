"""The tokens that were made by command or pairing, kept as hashes in the state folder.

    tokens.json   id, name, SHA-256, scopes and bounds of each token (mode 0600)

Decides nothing about requests. A token is 256 random bits, so its plain SHA-256 cannot be guessed back; it is
shown once, when it is made. The command and a running engine share the file: changes are made under a lock,
and a running engine sees them with the next request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import voluptuous as vol

from engine_service.checks import list_of, member, number, or_none, path_and_message, table, text
from engine_service.errors import InvalidRequest, SettingsError
from engine_service.identity.caller import Caller
from engine_service.protocol import parse_json, parse_resident_id
from engine_service.scheduling.model import WorkloadClass
from engine_service.settings import Scope
from engine_service.state import locked, replace_file

_LOGGER = logging.getLogger(__name__)

MAX_TOKENS: Final = 1000
_PREFIX: Final = "fh-"  #: lets a person, and a scanner for leaked secrets, see what the string is


def digest_of(token: str) -> bytes:
    """Return what is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptToken:
    """One token without itself."""

    token_id: str
    digest: bytes
    caller: Caller
    created_at: float  #: seconds since 1970


class TokenBook:
    """The tokens of one state folder."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time):
        """Read the file; raise SettingsError where it is damaged. clock gives seconds since 1970."""
        self._path = folder / "tokens.json"
        self._clock = clock
        self._seen = self._version()  # before it is read: what is made in between is read anew, not missed
        self._tokens = self._read()

    def all(self) -> tuple[KeptToken, ...]:
        """Return the tokens as of now, in the order they were made."""
        version = self._version()
        if version != self._seen:
            self._seen = version
            try:
                self._tokens = self._read()
            except SettingsError as error:
                _LOGGER.error("The tokens stay as they were: %s", error)
        return self._tokens

    def create(self, caller: Caller, *, rename: bool = False) -> tuple[str, KeptToken]:
        """Make a token that allows what caller may; return it and what is kept of it.

        Raises InvalidRequest for a name that is taken (rename: add a number instead), OSError if the disk
        does not take it.
        """
        token = _PREFIX + secrets.token_urlsafe(32)
        with self._locked():
            tokens = self._read()
            if len(tokens) >= MAX_TOKENS:
                raise InvalidRequest(f"there are {MAX_TOKENS} tokens already; revoke some first")
            kept = KeptToken(
                token_id=secrets.token_hex(4),
                digest=digest_of(token),
                caller=_named(caller, {entry.caller.name for entry in tokens}, rename=rename),
                created_at=self._clock(),
            )
            self._write((*tokens, kept))
        return token, kept

    def revoke(self, id_or_name: str) -> KeptToken:
        """Forget a token and return what it was; raise InvalidRequest naming those there are."""
        with self._locked():
            tokens = self._read()
            for entry in tokens:
                if id_or_name in (entry.token_id, entry.caller.name):
                    self._write(tuple(other for other in tokens if other is not entry))
                    return entry
        known = ", ".join(entry.caller.name for entry in tokens) or "none"
        raise InvalidRequest(f"there is no token {id_or_name!r}; known are: {known}")

    def _version(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _locked(self) -> AbstractContextManager[None]:
        return locked(self._path.with_suffix(".lock"))

    def _read(self) -> tuple[KeptToken, ...]:
        try:
            body = self._path.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise SettingsError(f"{self._path}: cannot be read: {error.strerror}") from None
        try:
            return tuple(_kept(entry) for entry in _FILE(parse_json(body, what="it"))["tokens"])
        except vol.Invalid as error:
            where, message = path_and_message(error)
            reason = f"{where} {message}".strip()
        except InvalidRequest as error:
            reason = error.message
        raise SettingsError(f"{self._path}: {reason}; delete the file to revoke all tokens made here")

    def _write(self, tokens: tuple[KeptToken, ...]) -> None:
        entries = [_as_kept(entry) for entry in tokens]
        replace_file(self._path, json.dumps({"tokens": entries}, ensure_ascii=False, indent=2) + "\n")


def _named(caller: Caller, taken: set[str], *, rename: bool) -> Caller:
    if caller.name not in taken:
        return caller
    if not rename:
        raise InvalidRequest(f"there is a token named {caller.name!r} already; choose another name")
    number_ = next(n for n in range(2, MAX_TOKENS + 2) if f"{caller.name} {n}" not in taken)
    return Caller(
        name=f"{caller.name} {number_}",
        scopes=caller.scopes,
        resident_id=caller.resident_id,
        most_urgent=caller.most_urgent,
    )


# --- the file ---


def _sha256(value: Any) -> bytes:
    digits: str = text(at_least=64, at_most=64)(value)
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise vol.Invalid("must be 64 hexadecimal digits") from None


_FILE: Final = table(
    {
        vol.Required("tokens"): list_of(
            table(
                {
                    vol.Required("id"): text(at_least=1, at_most=64),
                    vol.Required("name"): text(at_least=1, at_most=128),
                    vol.Required("sha256"): _sha256,
                    vol.Required("scopes"): list_of(member(Scope), at_least=1),
                    vol.Required("resident"): or_none(text(at_least=1, at_most=64)),
                    vol.Required("most_urgent"): or_none(member(WorkloadClass)),
                    vol.Required("created_at"): number(0),
                }
            )
        )
    }
)


def _kept(entry: dict[str, Any]) -> KeptToken:
    resident = entry["resident"]
    return KeptToken(
        token_id=entry["id"],
        digest=entry["sha256"],
        caller=Caller(
            name=entry["name"],
            scopes=frozenset(entry["scopes"]),
            resident_id=None if resident is None else parse_resident_id(resident),
            most_urgent=entry["most_urgent"],
        ),
        created_at=entry["created_at"],
    )


def _as_kept(entry: KeptToken) -> dict[str, Any]:
    caller = entry.caller
    return {
        "id": entry.token_id,
        "name": caller.name,
        "sha256": entry.digest.hex(),
        "scopes": sorted(scope.value for scope in caller.scopes),
        "resident": caller.resident_id,
        "most_urgent": None if caller.most_urgent is None else caller.most_urgent.value,
        "created_at": entry.created_at,
    }
