"""The command `fairhearth`: read settings, build, serve, drain. No logic of its own.

Exit codes: 0 served and drained, 2 bad settings or usage, 3 the address is taken or cannot be used, 4 the
model cannot be loaded, 5 it was lost while serving and cannot be loaded again, 1 anything else. Standard
output carries one line, `READY http://host:port`; all else goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from engine_service import __version__
from engine_service.backends.base import Backend, BackendError, ModelError
from engine_service.commands import config, doctor, plan, policy, top
from engine_service.engine.eventlog import EventLog
from engine_service.engine.ledger import Ledger
from engine_service.engine.loop import Engine
from engine_service.engine.residence import Models
from engine_service.errors import SettingsError
from engine_service.identity.command import add_token_commands, run_pair, run_token
from engine_service.logs import set_up_logging
from engine_service.opening import opened_backend, opened_models
from engine_service.running import listen, until_stopped
from engine_service.scheduling.baseline import FirstComeFirstServed
from engine_service.scheduling.model import ResidentId
from engine_service.scheduling.scheduler import Scheduler
from engine_service.server.discovery import announced
from engine_service.server.residents import merged
from engine_service.server.serving import bind, build_service, serving, url_of
from engine_service.server.tls import renew, server_context
from engine_service.settings import (
    FILE_NAME,
    TOKEN_VARIABLE,
    BackendName,
    DeviceName,
    NamedResident,
    Overrides,
    SchedulerName,
    Scope,
    Settings,
    TokenSetting,
    check_options,
    load,
    source_of,
)
from engine_service.simulator.command import add_commands
from engine_service.state import StateFolder

EXIT_OK: Final = 0
EXIT_SETTINGS: Final = 2
EXIT_ADDRESS: Final = 3
EXIT_MODEL: Final = 4
EXIT_LOST: Final = 5

_LOGGER = logging.getLogger(__name__)


class _AddressError(Exception):
    """The address cannot be listened on; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        if hasattr(parsed, "run"):  # it serves nobody and needs no settings
            status: int = parsed.run(parsed)
            return status
        source = source_of(parsed.config)  # a file that vanishes later is a mistake, not the defaults
        settings = load(source, _overrides(parsed))
        if hasattr(parsed, "run_with_settings"):
            status = parsed.run_with_settings(parsed, settings)
            return status
        if parsed.command == "serve":
            check_options(settings, _overrides(parsed))
            return _serve(settings, lambda: load(source, _overrides(parsed)))
        state = StateFolder(settings.paths.state_dir)
        if parsed.command == "pair":
            return run_pair(state.path)
        if not parsed.action:
            return _show_token(settings, state)
        return run_token(parsed, state.path, is_known=lambda who: _is_known(who, settings, state))
    except SettingsError as error:
        return _fail(EXIT_SETTINGS, error.message)
    except _AddressError as error:
        return _fail(EXIT_ADDRESS, str(error))
    except (ModelError, BackendError) as error:
        return _fail(EXIT_MODEL, str(error))
    except KeyboardInterrupt:
        is_serving = parsed.command == "serve"
        return _fail(130, "interrupted" + (" before the engine was ready" if is_serving else ""))


def _fail(code: int, message: str) -> int:
    print(f"fairhearth: {' '.join(message.split())}", file=sys.stderr)
    return code


# --- arguments ---


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fairhearth", description="Schedules one household accelerator fairly: voice first."
    )
    parser.add_argument("--version", action="version", version=f"fairhearth {__version__}")
    common = _common()
    commands = parser.add_subparsers(dest="command", required=True)
    _add_serve(commands.add_parser("serve", parents=[common], help="load the model and serve"))
    token = commands.add_parser("token", parents=[common], help="make, list, revoke tokens")
    # Left out below the subcommand, an option must not undo what was given before it.
    add_token_commands(token, _common(default=argparse.SUPPRESS))
    commands.add_parser("pair", parents=[common], help="make a code that pairs a client with this engine")
    add_commands(commands)
    _add_looking(commands)
    return parser


