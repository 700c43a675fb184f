"""The files in deploy/ start the engine that there is: options, addresses and folders are its own."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from engine_service.cli import _parser
from engine_service.settings import ServerSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PORT = ServerSettings().port


def instruction(name: str) -> list[str]:
    """Return the words of an instruction of the Dockerfile that is written as JSON."""
    text = (DEPLOY / "Dockerfile.cuda").read_text().replace("\\\n", " ")
    words: list[str] = json.loads(re.findall(rf"^{name} .*?(\[.*\])$", text, re.MULTILINE)[-1])
    return words


def test_the_image_starts_the_engine_with_options_that_it_has() -> None:
    program, *arguments = [*instruction("ENTRYPOINT"), *instruction("CMD")]
    assert program == "fairhearth"
    options = _parser().parse_args(arguments)
    assert (options.backend, options.host) == ("exllamav2", "0.0.0.0")
    assert str(options.state_dir) == "/state"
    assert str(options.cache_dir) == "/cache"


def test_the_image_runs_as_a_user_without_privileges_and_holds_no_secret() -> None:
    text = (DEPLOY / "Dockerfile.cuda").read_text()
    assert re.search(r"^USER fairhearth$", text, re.MULTILINE)
    assert text.index("USER fairhearth") > text.rindex("\nRUN ")
    assert "TOKEN" not in text
    for source in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        for path in source.split():
            assert (ROOT / path).exists(), f"{path} is copied and does not exist"


def test_image_and_compose_ask_the_port_that_is_listened_on() -> None:
    compose = (DEPLOY / "compose.yaml").read_text()
    for text in ((DEPLOY / "Dockerfile.cuda").read_text(), compose):
        assert f"http://127.0.0.1:{PORT}/health" in text
    assert f'"{PORT}:{PORT}"' in compose
    assert "capabilities: [gpu]" in compose


def test_the_service_starts_the_engine_with_options_that_it_has() -> None:
    unit = (DEPLOY / "fairhearth-engine.service").read_text()
    program, *arguments = shlex.split(re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)[0])
    assert program.endswith("/fairhearth")
    options = _parser().parse_args(arguments)
    state = re.findall(r"^StateDirectory=(.*)$", unit, re.MULTILINE)[0]
    assert str(options.state_dir) == f"/var/lib/{state}"
    assert re.search(r"^Type=notify$", unit, re.MULTILINE)
