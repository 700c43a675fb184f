"""What is published about the scenarios is what the command wrote, and every small evening is drawn."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from engine_service.simulator import charts, page, scenario as scenarios, suite
from tests.simulator.builders import TWO

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def rehearse() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rehearse", ROOT / "scripts" / "lib" / "rehearse.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_scenario_is_published_whole_and_others_stay(rehearse: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TWO)
    outcome = suite.simulate(str(tmp_path / "two.toml"), ["default", "fifo"], num_seeds=2)
    for name in ("H1", "overload"):
        rehearse.publish(name, outcome, tmp_path)
    document = json.loads((tmp_path / "results.json").read_text())
    assert list(document["scenarios"]) == ["H1", "overload"]
    entry = document["scenarios"]["H1"]
    assert entry["seeds"] == [1, 2]
    assert entry["criteria"][0]["holds"] is True
    assert set(entry["policies"]) == {"default", "fifo"}
    text = (tmp_path / "README.md").read_text()
    assert "| holds | voice starts at once: `voice.ttft.p95 <= 1.0`. |" in text
    assert "| voice | default | " in text


def test_the_published_page_is_made_of_the_published_figures(rehearse: ModuleType) -> None:
    document = json.loads((RESULTS / "results.json").read_text())
    assert (RESULTS / "README.md").read_text() == rehearse.as_page(document)


def test_every_scenario_is_published_as_judged_by_its_present_criteria() -> None:
    published = json.loads((RESULTS / "results.json").read_text())["scenarios"]
    assert list(published) == list(scenarios.names())
    for name, entry in published.items():
        now = [(c.name, c.text, c.over) for c in scenarios.load(name).criteria]
        assert [(c["name"], c["check"], c["over"]) for c in entry["criteria"]] == now, name


def test_small_evenings_are_drawn_request_by_request(tmp_path: Path) -> None:
    outcome = suite.simulate("homework", ["default", "fifo"], num_seeds=1)
    drawn = page.lives_by_policy(outcome, {"default": "Ours <now>"})
    assert set(drawn) == {"default", "fifo"}
    assert drawn["default"].count('class="answer') == 28
    picture = charts.standalone([drawn["fifo"], drawn["default"]], page.style())
    root = ElementTree.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "Ours &lt;now&gt;" in picture
    assert "prefers-color-scheme: dark" in picture


def test_a_large_evening_is_drawn_as_dots() -> None:
    outcome = suite.simulate("overload", ["default"], num_seeds=1)
    assert page.lives_by_policy(outcome) == {}
    assert "One dot per request" in page.as_html(outcome)
