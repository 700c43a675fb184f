"""The command as somebody types it: what it prints, how it fails, how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import stat
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine_service import __main__, __version__, cli, opening
from engine_service.backends.base import Backend, Language, ModelError, Tell
from engine_service.backends.llama_cpp.provision import default_model_path
from engine_service.settings import ModelSettings
from engine_service.simulator import command as simulator
from tests.cli.process import TOKEN, command, run
from tests.cli.test_looking import llama

SIMULATED = ("serve", "--backend", "simulated", "--port", "0")


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def ask(url: str, path: str, message: Any = None, token: str = TOKEN) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.request(
            "POST" if message else "GET", url + path, json=message, headers=bearer(token)
        ) as response,
    ):
        return response.status, await response.json()


HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}


async def test_it_serves_says_where_and_ends_cleanly(tmp_path: Path) -> None:
    async with command(tmp_path, *SIMULATED) as process:
        url = await process.ready()
        status, health = await ask(url, "/health")
        assert (status, health["status"], health["version"]) == (200, "ok", __version__)
        status, answer = await ask(url, "/v1/chat/completions", HELLO)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        process.signal(signal.SIGTERM)
        code, out, err = await process.end()
    assert (code, out) == (0, "")
    assert "Traceback" not in err
    assert TOKEN not in err


TWO_FILES = f"""
[[models]]
name = "house"
context_tokens = 1024
threads = 1
pinned = true
[[models]]
name = "plain"
path = "{default_model_path()}"
context_tokens = 2048
threads = 1
[residency]
max_loaded = 2
patience_s = 0
"""


async def test_several_models_of_the_settings_are_served_by_their_names(tmp_path: Path) -> None:
    """The embedded model twice: requantised, and as it is shipped."""
    (tmp_path / "fairhearth.toml").write_text(TWO_FILES, encoding="utf-8")
    async with command(tmp_path, "serve", "--port", "0") as process:
        url = await process.ready()
        for name in ("plain", "house"):
            status, answer = await ask(url, "/v1/chat/completions", HELLO | {"model": name})
            assert (status, answer["model"]) == (200, name), answer
        _, listed = await ask(url, "/v1/models")
        states = {row["id"]: row["fairhearth"]["state"] for row in listed["data"]}
        assert states == {"house": "loaded", "plain": "idle"}
        status, made = await ask(url, "/v1/embeddings", {"input": "the rain", "model": "plain"})
        assert (status, made["model"], len(made["data"][0]["embedding"])) == (200, "plain", 576)
        _, memory = await ask(url, "/v1/capacity")
        assert [model["kv_pages_total"] for model in memory["models"]] == [32, 64]
        process.signal(signal.SIGTERM)
        code, _, err = await process.end()
    assert code == 0
    assert "plain is ready after" in err
    assert "Traceback" not in err


async def test_options_that_could_mean_any_of_several_models_stop_the_start(tmp_path: Path) -> None:
    (tmp_path / "fairhearth.toml").write_text(TWO_FILES, encoding="utf-8")
    code, _, err = await run(tmp_path, "serve", "--port", "0", "--threads", "2")
    assert code == 2
    assert "--threads means one model, and the settings list [[models]]" in err


async def test_an_interrupt_ends_it_as_cleanly(tmp_path: Path) -> None:
    async with command(tmp_path, *SIMULATED) as process:
        await process.ready()
        process.signal(signal.SIGINT)
        assert (await process.end())[0] == 0


async def test_running_answers_finish_and_new_ones_are_refused_while_it_stops(tmp_path: Path) -> None:
    (tmp_path / "fairhearth.toml").write_text("[server]\ndrain_s = 25.0", encoding="utf-8")
    long = {**HELLO, "max_tokens": 150, "stream": True}
    async with command(tmp_path, *SIMULATED) as process, aiohttp.ClientSession() as http:
        url = await process.ready()
        async with http.post(url + "/v1/chat/completions", json=long, headers=bearer()) as response:
            assert (await response.content.readline()).startswith(b"data: ")
            # Another answer keeps the engine from ending before it was asked.
            longer = long | {"max_tokens": 3000}
            async with http.post(url + "/v1/chat/completions", json=longer, headers=bearer()) as other:
                process.signal(signal.SIGTERM)
                while (await ask(url, "/ready"))[0] == 200:
                    await asyncio.sleep(0.01)
                status, refused = await ask(url, "/v1/chat/completions", HELLO)
                assert (status, refused["error"]["code"]) == (503, "engine_unavailable")
                other.close()
            lines = [line async for line in response.content if line.strip()]
        assert lines[-1] == b"data: [DONE]\n"
        last = json.loads(lines[-2].removeprefix(b"data: "))
        assert last["fairhearth"]["tokens"]["decode"] == 150
        assert (await process.end())[0] == 0


async def test_an_answer_that_takes_too_long_is_told_that_the_engine_stops(tmp_path: Path) -> None:
    (tmp_path / "fairhearth.toml").write_text("[server]\ndrain_s = 0.0", encoding="utf-8")
    long = {**HELLO, "max_tokens": 3000, "stream": True}
    async with command(tmp_path, *SIMULATED) as process, aiohttp.ClientSession() as http:
        url = await process.ready()
        async with http.post(url + "/v1/chat/completions", json=long, headers=bearer()) as response:
            await response.content.readline()
            process.signal(signal.SIGTERM)
            lines = [line async for line in response.content if line.strip()]
        assert json.loads(lines[-1].removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
        assert (await process.end())[0] == 0


async def test_a_taken_port_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = await run(tmp_path, "serve", "--port", str(port), "--model", "missing.gguf")
    assert (code, out) == (3, "")
    assert err == f"fairhearth: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


async def test_an_address_of_another_machine_is_told(tmp_path: Path) -> None:
    code, _, err = await run(tmp_path, *SIMULATED, "--host", "192.0.2.1")
    assert code == 3
    assert "cannot listen on 192.0.2.1" in err


async def test_a_model_file_that_is_missing_is_named(tmp_path: Path) -> None:
    code, out, err = await run(tmp_path, "serve", "--port", "0", "--model", "missing.gguf")
    assert (code, out) == (4, "")
    assert "missing.gguf" in err
    assert "Traceback" not in err


async def test_a_cache_larger_than_all_memory_is_refused_as_the_doctor_does(tmp_path: Path) -> None:
    tokens = 2**30
    code, out, err = await run(tmp_path, "serve", "--port", "0", "--context-tokens", str(tokens))
    assert (code, out) == (4, "")
    assert f"GiB with a cache of {tokens:,} tokens; " in err
    assert re.search(
        r"of memory are free; (set model\.context_tokens to \d+ or less|use a smaller model)", err
    )
    assert "Traceback" not in err


async def test_one_of_several_models_that_can_never_fit_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "fairhearth.toml").write_text(
        "[[models]]\nname = 'small'\ncontext_tokens = 1024\nrequantise = false\n"
        f"[[models]]\nname = 'large'\ncontext_tokens = {2**30}\n",
        encoding="utf-8",
    )
    async with command(tmp_path, "serve", "--port", "0") as process:
        await process.ready()
        process.signal(signal.SIGTERM)
        code, _, err = await process.end()
    assert code == 0
    assert "The model large cannot be used" in err
    assert "of memory are free" in err


class NeverLoaded:
    """A source whose model somebody wants to load."""

    def describe(self) -> Language:
        raise AssertionError

    def open(self, tell: Tell) -> Backend:
        raise ModelError("it was to be loaded")


@pytest.mark.parametrize(
    ("free", "whole", "more", "told"),
    [
        (2**60, 2**60, {}, []),
        (2**20, 2**60, {}, ["memory may run out"]),
        (2**20, None, {}, ["memory may run out"]),
        (2**20, 2**20, {"llama.attention.sliding_window": 512}, ["memory may run out"]),
    ],
    ids=["plenty", "tight", "unknown", "layers that remember less"],
)
def test_what_may_still_fit_is_loaded_and_told_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    whole: int | None,
    more: dict[str, int],
    told: list[str],
) -> None:
    monkeypatch.setattr(opening, "available_bytes", lambda: free)
    monkeypatch.setattr(opening, "whole_bytes", lambda: whole)
    settings = ModelSettings(path=llama(tmp_path / "some.gguf", **more))
    progress: list[str] = []
    source = opening._Measured(NeverLoaded(), settings, progress.append)
    with pytest.raises(ModelError, match="it was to be loaded"):
        source.open(lambda _: None)
    assert [line.partition(":")[0] for line in progress] == told


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed here")
@pytest.mark.parametrize("backend", ["exllamav2", "exllamav3"])
async def test_a_backend_whose_packages_are_missing_is_told(tmp_path: Path, backend: str) -> None:
    code, out, err = await run(tmp_path, "serve", "--backend", backend, "--port", "0")
    assert (code, out) == (4, "")
    assert f"the backend {backend} needs Python packages that are not installed here: torch, {backend}" in err
    assert "Traceback" not in err


async def test_a_model_file_that_holds_no_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    code, out, err = await run(tmp_path, "serve", "--port", "0", "--model", "broken.gguf")
    assert (code, out) == (4, "")
    assert "broken.gguf" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nport = 'eight'", "server.port must be a whole number from 0 to 65535, not 'eight'"),
        ("[server", "is not valid TOML"),
        ("[policy]\ndue_window_s = nan", "policy.due_window_s must be a number >= 0, not NaN"),
        ("[residents.alice]\nweight = 0", "residents.alice: weight must be"),
    ],
)
async def test_a_bad_setting_stops_the_start_with_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
    code, out, err = await run(tmp_path, *SIMULATED, "--config", "bad.toml")
    assert (code, out) == (2, "")
    assert err.startswith("fairhearth: bad.toml: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [(), ("fly",), ("serve", "--port", "x"), ("serve", "--backend", "cuda"), (*SIMULATED, "--threads", "0")],
)
async def test_wrong_usage_is_told(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, out, err = await run(tmp_path, *arguments)
    assert (code, out) == (2, "")
    assert "fairhearth" in err
    assert "Traceback" not in err


def kept_secretly(path: Path) -> str:
    """Return the file's text after making sure that only its owner can get at it."""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    return path.read_text(encoding="ascii").strip()


