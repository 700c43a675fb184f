"""The commands that look: plan, models, policy check, config init, doctor, top. As somebody types them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import socket
import stat
import struct
import tomllib
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine_service.backends.base import ModelError
from engine_service.commands.config import keys, template
from engine_service.commands.policy import notes
from engine_service.footprint import footprint_of
from engine_service.protocol import ResidentRequest
from engine_service.scheduling.model import ClassPolicy, Policy, ResidencyPolicy
from engine_service.settings import (
    ExLlamaV2Settings,
    ExLlamaV3Settings,
    LogSettings,
    ModelSettings,
    NamedModel,
    PathSettings,
    ServerSettings,
    load,
)
from tests.cli.process import START_S, TOKEN, command, run

SIMULATED = ("serve", "--backend", "simulated", "--port", "0")
GIB = 2**30
TERMINAL = {"FORCE_COLOR": "1", "TERM": "xterm"}
"""What is shown live is written at once, not at the end."""


def gguf(path: Path, *, num_values: int = 0, kind: int = 0, **entries: int | str) -> Path:
    """Write a header as llama.cpp's converter does, and two MiB of nothing.

    With num_values the header knows of one tensor of that many values, of ggml's type kind.
    """

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    body = b"GGUF" + struct.pack("<IQQ", 3, bool(num_values), len(entries))
    for key, value in entries.items():
        body += text(key)
        body += struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<II", 4, value)
    if num_values:
        body += text("token_embd.weight") + struct.pack("<IQIQ", 1, num_values, kind, 0)
    path.write_bytes(body + bytes(-len(body) % 32) + bytes(2 * 2**20))
    return path


def llama(path: Path, *, num_values: int = 0, kind: int = 0, **more: int | str) -> Path:
    entries: dict[str, int | str] = {
        "general.architecture": "llama",
        "llama.block_count": 32,
        "llama.embedding_length": 4096,
        "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": 8,
        "llama.context_length": 131_072,
    }
    return gguf(path, num_values=num_values, kind=kind, **(entries | more))


def folder(path: Path, **config: Any) -> Path:
    path.mkdir()
    known = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "max_position_embeddings": 32_768,
    }
    (path / "config.json").write_text(json.dumps(known | config), encoding="utf-8")
    header = json.dumps({"w": {"dtype": "U8", "shape": [2 * 2**20], "data_offsets": [0, 2 * 2**20]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(2 * 2**20))
    return path


def shorten(path: Path, num_bytes: int = 1) -> None:
    """Take the last bytes away, as an interrupted download does."""
    os.truncate(path, path.stat().st_size - num_bytes)


# -- plan and models -----------------------------------------------------------------------------------


async def test_a_plan_says_what_fits_and_what_a_long_conversation_costs_the_others(tmp_path: Path) -> None:
    llama(tmp_path / "some.gguf")
    arguments = ("plan", "--model", "some.gguf", "--vram", "4", "--max-sequences", "9", "--json")
    code, out, err = await run(tmp_path, *arguments)
    assert (code, err) == (0, "")
    plan = json.loads(out)
    # 32 layers, 8 heads of 128 values, keys and values, 16 bits: 128 KiB a token.
    assert plan["cache_bytes"] == plan["cache_tokens"] * 131_072
    assert 4 * GIB - 256 * 131_072 < plan["needed_bytes"] <= 4 * GIB
    parts = ("weight_bytes", "cache_bytes", "overhead_bytes", "parking_bytes")
    assert plan["needed_bytes"] == sum(plan[part] for part in parts)
    by_length = {fit["context_tokens"]: fit for fit in plan["conversations"]}
    assert by_length[512]["active"] == 8, "one of nine places is kept for speech"
    pages = plan["cache_tokens"] // 32 - 16
    assert by_length[8192] == {
        "context_tokens": 8192,
        "pages": 256,
        "active": pages // 256,
        "beside": min(7, (pages - 256) // 32),
    }
    beside = [fit["beside"] for fit in plan["conversations"]]
    assert beside == sorted(beside, reverse=True), "the longer one is, the less is left"


@pytest.mark.parametrize("context_tokens", [128, 700, 4096])
async def test_a_plan_counts_the_pages_that_the_engine_then_has(tmp_path: Path, context_tokens: int) -> None:
    size = ("--context-tokens", str(context_tokens))
    code, out, _ = await run(tmp_path, "plan", *size, "--json")
    assert code == 0
    plan = json.loads(out)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with command(tmp_path, "serve", "--port", "0", *size) as process:
        url = await process.ready()
        async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{url}/v1/capacity") as answer:
            capacity = await answer.json()
    assert plan["cache_tokens"] == capacity["kv_pages_total"] * capacity["page_tokens"]
    assert plan["max_context_tokens"] == capacity["max_context_tokens"]
    assert plan["parking_bytes"] == capacity["parking_bytes"] == 256 * 2**20


async def test_a_plan_names_the_memory_that_idle_conversations_are_kept_in(tmp_path: Path) -> None:
    llama(tmp_path / "some.gguf")
    code, out, _ = await run(tmp_path, "plan", "--model", "some.gguf")
    assert code == 0
    assert "for computing + up to 256 MiB for idle conversations =" in " ".join(out.split())


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("prefix_share = 0.9999", "no conversation fits: every voice request would be refused"),
        ("[policy.classes.chat]\nmax_context_tokens = 1", "policy.classes.chat.max_context_tokens is 1"),
    ],
)
async def test_a_plan_in_which_nothing_fits_is_none(tmp_path: Path, policy: str, words: str) -> None:
    (tmp_path / "fairhearth.toml").write_text(f"[policy]\n{policy}\n", encoding="utf-8")
    code, out, err = await run(tmp_path, "plan")
    assert (code, out) == (1, "")
    assert words in err


async def test_a_smaller_cache_type_makes_room_for_more(tmp_path: Path) -> None:
    folder(tmp_path / "exl")
    tokens = {}
    for cache_type in ("fp16", "q4"):
        arguments = ("plan", "--model", "exl", "--vram", "4", "--cache-type", cache_type, "--json")
        code, out, _ = await run(tmp_path, *arguments)
        assert code == 0
        tokens[cache_type] = json.loads(out)["cache_tokens"]
        assert tokens[cache_type] % 256 == 0
    assert 3.5 < tokens["q4"] / tokens["fp16"] < 3.6


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--vram", "0.1"), "does not fit: it takes at least"),
        (("--vram", "1", "--context-tokens", "100000"), "is room for "),
    ],
)
async def test_what_does_not_fit_is_said_with_what_would(
    tmp_path: Path, more: tuple[str, ...], words: str
) -> None:
    llama(tmp_path / "some.gguf")
    code, out, err = await run(tmp_path, "plan", "--model", "some.gguf", *more)
    assert (code, out) == (1, "")
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--vram", "none"), "must be GiB > 0, for example 24, not 'none'"),
        (("--cache-type", "q3"), "invalid choice: 'q3'"),
        (("--context-tokens", "1"), "--context-tokens must be a whole number from 128 to 1073741824, not 1"),
    ],
)
async def test_wrong_usage_of_plan_is_told(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = await run(tmp_path, "plan", *arguments)
    assert code == 2
    assert words in err


async def test_models_lists_what_is_there_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    llama(tmp_path / "good.gguf")
    gguf(tmp_path / "odd.gguf", **{"general.architecture": "llama"})
    (tmp_path / "torn.gguf").write_bytes(b"GGUF" + bytes(3))
    folder(tmp_path / "exl", head_dim=64)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "fairhearth.toml").write_text("[model]\npath = 'good.gguf'\n", encoding="utf-8")
    code, out, _ = await run(tmp_path, "models", str(tmp_path), "--vram", "24", "--json")
    assert code == 0
    found = {Path(entry["path"]).name: entry for entry in json.loads(out)["models"]}
    assert found["good.gguf"]["is_configured"] is True
    assert found["good.gguf"]["room_tokens"] > 150_000
    assert found["exl"]["cache_bytes_per_1000_tokens"] == 1000 * 2 * 32 * 8 * 64 * 2
    assert "attention.head_count" in found["odd.gguf"]["error"]
    assert "cut short (a number goes beyond the end of the file)" in found["torn.gguf"]["error"]
    assert "no *.safetensors files" in found["empty"]["error"]
    assert any("SmolLM2" in name for name in found), "the embedded model is there"
    code, out, _ = await run(tmp_path, "models", str(tmp_path), "--vram", "24")
    assert code == 0
    assert "attention.head_count" in " ".join(out.split())


@pytest.mark.parametrize(
    ("num_values", "kind"),
    [(2**19, 0), (2**20, 1), (2**20, 30), (2**21 // 34 * 32, 8), (2**21 // 144 * 256, 12)],
    ids=["F32", "F16", "BF16", "Q8_0", "Q4_K"],
)
async def test_a_model_file_that_is_cut_short_is_found(tmp_path: Path, num_values: int, kind: int) -> None:
    whole = footprint_of(llama(tmp_path / "some.gguf", num_values=num_values, kind=kind))
    assert whole.name == "some"
    size = (tmp_path / "some.gguf").stat().st_size
    shorten(tmp_path / "some.gguf", 144)
    with pytest.raises(ModelError, match=f"cut short: {size - 144} bytes instead of .*fetch it again"):
        footprint_of(tmp_path / "some.gguf")


async def test_a_file_with_tensors_of_a_type_that_is_not_known_here_is_left_to_llama_cpp(
    tmp_path: Path,
) -> None:
    assert footprint_of(llama(tmp_path / "some.gguf", num_values=2**40, kind=99)).name == "some"


async def test_every_command_that_looks_finds_a_model_file_cut_short(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    shorten(llama(tmp_path / "m" / "some.gguf", num_values=2**19))
    shorten(folder(tmp_path / "m" / "exl") / "model.safetensors")
    code, out, _ = await run(tmp_path, "models", "m", "--json")
    errors = {Path(entry["path"]).name: entry.get("error", "") for entry in json.loads(out)["models"]}
    assert "the file is cut short" in errors["some.gguf"]
    assert "the file is cut short" in errors["exl"]
    code, _, err = await run(tmp_path, "plan", "--model", "m/some.gguf")
    assert code != 0
    assert "the file is cut short" in err
    code, found = await examined(tmp_path, "[model]\npath = 'm/some.gguf'\n")
    assert code == 1
    assert "the file is cut short" in found["model"]["what"]


async def test_a_model_in_several_files_is_counted_and_checked_as_a_whole(tmp_path: Path) -> None:
    first = llama(tmp_path / "some-00001-of-00002.gguf", **{"split.count": 2})
    with pytest.raises(ModelError, match=r"some-00002-of-00002\.gguf: the file cannot be read"):
        footprint_of(first)
    second = gguf(tmp_path / "some-00002-of-00002.gguf", num_values=2**19)
    assert footprint_of(first).weight_bytes == first.stat().st_size + second.stat().st_size
    shorten(second)
    with pytest.raises(ModelError, match=r"some-00002-of-00002\.gguf: the file is cut short"):
        footprint_of(first)


SEVERAL = """
[[models]]
name = "house"
path = "good.gguf"
pinned = true
[[models]]
name = "coder"
path = "other.gguf"
context_tokens = 16384
[residency]
max_loaded = MAX
"""


async def test_models_tells_which_names_a_file_has_and_whether_they_fit_together(tmp_path: Path) -> None:
    llama(tmp_path / "good.gguf")
    llama(tmp_path / "other.gguf")
    (tmp_path / "fairhearth.toml").write_text(SEVERAL.replace("MAX", "2"), encoding="utf-8")
    code, out, _ = await run(tmp_path, "models", "--vram", "24", "--json")
    assert code == 0
    told = json.loads(out)
    found = {Path(entry["path"]).name: entry for entry in told["models"]}
    assert found["good.gguf"]["configured_as"] == ["house"]
    assert found["other.gguf"]["is_configured"] is True
    assert told["together"]["models"] == ["house", "coder"]
    both = told["together"]["needed_bytes"]
    code, out, _ = await run(tmp_path, "models", "--vram", "24")
    assert code == 0
    assert "At most 2 are in memory at once (house stays)" in " ".join(out.split())
    code, _, err = await run(tmp_path, "models", "--vram", str(both / 2**30 * 0.9))
    assert code == 1
    assert "lower residency.max_loaded" in err
    (tmp_path / "fairhearth.toml").write_text(SEVERAL.replace("MAX", "1"), encoding="utf-8")
    code, out, _ = await run(tmp_path, "models", "--vram", str(both / 2**30 * 0.9), "--json")
    assert json.loads(out)["together"]["models"] == ["house"]


async def test_a_plan_is_made_of_a_model_by_its_name(tmp_path: Path) -> None:
    llama(tmp_path / "good.gguf")
    llama(tmp_path / "other.gguf")
    (tmp_path / "fairhearth.toml").write_text(SEVERAL.replace("MAX", "2"), encoding="utf-8")
    for arguments, name, tokens in (
        ((), "good", 8192),
        (("--model", "coder"), "other", 16384),
        (("--model", "coder", "--context-tokens", "4096"), "other", 4096),
    ):
        code, out, _ = await run(tmp_path, "plan", *arguments, "--json")
        assert code == 0
        plan = json.loads(out)
        assert (plan["model"], plan["cache_tokens"]) == (name, tokens)
    _, out, _ = await run(tmp_path, "plan")
    assert "fairhearth plan --model NAME, of house, coder" in " ".join(out.split())


async def test_the_doctor_looks_at_every_model(tmp_path: Path) -> None:
    llama(tmp_path / "good.gguf")
    (tmp_path / "fairhearth.toml").write_text(SEVERAL.replace("MAX", "2"), encoding="utf-8")
    _, out, _ = await run(tmp_path, "doctor", "--json")
    told = [f["what"] for f in json.loads(out)["findings"] if f["about"] == "model"]
    assert told[0].startswith("house: good")
    assert told[1].startswith("coder: ")
    assert "no such file" in told[1]


CROWDED = """
[[models]]
name = "house"
backend = "simulated"
pinned = true
[[models]]
name = "coder"
backend = "simulated"
"""


@pytest.mark.parametrize(
    ("residency", "is_told"),
    [("", True), ("[residency]\nmax_loaded = 2", False), ("[residency]\nreleases_pinned = true", False)],
)
async def test_a_model_that_can_never_be_loaded_is_told(
    tmp_path: Path, residency: str, is_told: bool
) -> None:
    path = tmp_path / "fairhearth.toml"
    path.write_text(CROWDED + residency, encoding="utf-8")
    words = "coder can never be loaded"
    assert any(note.startswith(words) for note in notes(load(path))) is is_told
    code, out, _ = await run(tmp_path, "doctor", "--json")
    findings = {finding["about"]: finding for finding in json.loads(out)["findings"]}
    assert code == 0, "the others are served"
    assert ("models" in findings) is is_told
    if is_told:
        assert findings["models"]["what"].startswith(words)
        assert findings["models"]["advice"].startswith("raise that")
    async with command(tmp_path, "serve", "--port", "0") as process:
        await process.ready()
        process.signal(signal.SIGTERM)
        _, _, err = await process.end()
    assert (words in err) is is_told


# -- policy check and config init ----------------------------------------------------------------------


async def test_a_policy_that_is_right_is_told_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "house.toml").write_text(
        "[policy]\nbackground_reserve = 0.2\nvoice_headroom_pages = 0\n"
        "[policy.classes.chat]\nmax_wait_s = 5\n"
        "[residents.alice]\nname = 'Alice'\nweight = 2\ndaily_tokens = 100\ndaily_is_hard = true\n"
        "rolling_tokens = 50\nrolling_window_s = 60\n",
        encoding="utf-8",
    )
    code, out, err = await run(tmp_path, "policy", "check", "house.toml")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "background_reserve: 0.1 -> 0.2" in text
    assert "classes.chat.max_wait_s: 30.0 -> 5" in text
    assert "Alice 2 50 % 100 a day, then refused; 50 in 60 s, then as background none" in text
    assert "voice_headroom_pages is 0" in text
    assert "sequences" not in text
    assert "Alice has 100 tokens a day" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[policy]\nprefix_share = 0.9999",
            "every voice request would be refused: at most 0 tokens would fit",
        ),
        (
            "[policy]\nvoice_headroom_pages = 9999",
            "voice_headroom_pages is 9999 of 256 pages: a quarter at most is kept free, so 64 are",
        ),
        ("[policy]\nvoice_headroom_sequences = 16", "is 16 of 16: 1 other request runs at a time"),
        (
            "[policy.classes.voice]\nmax_context_tokens = 100",
            "more than 100 tokens are refused; policy.classes.voice.max_context_tokens is 100",
        ),
        ("[server]\nusers = {x = 'nobody'}", "server.users: 'x' is 'nobody', who has no table"),
        ("[residents.al]\nname = 'Al'\n[residents.alan]\nname = 'al'", "al and alan are both shown as al"),
    ],
)
async def test_what_is_probably_not_meant_is_noted(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "house.toml").write_text(text, encoding="utf-8")
    code, out, err = await run(tmp_path, "policy", "check", "house.toml")
    assert (code, err) == (0, "")
    assert words in " ".join(out.split())


def test_a_token_of_somebody_who_is_not_there_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "house.toml"
    path.write_text(
        "[[server.tokens]]\nname = 'hall'\ntoken = 'a-token-of-the-hall'\nscopes = ['generate']\n"
        "resident = 'nobody'\n",
        encoding="utf-8",
    )
    (note,) = notes(load(path, environment={}))
    assert note.startswith("the token 'hall' acts for 'nobody', who has no table")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[policy]\nprefill_cost = 0\ndecode_cost = 0", "must not both be 0: nobody would be charged"),
        ("[policy]\nbackground_reserve = 1.5", "policy: background_reserve must be in [0, 1), not 1.5"),
        ("[policy]\nbackround_reserve = 0.1", "policy.backround_reserve"),
        ("[policy.classes.video]\nmax_wait_s = 1", "policy.classes.video"),
        ("[residents.alice]\nweight = -1", "residents.alice: weight"),
        ("[policy]\ntime_zone = 'Mars/Base'", "policy.time_zone must be an IANA time zone"),
    ],
)
async def test_a_mistake_in_a_policy_is_named_with_file_and_key(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "house.toml").write_text(text, encoding="utf-8")
    code, out, err = await run(tmp_path, "policy", "check", "house.toml")
    assert (code, out) == (2, "")
    assert err.startswith("fairhearth: house.toml: ")
    assert words in err


async def test_config_init_writes_a_file_that_changes_nothing_and_replaces_none(tmp_path: Path) -> None:
    code, out, err = await run(tmp_path, "config", "init")
    path = tmp_path / "fairhearth.toml"
    assert (code, err) == (0, "")
    assert "fairhearth.toml explains every key" in out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "a token may be written into it"
    assert load(path, environment={}) == load(None, environment={"FAIRHEARTH_CONFIG": "/dev/null"})
    code, out, err = await run(tmp_path, "config", "init")
    assert (code, out) == (1, "")
    assert "is there already; --force replaces it" in err
    assert (await run(tmp_path, "config", "init", "--force"))[0] == 0
    code, out, _ = await run(tmp_path, "config", "init", "-")
    assert (code, out) == (0, path.read_text(encoding="utf-8"))
    code, _, err = await run(tmp_path, "config", "init", "no/such/folder.toml")
    assert code == 1
    assert "cannot be written: No such file or directory" in err


def uncommented() -> str:
    return re.sub(r"^#(?=[\w.]+ = )", "", template(), flags=re.MULTILINE)


def test_everything_the_settings_file_suggests_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "all.toml"
    path.write_text(uncommented(), encoding="utf-8")
    settings = load(path, environment={})
    assert settings.policy == Policy(), "what is shown as a default is the default"
    assert settings.residents[0].name == "Alice"
    assert len(settings.server.tokens) == 2
    assert ": no default" not in template(), "every key has a default or an example"


def test_a_key_alone_that_is_uncommented_lands_where_it_belongs(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(re.sub(r"^#(?=[\w.]+weight = )", "", template(), flags=re.MULTILINE), encoding="utf-8")
    assert [entry.resident_id for entry in load(path, environment={}).residents] == [
        "alice",
        "guest",
        "house",
    ]


async def test_a_settings_file_needs_a_name(tmp_path: Path) -> None:
    for given in ("", "."):
        code, out, err = await run(tmp_path, "config", "init", given)
        assert (code, out) == (2, "")
        assert ". is a folder; say what the file is to be called, for example fairhearth.toml" in err


@pytest.mark.parametrize("url", ["nonsense", "ftp://there", "http://", "http://[::1", "http://a:99999"])
async def test_an_address_that_is_none_is_refused_in_one_line(tmp_path: Path, url: str) -> None:
    code, out, err = await run(tmp_path, "top", "--once", "--url", url)
    assert (code, out) == (2, "")
    assert err == f"fairhearth: --url must be an address like http://192.168.1.5:8321, not {url!r}\n"


async def test_a_folder_without_models_is_named(tmp_path: Path) -> None:
    code, out, err = await run(tmp_path, "models", "/nope")
    assert (code, out) == (2, "")
    assert "/nope: there is no such folder" in err
    code, out, _ = await run(tmp_path, "models", str(tmp_path))
    assert code == 0
    assert f"No model lies in {tmp_path}" in " ".join(out.split())


def test_every_key_of_the_settings_is_explained() -> None:
    explained: dict[str, set[str]] = {}
    for key in keys():
        assert len(key.meaning) > 10, key
        explained.setdefault(key.table, set()).add(key.name)

    def names(kind: type) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    assert explained["server"] == names(ServerSettings) | {"token"}
    assert explained["model"] == names(ModelSettings) - {"exllamav2", "exllamav3"}
    assert explained["model.exllamav2"] == names(ExLlamaV2Settings)
    assert explained["model.exllamav3"] == names(ExLlamaV3Settings)
    assert explained["models"] == names(NamedModel) - {"settings"}
    assert explained["residency"] == names(ResidencyPolicy)
    assert explained["policy"] == names(Policy) - {"classes"} | {"scheduler", "time_zone"}
    assert explained["policy.classes.NAME"] == names(ClassPolicy)
    assert explained["residents.ID"] == names(ResidentRequest)
    assert explained["paths"] == names(PathSettings) | {"event_log"}
    assert explained["log"] == names(LogSettings)
    assert set(tomllib.loads(uncommented())) == {
        "server",
        "model",
        "residency",
        "policy",
        "residents",
        "paths",
        "log",
    }


# -- doctor --------------------------------------------------------------------------------------------


async def examined(folder: Path, settings: str = "") -> tuple[int, dict[str, dict[str, str]]]:
    """Run the doctor; return its exit code and the worst finding about everything."""
    path = folder / "fairhearth.toml"
    path.write_text(settings, encoding="utf-8")
    code, out, err = await run(folder, "doctor", "--json")
    assert err == ""
    found: dict[str, dict[str, str]] = {}
    order = ("good", "doubtful", "bad")
    for finding in json.loads(out)["findings"]:
        before = found.get(finding["about"])
        if before is None or order.index(finding["grade"]) > order.index(before["grade"]):
            found[finding["about"]] = finding
    assert all(f["advice"] for f in found.values() if f["grade"] != "good"), "whatever is wrong has advice"
    return code, found


async def test_the_doctor_finds_this_machine_fit_to_serve(tmp_path: Path) -> None:
    code, found = await examined(tmp_path, "[server]\nport = 0\n[model]\ncontext_tokens = 2048\n")
    assert code == 0
    assert {"program", "state", "cache", "tokens", "library", "model", "port", "clock", "discovery"} <= set(
        found
    )
    assert "SmolLM2" in found["model"]["what"]
    assert "llama.cpp from" in found["library"]["what"]


@pytest.mark.parametrize(
    ("settings", "about", "words"),
    [
        ("[model]\npath = 'missing.gguf'", "model", "no such file"),
        ("[model]\ncontext_tokens = 900000000", "model", "of memory are free"),
        ("[server]\nhost = '192.0.2.7'", "port", "192.0.2.7:8321"),
        ("[paths]\nstate_dir = 'fairhearth.toml/x'", "state", "is no folder"),
        ("[model]\nbackend = 'exllamav2'\npath = 'missing'", "library", "is missing"),
        ("[model]\nbackend = 'exllamav3'\npath = 'missing'", "library", "is missing"),
    ],
)
async def test_the_doctor_says_what_stops_the_engine(
    tmp_path: Path, settings: str, about: str, words: str
) -> None:
    code, found = await examined(tmp_path, settings)
    assert code == 1
    assert found[about]["grade"] == "bad", found
    assert words in found[about]["what"]


async def test_the_doctor_knows_an_engine_from_a_stranger_on_its_port(tmp_path: Path) -> None:
    async with command(tmp_path, *SIMULATED) as process:
        port = int((await process.ready()).rpartition(":")[2])
        code, found = await examined(tmp_path, f"[server]\nport = {port}\n")
        assert code == 0
        assert "is served by fairhearth" in found["port"]["what"]
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger_port = stranger.getsockname()[1]
        code, found = await examined(tmp_path, f"[server]\nport = {stranger_port}\n")
    assert code == 1
    assert "Address already in use" in found["port"]["what"]


async def test_the_doctor_speaks_to_people_too(tmp_path: Path) -> None:
    code, out, _ = await run(tmp_path, "doctor")
    assert code == 0
    assert "✓ library" in out
    assert out.rstrip().endswith("The engine can serve.")


# -- top -----------------------------------------------------------------------------------------------


async def test_top_shows_who_is_served_and_who_holds_the_memory(tmp_path: Path) -> None:
    (tmp_path / "fairhearth.toml").write_text("[residents.alice]\nname = 'Alice'\n", encoding="utf-8")
    message = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
        "fairhearth": {"resident": "alice", "workload_class": "chat"},
    }
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with command(tmp_path, *SIMULATED) as process, aiohttp.ClientSession(headers=headers) as http:
        url = await process.ready()
        async with http.post(f"{url}/v1/chat/completions", json=message) as response:
            for _ in range(4):
                await response.content.readline()
            async with http.get(f"{url}/v1/capacity") as answer:
                capacity = await answer.json()
            code, out, err = await run(tmp_path, "top", "--url", url, "--once")
        assert (code, err) == (0, "")
        (holder,) = capacity["holders"]
        assert (holder["resident"], holder["workload_class"], holder["requests"]) == ("alice", "chat", 1)
        assert capacity["reclaimable_pages"] == holder["pages"] > 0
        assert capacity["kv_pages_free"] == capacity["kv_pages_total"] - holder["pages"]
        assert all(fit["more_now"] <= fit["active"] for fit in capacity["conversations"])
        assert re.search(r"Alice +1 +0", out)
        assert re.search(r"alice +chat +1 +\d+ +\d+", out)
        assert "policy met" in out
        assert re.search(r"fairness 1\.00, 0 % of its bound, policy met", out)


async def test_top_shows_what_is_paused_and_what_came_in_time(tmp_path: Path) -> None:
    message = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    voice = message | {"fairhearth": {"workload_class": "voice"}}
    async with (
        command(tmp_path, *SIMULATED) as process,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
    ):
        url = await process.ready()
        async with http.patch(
            f"{url}/v1/policy", json={"policy": {"paused_classes": ["background"]}}
        ) as done:
            assert done.status == 200
        async with http.post(f"{url}/v1/chat/completions", json=voice) as answer:
            assert answer.status == 200
        code, out, err = await run(tmp_path, "top", "--url", url, "--once")
        async with http.get(f"{url}/v1/fairness") as answer:
            in_time = (await answer.json())["classes"]["voice"]["slo_attainment"]
    assert (code, err) == (0, "")
    assert re.search(r"background\s+paused", out)
    assert not re.search(r"voice\s+paused", out)
    assert re.search(rf"voice .* {100 * in_time:.0f} %", out), "a busy machine may keep no target"
    assert re.search(r"background .* - ", out), "nobody was promised anything in the background"


async def test_top_follows_the_engine_until_it_ends(tmp_path: Path) -> None:
    async with command(tmp_path, *SIMULATED) as process:
        url = await process.ready()
        async with command(tmp_path, "top", "--url", url, environment=TERMINAL) as watching:
            async with asyncio.timeout(START_S):
                while b"Fairhearth" not in (line := await watching.output_line()):
                    assert line, await watching.errors()
            assert watching.is_running
            process.kill()
            code, _, err = await watching.end()
        assert code in (0, 1)
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--url", "http://127.0.0.1:9"), "does not answer"),
        (("--url", "URL", "--token", "not-a-token-of-anybody"), "--url where another engine is"),
    ],
)
async def test_top_says_why_it_shows_nothing(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    async with command(tmp_path, *SIMULATED) as process:
        url = await process.ready()
        code, out, err = await run(tmp_path, "top", *(url if a == "URL" else a for a in arguments))
    assert (code, out) == (1, "")
    assert words in err
    assert "Traceback" not in err
