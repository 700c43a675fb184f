"""Durable jobs when the engine is killed in the middle: none lost, none done twice."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cli.process import TOKEN, command

NUM_JOBS = 8
SIMULATED = ("serve", "--backend", "simulated", "--port", "0")
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def message(index: int) -> dict[str, Any]:
    return {
        "request": {
            "messages": [{"role": "user", "content": f"Summary number {index}"}],
            "max_tokens": 10 + 12 * index,
            "ignore_eos": True,
        },
        "idempotency_key": f"summary-{index}",
    }


async def submit(http: aiohttp.ClientSession, url: str, index: int) -> str | None:
    """Submit a job as a careful client does; return its id, None if the engine died meanwhile."""
    try:
        async with http.post(url + "/v1/jobs", json=message(index), headers=HEADERS) as response:
            body = await response.json()
            assert response.status in (200, 202), body
            return str(body["id"])
    except aiohttp.ClientError:
        return None


class Seen:
    """What was told of the jobs so far."""

    def __init__(self) -> None:
        self.finished: dict[str, str] = {}
        self.num_tokens: dict[str, int] = {}

    def note(self, job: dict[str, Any]) -> None:
        """A job that was seen finished stays as it was; one that writes never goes back."""
        job_id, num_tokens = job["id"], job["progress"]["output_tokens"]
        if job["state"] == "finished":
            assert self.finished.setdefault(job_id, job["result_sha256"]) == job["result_sha256"]
        else:
            assert job_id not in self.finished
        assert num_tokens >= self.num_tokens.get(job_id, 0), "progress went back"
        self.num_tokens[job_id] = num_tokens


async def listed(http: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    async with http.get(url + "/v1/jobs?limit=1000", headers=HEADERS) as response:
        jobs: list[dict[str, Any]] = (await response.json())["jobs"]
        return jobs


async def life(folder: Path, known: dict[int, str], seen: Seen, *, killed_after_s: float) -> None:
    """Run the engine for a while, submit what is not known to be accepted, and kill it."""
    async with command(folder, *SIMULATED) as process, aiohttp.ClientSession() as http:
        url = await process.ready()

        async def submit_all() -> None:
            for index in range(NUM_JOBS):
                job_id = await submit(http, url, index)
                if job_id is not None:
                    assert known.setdefault(index, job_id) == job_id
            while True:
                for job in await listed(http, url):
                    seen.note(job)

        task = asyncio.create_task(submit_all())
        await asyncio.sleep(killed_after_s)
        process.signal(signal.SIGKILL)
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, aiohttp.ClientError | OSError), ended  # nothing but the kill ends it


async def survive(folder: Path, *, seed: int, num_kills: int) -> None:
    chance = random.Random(seed)
    known: dict[int, str] = {}
    seen = Seen()
    for _ in range(num_kills):
        await life(folder, known, seen, killed_after_s=chance.uniform(0.0, 1.2))
    async with command(folder, *SIMULATED) as process, aiohttp.ClientSession() as http:
        url = await process.ready()
        for index in range(NUM_JOBS):
            job_id = await submit(http, url, index)
            assert job_id is not None
            assert known.setdefault(index, job_id) == job_id
        while {job["state"] for job in await listed(http, url)} != {"finished"}:
            await asyncio.sleep(0.1)
        jobs = await listed(http, url)
        assert sorted(job["id"] for job in jobs) == sorted(known.values())
        for job in jobs:
            seen.note(job)
            await check_answer(http, url, job["id"])


async def check_answer(http: aiohttp.ClientSession, url: str, job_id: str) -> None:
    async with http.get(f"{url}/v1/jobs/{job_id}", headers=HEADERS) as response:
        job = await response.json()
    choices = json.dumps(job["result"]["choices"], ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    assert job["result_sha256"] == hashlib.sha256(choices.encode()).hexdigest()
    assert job["result"]["usage"]["completion_tokens"] == job["progress"]["max_tokens"]


@pytest.mark.slow
async def test_no_job_is_lost_or_done_twice_when_the_engine_is_killed(tmp_path: Path) -> None:
    await survive(tmp_path, seed=random.randrange(2**32), num_kills=4)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_no_job_is_lost_or_done_twice_in_fifty_kills(tmp_path: Path) -> None:
    await survive(tmp_path, seed=20261130, num_kills=50)
