"""Who gets in, to what, and what the others are told."""

from __future__ import annotations

import pytest

from tests.server.conftest import Start
from tests.server.household import ADMIN, EDITOR, READER, SPEAKER, Household

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
ALL = {ADMIN, SPEAKER, READER, EDITOR}
ADDRESSES = [
    ("GET", "/health", None, ALL | {None}),
    ("GET", "/ready", None, ALL | {None}),
    ("GET", "/v1/engine", None, ALL),
    ("GET", "/v1/models", None, ALL),
    ("GET", "/v1/models/simulated", None, ALL),
    ("GET", "/v1/residents", None, ALL),
    ("GET", "/v1/capacity", None, ALL),
    ("GET", "/v1/fairness", None, ALL),
    ("POST", "/v1/chat/completions", HELLO, {ADMIN, SPEAKER}),
    ("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 1}, {ADMIN, SPEAKER}),
    ("POST", "/v1/prefix", {"messages": [{"role": "system", "content": "Hi"}]}, {ADMIN, SPEAKER}),
    ("PUT", "/v1/residents/bob", {}, {ADMIN, EDITOR}),
    ("DELETE", "/v1/residents/alice", None, {ADMIN, EDITOR}),
    ("GET", "/metrics", None, {ADMIN, READER}),
]


@pytest.mark.parametrize(
    ("method", "path", "message", "allowed"), ADDRESSES, ids=[f"{m} {p}" for m, p, _, _ in ADDRESSES]
)
async def test_a_token_opens_what_its_scopes_say(
    home: Household, method: str, path: str, message: object, allowed: set[str | None]
) -> None:
    for token in (None, "a-token-nobody-knows", *sorted(ALL - allowed), *sorted(ALL & allowed)):
        answer = await home.ask(method, path, message, token=token)
        if token in allowed or None in allowed:
            assert answer.status in (200, 204)
            if method == "DELETE":  # gone now, so that only the first token can be asked
                break
        elif token in ALL:
            assert (answer.status, answer.error["code"]) == (403, "not_allowed")
        else:
            assert (answer.status, answer.error["code"]) == (401, "not_authenticated")
            assert answer.headers["WWW-Authenticate"] == 'Bearer realm="fairhearth"'


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Basic {ADMIN}",
        ADMIN,
        f"Bearer {ADMIN}x",
        f"Bearer {ADMIN[:-1]}",
        "Bearer ä",
    ],
)
async def test_a_header_that_holds_no_known_token_is_refused(home: Household, header: str) -> None:
    answer = await home.ask("GET", "/v1/engine", token=None, headers={"Authorization": header})
    assert answer.status == 401


async def test_a_missing_scope_is_named(home: Household) -> None:
    answer = await home.chat(token=READER)
    assert answer.error["message"] == "the token 'prometheus' lacks the scope 'generate'"


async def test_a_body_is_not_read_before_the_token(home: Household) -> None:
    answer = await home.ask("POST", "/v1/chat/completions", data=b"\xff", token=None)
    assert answer.status == 401


async def test_guessing_is_answered_more_and_more_slowly_but_never_locks_the_household_out(
    home: Household,
) -> None:
    statuses = [(await home.ask("GET", "/v1/engine", token="wrong" * 4)).status for _ in range(12)]
    assert statuses == [401] * 10 + [429] * 2
    refused = await home.ask("GET", "/v1/engine", token=None)
    assert (refused.error["code"], refused.error["type"]) == ("too_many_failures", "rate_limit_error")
    assert 0 < int(refused.headers["Retry-After"]) <= 60
    assert (await home.ask("GET", "/v1/engine")).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:8321"}, 200),
        ({"Host": "evil.example"}, 401),
        ({"Origin": "http://evil.example"}, 401),
        ({"Origin": "null"}, 401),
        ({"X-Forwarded-For": "10.0.0.1"}, 401),
        ({"Forwarded": "for=10.0.0.1"}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
    ],
)
async def test_only_a_program_on_this_machine_may_come_without_a_token_where_that_is_allowed(
    start: Start, headers: dict[str, str], status: int
) -> None:
    async with start(allow_loopback=True) as home:
        assert (await home.ask("GET", "/v1/engine", token=None, headers=headers)).status == status


async def test_scopes_are_told(home: Household) -> None:
    assert (await home.ask("GET", "/v1/engine", token=SPEAKER)).json()["scopes"] == ["generate"]
    assert (await home.ask("GET", "/v1/engine")).json()["scopes"] == ["admin"]
