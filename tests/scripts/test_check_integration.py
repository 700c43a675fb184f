"""The local stand-in for Home Assistant's validator finds every mistake, and none where there is none."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LIB = Path(__file__).parents[2] / "scripts" / "lib"

MANIFEST = {
    "domain": "fairhearth",
    "name": "Fairhearth",
    "codeowners": ["@someone"],
    "config_flow": True,
    "documentation": "https://example.com/fairhearth",
    "integration_type": "service",
    "iot_class": "local_push",
    "issue_tracker": "https://example.com/fairhearth/issues",
    "requirements": [],
    "version": "0.1.0",
}
ENGLISH = {
    "config": {
        "step": {"user": {"data": {"url": "URL"}, "data_description": {"url": "Address of the engine"}}},
        "error": {"cannot_connect": "Cannot reach {url}"},
    },
    "entity": {"sensor": {"waiting": {"name": "Waiting"}}},
    "exceptions": {"no_engine": {"message": "No engine"}},
    "services": {
        "set_weight": {
            "name": "Set weight",
            "description": "Change a weight.",
            "fields": {"weight": {"name": "Weight", "description": "A whole number."}},
        }
    },
}
ICONS = {
    "entity": {"sensor": {"waiting": {"default": "mdi:tray-full"}}},
    "services": {"set_weight": {"service": "mdi:scale-balance"}},
}
INIT = """
from homeassistant.exceptions import HomeAssistantError
CONFIG_SCHEMA = None
async def async_setup(hass, config):
    hass.services.async_register("fairhearth", "set_weight", None)
    raise HomeAssistantError(translation_domain="fairhearth", translation_key="no_engine")
"""
SENSOR = 'DESCRIPTION = SensorEntityDescription(key="waiting", translation_key="waiting")\n'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository whose integration has nothing wrong."""
    folder = tmp_path / "custom_components" / "fairhearth"
    (folder / "translations").mkdir(parents=True)
    (folder / "brand").mkdir()
    rules = subprocess.run(
        [sys.executable, "-c", "import integration_rules as r; print(*sorted(r.QUALITY_RULES))"],
        cwd=LIB,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    (tmp_path / "hacs.json").write_text('{"name": "Fairhearth", "homeassistant": "2026.11.0"}')
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    (folder / "translations" / "en.json").write_text(json.dumps(ENGLISH))
    (folder / "icons.json").write_text(json.dumps(ICONS))
    (folder / "services.yaml").write_text("set_weight:\n  fields:\n    weight:\n      required: true\n")
    (folder / "quality_scale.yaml").write_text("rules:\n" + "".join(f"  {rule}: done\n" for rule in rules))
    (folder / "brand" / "icon.png").write_bytes(
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 256, 256)
    )
    (folder / "__init__.py").write_text(INIT)
    (folder / "config_flow.py").write_text("")
    (folder / "sensor.py").write_text(SENSOR)
    return tmp_path


