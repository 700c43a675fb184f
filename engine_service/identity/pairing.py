"""Pairing: a code of six digits, read by a person beside the engine, is traded for a token once.

    pairing.json   the code that is open now (mode 0600)

Decides when a code is good: for ten minutes, five wrong tries and one use, and only after somebody at the
engine had one made. Nobody can open a code from afar, so there is nothing to guess at while nobody pairs. The
code lies in the file as it is: a hash of six digits hides nothing, the file's mode does. Knows no HTTP.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import voluptuous as vol

from engine_service.checks import number, table, text, whole_number
from engine_service.errors import InvalidRequest, PairingClosed, WrongCode
from engine_service.protocol import parse_json
from engine_service.state import locked, replace_file

LIFETIME_S: Final = 600.0
MAX_WRONG: Final = 5

_FILE: Final = table(
    {
        vol.Required("code"): text(at_least=6, at_most=6),
        vol.Required("opened_at"): number(0),
        vol.Required("wrong"): whole_number(0),
    }
)


class PairingDesk:
    """The code of one state folder; the command and a running engine share it."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time):
        """Keep the code in folder; clock gives seconds since 1970."""
        self._path = folder / "pairing.json"
        self._clock = clock

    def open(self) -> str:
        """Make a code, which replaces an earlier one, and return it; raise OSError if it cannot be kept."""
        code = f"{secrets.randbelow(1_000_000):06d}"
        with self._locked():
            self._keep({"code": code, "opened_at": self._clock(), "wrong": 0})
        return code

    def open_or_kept(self) -> str:
        """Return the code that is open, made now if there is none; raise OSError if it cannot be kept."""
        try:
            with self._locked():
                code: str = self._open_entry()["code"]
        except PairingClosed:
            return self.open()
        return code

    def trade(self, code: str) -> None:
        """Use the code up; raise PairingClosed where none is open, WrongCode for another one."""
        with self._locked():
            entry = self._open_entry()
            if hmac.compare_digest(code.encode(), entry["code"].encode()):
                self._path.unlink()
                return
            left = MAX_WRONG - entry["wrong"] - 1
            if left <= 0:
                self._path.unlink()
                raise WrongCode(
                    f"that is not the code, and {MAX_WRONG} tries are used up; run `fairhearth pair` beside "
                    "the engine for a new one",
                    param="code",
                )
            self._keep(entry | {"wrong": entry["wrong"] + 1})
        raise WrongCode(f"that is not the code the engine shows; tries left: {left}", param="code")

    def _open_entry(self) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = _FILE(parse_json(self._path.read_bytes()))
        except (OSError, InvalidRequest, vol.Invalid):
            entry = {}
        if not entry or not 0 <= self._clock() - entry["opened_at"] < LIFETIME_S:
            self._path.unlink(missing_ok=True)
            raise PairingClosed(
                "no pairing code is open; run `fairhearth pair` beside the engine and use the code within "
                f"{LIFETIME_S / 60:g} minutes"
            )
        return entry

    def _keep(self, entry: dict[str, Any]) -> None:
        replace_file(self._path, json.dumps(entry) + "\n")

    def _locked(self) -> AbstractContextManager[None]:
        return locked(self._path.with_suffix(".lock"))
