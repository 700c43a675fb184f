"""`fairhearth plan`: how many conversations of which length fit. `fairhearth models`: what there is.

Decides nothing: reads file headers and counts with the scheduler's own numbers. Loads no model.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from engine_service.backends.base import ModelError
from engine_service.backends.host_memory import available_bytes
from engine_service.backends.llama_cpp.provision import default_model_path
from engine_service.commands.showing import EXIT_BAD, EXIT_OK, console, fail, print_json, size, table
from engine_service.engine.memory import REFERENCE_TOKENS, Room, is_useless, planned
from engine_service.footprint import CACHE_BITS, CACHE_STEP, GIB, Footprint, footprint_of
from engine_service.scheduling.model import Capacity
from engine_service.settings import BackendName, ModelSettings, Settings

_SEVERAL: Final = 1000
"""Tokens that the cache of a model is told for."""


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `plan` and `models`; add makes a parser that knows the options of all commands."""
    plan = add("plan", help="say how many conversations of which length fit", run_with_settings=run_plan)
    plan.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a GGUF file, a folder, or a name of the settings' [[models]] (default: the settings' first)",
    )
    plan.add_argument("--vram", type=_gib, metavar="G", help="memory for model and cache together (GiB)")
    plan.add_argument("--context-tokens", type=int, metavar="N", help="token slots of the KV cache, in all")
    plan.add_argument("--max-sequences", type=int, metavar="N", help="requests that run at once")
    plan.add_argument(
        "--cache-type", choices=list(CACHE_BITS), help="how cached values are kept (default: fp16)"
    )
    plan.add_argument("--json", action="store_true", help="for programs")
    models = add(
        "models", help="list models, what they take and whether they fit", run_with_settings=run_models
    )
    models.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="where else to look")
    models.add_argument(
        "--vram", type=_gib, metavar="G", help="memory to fit into (default: what is free here)"
    )
    models.add_argument("--json", action="store_true", help="for programs")


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 100_000:
        raise argparse.ArgumentTypeError(f"must be GiB > 0, for example 24, not {text!r}")
    return value


def model_path(settings: Settings) -> Path:
    """Return the file or folder of the settings' model; raise ModelError if there is none."""
    return settings.model.path or default_model_path()


