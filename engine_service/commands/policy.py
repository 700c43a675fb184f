"""`fairhearth policy check`: whether a settings file is right, and what its policy comes to in plain words.

Decides nothing about scheduling; says what the core will do with the numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from engine_service.commands.showing import EXIT_OK, console, table
from engine_service.engine.memory import doubts, is_useless
from engine_service.scheduling.model import (
    GUEST,
    HOUSE,
    Capacity,
    ClassPolicy,
    Policy,
    ResidentId,
    WorkloadClass,
)
from engine_service.settings import BackendName, NamedResident, Settings, load

_NOT_HERE: Final = "has no table [residents.…]; requests are refused until the API makes one"


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `policy check`; add makes a parser that knows the options of all commands."""
    policy = add("policy", help="check a policy before living with it")
    actions = policy.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="check a settings file and say what its policy comes to")
    check.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a settings file (default: the one `serve` would read)",
    )
    check.set_defaults(run=run_check)


def run_check(parsed: argparse.Namespace) -> int:
    """Run `fairhearth policy check`; raise SettingsError that names file, key and what is allowed."""
    settings = load(parsed.file or getattr(parsed, "config", None))
    out = console()
    changes = list(_changes(settings.policy))
    out.print(
        "The settings are right." + ("" if changes else " The policy is the default one."), highlight=False
    )
    for line in changes:
        out.print(Text(f"  {line}"))
    _show_residents(out, settings)
    _show_classes(out, settings.policy)
    for note in notes(settings):
        out.print(Text("note ", style="yellow").append(note, style="default"))
    return EXIT_OK


def _changes(policy: Policy) -> Iterator[str]:
    """Yield what differs from the default policy."""
    default = Policy()
    for part in fields(Policy):
        old, new = getattr(default, part.name), getattr(policy, part.name)
        if part.name != "classes" and old != new:
            yield f"{part.name}: {_shown(old)} -> {_shown(new)}"
    for class_id in WorkloadClass:
        for part in fields(ClassPolicy):
            old = getattr(default.classes[class_id], part.name)
            new = getattr(policy.classes[class_id], part.name)
            if old != new:
                yield f"classes.{class_id.value}.{part.name}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)


def _show_residents(out: Console, settings: Settings) -> None:
    weights = sum(entry.resident.weight for entry in settings.residents)
    rows = [_resident(entry, weights) for entry in settings.residents]
    out.print()
    out.print(table(("resident", "weight", "share if all ask", "most tokens", "page cap"), rows))


def _resident(entry: NamedResident, weights: int) -> tuple[str, ...]:
    resident = entry.resident
    limits = []
    if resident.daily_tokens is not None:
        limits.append(_limit(resident.daily_tokens, "a day", is_hard=resident.daily_is_hard))
    if resident.rolling_tokens is not None:
        window = f"in {resident.rolling_window_s:g} s"
        limits.append(_limit(resident.rolling_tokens, window, is_hard=resident.rolling_is_hard))
    return (
        escape(entry.name),
        str(resident.weight),
        f"{100 * resident.weight / weights:.0f} %",
        "; ".join(limits) or "no limit",
        "none" if resident.page_cap is None else str(resident.page_cap),
    )


def _limit(tokens: int, window: str, *, is_hard: bool) -> str:
    return f"{tokens:,} {window}, then {'refused' if is_hard else 'as background'}"


def _show_classes(out: Console, policy: Policy) -> None:
    rows = [
        (
            class_id.value,
            f"{policy.classes[class_id].max_wait_s:g} s",
            _shown(policy.classes[class_id].inter_token_target_s),
            _shown(policy.classes[class_id].max_context_tokens),
            _shown(policy.classes[class_id].max_output_tokens),
        )
        for class_id in WorkloadClass
    ]
    out.print()
    out.print(table(("class", "longest wait", "gap between words (s)", "most context", "most output"), rows))
    out.print()


def capacity_of(settings: Settings) -> Capacity:
    """Return what the settings' cache comes to; a model may be trained for less."""
    model = settings.model
    page_tokens = 256 if model.backend in (BackendName.EXLLAMAV2, BackendName.EXLLAMAV3) else 32
    return Capacity(
        num_pages=model.context_tokens // page_tokens,
        page_tokens=page_tokens,
        max_sequences=model.max_sequences,
        max_context_tokens=model.context_tokens,
    )


def _unclear_names(settings: Settings) -> Iterator[str]:
    """Yield residents whom people cannot tell apart, and tokens and users of residents who are not there."""
    known = {entry.resident_id for entry in settings.residents}
    names: dict[str, ResidentId] = {}
    for entry in settings.residents:
        other = names.setdefault(entry.name.casefold(), entry.resident_id)
        if other != entry.resident_id:
            yield f"{other} and {entry.resident_id} are both shown as {entry.name}"
    for token in settings.server.tokens:
        if token.resident_id is not None and token.resident_id not in known:
            yield f"the token {token.name!r} acts for {token.resident_id!r}, who {_NOT_HERE}"
    for user, resident_id in settings.server.users.items():
        if resident_id not in known:
            yield f"server.users: {user!r} is {resident_id!r}, who {_NOT_HERE}"


def notes(settings: Settings) -> list[str]:
    """Return what is allowed and probably not what was meant."""
    policy, found = settings.policy, []
    waits = [policy.classes[class_id].max_wait_s for class_id in WorkloadClass]
    if waits[0] > waits[2]:
        found.append("voice may wait longer than chat: people will stand in the kitchen and wait")
    if policy.voice_headroom_pages == 0:
        found.append(
            "voice_headroom_pages is 0: a spoken request may find no memory until somebody gives way"
        )
    if policy.background_reserve == 0:
        found.append("background_reserve is 0: summaries depend on their longest wait alone")
    if policy.background_reserve > 0.5:
        found.append("background_reserve is over one half: chat gets less than summaries while both wait")
    named = [entry for entry in settings.residents if entry.resident_id not in (GUEST, HOUSE)]
    guest = next(entry for entry in settings.residents if entry.resident_id == GUEST)
    if named and guest.resident.weight > max(entry.resident.weight for entry in named):
        found.append(
            "guest has more weight than anybody of the household; unknown speakers all count as guest"
        )
    found += doubts(capacity_of(settings), policy)
    if reason := is_useless(capacity_of(settings), policy):
        found.append(reason)
    found += _unclear_names(settings)
    if settings.room_note:
        found.append(settings.room_note)
    for entry in named:
        daily, output = entry.resident.daily_tokens, policy.output_slice_tokens
        if daily is not None and daily < 10 * output:
            found.append(f"{entry.name} has {daily} tokens a day: that is a few sentences")
    return found
