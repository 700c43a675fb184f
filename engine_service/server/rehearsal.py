"""Rehearse a policy: a scenario of the simulator, in a process of its own, while the engine goes on serving.

Decides nothing about scheduling and knows nothing of the simulator but its command: `simulate SCENARIO
--policy FILE --json OUT`. One rehearsal at a time, at the lowest priority, for a bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import engine_service
from engine_service.errors import EngineError, InvalidRequest, TooManyRequests
from engine_service.scheduling.model import Policy
from engine_service.settings import policy_as_table

MOST_S: Final = 120.0
_NICENESS: Final = 19
_PACKAGE: Final = str(Path(engine_service.__file__).parents[1])
_EXIT_USAGE: Final = 2


class Rehearsals:
    """Runs scenarios one by one."""

    def __init__(self, *, most_s: float = MOST_S) -> None:
        """A rehearsal that takes longer than most_s (> 0) is ended."""
        self._most_s = most_s
        self._is_busy = False

    async def run(self, scenario: str, policy: Policy, *, num_seeds: int) -> dict[str, Any]:
        """Return what the scenario's criteria say of the policy.

        Raises InvalidRequest where there is no such scenario, TooManyRequests while another one runs,
        and EngineError for one that takes too long or fails. Ends the process when it is cancelled.
        """
        if self._is_busy:
            raise TooManyRequests("a rehearsal is under way; there is one at a time", retry_after_s=10)
        self._is_busy = True
        try:
            with tempfile.TemporaryDirectory(prefix="fairhearth-rehearsal-") as folder:
                return await self._run(Path(folder), scenario, policy, num_seeds)
        finally:
            self._is_busy = False

    async def _run(self, folder: Path, scenario: str, policy: Policy, num_seeds: int) -> dict[str, Any]:
        told, found = folder / "rehearsed.toml", folder / "found.json"
        told.write_text(as_toml(policy), encoding="utf-8")
        command = ("simulate", scenario, "--seeds", str(num_seeds), "--policy", str(told))
        status, complaint = await self._simulate(*command, "--json", str(found), "--quiet")
        if status == _EXIT_USAGE and not found.exists():
            raise InvalidRequest(complaint.removeprefix("fairhearth: "), param="scenario")
        if not found.exists():
            raise EngineError(
                f"the rehearsal failed with exit status {status}: {complaint or 'no reason given'}"
            )
        return _verdict(json.loads(found.read_text(encoding="utf-8")))

    async def _simulate(self, *arguments: str) -> tuple[int, str]:
        """Return the exit status and the last line of what the command complains of."""
        path = os.pathsep.join(filter(None, (_PACKAGE, os.environ.get("PYTHONPATH"))))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine_service", *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        try:
            with contextlib.suppress(ProcessLookupError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
            async with asyncio.timeout(self._most_s):
                _, complaint = await process.communicate()
        except TimeoutError:
            raise EngineError(
                f"the rehearsal took more than {self._most_s:g} s and was ended; try fewer seeds"
            ) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        lines = complaint.decode(errors="replace").strip().splitlines()
        return process.returncode or 0, lines[-1] if lines else ""


def _verdict(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a household asks of all the figures."""
    told = ("name", "check", "over", "holds", "seeds")
    return {
        "scenario": found["scenario"],
        "title": found["title"],
        "machine": found["profile"]["name"],
        "simulated_s": found["duration_s"],
        "seeds": found["seeds"],
        "passes": found["passes"],
        "criteria": [{key: criterion[key] for key in told} for criterion in found["criteria"]],
    }


def as_toml(policy: Policy) -> str:
    """Return a settings file that holds the policy and nothing else."""
    whole = policy_as_table(policy)
    classes = whole.pop("classes")
    lines = ["[policy]", *_lines(whole)]
    for name, values in classes.items():
        lines += [f"[policy.classes.{name}]", *_lines(values)]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any]) -> list[str]:
    # Numbers, texts and lists of texts are written alike in JSON and TOML; nothing is false.
    return [f"{key} = {json.dumps(False if value is None else value)}" for key, value in values.items()]
