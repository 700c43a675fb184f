"""A child process that does not outlive its parent, writes to a log file, and ends when asked.

It gets a session of its own, so that Ctrl-C reaches the parent alone, which then ends its children in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


class ProcessDied(RuntimeError):
    """A process ended by itself; the message holds its last lines."""


def _die_with_parent() -> None:
    """Have the kernel end this process when its parent is gone, however that ended (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Process:
    """One child process."""

    def __init__(self, name: str, child: asyncio.subprocess.Process, log: Path) -> None:
        """Look after a child that was started."""
        self.name = name
        self.log = log
        self._child = child

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str | Path],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Process:
        """Start a command; what it says goes to the log, which is added to."""
        inherited = {
            k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
        }
        with log.open("ab") as file:
            child = await asyncio.create_subprocess_exec(
                *map(str, command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                env={**inherited, **(environment or {})},
                cwd=folder,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        return cls(name, child, log)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._child.pid

    @property
    def is_running(self) -> bool:
        """Return whether the process lives."""
        return self._child.returncode is None

    def check(self) -> None:
        """Raise ProcessDied if the process ended by itself."""
        if not self.is_running:
            raise ProcessDied(self._last_words())

    async def line(self, timeout_s: float) -> str:
        """Return the next line of standard output; raise ProcessDied or TimeoutError where none comes."""
        assert self._child.stdout is not None
        async with asyncio.timeout(timeout_s):
            line = await self._child.stdout.readline()
        if not line:
            await self._child.wait()
            raise ProcessDied(self._last_words())
        return line.decode(errors="replace").strip()

    async def stop(self, *, grace_s: float = 20.0) -> None:
        """Ask the process to end, and insist after grace_s."""
        for number, wait_s in ((signal.SIGINT, grace_s), (signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
            if not self.is_running:
                return
            self.send(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._child.wait(), wait_s)
        raise RuntimeError(f"{self.name} (process {self.pid}) could not be ended")

    async def kill(self) -> None:
        """End the process without a word to it."""
        self.send(signal.SIGKILL)
        await self._child.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return "\n    ".join(
            [f"{self.name} ended with {self._child.returncode}; last lines of {self.log}:", *lines]
        )
