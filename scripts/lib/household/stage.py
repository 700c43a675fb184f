"""Both programs on loopback and a household in them, for the length of a block; nothing runs on after it."""

from __future__ import annotations

import asyncio
import fcntl
import shutil
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self, TypeVar

import aiohttp

from household import logs
from household.engine import EngineApi, EngineProcess
from household.homeassistant import HomeAssistantProcess
from household.places import free_port
from household.residence import HELPERS, Household, set_up
from household.waiting import until

ENGINE_PORT: Final = 8321
HOME_PORT: Final = 8123

BACK_TIMEOUT_S: Final = 90.0
_LOOK_EVERY_S: Final = 1.0

T = TypeVar("T")


class StageTaken(RuntimeError):
    """Another process uses the folder."""


class Stage:
    """A folder with an engine and a Home Assistant. Use as an async context manager."""

    session: aiohttp.ClientSession
    engine_api: EngineApi
    household: Household

    def __init__(self, folder: Path, *, engine_port: int = ENGINE_PORT, home_port: int = HOME_PORT) -> None:
        """Use a folder, which is emptied, and the given ports where they are free."""
        self.folder = folder
        self.engine = EngineProcess(folder / "engine", free_port(engine_port))
        self.home = HomeAssistantProcess(folder / "homeassistant", free_port(home_port))
        self._lock: IO[str] | None = None

    async def __aenter__(self) -> Self:
        """Take the folder; start nothing yet."""
        self._lock = _taken(self.folder)
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
        self.engine_api = EngineApi(self.session, self.engine)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End both programs, Home Assistant first."""
        try:
            if hasattr(self, "household"):
                await self.household.close()
            await self.session.close()
        finally:
            try:
                await self.home.stop()
            finally:
                await self.engine.stop()
                if self._lock is not None:
                    self._lock.close()

    def event_log(self, policy: str) -> Path:
        """Return where the engine writes its event log under a policy."""
        return self.folder / "engine" / f"{policy}.jsonl"

    async def start(self, *, policy: str = "fairhearth") -> None:
        """Start both programs and set the household up."""
        self.home.prepare(helpers=HELPERS)
        await asyncio.gather(
            self.engine.start(policy=policy, event_log=self.event_log(policy)), self.home.start(self.session)
        )
        self.household = await set_up(self.session, self.home, self.engine.url, self.engine.token)
        await self.until_pinned()

    async def restart_engine(self, *, policy: str) -> float:
        """Start the engine anew under a running Home Assistant; return the seconds until it was found."""
        await self.engine.stop()
        await self.engine.start(policy=policy, event_log=self.event_log(policy))
        started_at = asyncio.get_running_loop().time()
        await self.until_back()
        return asyncio.get_running_loop().time() - started_at

    async def until_back(self) -> None:
        """Wait until Home Assistant has found the engine again and its prompts are kept there."""
        home = self.household
        await until(
            lambda: home.state(home.agent("Voice")),
            lambda state: state != "unavailable",
            "Home Assistant finds the engine again",
            timeout_s=BACK_TIMEOUT_S,
        )
        await self.until_pinned()

    async def until_pinned(self) -> None:
        """Wait until the agents' prompts are kept by the engine and nothing else goes on."""
        await until(
            self.engine_api.fairness,
            lambda snapshot: snapshot["engine"]["kv_pages_pinned"] > 0,
            "the agents' prompts are kept by the engine",
            timeout_s=BACK_TIMEOUT_S,
        )
        await self.engine_api.quiet(timeout_s=BACK_TIMEOUT_S)

    async def restart_home(self, *, expect_engine: bool = True) -> None:
        """Start Home Assistant anew; its tokens and connections go on as before."""
        await self.household.close()
        await self.home.stop()
        await self.home.start(self.session)
        self.household = await self.household.reconnected()
        if expect_engine:
            await self.until_back()

    def faults(self) -> list[str]:
        """Return the errors in the logs of both programs so far."""
        return [*logs.faults(self.home.log), *logs.faults(self.engine.log)]

    async def while_both_live(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what work comes to; give it up and raise ProcessDied once one of the programs is gone."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                self.check()
                await asyncio.wait({task}, timeout=_LOOK_EVERY_S)
            self.check()  # what failed because a program was gone is told as that
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def check(self) -> None:
        """Raise ProcessDied if one of the programs ended by itself."""
        self.engine.check()
        self.home.check()


def _taken(folder: Path) -> IO[str]:
    """Empty the folder and hold its lock; raise StageTaken where another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StageTaken(f"another demonstration is running in {folder}") from None
    for name in ("engine", "homeassistant"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / ".gitignore").write_text("*\n")
    return lock
