"""Many streams at once against an engine in a process of its own, and what became of them.

    python -m tests.server.load --streams 1000 --seconds 600

The engine is the real server, loop and scheduler on a simulated backend as fast as a large GPU. Callers come
back as soon as they were answered; one in twenty goes away in the middle. At the end the engine says what it
still holds, and its event log is replayed: both must agree to the token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from engine_service.backends.cost_model import H200_8B
from engine_service.backends.simulated import SimulatedBackend
from engine_service.engine import eventlog
from engine_service.engine.loop import Engine
from engine_service.scheduling.invariants import check
from engine_service.scheduling.scheduler import Scheduler
from engine_service.server.serving import bind, build_service, serving, url_of
from engine_service.settings import load
from engine_service.state import StateFolder

TOKEN: Final = "token-of-the-load-test"
NUM_RESIDENTS: Final = 25
NAMED: Final = frozenset({"too_many_requests", "queue_full", "quota_exhausted", "engine_unavailable"})
_CLASSES: Final = ("voice", "chat", "chat", "chat", "agent", "background", "background", "background")
_LOOK_EVERY_S: Final = 0.02
_ROOT: Final = Path(__file__).parents[2]


# --- the engine's side ---


async def serve(folder: Path) -> None:
    """Serve until SIGTERM; then print what is left and how late the event loop was."""
    residents = "".join(f"[residents.r{n:02}]\n" for n in range(NUM_RESIDENTS))
    settings_file = folder / "fairhearth.toml"
    settings_file.write_text(
        f'[server]\nport = 0\ntoken = "{TOKEN}"\n[paths]\nstate_dir = "state"\n{residents}', encoding="utf-8"
    )
    settings = load(settings_file, environment={})
    backend = SimulatedBackend(cost_model=H200_8B, context_tokens=65_536, max_sequences=64)
    engine = Engine(
        backend,
        policy=settings.policy,
        residents=[entry.resident for entry in settings.residents],
        event_log=folder / "events.jsonl",
    )
    # The whole run in one file, however long: the replay needs its beginning.
    assert engine._event_log is not None
    engine._event_log.close()
    engine._event_log = eventlog.EventLog(folder / "events.jsonl", max_bytes=2**50)
    state = StateFolder(settings.paths.state_dir)
    service = build_service(engine, settings, state=state, tokens=settings.server.tokens)
    bound = bind("127.0.0.1", 0)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    late: list[float] = []
    own: list[float] = []
    async with serving(service, bound, max_body_bytes=2**20, drain_s=5):
        print(url_of(bound), flush=True)
        measuring = asyncio.create_task(_measure_lag(late, own))
        await stopped.wait()
        measuring.cancel()
    bound.close()
    scheduler = engine._scheduler
    check(scheduler)
    backend.check()
    left = {
        "pages": scheduler.state.pages.num_held,
        "requests": len(scheduler.state.records),
        "sequences": len(backend.request_ids),
        "sessions": len(engine._live),
    }
    lag = {"lag_s": quantiles(late), "own_lag_s": quantiles(own)}
    print(json.dumps({"left": left, "accounts": accounts(scheduler)} | lag), flush=True)


async def _measure_lag(late: list[float], own: list[float]) -> None:
    """Note how late the event loop is; own: less the time in which the machine ran none of our threads."""
    loop = asyncio.get_running_loop()
    while True:
        due, waited = loop.time() + _LOOK_EVERY_S, _waited_for_processor()
        await asyncio.sleep(_LOOK_EVERY_S)
        late.append(loop.time() - due)
        own.append(max(0.0, late[-1] - (_waited_for_processor() - waited)))


def _waited_for_processor() -> float:
    """Return the seconds that threads of this process were ready to run and were not run, summed (Linux)."""
    total = 0
    for task in os.scandir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"{task.path}/schedstat", encoding="ascii") as file:
            total += int(file.read().split()[1])
    return total / 1e9


def accounts(scheduler: Scheduler) -> dict[str, Any]:
    """Return every account of a scheduler, by resident and by class."""
    state = scheduler.state
    return {
        "residents": {name: asdict(account) for name, account in state.accounts.items()},
        "classes": {name.value: asdict(account) for name, account in state.class_accounts.items()},
    }


def replayed(path: Path) -> dict[str, Any]:
    """Return the accounts that a fresh scheduler comes to by the log; fails where it decides otherwise."""
    scheduler = Scheduler()
    for now, event, decisions in eventlog.read(path):
        assert scheduler.handle(event, now=now) == decisions, event
    return accounts(scheduler)


# --- the callers' side ---


@dataclass(slots=True)
class Result:
    """What became of a run."""

    ends: Counter[str] = field(default_factory=Counter)  #: served, left, a named refusal, or a fault
    seconds: float = 0.0
    bytes_read: int = 0
    memory: list[int] = field(default_factory=list)  #: of the engine, once a second (bytes)
    engine: dict[str, Any] = field(default_factory=dict)
    is_replay_equal: bool = False

    @property
    def faults(self) -> dict[str, int]:
        """Return the ends that are neither an answer, nor the caller's own leaving, nor a named refusal."""
        return {end: n for end, n in self.ends.items() if end not in ("served", "left") and end not in NAMED}

    def memory_growth(self) -> float:
        """Return the median of the last quarter over that of the second, minus 1."""
        quarter = len(self.memory) // 4
        before, after = self.memory[quarter : 2 * quarter], self.memory[-quarter:]
        return statistics.median(after) / statistics.median(before) - 1