async def test_the_first_start_makes_a_token_and_the_next_ones_keep_it(tmp_path: Path) -> None:
    async with command(tmp_path, *SIMULATED, token=None) as process:
        url = await process.ready()
        code, out, _ = await run(tmp_path, "token", token=None)
        token = kept_secretly(Path(out.strip()))
        assert code == 0
        assert (await ask(url, "/v1/engine", token=token))[0] == 200
        assert (await ask(url, "/v1/engine", token=token + "x"))[0] == 401
        process.signal(signal.SIGTERM)
        _, _, err = await process.end()
        assert err.count(token) == 1
    async with command(tmp_path, *SIMULATED, token=None) as process:
        url = await process.ready()
        assert (await ask(url, "/v1/engine", token=token))[0] == 200
        process.signal(signal.SIGTERM)
        _, _, err = await process.end()
        assert token not in err


async def test_fairhearth_token_tells_about_a_token_that_is_not_made_yet(tmp_path: Path) -> None:
    code, out, _ = await run(tmp_path, "token", token=None)
    assert code == 0
    assert out.strip().endswith("token (made when the engine first starts)")


async def test_a_damaged_residents_file_stops_the_start_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "residents.json").write_text("{", encoding="utf-8")
    code, _, err = await run(tmp_path, *SIMULATED, "--state-dir", str(tmp_path))
    assert code == 2
    assert "residents.json: it is not JSON" in err


