"""The commands `fairhearth token create|list|revoke` and `fairhearth pair`: arguments in, lines out.

Decides nothing; works beside a running engine, which sees the change with its next request. Standard output
carries the token or code alone, so that scripts can take it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from engine_service.errors import InvalidRequest, SettingsError
from engine_service.identity.caller import Caller
from engine_service.identity.pairing import LIFETIME_S, PairingDesk
from engine_service.identity.tokens import KeptToken, TokenBook
from engine_service.protocol import parse_resident_id
from engine_service.scheduling.model import ResidentId, WorkloadClass
from engine_service.settings import Scope

_LEFT_BY_AN_ENGINE: Final = ("engine.lock", "engine_id")
"""Files that every engine makes in its state folder; one of them alone may have come from a backup."""


def add_token_commands(token: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Add `create`, `list` and `revoke` below `fairhearth token`; common holds the options of all."""
    actions = token.add_subparsers(dest="action")
    create = actions.add_parser("create", parents=[common], help="make a token and print it, once")
    create.add_argument("name", metavar="NAME", help="whose it is, for example kitchen-tablet")
    create.add_argument(
        "--scope",
        action="append",
        choices=[scope.value for scope in Scope],
        help="what it may do; may be repeated (default: generate)",
    )
    create.add_argument(
        "--resident", metavar="ID", help="act for this resident only (default: for everybody)"
    )
    create.add_argument(
        "--most-urgent",
        choices=[class_id.value for class_id in WorkloadClass],
        help="the most urgent class its requests may have (default: any)",
    )
    actions.add_parser("list", parents=[common], help="show the tokens, without themselves")
    revoke = actions.add_parser("revoke", parents=[common], help="make a token worthless at once")
    revoke.add_argument("which", metavar="ID|NAME", help="as `fairhearth token list` shows it")


def run_token(parsed: argparse.Namespace, folder: Path, *, is_known: Callable[[ResidentId], bool]) -> int:
    """Carry out `create`, `list` or `revoke` on a state folder; raise SettingsError for what cannot be.

    is_known says whether there is such a resident.
    """
    try:
        match parsed.action:
            case "create":
                return _create(parsed, TokenBook(folder), is_known)
            case "list":
                return _list(TokenBook(folder))
            case _:
                revoked = TokenBook(folder).revoke(parsed.which)
                print(f"revoked {revoked.caller.name} ({revoked.token_id})")
                return 0
    except InvalidRequest as error:
        raise SettingsError(error.message) from None
    except OSError as error:
        raise SettingsError(f"{folder}: cannot be written: {error.strerror}") from None


def run_pair(folder: Path) -> int:
    """Open a pairing code and print it; raise SettingsError if it cannot be kept.

    A code may be made before the engine first starts, so a folder that none has used is told and no mistake.
    """
    is_used = any((folder / name).exists() for name in _LEFT_BY_AN_ENGINE)
    try:
        code = PairingDesk(folder).open()
    except OSError as error:
        raise SettingsError(f"{folder}: cannot be written: {error.strerror}") from None
    print(code)
    print(f"good for {LIFETIME_S / 60:g} minutes and one use", file=sys.stderr)
    if not is_used:
        print(
            f"note: no engine has ever used {folder}; the code is good only for one that starts with this "
            "state folder. --config or --state-dir says where a running one keeps its state",
            file=sys.stderr,
        )
    return 0


def _create(parsed: argparse.Namespace, book: TokenBook, is_known: Callable[[ResidentId], bool]) -> int:
    if not 1 <= len(parsed.name) <= 64 or not parsed.name.isprintable():
        raise SettingsError("a token's name has 1 to 64 printable characters")
    resident_id = None if parsed.resident is None else parse_resident_id(parsed.resident)
    is_of_nobody = resident_id is not None and not is_known(resident_id)
    token, kept = book.create(
        Caller(
            name=parsed.name,
            scopes=frozenset(Scope(name) for name in parsed.scope or ["generate"]),
            resident_id=resident_id,
            most_urgent=None if parsed.most_urgent is None else WorkloadClass(parsed.most_urgent),
        )
    )
    print(token)
    print(f"this is shown only now; it is {kept.caller.name} ({kept.token_id})", file=sys.stderr)
    if is_of_nobody:
        print(
            f"note: there is no resident {resident_id!r} here; what this token asks for is refused until "
            "there is one",
            file=sys.stderr,
        )
    return 0


def _list(book: TokenBook) -> int:
    shown = Table("id", "name", "scopes", "acts for", "most urgent", "made", box=None)
    for entry in book.all():
        shown.add_row(*_row(entry))
    Console().print(shown if book.all() else "no token was made here")
    return 0


def _row(entry: KeptToken) -> tuple[str, ...]:
    caller = entry.caller
    return (
        entry.token_id,
        caller.name,
        ", ".join(sorted(scope.value for scope in caller.scopes)),
        caller.resident_id or "everybody",
        caller.most_urgent.value if caller.most_urgent else "any",
        datetime.fromtimestamp(entry.created_at).astimezone().isoformat(" ", "minutes"),
    )
