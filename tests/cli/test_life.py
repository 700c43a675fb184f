"""The serving process over its life: settings read anew, systemd told, the end when the model is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine_service.backends.simulated import SimulatedBackend
from engine_service.errors import SettingsError
from engine_service.notify import Notifier
from engine_service.running import Signals, until_stopped
from engine_service.settings import Settings
from tests.cli.process import TOKEN, command
from tests.server.household import household

SIMULATED = ("serve", "--backend", "simulated", "--port", "0")
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}


async def get(http: aiohttp.ClientSession, url: str) -> Any:
    async with http.get(url, headers=HEADERS) as response:
        return await response.json()


async def until(condition: Callable[[], Any], *, seconds: float = 30) -> None:
    """Wait until the condition (a coroutine function) holds."""
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_a_hangup_takes_over_residents_and_policy_and_says_what_needs_a_restart(tmp_path: Path) -> None:
    settings = tmp_path / "fairhearth.toml"
    settings.write_text("[residents.alice]\nweight = 1\n", encoding="utf-8")
    async with command(tmp_path, *SIMULATED) as process, aiohttp.ClientSession() as http:
        url = await process.ready()
        put = {"name": "Carol", "weight": 7}
        async with http.put(f"{url}/v1/residents/carol", json=put, headers=HEADERS) as response:
            assert response.status == 200
        settings.write_text(
            "[residents.alice]\nweight = 3\n[residents.bob]\n[model]\ncontext_tokens = 4096\n"
            "[policy.classes.chat]\nmax_output_tokens = 2\n",
            encoding="utf-8",
        )
        process.signal(signal.SIGHUP)

        async def has_bob() -> bool:
            residents = (await get(http, f"{url}/v1/residents"))["residents"]
            weights = {r["id"]: r["weight"] for r in residents}
            return weights == {"alice": 3, "bob": 1, "carol": 7, "guest": 1, "house": 1}

        await until(has_bob)
        async with http.post(f"{url}/v1/chat/completions", json=HELLO, headers=HEADERS) as response:
            assert (await response.json())["usage"]["completion_tokens"] == 2, "the new policy holds"
        process.signal(signal.SIGTERM)
        code, _, err = await process.end()
    assert code == 0
    assert "model.context_tokens changed and is taken over at the next start" in err


async def test_a_hangup_with_a_mistake_in_the_settings_changes_nothing(tmp_path: Path) -> None:
    settings = tmp_path / "fairhearth.toml"
    settings.write_text("[residents.alice]\n", encoding="utf-8")
    async with command(tmp_path, *SIMULATED) as process, aiohttp.ClientSession() as http:
        url = await process.ready()
        settings.write_text("[residents.alice]\nweight = 0\n[residents.bob]\n", encoding="utf-8")
        process.signal(signal.SIGHUP)
        line = b""
        async with asyncio.timeout(30):
            while b"stay as they were" not in line:
                line = await process.error_line()
        assert b"residents.alice: weight must be" in line
        known = [r["id"] for r in (await get(http, f"{url}/v1/residents"))["residents"]]
        assert known == ["alice", "guest", "house"]
        process.signal(signal.SIGTERM)
        assert (await process.end())[0] == 0


async def test_a_settings_file_that_vanished_is_a_mistake_too(tmp_path: Path) -> None:
    settings = tmp_path / "fairhearth.toml"
    settings.write_text("[residents.alice]\n", encoding="utf-8")
    async with command(tmp_path, *SIMULATED) as process, aiohttp.ClientSession() as http:
        url = await process.ready()
        settings.unlink()
        process.signal(signal.SIGHUP)
        line = b""
        async with asyncio.timeout(30):
            while b"stay as they were" not in line:
                line = await process.error_line()
        assert b"fairhearth.toml" in line
        known = [r["id"] for r in (await get(http, f"{url}/v1/residents"))["residents"]]
        assert known == ["alice", "guest", "house"]


class Manager:
    """What systemd does: listens on a socket for lines."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    async def message(self) -> dict[str, str]:
        async with asyncio.timeout(30):
            data = await asyncio.get_running_loop().sock_recv(self._socket, 4096)
        return dict(line.split("=", 1) for line in data.decode().splitlines())

    async def until(self, key: str) -> dict[str, str]:
        while key not in (message := await self.message()):
            pass
        return message

    def close(self) -> None:
        self._socket.close()


async def test_systemd_is_told_of_readiness_life_reload_and_end(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    manager = Manager(path)
    asked = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "300000"}
    async with command(tmp_path, *SIMULATED, environment=asked) as process:
        ready = await manager.message()
        await process.ready()
        assert ready == {"READY": "1", "STATUS": "serving simulated"}
        assert await manager.until("WATCHDOG") == {"WATCHDOG": "1"}
        assert await manager.until("WATCHDOG") == {"WATCHDOG": "1"}
        process.signal(signal.SIGHUP)
        assert (await manager.until("RELOADING"))["MONOTONIC_USEC"].isdecimal()
        await manager.until("READY")
        process.signal(signal.SIGTERM)
        await manager.until("STOPPING")
        assert (await process.end())[0] == 0
    manager.close()


@pytest.mark.parametrize("watchdog", ["", "0", "soon"])
def test_without_a_service_manager_nothing_is_sent(tmp_path: Path, watchdog: str) -> None:
    Notifier({"WATCHDOG_USEC": watchdog}).ready("fine")
    gone = Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": watchdog})
    gone.ready("fine")
    gone.stopping()
    assert gone.watchdog_s is None


async def test_an_abstract_socket_is_reached_too() -> None:
    name = f"fairhearth-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name)
        Notifier({"NOTIFY_SOCKET": "@" + name}).alive()
        assert listening.recv(100) == b"WATCHDOG=1"


async def test_an_engine_that_lost_its_model_for_good_ends_the_process(tmp_path: Path) -> None:
    backend = SimulatedBackend()
    async with household(tmp_path, backend) as home:
        serving = asyncio.create_task(
            until_stopped(home.service, Signals(), home.settings, lambda: home.settings)
        )
        await asyncio.sleep(0)
        backend.lose_everything()
        await home.chat(max_tokens=3)
        assert await asyncio.wait_for(serving, 30) is True


async def test_a_hangup_that_fails_is_logged_and_the_next_one_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [SettingsError("a mistake in the file"), RuntimeError("nobody thought of this")]

    def load_again() -> Settings:
        raise errors.pop()

    async def is_told(words: str) -> bool:
        return words in caplog.text

    async with household(tmp_path, SimulatedBackend()) as home:
        signals = Signals()
        serving = asyncio.create_task(until_stopped(home.service, signals, home.settings, load_again))
        signals.hung_up.set()
        await until(lambda: is_told("nobody thought of this"))
        assert "send SIGHUP to try again" in caplog.text
        signals.hung_up.set()
        await until(lambda: is_told("stay as they were: a mistake in the file"))
        signals.stopped.set()
        assert await asyncio.wait_for(serving, 30) is False