def quantiles(values: list[float]) -> dict[str, float]:
    """Return p50, p99 and the greatest."""
    ordered = sorted(values)
    return {
        "p50": round(ordered[len(ordered) // 2], 4),
        "p99": round(ordered[int(len(ordered) * 0.99)], 4),
        "max": round(ordered[-1], 4),
    }


async def run_load(folder: Path, *, streams: int, seconds: float, seed: int = 1) -> Result:
    """Keep that many streams open for so long; return what became of them and of the engine."""
    result = Result()
    chance = random.Random(seed)
    async with _engine(folder) as (process, url):
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=300)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(
            url, headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        ) as http:
            until = time.monotonic() + seconds
            started = time.monotonic()
            watching = asyncio.create_task(_watch(process.pid, result))
            async with asyncio.TaskGroup() as group:
                for _ in range(streams):
                    group.create_task(_caller(http, random.Random(chance.random()), until, result))
            result.seconds = time.monotonic() - started
            watching.cancel()
            await _until_idle(http)
        process.send_signal(signal.SIGTERM)
        out, _ = await process.communicate()
        result.engine = json.loads(out)
    result.is_replay_equal = (
        await asyncio.to_thread(replayed, folder / "events.jsonl") == result.engine["accounts"]
    )
    return result


@asynccontextmanager
async def _engine(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.server.load", "--serve", str(folder),
        cwd=_ROOT, env=os.environ | {"PYTHONPATH": str(_ROOT)}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        assert url.startswith("http://"), "the engine did not start"
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _watch(pid: int, result: Result) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    while True:
        statm = await asyncio.to_thread(Path(f"/proc/{pid}/statm").read_text)
        result.memory.append(int(statm.split()[1]) * page)
        await asyncio.sleep(1)


async def _caller(http: aiohttp.ClientSession, chance: random.Random, until: float, result: Result) -> None:
    while time.monotonic() < until:
        end = await _ask(http, chance, result)
        result.ends[end] += 1
        if end in NAMED:
            await asyncio.sleep(chance.random())


async def _ask(http: aiohttp.ClientSession, chance: random.Random, result: Result) -> str:
    message = {
        "messages": [{"role": "user", "content": "the light in the kitchen " * chance.randrange(1, 12)}],
        "max_tokens": chance.randrange(4, 40),
        "stream": True,
        "fairhearth": {
            "resident": f"r{chance.randrange(NUM_RESIDENTS):02}",
            "workload_class": chance.choice(_CLASSES),
        },
    }
    leaves_after = chance.randrange(0, 2000) if chance.random() < 0.05 else None
    tail = b""
    try:
        async with http.post("/v1/chat/completions", json=message) as response:
            if response.status != 200:
                return str((await response.json())["error"]["code"])
            async for piece in response.content.iter_any():
                result.bytes_read += len(piece)
                tail = (tail + piece)[-4096:]
                if leaves_after is not None and (leaves_after := leaves_after - len(piece)) < 0:
                    response.close()
                    return "left"
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return f"connection: {type(error).__name__}"
    if b"data: [DONE]" in tail:
        return "served"
    for line in tail.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line.removeprefix(b"data: "))["error"]["code"])
    return "cut off"


async def _until_idle(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(120):
        while True:
            async with http.get("/v1/fairness") as response:
                seen = (await response.json())["engine"]
            if not (seen["requests_running"] or seen["requests_waiting"]):
                return
            await asyncio.sleep(0.2)


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.serve:
        asyncio.run(serve(parsed.serve))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(run_load(Path(folder), streams=parsed.streams, seconds=parsed.seconds))
    served = result.ends["served"]
    print(f"{parsed.streams} streams, {result.seconds:.0f} s: {dict(result.ends)}")
    print(f"answers/s {served / result.seconds:.1f}, MiB read {result.bytes_read / 2**20:.1f}")
    print(f"event loop late (s): {result.engine['lag_s']}; own: {result.engine['own_lag_s']}")
    memory = [round(value / 2**20, 1) for value in result.memory]
    print(f"memory of the engine (MiB): first {memory[0]}, most {max(memory)}, last {memory[-1]}, "
          f"growth {100 * result.memory_growth():.1f} %")  # fmt: skip
    print(f"memory every half minute (MiB): {memory[::30]}")
    print(f"left behind: {result.engine['left']}; counters equal the replay: {result.is_replay_equal}")


if __name__ == "__main__":
    main()
