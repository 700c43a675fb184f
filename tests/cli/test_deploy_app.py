"""The image for a processor and the Home Assistant app start the engine that there is."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import socket
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest

from engine_service import __version__
from engine_service.cli import _parser
from engine_service.settings import ServerSettings
from tests.cli.process import TOKEN, command

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
APP = DEPLOY / "home-assistant-app"
PORT = ServerSettings().port


def start_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("app_start", APP / "start.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def top_level(text: str) -> dict[str, str]:
    """Return the keys of a YAML file that stand alone on a line, with what follows them."""
    return dict(re.findall(r"^(\w+): *(.*)$", text, re.MULTILINE))


def test_the_image_for_a_processor_starts_the_engine_with_options_that_it_has() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    words: list[str] = []
    for name in ("ENTRYPOINT", "CMD"):
        words += json.loads(re.findall(rf"^{name} (\[.*\])$", text, re.MULTILINE)[-1])
    assert words[0] == "fairhearth"
    options = _parser().parse_args(words[1:])
    assert (options.backend, options.host, str(options.state_dir)) == ("llama_cpp", "0.0.0.0", "/state")
    assert f"http://127.0.0.1:{PORT}/health" in text
    assert text.index("USER fairhearth") > text.rindex("\nRUN ")
    assert "TOKEN" not in text


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_is_built_from_everything_that_the_package_needs(name: str) -> None:
    text = (DEPLOY / name).read_text()
    copied = [path for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for path in line.split()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for needed in (*wheel["packages"], *wheel["force-include"], project["project"]["readme"], "LICENSE"):
        assert any(needed == path or needed.startswith(f"{path}/") for path in copied), needed
    assert all((ROOT / path).exists() for path in copied)


def test_the_app_has_the_engines_version_and_an_explanation_of_every_option() -> None:
    config = (APP / "config.yaml").read_text()
    assert top_level(config)["version"] == f'"{__version__}"'
    assert f":{PORT}/" in top_level(config)["watchdog"]
    schema = re.findall(r"^  (\w+):", config[config.index("\nschema:") :], re.MULTILINE)
    told = re.findall(r"^  (\w+):$", (APP / "translations" / "en.yaml").read_text(), re.MULTILINE)
    assert sorted(schema) == sorted(told)
    defaults = re.findall(
        r"^  (\w+):", config[config.index("\noptions:") : config.index("\nschema:")], re.MULTILINE
    )
    assert set(defaults) < set(schema)


@pytest.mark.parametrize(
    "more", [{}, {"model": "models/some.gguf", "threads": 3}, {"model": "", "engine_elsewhere": ""}]
)
def test_the_apps_options_become_a_command_that_the_engine_understands(more: dict[str, Any]) -> None:
    program, *words = start_program().arguments({"context_tokens": 4096, "log_level": "info", **more})
    assert program == "fairhearth"
    options = _parser().parse_args(words)
    assert (options.command, options.port, options.context_tokens) == ("serve", PORT, 4096)
    assert str(options.state_dir).startswith("/data/"), "what is kept is part of the backup"
    assert options.model == (Path("/share/models/some.gguf") if more.get("model") else None)
    assert options.threads == more.get("threads")


async def test_the_app_hands_streams_on_to_an_engine_elsewhere_and_leaves_with_the_client(
    tmp_path: Path,
) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    message = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True, "stream": True}
    async with command(tmp_path, "serve", "--backend", "simulated", "--port", "0") as process:
        far = await process.ready()
        server = await start_program().relay(
            "127.0.0.1", int(far.rpartition(":")[2]), listen="127.0.0.1", on=0
        )
        near = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, aiohttp.ClientSession(headers=headers) as http:
            short = message | {"max_tokens": 5}
            async with http.post(f"{near}/v1/chat/completions", json=short) as response:
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            long = message | {"max_tokens": 4000}
            async with http.post(f"{near}/v1/chat/completions", json=long) as response:
                await response.content.readline()
                response.close()
            async with asyncio.timeout(30):
                running = 1
                while running:
                    async with http.get(f"{far}/v1/fairness") as response:
                        running = (await response.json())["engine"]["requests_running"]


async def test_the_app_ends_a_connection_when_nobody_answers_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens, and no other process can
        port = taken.getsockname()[1]
        server = await start_program().relay("127.0.0.1", port, listen="127.0.0.1", on=0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            assert await reader.read() == b""
            writer.close()
    assert f"127.0.0.1:{port} does not answer" in capsys.readouterr().err
