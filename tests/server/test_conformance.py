"""schemathesis against the served OpenAPI document: what it draws from it is answered as it says.

Of its checks these hold: no server error, only documented statuses, content types, headers and bodies, and
nothing that the document forbids is accepted. That everything it allows is accepted does not hold: a schema
cannot say which resident exists. `test_fuzz` mutates real requests; this test knows only the document.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.schemas import APIOperation

from tests.server.household import ADMIN, Household, bearer

ENDLESS = ("/v1/fairness/stream", "/v1/jobs/stream")  # `test_household` and `test_jobs` read them
SLOW = ("/v1/rehearse",)  # every one that is accepted is a process of some seconds: `test_rehearsal`
HOLDING = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
NO_SUCH_ABILITY = 422  # the simulated backend makes no embeddings and sees no pictures, and says so


def operations(url: str) -> list[APIOperation[Any, Any, Any, Any]]:
    """Return what the document at this engine describes and a test can read to its end."""
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found = [result.ok() for result in document.get_all_operations()]
    return [operation for operation in found if operation.path not in (*ENDLESS, *SLOW)]


def ask(operation: APIOperation[Any, Any, Any, Any], url: str, mode: GenerationMode, count: int) -> int:
    """Send so many requests drawn for the operation, and judge the answers; return how many were sent."""
    load_all_checks()
    checks = [CHECKS.get_one(name) for name in HOLDING]
    num_sent = 0

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def judged(case: Case) -> None:
        nonlocal num_sent
        num_sent += 1
        if isinstance(case.body, dict) and "completions" in operation.path:
            case.body["max_tokens"] = 2  # an answer of the whole context takes a while
        answer = case.call(base_url=url, headers=bearer(ADMIN), timeout=60)
        if answer.status_code == NO_SUCH_ABILITY:
            assert answer.json()["error"]["code"] == "not_supported"
            return
        case.validate_response(answer, checks=checks)

    judged()
    return num_sent


async def hold_to_the_document(home: Household, count: int) -> int:
    """Ask every operation in both modes; return how many requests were sent."""
    num_sent = 0
    for operation in await asyncio.to_thread(operations, home.url):
        modes = list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]
        for mode in modes:  # without a body, what is drawn as wrong can get lost on its way into an address
            num_sent += await asyncio.to_thread(ask, operation, home.url, mode, count)
    for job in (await home.ask("GET", "/v1/jobs?limit=1000")).json()["jobs"]:
        await home.ask("DELETE", f"/v1/jobs/{job['id']}")
    await home.until_idle()
    engine = home.engine.snapshot().engine
    assert engine["kv_pages_used"] == engine["kv_pages_pinned"]
    return num_sent


async def test_the_engine_answers_as_its_document_says(home: Household) -> None:
    assert await hold_to_the_document(home, 10) > 200


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_the_engine_answers_as_its_document_says_all_night(home: Household) -> None:
    assert await hold_to_the_document(home, 500) > 10_000