async def test_a_resident_in_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "residents.json").write_text('{"alice": 1}', encoding="utf-8")
    code, _, err = await run(tmp_path, *SIMULATED, "--state-dir", str(tmp_path))
    assert code == 2
    assert "residents.json: alice must be an object, not 1; delete the file" in err


async def test_a_device_for_a_backend_that_has_none_is_refused(tmp_path: Path) -> None:
    code, _, err = await run(tmp_path, *SIMULATED, "--device", "cuda")
    assert code == 2
    assert "--device is for the backend exllamav2, not simulated; leave it out" in err


@pytest.mark.parametrize("policy", ["fairhearth", "fifo"])
async def test_the_policy_can_be_chosen(tmp_path: Path, policy: str) -> None:
    async with command(tmp_path, *SIMULATED, "--policy", policy) as process:
        url = await process.ready()
        assert (await ask(url, "/v1/engine"))[1]["policy"] == policy
        assert (await ask(url, "/v1/chat/completions", HELLO))[0] == 200


async def test_everything_the_scheduler_saw_can_be_written_down(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    async with command(tmp_path, *SIMULATED, "--event-log", str(log)) as process:
        await ask(await process.ready(), "/v1/chat/completions", HELLO)
        process.signal(signal.SIGTERM)
        assert (await process.end())[0] == 0
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert "Arrived" in json.dumps(lines)


async def test_one_event_log_is_written_by_one_engine(tmp_path: Path) -> None:
    log = ("--event-log", str(tmp_path / "events.jsonl"))
    async with command(tmp_path, *SIMULATED, *log) as process:
        await process.ready()
        code, out, err = await run(tmp_path, *SIMULATED, *log, "--state-dir", str(tmp_path / "other"))
    assert (code, out) == (2, "")
    assert "events.jsonl: another engine writes its event log there" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("log", ["nodir/events.jsonl", "/"])
async def test_an_event_log_that_cannot_be_written_is_told_in_one_line(tmp_path: Path, log: str) -> None:
    code, out, err = await run(tmp_path, *SIMULATED, "--event-log", log)
    assert (code, out) == (2, "")
    assert err.startswith("fairhearth: ")
    assert "the event log cannot be written" in err
    assert err.count("\n") == 1


async def test_a_second_engine_on_a_state_folder_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    async with command(tmp_path, *SIMULATED) as process:
        url = await process.ready()
        code, out, err = await run(tmp_path, *SIMULATED)
        assert (code, out) == (2, "")
        assert "another engine serves from this state folder: process " in err
        assert f" at {url}; end it, or give this one a folder of its own" in err
        process.signal(signal.SIGKILL)
        await process.end()
    async with command(tmp_path, *SIMULATED) as process:
        assert await process.ready(), "the lock ends with the process"


async def test_a_state_folder_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "engine.lock").mkdir()
    code, out, err = await run(tmp_path, *SIMULATED, "--state-dir", str(tmp_path))
    assert (code, out) == (2, "")
    assert "engine.lock: cannot be written: Is a directory" in err


