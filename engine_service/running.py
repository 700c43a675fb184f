"""What a serving process hears while it serves: signals, the engine's failure, systemd's questions.

Decides which settings can be taken over while running: policy, residents and logging; others need a restart.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Final

from engine_service.errors import SettingsError
from engine_service.logs import set_up_logging
from engine_service.notify import Notifier
from engine_service.server.models import name_of
from engine_service.server.service import Service
from engine_service.settings import Settings

_LOGGER = logging.getLogger(__name__)

_LIVE: Final = frozenset({"policy", "residents", "log"})


@dataclass(frozen=True, slots=True)
class Signals:
    """What the process was told from outside."""

    stopped: asyncio.Event = field(default_factory=asyncio.Event)  #: SIGTERM or SIGINT
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)  #: SIGHUP


def listen() -> Signals:
    """Hear signals from now on; a second SIGTERM or SIGINT ends the process at once."""
    signals = Signals()
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        if signals.stopped.is_set():
            os._exit(128 + number)
        signals.stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, signals.hung_up.set)
    return signals


async def until_stopped(
    service: Service, signals: Signals, settings: Settings, load_again: Callable[[], Settings]
) -> bool:
    """Serve until a signal or a failure ends it; return whether the engine failed."""
    notifier = Notifier()
    notifier.ready(_status(service))
    reloading = asyncio.create_task(_reload_when_told(service, signals, settings, load_again, notifier))
    living = asyncio.create_task(_give_signs_of_life(notifier))
    ends = [asyncio.create_task(signals.stopped.wait()), asyncio.create_task(service.engine.failed())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    notifier.stopping()
    for task in (reloading, living, *ends):
        task.cancel()
    return not signals.stopped.is_set()


def _status(service: Service) -> str:
    names = [name_of(status) for status in service.engine.models()]
    return f"serving {', '.join(names)}"


async def _give_signs_of_life(notifier: Notifier) -> None:
    while notifier.watchdog_s is not None:
        notifier.alive()
        await asyncio.sleep(notifier.watchdog_s / 3)


async def _reload_when_told(
    service: Service,
    signals: Signals,
    settings: Settings,
    load_again: Callable[[], Settings],
    notifier: Notifier,
) -> None:
    while True:
        await signals.hung_up.wait()
        signals.hung_up.clear()
        notifier.reloading()
        try:
            settings = await reload(service, settings, load_again)
        except Exception:  # the next hangup must find somebody who hears it
            _LOGGER.exception("The settings could not be taken over as a whole; send SIGHUP to try again")
        notifier.ready(_status(service))


async def reload(service: Service, settings: Settings, load_again: Callable[[], Settings]) -> Settings:
    """Take over what changed in the settings; return what holds now. Bad ones change nothing and are told."""
    try:
        fresh = await asyncio.to_thread(load_again)
    except SettingsError as error:
        _LOGGER.error("The settings stay as they were: %s", error.message)
        return settings
    set_up_logging(fresh.log)
    if not await service.policies.reconfigure(service.engine, fresh.policy):
        _LOGGER.warning("A policy set through the API is in force and stays; the settings' own is revision 0")
    await service.residents.reconfigure(fresh.residents)
    _LOGGER.info("The settings were read anew: policy, residents and logging are taken over")
    for name in changed(settings, fresh):
        if name.partition(".")[0] not in _LIVE:
            _LOGGER.warning("%s changed and is taken over at the next start", name)
    return fresh


def changed(before: Settings, after: Settings) -> list[str]:
    """Return the names of the settings that differ, as they stand in the file."""
    names: list[str] = []
    for part in fields(Settings):
        old, new = getattr(before, part.name), getattr(after, part.name)
        if old != new:
            names += [f"{part.name}.{key}" for key in _differing(old, new)] or [part.name]
    return names


def _differing(old: Any, new: Any) -> list[str]:
    if type(old) is not type(new) or not hasattr(old, "__dataclass_fields__"):
        return []
    return [key.name for key in fields(old) if getattr(old, key.name) != getattr(new, key.name)]
