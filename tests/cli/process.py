"""The real command in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

TOKEN = "a-token-of-the-household"
START_S = 60.0
END_S = 60.0


class Process:
    """`fairhearth …` while it runs."""

    def __init__(self, process: asyncio.subprocess.Process):
        """Hold a started process whose output nobody has read."""
        self._process = process
        self.url = ""

    async def ready(self) -> str:
        """Wait for the line that says where it serves; return the address."""
        assert self._process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await self._process.stdout.readline()).decode()
        assert line.startswith(("READY http://", "READY https://")), line + await self.errors()
        self.url = line.removeprefix("READY ").strip()
        return self.url

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def end(self) -> tuple[int, str, str]:
        """Wait for the end; return exit code and what was still to read of both outputs."""
        async with asyncio.timeout(END_S):
            out, err = await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode, out.decode(), err.decode()

    async def errors(self) -> str:
        """Return what went to standard error."""
        assert self._process.stderr is not None
        async with asyncio.timeout(END_S):
            return (await self._process.stderr.read()).decode()

    async def output_line(self) -> bytes:
        """Return the next line of standard output; empty at its end."""
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    async def error_line(self) -> bytes:
        """Return the next line of standard error; empty at its end."""
        assert self._process.stderr is not None
        return await self._process.stderr.readline()

    @property
    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return self._process.returncode is None

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


@asynccontextmanager
async def command(
    folder: Path,
    *arguments: str,
    token: str | None = TOKEN,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Process]:
    """Run the command with folder as working directory, home and state; kill what is left at the end."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FAIRHEARTH_")}
    kept |= environment or {}
    kept |= {
        "HOME": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    kept["XDG_CACHE_HOME"] = str(folder / "cache")
    if token is not None:
        kept["FAIRHEARTH_TOKEN"] = token
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engine_service",
        *arguments,
        cwd=folder,
        env=kept | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    process = Process(started)
    try:
        yield process
    finally:
        if process.is_running:
            process.kill()
            await started.communicate()


async def run(folder: Path, *arguments: str, token: str | None = TOKEN) -> tuple[int, str, str]:
    """Run the command to its end; return exit code, standard output, standard error."""
    async with command(folder, *arguments, token=token) as process:
        return await process.end()