def check(repository: Path) -> list[str]:
    """Return the problems found; the exit status must agree with them."""
    command = [sys.executable, str(LIB / "check_integration.py"), str(repository)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    *problems, last = answer.stdout.splitlines()
    assert last == f"integration files: {len(problems)} problems", answer.stderr
    assert answer.returncode == (1 if problems else 0)
    return problems


def edit(file: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Return a mistake: a change to one JSON file of the integration."""

    def mistake(repository: Path) -> None:
        path = repository / "custom_components" / "fairhearth" / file
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return mistake


def replace(file: str, old: str, new: str) -> Callable[[Path], None]:
    """Return a mistake: other text in one file of the integration."""

    def mistake(repository: Path) -> None:
        path = repository / "custom_components" / "fairhearth" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return mistake


def test_a_clean_integration_has_no_problem(repository: Path) -> None:
    assert check(repository) == []


def test_a_repository_without_the_integration_has_nothing_to_check(tmp_path: Path) -> None:
    command = [sys.executable, str(LIB / "check_integration.py"), str(tmp_path)]
    assert "nothing to check" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


MISTAKES = [
    (edit("manifest.json", lambda m: m.pop("version")), "missing keys: version"),
    (edit("manifest.json", lambda m: m.update(homepage="x")), "unknown keys: homepage"),
    (edit("manifest.json", lambda m: m.update(dependencies=[])), "keys must be in the order"),
    (edit("manifest.json", lambda m: m.update(domain="other")), "the folder is 'fairhearth'"),
    (edit("manifest.json", lambda m: m.update(codeowners=["someone"])), "beginning with @"),
    (edit("manifest.json", lambda m: m.update(documentation="http://x")), "documentation must be an https"),
    (edit("manifest.json", lambda m: m.update(version="one")), "version 'one'"),
    (edit("manifest.json", lambda m: m.update(iot_class="push")), "iot_class 'push'"),
    (edit("manifest.json", lambda m: m.update(requirements=["x>=1"])), "pinned"),
    (replace("manifest.json", '"name": "Fairhearth"', '"name": "A", "name": "B"'), "repeated keys: name"),
    (replace("manifest.json", "{", "{,"), "manifest.json: Expecting"),
    (edit("translations/en.json", lambda t: t.update(confg={})), "confg: unknown key"),
    (edit("translations/en.json", lambda t: t["exceptions"].update(no_engine="x")), "expected an object"),
    (
        edit("translations/en.json", lambda t: t["exceptions"].pop("no_engine")),
        "exceptions.no_engine does not exist",
    ),
    (
        edit("translations/en.json", lambda t: t["entity"].pop("sensor")),
        "entity.sensor.waiting does not exist",
    ),
    (replace("translations/en.json", "No engine", "No <b>engine</b>"), "no HTML"),
    (replace("translations/en.json", "No engine", "See http://x"), "no literal address"),
    (replace("translations/en.json", "No engine", "[%key:common::x%]"), "references are not resolved"),
    (replace("translations/en.json", "No engine", " No engine"), "white space"),
    (
        edit("translations/en.json", lambda t: t["config"]["step"]["user"].pop("data_description")),
        "user.data_description.url is missing",
    ),
    (
        edit("translations/en.json", lambda t: t.pop("services")),
        "translations/en.json: action set_weight is missing",
    ),
    (replace("services.yaml", "weight:\n      ", "amount:\n      "), "field amount is in only one"),
    (replace("services.yaml", "set_weight", "set_share"), "action set_share is named nowhere in the code"),
    (
        edit("icons.json", lambda i: i["services"].pop("set_weight")),
        "icons.json: action set_weight is missing",
    ),
    (replace("icons.json", "mdi:tray-full", "tray"), "is not like mdi:name"),
    (replace("icons.json", '"waiting"', '"paused"'), "entity.sensor.paused has no translation"),
    (replace("__init__.py", "CONFIG_SCHEMA = None", ""), "async_setup needs CONFIG_SCHEMA"),
    (replace("quality_scale.yaml", "  brands: done\n", ""), "missing rules: brands"),
    (replace("quality_scale.yaml", "brands: done", "brands: exempt"), "an exemption needs a comment"),
    (
        lambda repository: (repository / "hacs.json").write_text('{"name": "F", "domains": []}'),
        "unknown keys: domains",
    ),
    (
        lambda repository: (repository / "custom_components" / "fairhearth" / "brand" / "icon.png").unlink(),
        "brand/icon.png: missing",
    ),
]


@pytest.mark.parametrize(("mistake", "complaint"), MISTAKES, ids=[complaint for _, complaint in MISTAKES])
def test_a_mistake_is_named(repository: Path, mistake: Callable[[Path], None], complaint: str) -> None:
    mistake(repository)
    assert any(complaint in problem for problem in check(repository))


def test_another_language_keeps_the_keys_and_placeholders_of_english(repository: Path) -> None:
    german = repository / "custom_components" / "fairhearth" / "translations" / "de.json"
    german.write_text(
        json.dumps({"config": {"error": {"cannot_connect": "Nicht erreichbar", "other": "Anderes"}}})
    )
    assert check(repository) == [
        "translations/de.json: config.error.cannot_connect: placeholders differ from en.json",
        "translations/de.json: config.error.other: not in en.json",
    ]