@pytest.mark.parametrize("left", [b"", b"\n", b"0123456789abcdef", b"not an id\n", b"\xff" * 33])
async def test_an_engine_id_that_is_damaged_is_not_replaced_in_silence(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "engine_id").write_bytes(left)
    code, out, err = await run(tmp_path, *SIMULATED, "--state-dir", str(tmp_path))
    assert (code, out) == (2, "")
    assert "engine_id: is damaged" in err
    assert "delete it to have a new one made" in err
    assert (tmp_path / "engine_id").read_bytes() == left


async def test_an_empty_file_of_jobs_is_told(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite3").touch()
    for is_told in (True, False):
        async with command(tmp_path, *SIMULATED, "--state-dir", str(tmp_path)) as process:
            url = await process.ready()
            await ask(url, "/v1/jobs")
            process.signal(signal.SIGTERM)
            _, _, err = await process.end()
        assert ("jobs.sqlite3 is empty: the jobs that it held are lost" in err) is is_told


async def test_a_port_that_an_engine_holds_is_told_and_nothing_is_made_or_shown(tmp_path: Path) -> None:
    async with command(tmp_path, *SIMULATED) as process:
        port = (await process.ready()).rpartition(":")[2]
        fresh = tmp_path / "fresh"
        arguments = ("serve", "--backend", "simulated", "--port", port, "--state-dir", str(fresh))
        code, out, err = await run(tmp_path, *arguments, token=None)
    assert (code, out) == (3, "")
    assert f"port {port}: Address already in use by fairhearth {__version__}" in err
    assert err.count("\n") == 1
    assert not fresh.exists()


async def test_a_token_that_others_could_read_is_made_private_and_told(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("a-token-that-was-copied-here\n", encoding="ascii")
    path.chmod(0o666)
    _, out, _ = await run(tmp_path, "doctor", "--json", "--state-dir", str(tmp_path), token=None)
    assert f"others may read {path}" in out
    async with command(tmp_path, *SIMULATED, "--state-dir", str(tmp_path), token=None) as process:
        await process.ready()
        process.signal(signal.SIGTERM)
        _, _, err = await process.end()
    assert "could be read by others and was made private" in err
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_log_lines_can_be_json(tmp_path: Path) -> None:
    (tmp_path / "fairhearth.toml").write_text("[log]\nformat = 'json'", encoding="utf-8")
    async with command(tmp_path, *SIMULATED) as process:
        await ask(await process.ready(), "/v1/chat/completions", HELLO)
        process.signal(signal.SIGTERM)
        _, _, err = await process.end()
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    ended = next(line for line in lines if line["message"].startswith("Request r000001 "))
    assert ended["message"] == "Request r000001 of guest (chat) finished"
    assert (ended["request_id"], ended["resident"], ended["workload_class"]) == ("r000001", "guest", "chat")


class Interrupted:
    """An import system in which somebody presses Ctrl-C while the command is being read."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "engine_service.cli":
            raise KeyboardInterrupt


def test_an_interrupt_while_the_command_is_being_read_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "engine_service.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert __main__.main() == 130
    assert capsys.readouterr().err == "fairhearth: interrupted\n"


def test_the_installed_command_begins_where_an_interrupt_is_heard() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"fairhearth": "engine_service.__main__:main"}


def test_an_interrupt_speaks_of_an_engine_only_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulator, "run_simulate", interrupted)
    assert cli.main(["simulate", "H1"]) == 130
    assert capsys.readouterr().err == "fairhearth: interrupted\n"
    monkeypatch.setattr(cli, "_serve", interrupted)
    assert cli.main(["serve", "--state-dir", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "fairhearth: interrupted before the engine was ready\n"


async def test_nothing_that_was_said_is_logged(tmp_path: Path) -> None:
    async with command(tmp_path, *SIMULATED, "--log-level", "debug") as process:
        url = await process.ready()
        secret = {"messages": [{"role": "user", "content": "the-cat-is-called-Minka"}], "max_tokens": 2}
        await ask(url, "/v1/chat/completions", secret)
        await ask(url, "/v1/chat/completions", {**secret, "max_tokens": 0})
        process.signal(signal.SIGTERM)
        _, _, err = await process.end()
    assert "Minka" not in err


async def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    code, out, _ = await run(tmp_path, "--version")
    assert (code, out) == (0, f"fairhearth {__version__}\n")
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{__version__}"\n' in project
