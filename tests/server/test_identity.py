"""Tokens and pairing over HTTP: what a token is bound to, and how a new client gets one."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from engine_service.errors import InvalidRequest, PairingClosed, SettingsError, WrongCode
from engine_service.identity.caller import Caller
from engine_service.identity.pairing import LIFETIME_S, MAX_WRONG, PairingDesk
from engine_service.identity.tokens import KeptToken, TokenBook
from engine_service.protocol import Asked
from engine_service.scheduling.model import ResidentId, WorkloadClass
from engine_service.settings import Scope
from tests.server.household import Household

ALICE = ResidentId("alice")
GENERATE = frozenset({Scope.GENERATE})


def made(home: Household, **bounds: object) -> str:
    """Return a fresh token of the running engine's book, as the command makes it."""
    caller = Caller(**{"name": "tablet", "scopes": GENERATE, **bounds})  # type: ignore[arg-type]
    return TokenBook(home.settings.paths.state_dir).create(caller)[0]


# --- bounds ---


async def test_a_token_bound_to_a_resident_charges_that_resident(home: Household) -> None:
    token = made(home, resident_id=ALICE)
    answer = await home.chat(token=token, max_tokens=2)
    assert answer.json()["fairhearth"]["resident"] == "alice"
    again = await home.chat(token=token, max_tokens=2, fairhearth={"resident": "alice"})
    assert again.status == 200


async def test_a_token_bound_to_a_resident_acts_for_nobody_else(home: Household) -> None:
    answer = await home.chat(token=made(home, resident_id=ALICE), fairhearth={"resident": "house"})
    assert (answer.status, answer.error["code"]) == (403, "not_allowed")
    assert answer.error["param"] == "fairhearth.resident"
    assert "acts for 'alice' only" in answer.error["message"]


@pytest.mark.parametrize(
    ("asked", "status", "served"),
    [
        (None, 200, "agent"),
        ("agent", 200, "agent"),
        ("background", 200, "background"),
        ("chat", 403, None),
        ("voice", 403, None),
    ],
)
async def test_a_request_may_be_less_urgent_than_its_token_but_not_more(
    home: Household, asked: str | None, status: int, served: str | None
) -> None:
    token = made(home, most_urgent=WorkloadClass.AGENT)
    who = {} if asked is None else {"fairhearth": {"workload_class": asked}}
    answer = await home.chat(token=token, max_tokens=2, **who)
    assert answer.status == status
    if served:
        assert answer.json()["fairhearth"]["workload_class"] == served
    else:
        assert answer.error["param"] == "fairhearth.workload_class"
        assert "may ask for agent, embedding, background" in answer.error["message"]


def test_an_admin_is_bound_by_nothing() -> None:
    admin = Caller(
        name="a", scopes=frozenset({Scope.ADMIN}), resident_id=ALICE, most_urgent=WorkloadClass.AGENT
    )
    who = admin.attribute(Asked(resident_id=ResidentId("bob"), class_id=WorkloadClass.VOICE))
    assert (who.resident_id, who.class_id) == ("bob", WorkloadClass.VOICE)


async def test_the_settings_say_which_resident_an_openai_user_is(home: Household) -> None:
    home.service.users = {"alice@example.org": ALICE}
    mapped = await home.chat(max_tokens=2, user="alice@example.org")
    assert mapped.json()["fairhearth"]["resident"] == "alice"
    unknown = await home.chat(max_tokens=2, user="bob@example.org")
    assert unknown.json()["fairhearth"]["resident"] == "guest"


# --- the book of tokens ---


async def test_a_token_works_at_once_and_no_more_once_it_is_revoked(home: Household) -> None:
    token = made(home)
    assert (await home.chat(token=token, max_tokens=1)).status == 200
    TokenBook(home.settings.paths.state_dir).revoke("tablet")
    assert (await home.chat(token=token, max_tokens=1)).status == 401


class Overtaken(TokenBook):
    """A book that somebody writes into just when it has been read for the first time."""

    has_been_read = False

    def _read(self) -> tuple[KeptToken, ...]:
        tokens = super()._read()
        if not self.has_been_read:
            self.has_been_read = True
            TokenBook(self._path.parent).create(Caller(name="late", scopes=GENERATE))
        return tokens


def test_a_token_made_while_the_book_is_opened_is_known(tmp_path: Path) -> None:
    assert [kept.caller.name for kept in Overtaken(tmp_path).all()] == ["late"]


def test_a_token_is_kept_as_a_hash_only(tmp_path: Path) -> None:
    token, kept = TokenBook(tmp_path).create(Caller(name="x", scopes=GENERATE))
    for path in tmp_path.iterdir():
        assert token not in path.read_text(encoding="utf-8")
    assert (tmp_path / "tokens.json").stat().st_mode & 0o777 == 0o600
    assert TokenBook(tmp_path).all() == (kept,)


def test_two_tokens_of_one_name_are_refused_or_numbered(tmp_path: Path) -> None:
    book = TokenBook(tmp_path)
    book.create(Caller(name="x", scopes=GENERATE))
    with pytest.raises(InvalidRequest, match="already; choose another name"):
        book.create(Caller(name="x", scopes=GENERATE))
    names = [book.create(Caller(name="x", scopes=GENERATE), rename=True)[1].caller.name for _ in range(2)]
    assert names == ["x 2", "x 3"]


