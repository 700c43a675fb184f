"""Over HTTP: what is wrong is refused with a status, a stable code, and words that help."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import pytest

from tests.server.household import Household

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/prefix"])
@pytest.mark.parametrize(
    ("data", "headers", "words"),
    [
        (b"\xff\xfe{}", JSON, "not UTF-8"),
        (b'{"messages": [', JSON, "not JSON"),
        (b"", JSON, "not JSON"),
        (b"[]", JSON, "must be an object"),
        (b"[" * 50_000, JSON, "nested too deeply"),
        (b'{"surprise": 1}', JSON, "surprise is not a known field"),
        (b"xx", JSON | {"Content-Encoding": "gzip"}, "without Content-Encoding 'gzip'"),
        (gzip.compress(b"{}"), JSON | {"Content-Encoding": "GZIP"}, "without Content-Encoding 'gzip'"),
        (b"xx", JSON | {"Content-Encoding": "deflate"}, "without Content-Encoding 'deflate'"),
        (b"{}", {"Content-Type": "text/plain"}, "Content-Type must be application/json"),
        (
            b"{}",
            {"Content-Type": "application/x-www-form-urlencoded"},
            "Content-Type must be application/json",
        ),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(
    home: Household,
    caplog: pytest.LogCaptureFixture,
    path: str,
    data: bytes,
    headers: dict[str, str],
    words: str,
) -> None:
    answer = await home.ask("POST", path, data=data, headers=headers)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert answer.error["type"] == "invalid_request_error"
    assert words in answer.error["message"]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("changes", "status", "code", "param"),
    [
        ({"fairhearth": {"resident": "bob"}}, 404, "unknown_resident", "fairhearth.resident"),
        ({"fairhearth": {"resident": "system"}}, 404, "unknown_resident", "fairhearth.resident"),
        ({"fairhearth": {"workload_class": "urgent"}}, 400, "invalid_request", "fairhearth.workload_class"),
        ({"model": "gpt-9"}, 404, "unknown_model", "model"),
        ({"max_tokens": 0}, 400, "invalid_request", "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 50_000}]}, 413, "prompt_too_long", "messages"),
        ({"logit_bias": {"99999999": 1}}, 400, "invalid_request", "logit_bias"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            400,
            "invalid_request",
            "tools[0].function.parameters.type",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "x"}},
                }
            },
            400,
            "invalid_request",
            "response_format.json_schema.schema.type",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"$ref": "#"}},
                }
            },
            400,
            "invalid_request",
            "response_format.json_schema.schema",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_cannot_be_served_is_refused_before_anything_streams(
    home: Household, changes: dict[str, Any], status: int, code: str, param: str, stream: bool
) -> None:
    answer = await home.ask("POST", "/v1/chat/completions", {**HELLO, "stream": stream, **changes})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param)
    assert answer.headers["Content-Type"].startswith("application/json")


async def test_who_is_known_is_said_where_somebody_is_not(home: Household) -> None:
    answer = await home.chat(fairhearth={"resident": "bob"})
    assert answer.error["message"] == "there is no resident 'bob'; known are alice, guest, house"


async def test_a_prompt_that_leaves_no_room_is_told_how_many_tokens_would_fit(home: Household) -> None:
    answer = await home.chat("word " * 50_000)
    longest = int(answer.error["message"].partition("at most ")[2].split()[0])
    assert longest < home.engine.info.max_context_tokens
    fitting = await home.ask("POST", "/v1/completions", {"prompt": [7] * longest, "max_tokens": 5})
    assert fitting.status == 200
    above = await home.ask("POST", "/v1/completions", {"prompt": [7] * (longest + 1), "max_tokens": 5})
    assert above.error["code"] == "prompt_too_long"


async def test_the_longest_conversation_is_the_same_wherever_it_is_told(home: Household) -> None:
    paths = ("/v1/engine", "/v1/capacity")
    told = {(await home.ask("GET", path)).json()["max_context_tokens"] for path in paths}
    answer = await home.chat("word " * 50_000)
    assert told == {int(answer.error["message"].partition("at most ")[2].split()[0]) + 1}
    assert "beside what is kept for speech and for pinned prefixes" in answer.error["message"]


async def test_more_output_than_fits_is_cut_to_what_fits(home: Household) -> None:
    too_long = {
        "prompt": [7] * (home.engine.info.max_context_tokens - 1),
        "max_tokens": 1,
        "ignore_eos": True,
    }
    refused = await home.ask("POST", "/v1/completions", too_long)
    assert refused.error["code"] == "prompt_too_long"
    longest = int(refused.error["message"].partition("at most ")[2].split()[0])
    message = {"prompt": [7] * (longest - 2), "max_tokens": 10**9, "ignore_eos": True}
    answer = await home.ask("POST", "/v1/completions", message)
    assert answer.status == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_an_answer_without_a_length_may_be_as_long_as_fits(home: Household) -> None:
    answer = await home.chat("Say hello", temperature=0, seed=1)
    assert answer.status == 200
    assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    ("prompt", "param"), [([10**7], "prompt"), ([1] * 100_000, "prompt"), ("word " * 50_000, "prompt")]
)
async def test_a_completion_that_cannot_be_served_names_its_prompt(
    home: Household, prompt: object, param: str
) -> None:
    answer = await home.ask("POST", "/v1/completions", {"prompt": prompt})
    assert answer.status in (400, 413)
    assert answer.error["param"] == param


async def test_a_body_larger_than_the_engine_reads_is_refused(home: Household) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 5_000_000}]}).encode()
    answer = await home.ask("POST", "/v1/chat/completions", data=io.BytesIO(body), headers=JSON)
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/chat/completions", HELLO),
        ("/v1/completions", {"prompt": "Once"}),
        ("/v1/prefix", {"messages": [{"role": "system", "content": "Hi"}]}),
        ("/v1/jobs", {"request": HELLO}),
    ],
)
async def test_no_address_answers_for_a_model_that_is_not_served(
    home: Household, path: str, message: dict[str, Any]
) -> None:
    named = (
        {"request": {**HELLO, "model": "gpt-9"}} if "request" in message else {**message, "model": "gpt-9"}
    )
    answer = await home.ask("POST", path, named)
    assert (answer.status, answer.error["code"]) == (404, "unknown_model")
    assert answer.error["param"] == ("request.model" if "request" in message else "model")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/index.html", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/residents/guest", 400, "invalid_request"),
        ("DELETE", "/v1/residents/house", 400, "invalid_request"),
        ("GET", "/v1/models/gpt-4", 404, "unknown_model"),
        ("GET", "/v1/models/somebody%2Fgpt-4", 404, "unknown_model"),
        ("DELETE", "/v1/residents/nobody", 404, "unknown_resident"),
        ("DELETE", "/v1/residents/Not%20One", 400, "invalid_request"),
    ],
)
async def test_a_wrong_address_or_method_is_told(
    home: Household, method: str, path: str, status: int, code: str
) -> None:
    answer = await home.ask(method, path)
    assert (answer.status, answer.error["code"]) == (status, code)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/residents/bob", {"weight": 0}, "weight"),
        ("/v1/residents/bob", {"wheight": 1}, "wheight"),
        ("/v1/residents/Bob", {}, "resident"),
        ("/v1/residents/system", {}, "resident"),
    ],
)
async def test_a_wrong_resident_is_refused(home: Household, path: str, body: object, param: str) -> None:
    answer = await home.ask("PUT", path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_no_page_of_another_origin_gets_permission(home: Household) -> None:
    answer = await home.ask("GET", "/health", token=None, headers={"Origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


async def test_after_all_refusals_nothing_is_left_behind(home: Household) -> None:
    for changes in ({"max_tokens": 0}, {"model": "x"}, {"fairhearth": {"resident": "bob"}}):
        await home.chat(**changes)
    await home.chat("word " * 50_000)
    engine = home.engine.snapshot().engine
    assert (engine["requests_running"], engine["requests_waiting"]) == (0, 0)
    assert engine["kv_pages_used"] == engine["kv_pages_pinned"]


async def test_a_long_address_is_not_sent_back_whole(home: Household) -> None:
    answer = await home.ask("GET", "/" + "x" * 5_000)
    assert answer.status == 404
    assert len(answer.body) < 500


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
async def test_what_needs_no_token_can_be_asked_without_its_body(home: Household, path: str) -> None:
    answer = await home.ask("HEAD", path, token=None)
    assert (answer.status, answer.body) == (200, b"")