# --- fairhearth plan ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One model with one cache."""

    footprint: Footprint
    cache_type: str
    cache_tokens: int
    memory_bytes: int | None  #: what was said to be there; None: nothing was
    room: Room
    settings: Settings

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs."""
        footprint, tokens = self.footprint, self.cache_tokens
        return {
            "model": footprint.name,
            "architecture": footprint.architecture,
            "weight_bytes": footprint.weight_bytes,
            "cache_type": self.cache_type,
            "cache_tokens": tokens,
            "cache_bytes": footprint.cache_bytes(tokens, self.cache_type),
            "overhead_bytes": footprint.overhead_bytes,
            "parking_bytes": footprint.parking_bytes,
            "needed_bytes": footprint.needed_bytes(tokens, self.cache_type),
            "memory_bytes": self.memory_bytes,
            "page_tokens": self.room.page_tokens,
            "max_sequences": self.settings.model.max_sequences,
            "max_context_tokens": self.room.max_context_tokens,
            "reference_tokens": REFERENCE_TOKENS,
            "conversations": [fit.as_dict() for fit in self.room.fits()],
        }


def run_plan(parsed: argparse.Namespace, settings: Settings) -> int:
    """Run `fairhearth plan`."""
    settings = _for_named(parsed, settings)
    footprint = footprint_of(model_path(settings))
    cache_type = parsed.cache_type or settings.model.cache_type.value
    memory = None if parsed.vram is None else int(parsed.vram * GIB)
    tokens = footprint.cache_tokens(settings.model.context_tokens)
    if memory is not None:
        most = footprint.most_tokens(memory, cache_type)
        if most < (tokens if parsed.context_tokens else CACHE_STEP):
            return fail(_does_not_fit(footprint, memory, tokens, most, cache_type), EXIT_BAD)
        tokens = tokens if parsed.context_tokens else most
    if not tokens:
        return fail(
            f"context_tokens must be at least {CACHE_STEP} with a folder of safetensors, one page", EXIT_BAD
        )
    capacity = _capacity(footprint, tokens, settings)
    if reason := is_useless(capacity, settings.policy):
        return fail(f"no conversation fits: {reason}", EXIT_BAD)
    plan = Plan(
        footprint=footprint,
        cache_type=cache_type,
        cache_tokens=tokens,
        memory_bytes=memory,
        room=planned(capacity, settings.policy),
        settings=settings,
    )
    if parsed.json:
        print_json(plan.as_dict())
    else:
        _show(plan)
    return EXIT_OK


def _for_named(parsed: argparse.Namespace, settings: Settings) -> Settings:
    """Return the settings with the model that is meant by its name, if one is."""
    named = next((model.settings for model in settings.models if model.name == str(parsed.model)), None)
    if named is None:
        return settings
    given = {key: getattr(parsed, key) for key in ("context_tokens", "max_sequences")}
    model = replace(named, **{key: value for key, value in given.items() if value is not None})
    return replace(settings, model=model)


def _does_not_fit(footprint: Footprint, memory: int, tokens: int, most: int, cache_type: str) -> str:
    if not most:
        needed = footprint.needed_bytes(CACHE_STEP, cache_type)
        return (
            f"{footprint.name} does not fit: it takes at least {size(needed)} and there are {size(memory)}; "
            "use a smaller model or a stronger quantisation of this one"
        )
    return (
        f"a cache of {tokens} tokens does not fit: beside the weights ({size(footprint.weight_bytes)}) "
        f"there is room for {most} tokens; use --context-tokens {most}, or a smaller --cache-type"
    )


def _capacity(footprint: Footprint, tokens: int, settings: Settings) -> Capacity:
    return Capacity(
        num_pages=tokens // footprint.page_tokens,
        page_tokens=footprint.page_tokens,
        max_sequences=settings.model.max_sequences,
        max_context_tokens=min(tokens, footprint.max_context_tokens),
    )


def _show(plan: Plan) -> None:
    out, footprint = console(), plan.footprint
    out.print(
        f"[bold]{footprint.name}[/] ({footprint.architecture}), "
        f"trained for {footprint.max_context_tokens:,} tokens",
        highlight=False,
    )
    cache = footprint.cache_bytes(plan.cache_tokens, plan.cache_type)
    needed = footprint.needed_bytes(plan.cache_tokens, plan.cache_type)
    of = "" if plan.memory_bytes is None else f" of {size(plan.memory_bytes)}"
    out.print(
        f"{size(footprint.weight_bytes)} weights + {size(cache)} cache of {plan.cache_tokens:,} tokens "
        f"({plan.cache_type}) + {size(footprint.overhead_bytes)} for computing{_parking(footprint)} "
        f"= {size(needed)}{of}",
        highlight=False,
    )
    room, policy = plan.room, plan.settings.policy
    kept = plan.cache_tokens // room.page_tokens - room.pages
    out.print(
        f"{kept} of {plan.cache_tokens // room.page_tokens} pages are kept free for speech "
        f"(voice_headroom_pages = {policy.voice_headroom_pages}); at most "
        f"{plan.settings.model.max_sequences} requests run at once (max_sequences)\n",
        highlight=False,
    )
    rows = [
        (f"{fit.context_tokens:,} tokens", str(fit.pages), str(fit.active), str(fit.beside))
        for fit in room.fits()
    ]
    headers = (
        "a conversation of",
        "pages",
        "active at once",
        f"and beside one: others of {REFERENCE_TOKENS:,}",
    )
    out.print(table(headers, rows))
    out.print(
        f"\nThe last column: beside one such conversation so many of {REFERENCE_TOKENS:,} tokens are active."
        "\nMore conversations than fit take turns; how long a request may wait is in the policy.",
        highlight=False,
    )
    if len(plan.settings.models) > 1:
        names = ", ".join(model.name for model in plan.settings.models)
        out.print(
            f"Every model has a cache of its own: fairhearth plan --model NAME, of {names}. "
            "What fits together: fairhearth models.",
            highlight=False,
            markup=False,
        )


def _parking(footprint: Footprint) -> str:
    if not footprint.parking_bytes:
        return ""
    return f" + up to {size(footprint.parking_bytes)} for idle conversations"


# --- fairhearth models ---


def run_models(parsed: argparse.Namespace, settings: Settings) -> int:
    """Run `fairhearth models`."""
    for folder in parsed.folders:
        if not folder.is_dir():
            return fail(f"{folder}: there is no such folder; give folders in which models lie")
    memory = int(parsed.vram * GIB) if parsed.vram else available_bytes()
    entries = [_entry(path, settings, memory) for path in _paths(parsed.folders, settings)]
    together = _together(settings)
    if parsed.json:
        print_json({"memory_bytes": memory, "models": entries, "together": together})
        return EXIT_OK
    out = console()
    if not entries:
        out.print("No model was found; give folders to look in, or the key model.path in the settings.")
        return EXIT_BAD
    rows = [_row(entry) for entry in entries]
    headers = ("", "model", "weights", f"cache / {_SEVERAL:,}", "longest conversation", "room in all")
    out.print(table(headers, rows, left=2))
    known = "" if memory is None else f", measured against {size(memory)}"
    for folder in parsed.folders:
        if not any(_models_in(folder)):
            out.print(Text(f"\nNo model lies in {folder}: no *.gguf file, no folder with a config.json."))
    which = "one of those" if settings.models else "the one"
    out.print(f"\n* is {which} that `fairhearth serve` loads{known}.", highlight=False)
    if together is None:
        return EXIT_OK
    return _show_together(together, memory, settings)


def _together(settings: Settings) -> dict[str, Any] | None:
    """Return the largest set of the settings' models that may be in memory at once; None for one model.

    Pinned ones are always part of it. Simulated ones take nothing, and one that cannot be read is left out.
    """
    if not settings.models:
        return None
    sizes: list[tuple[bool, int, str]] = []
    for model in settings.models:
        own = replace(settings, model=model.settings)
        with contextlib.suppress(ModelError):
            if model.settings.backend is not BackendName.SIMULATED:
                found = footprint_of(model_path(own))
                cache_type = model.settings.cache_type.value
                needed = found.needed_bytes(model.settings.context_tokens, cache_type)
                sizes.append((model.pinned, needed, model.name))
    chosen = sorted(sizes, reverse=True)[: settings.residency.max_loaded]
    return {
        "max_loaded": settings.residency.max_loaded,
        "models": [name for _, _, name in chosen],
        "needed_bytes": sum(needed for _, needed, _ in chosen),
    }


def _show_together(together: dict[str, Any], memory: int | None, settings: Settings) -> int:
    """Say whether the models that may be in memory at once fit there."""
    needed = together["needed_bytes"]
    pinned = [model.name for model in settings.models if model.pinned]
    stays = f" ({' and '.join(pinned)} stays)" if pinned else ""
    names = " + ".join(together["models"]) or "none"
    text = f"At most {together['max_loaded']} are in memory at once{stays}; the largest together: {names}"
    fits = memory is None or needed <= memory
    verdict = "" if memory is None else f" of {size(memory)}"
    console().print(f"{text} = {size(needed)}{verdict}.", highlight=False, markup=False)
    if fits:
        return EXIT_OK
    return fail(
        "that does not fit: lower residency.max_loaded or a model's context_tokens, or use smaller models",
        EXIT_BAD,
    )


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    mark = "*" if entry["is_configured"] else ""
    called = f" = {', '.join(entry['configured_as'])}" if entry["configured_as"] else ""
    if "error" in entry:
        return mark, f"{entry['path']}\n[red]{entry['error']}[/]", "", "", "", ""
    room = "?" if entry["room_tokens"] is None else f"{entry['room_tokens']:,} tokens"
    if entry["room_tokens"] == 0:
        room = "[red]does not fit[/]"
    return (
        mark,
        f"{entry['name']} ({entry['architecture']}){called}\n[dim]{entry['path']}[/]",
        size(entry["weight_bytes"]),
        size(entry["cache_bytes_per_1000_tokens"]),
        f"{entry['max_context_tokens']:,}",
        room,
    )


def _entry(path: Path, settings: Settings, memory: int | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "path": str(path),
        "is_configured": any(_is_of(path, model) for model in _all_models(settings)),
        "configured_as": [m.name for m in settings.models if _is_of(path, m.settings)],
    }
    cache_type = settings.model.cache_type.value
    try:
        found = footprint_of(path)
    except ModelError as error:
        return entry | {"error": str(error).removeprefix(f"{path}: ")}
    return entry | {
        "name": found.name,
        "architecture": found.architecture,
        "weight_bytes": found.weight_bytes,
        "cache_bytes_per_1000_tokens": found.cache_bytes(_SEVERAL, cache_type),
        "max_context_tokens": found.max_context_tokens,
        "room_tokens": None if memory is None else found.most_tokens(memory, cache_type),
    }


def _all_models(settings: Settings) -> list[ModelSettings]:
    return [model.settings for model in settings.models] or [settings.model]


def _is_of(path: Path, model: ModelSettings) -> bool:
    """Return whether it is the file (or folder) of a configured model."""
    if model.backend is BackendName.SIMULATED:
        return False
    try:
        return path == (model.path or default_model_path()).absolute()
    except ModelError:
        return False


def _paths(folders: list[Path], settings: Settings) -> Iterator[Path]:
    """Yield the settings' model, the default one, and what lies in the folders; each once."""
    seen: set[Path] = set()
    for path in map(Path.absolute, _candidates(folders, settings)):
        if path not in seen:
            seen.add(path)
            yield path


def _candidates(folders: list[Path], settings: Settings) -> Iterator[Path]:
    configured = [model.path for model in _all_models(settings) if model.path is not None]
    yield from configured
    folders = [*(path.parent for path in configured), *folders]
    with contextlib.suppress(ModelError):  # it is an extra; nobody has to have it
        yield default_model_path()
    for folder in folders:
        yield from _models_in(folder)


def _models_in(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("*.gguf"))
    yield from sorted(config.parent for config in folder.glob("*/config.json"))
    if (folder / "config.json").is_file():
        yield folder
