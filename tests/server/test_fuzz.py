"""Mutated requests over HTTP: no 500, no hang, nothing left behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.server.household import Household
from tests.server.mutations import REQUESTS, mutated

CASES = st.one_of(*(st.tuples(st.just(path), mutated(kind)) for kind, path in REQUESTS.items()))


def drawn(count: int, *, is_fixed: bool) -> list[tuple[str, Any]]:
    """Return so many mutated requests, the same ones every time or others."""
    cases: list[tuple[str, Any]] = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=is_fixed,
        suppress_health_check=list(HealthCheck),
    )
    @given(CASES)
    def collect(case: tuple[str, Any]) -> None:
        cases.append(case)

    collect()
    return cases


async def sent(home: Household, path: str, message: Any) -> None:
    """Send it; whatever comes must be an answer or a refusal that names itself."""
    if isinstance(message, dict) and path.endswith("completions"):
        message.setdefault("max_tokens", 2)
    async with asyncio.timeout(60):
        answer = await home.ask("POST", path, data=json.dumps(message).encode(), headers=JSON_BODY)
    if answer.status >= 400:
        assert answer.error["code"]
        assert answer.error["message"]
        assert answer.status == 503 or answer.status < 500, (path, message, answer.body)
    assert answer.status not in (401, 500)


JSON_BODY = {"Content-Type": "application/json"}


async def bombard(home: Household, count: int, *, is_fixed: bool) -> None:
    for path, message in drawn(count, is_fixed=is_fixed):
        await sent(home, path, message)
    for job in (await home.ask("GET", "/v1/jobs?limit=1000")).json()["jobs"]:
        await home.ask("DELETE", f"/v1/jobs/{job['id']}")
    await home.until_idle()
    assert (await home.chat(max_tokens=1)).status == 200
    engine = home.engine.snapshot().engine
    assert engine["kv_pages_used"] == engine["kv_pages_pinned"]


async def test_mutated_requests_are_answered_or_refused_by_name(home: Household) -> None:
    await bombard(home, 200, is_fixed=True)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_ten_thousand_mutated_requests_are_answered_or_refused_by_name(home: Household) -> None:
    await bombard(home, 10_000, is_fixed=False)