def _add_looking(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands that look and do not serve."""

    def add(name: str, *, help: str, **defaults: object) -> argparse.ArgumentParser:
        made = commands.add_parser(name, parents=[_common()], help=help, description=help)
        made.set_defaults(**defaults)
        return made

    for module in (plan, policy, config, doctor, top):
        module.add_commands(add)


def _common(default: str | None = None) -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, argument_default=default)
    common.add_argument(
        "--config", type=Path, metavar="FILE", help=f"settings (default: ./{FILE_NAME} if there)"
    )
    common.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="where identity, tokens and residents are kept"
    )
    return common


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on, 0 for any free one (default: 8321)")
    serve.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a GGUF file (default: the embedded model); with ExLlamaV2 a folder",
    )
    serve.add_argument("--backend", choices=[name.value for name in BackendName])
    serve.add_argument(
        "--device",
        choices=[name.value for name in DeviceName],
        help="of ExLlamaV2 (default: cuda)",
    )
    serve.add_argument("--policy", choices=[name.value for name in SchedulerName])
    serve.add_argument("--threads", type=int, metavar="N", help="processor threads of the backend")
    serve.add_argument("--context-tokens", type=int, metavar="N", help="token slots of the KV cache, in all")
    serve.add_argument("--max-sequences", type=int, metavar="N", help="requests that run at once")
    serve.add_argument("--token", metavar="T", help=f"bearer token (better: the variable {TOKEN_VARIABLE})")
    serve.add_argument("--cache-dir", type=Path, metavar="DIR", help="where converted models are kept")
    serve.add_argument(
        "--event-log", type=Path, metavar="FILE", help="write what the scheduler saw, for replay"
    )
    serve.add_argument("--log-level", choices=["debug", "info", "warning", "error"])


def _overrides(parsed: argparse.Namespace) -> Overrides:
    known = {option.name for option in fields(Overrides)}
    return Overrides(**{key: value for key, value in vars(parsed).items() if key in known})


# --- fairhearth token ---


def _show_token(settings: Settings, state: StateFolder) -> int:
    if settings.server.tokens:
        print("the tokens are those of the settings; none is kept in the state folder")
    elif state.token_path.exists():
        print(state.token_path)
    else:
        print(f"{state.token_path} (made when the engine first starts)")
    return EXIT_OK


def _is_known(resident_id: ResidentId, settings: Settings, state: StateFolder) -> bool:
    """Return whether the settings or the engine's own files have the resident."""
    known = merged(settings.residents, state.residents())
    return any(entry.resident_id == resident_id for entry in known)


# --- fairhearth serve ---


def _serve(settings: Settings, load_again: Callable[[], Settings]) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something that could be told anew
    set_up_logging(settings.log)
    with _bound(settings) as bound:  # before anything is made or printed that would be of no use
        state = StateFolder(settings.paths.state_dir)
        try:
            with state.held(url_of(bound, settings.server.scheme)):
                has_failed = _serve_from(state, bound, settings, load_again)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Another engine bound the same port while both loaded their models, and listened first.
            raise _AddressError(
                f"cannot listen on {url_of(bound, settings.server.scheme)}: {error.strerror}"
            ) from None
    if has_failed:
        return _fail(EXIT_LOST, "the engine lost its model and could not load it again; its log says why")
    return EXIT_OK


def _serve_from(
    state: StateFolder, bound: socket.socket, settings: Settings, load_again: Callable[[], Settings]
) -> bool:
    """Load the model and serve from a state folder that no other engine uses; return whether it failed."""
    kept = state.residents()
    state.engine_id()  # says what is wrong with it before the model is loaded
    state.tell_of_lost_jobs()
    tls = server_context(settings.server)
    if settings.event_log is not None:
        EventLog(settings.event_log).close()  # says what is wrong with it before the model is loaded
    tokens = _tokens(settings, state)
    if settings.room_note:
        _LOGGER.warning("%s", settings.room_note)
    models = opened_models(settings, _progress) if settings.models else None
    backend = opened_backend(settings, _progress) if models is None else models.open_first()
    engine = _engine(settings, merged(settings.residents, kept), backend, models, state)
    return asyncio.run(_run(engine, settings, state, tokens, kept, bound, tls, load_again))


def _tokens(settings: Settings, state: StateFolder) -> tuple[TokenSetting, ...]:
    if settings.server.tokens:
        return settings.server.tokens
    token, is_new = state.token()
    if is_new:
        print(f"fairhearth: a token was made: {token} (kept in {state.token_path})", file=sys.stderr)
    return (TokenSetting(name="state", token=token, scopes=frozenset({Scope.ADMIN})),)


def _bound(settings: Settings) -> socket.socket:
    host, port = settings.server.host, settings.server.port
    try:
        return bind(host, port)
    except OSError as error:
        who = doctor.who_serves(settings) if error.errno == errno.EADDRINUSE else None
        reason = f"{error.strerror or error}{f' by {who}' if who else ''}"
        raise _AddressError(f"cannot listen on {host} port {port}: {reason}") from None


def _progress(sentence: str) -> None:
    print(f"fairhearth: {sentence}", file=sys.stderr, flush=True)


def _engine(
    settings: Settings,
    residents: tuple[NamedResident, ...],
    backend: Backend,
    models: Models | None,
    state: StateFolder,
) -> Engine:
    return Engine(
        backend,
        policy=settings.policy,
        residents=[entry.resident for entry in residents],
        names={entry.resident_id: entry.name for entry in residents},
        scheduler=_scheduler(settings),
        rebuild=lambda: opened_backend(settings, _progress),
        models=models,
        zone=settings.time_zone,
        event_log=settings.event_log,
        ledger=Ledger(state.path),
        policy_name=settings.scheduler.value,
        patience_s=max(
            model.max_iteration_s for model in (settings.model, *(m.settings for m in settings.models))
        ),
    )


def _scheduler(settings: Settings) -> Scheduler | None:
    if settings.scheduler is SchedulerName.FIFO:
        return FirstComeFirstServed(settings.policy)
    return None


async def _run(
    engine: Engine,
    settings: Settings,
    state: StateFolder,
    tokens: tuple[TokenSetting, ...],
    kept: tuple[NamedResident, ...],
    bound: socket.socket,
    tls: ssl.SSLContext | None,
    load_again: Callable[[], Settings],
) -> bool:
    """Serve until the end; return whether the engine failed."""
    signals = listen()
    service = build_service(engine, settings, state=state, tokens=tokens, kept=kept)
    if not settings.server.tokens and not service.tokens.all():
        code = service.pairing.open_or_kept()
        _progress(
            f"pairing code: {code} (ten minutes from when it was made, one use; later: fairhearth pair)"
        )
    server = settings.server

    def load_all_again() -> Settings:
        fresh = load_again()
        if tls is not None:
            renew(tls, fresh.server)
        return fresh

    async with serving(service, bound, max_body_bytes=server.max_body_bytes, drain_s=server.drain_s, tls=tls):
        print(f"READY {url_of(bound, server.scheme)}", flush=True)
        async with announced(bound, server, engine_id=service.engine_id):
            has_failed = await until_stopped(service, signals, settings, load_all_again)
        _progress("stopping: running answers may finish")
    return has_failed
