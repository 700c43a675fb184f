"""The OpenAPI document: it is what the engine serves, takes and says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import voluptuous as vol

from engine_service.protocol import SCHEMAS
from engine_service.server.openapi import ANSWERS
from engine_service.server.routes import ROUTES
from tests.server.household import Household

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
ASKED: list[tuple[str, str, Any]] = [
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/v1/engine", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/simulated", None),
    ("GET", "/v1/capacity", None),
    ("GET", "/v1/fairness", None),
    ("GET", "/v1/residents", None),
    ("PUT", "/v1/residents/bob", {"weight": 3}),
    ("DELETE", "/v1/residents/bob", None),
    ("POST", "/v1/chat/completions", HELLO),
    ("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 2}),
    ("POST", "/v1/prefix", {"messages": [{"role": "system", "content": "Hi"}]}),
    ("POST", "/v1/embeddings", {"input": "x"}),
    ("GET", "/v1/policy", None),
    ("PUT", "/v1/policy", {"policy": {}}),
    ("PATCH", "/v1/policy", {"policy": {"max_skips": 3}}),
    ("POST", "/v1/policy/validate", {"policy": {"max_skips": 3}}),
    ("POST", "/v1/policy/rollback", {"revision": 0}),
    ("POST", "/v1/rehearse", {"scenario": "kitchen_light"}),
    ("POST", "/v1/jobs", {"request": HELLO}),
    ("GET", "/v1/jobs", None),
    ("GET", "/v1/jobs/JOB", None),
    ("DELETE", "/v1/jobs/JOB", None),
    ("POST", "/v1/pair", {"code": "CODE", "name": "x"}),
]
STREAMS_AND_FILES = {"/", "/status.js", "/status.css", "/openapi.json", "/metrics"} | {
    "/v1/jobs/stream",
    "/v1/fairness/stream",
}


async def test_every_route_is_asked_by_these_tests() -> None:
    def form(path: str) -> str:
        return re.sub(r"{\w+}|JOB|(?<=residents/)bob|(?<=models/)simulated", "*", path)

    asked = {(method, form(path)) for method, path, _ in ASKED}
    served = {(r.method, form(r.path)) for r in ROUTES if r.path not in STREAMS_AND_FILES}
    assert asked == served


@pytest.mark.usefixtures("favoured_rehearsals")
async def test_every_answer_is_as_the_document_says(home: Household) -> None:
    document = (await home.ask("GET", "/openapi.json", token=None)).json()
    job_id = ""
    for method, path, message in ASKED:
        if message and message.get("code") == "CODE":
            message = {**message, "code": home.service.pairing.open()}
        answer = await home.ask(method, path.replace("JOB", job_id), message)
        template = re.sub(r"JOB", "{job_id}", path).replace("residents/bob", "residents/{resident_id}")
        template = template.replace("models/simulated", "models/{model_id}")
        responses = document["paths"][template][method.lower()]["responses"]
        assert str(answer.status) in responses, (method, path, answer.body)
        content = responses[str(answer.status)].get("content")
        if content is None:
            assert answer.body == b""
            continue
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        ANSWERS[name](answer.json())
        if path == "/v1/jobs" and method == "POST":
            job_id = answer.json()["id"]


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("GET", "/v1/nothing", None),
        ("POST", "/v1/chat/completions", {}),
        ("POST", "/v1/pair", {"code": "123456", "name": "x"}),
        ("GET", "/v1/jobs/none", None),
        ("GET", "/v1/models/none", None),
        ("POST", "/v1/embeddings", {"input": "x"}),
    ],
)
async def test_every_refusal_is_an_error_as_the_document_says(
    home: Household, method: str, path: str, message: object
) -> None:
    ANSWERS["Error"]((await home.ask(method, path, message)).json())


async def test_the_document_is_whole(home: Household) -> None:
    document = (await home.ask("GET", "/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    text = str(document)
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in document["components"]["schemas"]
    operations = [one for path in document["paths"].values() for one in path.values()]
    assert len({one["operationId"] for one in operations}) == len(operations) == len(ROUTES)
    assert all(one["summary"] for one in operations)


async def test_the_document_says_how_thinking_is_switched(home: Household) -> None:
    schemas = (await home.ask("GET", "/openapi.json")).json()["components"]["schemas"]
    for name in ("ChatRequest", "PrefixRequest"):
        (switches,) = [
            one
            for one in schemas[name]["properties"]["chat_template_kwargs"]["anyOf"]
            if one.get("type") == "object"
        ]
        assert "boolean" in str(switches["properties"]["enable_thinking"])
        assert switches["additionalProperties"] is False


def test_every_named_message_is_one_there_is() -> None:
    for route in ROUTES:
        assert route.takes is None or route.takes in SCHEMAS
        for kind in route.gives.values():
            assert kind in ANSWERS or "/" in kind or route.gives == {204: "removed"}


def test_an_answer_against_the_document_would_be_found() -> None:
    with pytest.raises(vol.Invalid):
        ANSWERS["Prefix"]({"prefix_tokens": 1})
    with pytest.raises(vol.Invalid):
        ANSWERS["Error"]({"error": "x"})
