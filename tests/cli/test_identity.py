"""`fairhearth token …` and `fairhearth pair`, beside a running engine."""

from __future__ import annotations

import signal
from pathlib import Path

import aiohttp
import pytest

from engine_service.scheduling.model import Resident, ResidentId
from engine_service.settings import NamedResident
from engine_service.state import StateFolder
from tests.cli.process import command, run

SIMULATED = ("serve", "--backend", "simulated", "--port", "0")
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


async def status_of(url: str, path: str, token: str, message: object = None) -> int:
    headers = {"Authorization": f"Bearer {token}"}
    method = "GET" if message is None else "POST"
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, url + path, json=message, headers=headers) as response,
    ):
        return response.status


async def test_a_token_can_be_made_shown_and_revoked_while_the_engine_runs(tmp_path: Path) -> None:
    async with command(tmp_path, *SIMULATED) as process:
        url = await process.ready()
        code, out, err = await run(tmp_path, "token", "create", "tablet", "--most-urgent", "chat")
        assert code == 0
        token = out.strip()
        assert "shown only now" in err
        assert token not in err
        assert await status_of(url, "/v1/chat/completions", token, HELLO) == 200
        assert await status_of(url, "/metrics", token) == 403

        code, out, _ = await run(tmp_path, "token", "list")
        assert code == 0
        assert token not in out
        assert {"tablet", "generate", "everybody", "chat"} <= set(out.split())

        code, out, _ = await run(tmp_path, "token", "revoke", "tablet")
        assert (code, out.startswith("revoked tablet")) == (0, True)
        assert await status_of(url, "/v1/chat/completions", token, HELLO) == 401
        process.signal(signal.SIGTERM)
        _, _, err = await process.end()
        assert token not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "x", "--resident", "Not One"), "a resident id is 1 to 64 of a-z"),
        (("create", "x" * 65), "1 to 64 printable characters"),
        (("revoke", "nobody"), "there is no token 'nobody'; known are: none"),
    ],
)
async def test_what_cannot_be_done_with_a_token_is_told(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = await run(tmp_path, "token", *arguments)
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.parametrize("options_first", [False, True])
async def test_options_may_stand_before_or_after_the_action(tmp_path: Path, options_first: bool) -> None:
    where = ("--state-dir", str(tmp_path / "elsewhere"))
    before, after = (where, ()) if options_first else ((), where)
    code, _, _ = await run(tmp_path, "token", *before, "create", "x", *after)
    assert code == 0
    assert (tmp_path / "elsewhere" / "tokens.json").exists()


async def test_an_engine_nobody_has_paired_with_shows_a_code_and_later_ones_are_asked_for(
    tmp_path: Path,
) -> None:
    async with command(tmp_path, *SIMULATED, token=None) as process, aiohttp.ClientSession() as http:
        url = await process.ready()
        code, out, err = await run(tmp_path, "pair", token=None)
        assert code == 0
        assert "good for 10 minutes and one use" in err
        async with http.post(url + "/v1/pair", json={"code": out.strip(), "name": "HA"}) as response:
            assert response.status == 201
            token = (await response.json())["token"]
        assert await status_of(url, "/v1/chat/completions", token, HELLO) == 200
        process.signal(signal.SIGTERM)
        _, _, err = await process.end()
        assert "fairhearth: pairing code: " in err
        assert token not in err
    async with command(tmp_path, *SIMULATED, token=None) as process:
        await process.ready()
        process.signal(signal.SIGTERM)
        assert "pairing code" not in (await process.end())[2]


async def test_a_code_made_before_the_first_start_is_the_one_that_the_start_shows(tmp_path: Path) -> None:
    _, out, _ = await run(tmp_path, "pair", token=None)
    async with command(tmp_path, *SIMULATED, token=None) as process, aiohttp.ClientSession() as http:
        url = await process.ready()
        async with http.post(url + "/v1/pair", json={"code": out.strip(), "name": "HA"}) as response:
            assert response.status == 201
        process.signal(signal.SIGTERM)
        assert f"pairing code: {out.strip()} " in (await process.end())[2]


async def test_an_engine_with_tokens_of_its_settings_shows_no_code_by_itself(tmp_path: Path) -> None:
    async with command(tmp_path, *SIMULATED) as process:
        await process.ready()
        process.signal(signal.SIGTERM)
        assert "pairing code" not in (await process.end())[2]


async def test_a_code_for_a_folder_that_no_engine_has_used_says_so(tmp_path: Path) -> None:
    code, out, err = await run(tmp_path, "pair", token=None)
    assert (code, len(out.strip())) == (0, 6)
    assert "note: no engine has ever used" in err
    async with command(tmp_path, *SIMULATED, token=None) as process:
        await process.ready()
        code, _, err = await run(tmp_path, "pair", token=None)
    assert code == 0
    assert "note:" not in err


async def test_a_token_for_a_resident_who_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "fairhearth.toml").write_text("[residents.alice]\nweight = 2\n", encoding="utf-8")
    state = StateFolder(tmp_path / "kept")
    state.keep_residents([NamedResident(resident=Resident(resident_id=ResidentId("bob")), name="Bob")])
    for who, is_told in (("alice", False), ("bob", False), ("guest", False), ("nobody", True)):
        arguments = ("token", "create", f"of-{who}", "--resident", who, "--state-dir", str(state.path))
        code, out, err = await run(tmp_path, *arguments)
        assert code == 0
        assert out.strip()
        assert ("there is no resident 'nobody' here" in err) is is_told
