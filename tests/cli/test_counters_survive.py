"""Counters when the engine is killed: what anybody was told is counted afterwards, exactly."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cli.process import TOKEN, command

SIMULATED = ("serve", "--backend", "simulated", "--port", "0")
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
SETTINGS = "[residents.alice]\ndaily_tokens = 1000000\n"


async def guests(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(url + "/v1/fairness", headers=HEADERS) as response:
        alice: dict[str, Any] = (await response.json())["residents"]["alice"]
        return alice


def far_from_midnight() -> dict[str, str]:
    """Return an environment whose local time is about noon: no day begins, and renews quotas, in the test."""
    return {"TZ": f"NOON{time.gmtime().tm_hour - 12}"}


async def asked(http: aiohttp.ClientSession, url: str, told: dict[str, int], has_come: asyncio.Event) -> None:
    """Ask again and again; count every token that arrives, and every answer that ends."""
    message = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 40,
        "ignore_eos": True,
        "stream": True,
        "fairhearth": {"resident": "alice"},
        "logprobs": True,
    }
    try:
        while True:
            async with http.post(url + "/v1/chat/completions", json=message, headers=HEADERS) as response:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    body = json.loads(line.removeprefix(b"data: "))
                    choice = body["choices"][0]
                    told["decode"] += len((choice.get("logprobs") or {}).get("content", ()))
                    told["finished"] += choice["finish_reason"] is not None
                    if told["decode"]:
                        has_come.set()
    except (aiohttp.ClientError, json.JSONDecodeError):
        return  # killed


async def survive(folder: Path, *, seed: int, num_kills: int) -> None:
    (folder / "fairhearth.toml").write_text(SETTINGS, encoding="utf-8")
    chance, noon = random.Random(seed), far_from_midnight()
    told = {"decode": 0, "finished": 0}
    before: dict[str, Any] | None = None
    for number in range(num_kills):
        async with (
            command(folder, *SIMULATED, environment=noon) as process,
            aiohttp.ClientSession() as http,
        ):
            url = await process.ready()
            found = await guests(http, url)
            assert found["tokens"]["decode"] >= told["decode"]
            assert found["finished"] >= told["finished"]
            if before is not None:
                for name in ("finished", "cancelled", "rejected", "preemptions", "tokens_served"):
                    assert found[name] >= before[name], name
                assert found["tokens_left_today"] <= before["tokens_left_today"]
            told = {"decode": found["tokens"]["decode"], "finished": found["finished"]}
            has_come = asyncio.Event()
            asking = [asyncio.create_task(asked(http, url, told, has_come)) for _ in range(4)]
            await asyncio.sleep(chance.uniform(0.05, 1.0))
            before = await guests(http, url)
            await asyncio.sleep(chance.uniform(0.0, 0.2))
            if number == num_kills - 1:  # or all lives may have been shorter than a first token takes
                await asyncio.wait_for(has_come.wait(), 60)
            process.signal(signal.SIGKILL)
            await asyncio.gather(*asking)
    assert told["decode"] > 0


@pytest.mark.slow
async def test_nothing_anybody_was_told_is_uncounted_after_a_kill(tmp_path: Path) -> None:
    await survive(tmp_path, seed=random.randrange(2**32), num_kills=4)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_nothing_anybody_was_told_is_uncounted_after_fifty_kills(tmp_path: Path) -> None:
    await survive(tmp_path, seed=20261130, num_kills=50)


async def test_counters_are_equal_over_an_orderly_restart(tmp_path: Path) -> None:
    (tmp_path / "fairhearth.toml").write_text(SETTINGS, encoding="utf-8")
    looks, noon = [], far_from_midnight()
    for _ in range(2):
        async with (
            command(tmp_path, *SIMULATED, environment=noon) as process,
            aiohttp.ClientSession() as http,
        ):
            url = await process.ready()
            looks.append(await guests(http, url))
            message = {
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 7,
                "ignore_eos": True,
                "fairhearth": {"resident": "alice"},
            }
            async with http.post(url + "/v1/chat/completions", json=message, headers=HEADERS) as response:
                assert response.status == 200
            looks.append(await guests(http, url))
            process.signal(signal.SIGTERM)
            assert (await process.end())[0] == 0
    exact = ("tokens", "tokens_served", "finished", "cancelled", "rejected", "tokens_left_today")
    assert {name: looks[1][name] for name in exact} == {name: looks[2][name] for name in exact}
    assert looks[3]["tokens"]["decode"] == 14
