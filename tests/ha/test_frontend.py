"""The card and the dashboard strategy: how they reach the browser, and what they say in which language."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry
from pytest_homeassistant_custom_component.typing import ClientSessionGenerator

from custom_components.fairhearth.attribution import WorkloadClass
from custom_components.fairhearth.frontend import FOLDER, MODULE, async_setup_frontend
from homeassistant.components.frontend import DATA_EXTRA_MODULE_URL
from homeassistant.core import HomeAssistant
from homeassistant.setup import async_setup_component

LANGUAGES = {"en", "sv", "ja", "de"}
MODULES = sorted(FOLDER.glob("*.js"))


def texts() -> dict[str, dict[str, str]]:
    """The table in texts.js is JSON."""
    source = (FOLDER / "texts.js").read_text(encoding="utf-8")
    table = re.search(r"^const TEXTS = (\{.*?^\});", source, re.DOTALL | re.MULTILINE)
    assert table is not None
    return dict(json.loads(table[1]))


def code() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in MODULES if path.name != "texts.js")


async def test_every_page_loads_the_module_and_everything_it_imports(
    hass: HomeAssistant,
    hass_client_no_auth: ClientSessionGenerator,
    hass_frontend: None,
    loaded: MockConfigEntry,
) -> None:
    (address,) = [url for url in hass.data[DATA_EXTRA_MODULE_URL].urls if "fairhearth" in url]
    client = await hass_client_no_auth()
    waiting, seen = [address], set()
    while waiting:
        url = waiting.pop()
        response = await client.get(url)
        assert response.status == 200, url
        assert "javascript" in response.headers["Content-Type"]
        assert "max-age" in response.headers["Cache-Control"]
        seen.add(url.rsplit("/", 1)[1])
        folder = url.rsplit("/", 1)[0]
        imports = re.findall(r'^(?:import|export) .* from "\./([^"]+)";', await response.text(), re.MULTILINE)
        waiting += [f"{folder}/{name}" for name in imports if name.rsplit("/", 1)[-1] not in seen]
    assert seen == {path.name for path in MODULES} | {"lit.js"}


async def test_a_changed_module_gets_another_address(
    hass: HomeAssistant,
    hass_frontend: None,
    loaded: MockConfigEntry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / MODULE).write_text("// another version")
    monkeypatch.setattr("custom_components.fairhearth.frontend.FOLDER", tmp_path)
    await async_setup_frontend(hass)
    assert len([url for url in hass.data[DATA_EXTRA_MODULE_URL].urls if "fairhearth" in url]) == 2


async def test_without_a_frontend_the_integration_works_all_the_same(
    hass: HomeAssistant, loaded: MockConfigEntry
) -> None:
    assert "frontend" not in hass.config.components
    assert DATA_EXTRA_MODULE_URL not in hass.data


@pytest.fixture
async def hass_frontend(hass: HomeAssistant, core: None) -> None:
    """Home Assistant's frontend, set up before the integration."""
    assert await async_setup_component(hass, "frontend", {})


def test_every_language_says_everything() -> None:
    said = texts()
    assert said.keys() == LANGUAGES
    for language, table in said.items():
        assert list(table) == sorted(said["en"]), language
        for key, text in table.items():
            assert text.strip() == text != "", (language, key)
            assert placeholders(text) == placeholders(said["en"][key]), (language, key)


def placeholders(text: str) -> list[str]:
    return sorted(re.findall(r"\{(\w+)\}", text))


def test_every_text_is_used_and_every_text_used_exists() -> None:
    keys = set(texts()["en"])
    by_name = {key for key in keys if re.search(rf'"{key}"', code())}
    by_class = {f"class_{workload_class}" for workload_class in WorkloadClass}
    by_state = {
        f"job_{state}" for state in ("submitted", "running", "finished", "failed", "cancelled", "expired")
    }
    assert keys == by_name | by_class | by_state | {"job_running_eta"}
    assert set(re.findall(r'\b_?say\("(\w+)"', code())) <= keys


def test_no_text_is_written_into_the_code() -> None:
    """What stands between tags is an expression."""
    for path in MODULES:
        if path.name == "texts.js":
            continue
        for template in re.findall(r"html`(.*?)`", path.read_text(encoding="utf-8"), re.DOTALL):
            bare = re.sub(r"\$\{[^}]*\}", "", template)
            assert not re.findall(r">\s*([A-Za-z][^<>{}$]*)<", bare), (path.name, template)


def test_the_library_comes_with_its_licence() -> None:
    assert "BSD 3-Clause License" in (FOLDER / "vendor/LICENSE").read_text(encoding="utf-8")
    assert "BSD-3-Clause" in (FOLDER / "vendor/lit.js").read_text(encoding="utf-8")
