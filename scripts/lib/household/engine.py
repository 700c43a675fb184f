"""The engine as a process: start, stop, ask. Knows its command line and its wire, nothing inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import aiohttp

from household.places import ENGINE_COMMAND, LOOPBACK
from household.process import Process, ProcessDied
from household.waiting import until

START_TIMEOUT_S: Final = 120.0
"""The first start converts the model, which takes seconds."""
CONTEXT_TOKENS: Final = 12_288
"""Three documents, their summaries, pinned prompts, a reserve for speech: not memory is what is compared."""

TOKEN: Final = "fairhearth-demo-token-0123456789"


class EngineProcess:
    """One engine on one port; may be stopped and started again, also with another policy."""

    def __init__(self, folder: Path, port: int, *, token: str = TOKEN) -> None:
        """Keep identity, residents and logs of the engine in a folder."""
        self.folder = folder
        self.port = port
        self.token = token
        self.log = folder / "engine.log"
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """Return where the engine answers."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def is_running(self) -> bool:
        """Return whether the process lives."""
        return self._process is not None and self._process.is_running

    @property
    def pid(self) -> int:
        """Return the process id; raise RuntimeError if the engine is not started."""
        if self._process is None:
            raise RuntimeError("the engine is not started")
        return self._process.pid

    async def start(self, *, policy: str = "fairhearth", event_log: Path | None = None) -> None:
        """Start and wait until it is ready; raise ProcessDied with its own words where it is not."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command: list[str | Path] = [ENGINE_COMMAND, "serve", "--host", LOOPBACK, "--port", str(self.port)]
        command += ["--state-dir", self.folder / "state", "--policy", policy]
        command += ["--context-tokens", str(CONTEXT_TOKENS)]
        if event_log is not None:
            _remove(event_log)
            command += ["--event-log", event_log]
        self._process = await Process.start(
            "the engine",
            command,
            log=self.log,
            environment={"FAIRHEARTH_TOKEN": self.token},
            folder=self.folder,
        )
        line = await self._process.line(START_TIMEOUT_S)
        if not line.startswith("READY "):
            raise ProcessDied(f"the engine's first line was {line!r}, not READY")

    def forget_residents(self) -> None:
        """Delete what the stopped engine kept about residents, as if set up anew; it stays who it is."""
        (self.folder / "state/residents.json").unlink()

    async def stop(self) -> None:
        """End the process; its event log is complete afterwards."""
        if self._process is not None:
            await self._process.stop()
            self._process = None

    async def kill(self) -> None:
        """Take the process away from one moment to the next, as a power cut would."""
        if self._process is not None:
            await self._process.kill()
            self._process = None

    def check(self) -> None:
        """Raise ProcessDied if it ended by itself."""
        if self._process is not None:
            self._process.check()


class EngineApi:
    """The part of the engine's wire that the demonstration reads."""

    def __init__(self, session: aiohttp.ClientSession, engine: EngineProcess) -> None:
        """Ask one engine."""
        self._session = session
        self._engine = engine

    async def fairness(self) -> dict[str, Any]:
        """Return one snapshot."""
        return await self.get("/v1/fairness")

    async def get(self, path: str) -> dict[str, Any]:
        """Return the body of a GET."""
        async with self._session.get(self._engine.url + path, headers=self._headers()) as response:
            response.raise_for_status()
            return dict(await response.json())

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a POST."""
        async with self._session.post(
            self._engine.url + path, json=body, headers=self._headers()
        ) as response:
            response.raise_for_status()
            return dict(await response.json())

    async def quiet(self, *, timeout_s: float) -> dict[str, Any]:
        """Return the first snapshot in which nothing runs or waits; raise TimeoutError where none comes."""
        return await until(self.fairness, _is_quiet, "the engine has nothing to do", timeout_s=timeout_s)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._engine.token}"}


def _is_quiet(snapshot: dict[str, Any]) -> bool:
    load = snapshot["engine"]
    return not load["requests_running"] and not load["requests_waiting"]


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