def test_a_token_that_is_not_there_cannot_be_revoked(tmp_path: Path) -> None:
    book = TokenBook(tmp_path)
    book.create(Caller(name="kitchen", scopes=GENERATE))
    with pytest.raises(InvalidRequest, match="known are: kitchen"):
        book.revoke("bath")


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"tokens": [{}]}', '{"tokens": [{"id": "a", "sha256": "zz"}]}', "\x00"]
)
def test_a_damaged_book_stops_the_start_and_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokens.json").write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=r"tokens\.json: .*delete the file to revoke"):
        TokenBook(tmp_path)


def test_a_book_damaged_while_the_engine_runs_keeps_the_tokens_it_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = TokenBook(tmp_path)
    _, kept = book.create(Caller(name="x", scopes=GENERATE))
    assert book.all() == (kept,)
    (tmp_path / "tokens.json").write_text("{", encoding="utf-8")
    assert book.all() == (kept,)
    assert "The tokens stay as they were" in caplog.text


# --- pairing ---


async def paired(home: Household, code: str, name: str = "Home Assistant") -> tuple[int, dict[str, object]]:
    answer = await home.ask("POST", "/v1/pair", {"code": code, "name": name}, token=None)
    return answer.status, answer.json()


async def test_a_code_is_traded_once_for_a_token_that_works(
    home: Household, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    code = home.service.pairing.open()
    status, answer = await paired(home, f"{code[:3]} {code[3:]}")
    assert status == 201
    assert answer["scopes"] == ["generate", "policy", "residents"]
    assert answer["engine_id"] == home.service.engine_id
    assert (await home.chat(token=str(answer["token"]), max_tokens=1)).status == 200
    assert str(answer["token"]) not in caplog.text
    status, refused = await paired(home, code)
    assert (status, refused["error"]["code"]) == (403, "pairing_closed")  # type: ignore[index]


async def test_a_second_client_of_the_same_name_gets_a_number(home: Household) -> None:
    names = [(await paired(home, home.service.pairing.open()))[1]["name"] for _ in range(2)]
    assert names == ["Home Assistant", "Home Assistant 2"]


async def test_nothing_can_be_guessed_while_nobody_pairs(home: Household) -> None:
    status, answer = await paired(home, "123456")
    assert (status, answer["error"]["code"]) == (403, "pairing_closed")  # type: ignore[index]
    assert "fairhearth pair" in answer["error"]["message"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"code": "12345", "name": "x"}, "code"),
        ({"code": "12345a", "name": "x"}, "code"),
        ({"code": 123456, "name": "x"}, "code"),
        ({"code": "123456", "name": ""}, "name"),
        ({"name": "x"}, "code"),
        ({"code": "123456", "name": "x", "scopes": ["admin"]}, "scopes"),
    ],
)
async def test_a_wrong_request_to_pair_is_named(home: Household, message: object, param: str) -> None:
    answer = await home.ask("POST", "/v1/pair", message, token=None)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_an_address_that_keeps_guessing_is_slowed_down(home: Household) -> None:
    statuses = []
    for _ in range(3):
        code = home.service.pairing.open()
        wrong = f"{(int(code) + 1) % 1_000_000:06d}"
        statuses += [(await paired(home, wrong))[0] for _ in range(MAX_WRONG)]
    assert statuses == [403] * 10 + [429] * 5


def test_a_code_dies_of_too_many_wrong_tries(tmp_path: Path) -> None:
    desk = PairingDesk(tmp_path)
    code = desk.open()
    wrong = f"{(int(code) + 1) % 1_000_000:06d}"
    for left in range(MAX_WRONG - 1, 0, -1):
        with pytest.raises(WrongCode, match=f"tries left: {left}"):
            desk.trade(wrong)
    with pytest.raises(WrongCode, match="used up"):
        desk.trade(wrong)
    with pytest.raises(PairingClosed):
        desk.trade(code)


@pytest.mark.parametrize("passed_s", [LIFETIME_S, -1.0])
def test_a_code_is_good_for_its_minutes_only_whatever_the_clock_does(tmp_path: Path, passed_s: float) -> None:
    now = 1000.0
    desk = PairingDesk(tmp_path, clock=lambda: now)
    code = desk.open()
    now += passed_s
    with pytest.raises(PairingClosed):
        desk.trade(code)


def test_a_code_survives_a_restart_and_its_file_is_private(tmp_path: Path) -> None:
    code = PairingDesk(tmp_path).open()
    assert re.fullmatch(r"\d{6}", code)
    assert (tmp_path / "pairing.json").stat().st_mode & 0o777 == 0o600
    PairingDesk(tmp_path).trade(code)


@pytest.mark.parametrize("content", ["", "{", json.dumps({"code": 1}), "\x00"])
def test_a_damaged_pairing_file_opens_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "pairing.json").write_text(content, encoding="utf-8")
    with pytest.raises(PairingClosed):
        PairingDesk(tmp_path).trade("123456")
