"""The page for a browser, and what the engine says it cannot do."""

from __future__ import annotations

import re

import pytest

from tests.server.household import Household


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "text/html"), ("/status.js", "text/javascript"), ("/status.css", "text/css")]
)
async def test_the_page_is_served_without_a_token_and_may_load_nothing_from_elsewhere(
    home: Household, path: str, kind: str
) -> None:
    answer = await home.ask("GET", path, token=None)
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith(kind)
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert not re.search(rb"https?://", answer.body)


async def test_the_page_itself_tells_nothing_about_the_household(home: Household) -> None:
    for path in ("/", "/status.js", "/status.css"):
        body = (await home.ask("GET", path, token=None)).body.lower()
        assert b"alice" not in body
        assert home.engine.info.name.lower().encode() not in body


async def test_the_page_asks_only_for_what_the_engine_serves(home: Household) -> None:
    script = (await home.ask("GET", "/status.js", token=None)).body.decode()
    paths = set(re.findall(r'(?:ask|fetch)\("([^"]+)"', script))
    assert paths == {"health", "ready", "v1/fairness"}
    for path in paths:
        assert (await home.ask("GET", "/" + path)).status == 200
    snapshot = (await home.ask("GET", "/v1/fairness")).json()
    of_the_engine, of_one = (set(re.findall(rf"{of}\.(\w+)", script)) for of in ("engine", "one"))
    assert {"policy_met", "bound_used", "paused_classes"} <= of_the_engine <= snapshot["engine"].keys()
    known = snapshot["residents"]["alice"] | snapshot["classes"]["voice"]
    assert {"slo_attainment", "service_share"} <= of_one <= known.keys()


async def test_what_the_page_hides_is_hidden_whatever_its_layout(home: Household) -> None:
    style = (await home.ask("GET", "/status.css", token=None)).body
    assert b"[hidden] { display: none !important; }" in style


async def test_embeddings_are_refused_by_name_where_the_backend_makes_none(home: Household) -> None:
    answer = await home.ask("POST", "/v1/embeddings", {"input": "Hello"})
    assert (answer.status, answer.error["code"]) == (422, "not_supported")
    assert "makes no embeddings" in answer.error["message"]
    assert (await home.ask("GET", "/v1/engine")).json()["can_embed"] is False


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": [1, "a"]}, "input[0][1]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
    ],
)
async def test_a_wrong_request_for_embeddings_is_named(home: Household, message: object, param: str) -> None:
    answer = await home.ask("POST", "/v1/embeddings", message)
    assert (answer.status, answer.error["param"]) == (400, param)
