"""`fairhearth simulate` and `replay` as a person uses them: tables, files, exit status, mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from engine_service.cli import main
from engine_service.simulator import plot
from tests.simulator.builders import TWO

BROKEN = TWO.replace("voice.ttft.p95 <= 1.0", "voice.ttft.p95 <= 0.001")
COMPARED = TWO.replace("voice.ttft.p95 <= 1.0", "voice.ttft.p95 <= 2 * alone.voice.ttft.p95 + fifo.tokens")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run fairhearth in a wide terminal; return exit status, output and errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as left:
            status = int(left.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(TWO)
    return path


def test_a_scenario_that_keeps_its_promises_exits_with_0(command: Command, two: Path) -> None:
    status, out, _ = command("simulate", two, "--policy", "default", "--policy", "fifo", "--seeds", 2)
    assert status == 0
    assert "two: Two residents" in out
    assert re.search(r"voice/anna +1\d +1\d ", out)
    for expected in ("first token p50", "Share of the service", "1 of 1 criteria hold", "longest iteration"):
        assert expected in out


def test_a_promise_that_half_of_the_seeds_must_keep_says_so(command: Command, tmp_path: Path) -> None:
    path, page = tmp_path / "half.toml", tmp_path / "page.html"
    path.write_text(re.sub("(check = .*)", r'\1\nover = "median"', TWO))
    _, out, _ = command("simulate", path, "--seeds", 1, "--report", page)
    assert "(in at least half of the seeds)" in out
    assert "in at least half of the seeds" in page.read_text(encoding="utf-8")


def test_a_broken_promise_exits_with_1_and_says_which(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(BROKEN)
    status, out, _ = command("simulate", path, "--seeds", 1)
    assert status == 1
    assert "FAIL default: voice.ttft.p95 <= 0.001" in out
    assert "0 of 1 criteria hold" in out


def test_baselines_do_not_decide_beside_the_policy(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text(TWO.replace("voice.ttft.p95 <= 1.0", "longest_iteration <= 0.15"))
    assert command("simulate", path, "--policy", "fifo", "--seeds", 1, "--quiet")[0] == 1
    both = command("simulate", path, "--policy", "fifo", "--policy", "default", "--seeds", 1, "--quiet")
    assert both[0] == 0


def test_what_criteria_compare_with_is_run_without_being_named(command: Command, tmp_path: Path) -> None:
    path, target = tmp_path / "compared.toml", tmp_path / "out.json"
    path.write_text(COMPARED)
    assert command("simulate", path, "--seeds", 2, "--json", target, "--quiet")[0] == 0
    written = json.loads(target.read_text())
    assert list(written["policies"]) == ["default", "fifo"]
    assert [(a["policy"], a["group"], len(a["runs"])) for a in written["alone"]] == [("default", "voice", 2)]
    assert len(written["criteria"][0]["seeds"]) == 2


def test_json_holds_every_figure_and_processes_do_not_change_it(
    command: Command, two: Path, tmp_path: Path
) -> None:
    targets = [tmp_path / "one.json", tmp_path / "two.json"]
    for jobs, target in zip((1, 2), targets, strict=True):
        assert command("simulate", two, "--seeds", 2, "--jobs", jobs, "--json", target, "--quiet")[0] == 0
    assert targets[0].read_text() == targets[1].read_text()
    written = json.loads(targets[0].read_text())
    assert written["passes"] is True
    run = written["policies"]["default"][0]
    assert run["groups"]["voice"]["ttft"]["p95"] > 0
    assert run["timeline"] is None


class Page(HTMLParser):
    """Collects what a browser would fetch, and whether tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.num_pictures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]
        self.num_pictures += tag == "svg"
        if tag not in ("meta", "line", "circle", "path", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_shows_the_policy_beside_fifo(
    command: Command, two: Path, tmp_path: Path
) -> None:
    target = tmp_path / "page.html"
    status, _, _ = command(
        "simulate", two, "--policy", "default", "--policy", "fifo", "--seeds", 1, "--report", target
    )
    assert status == 0
    content = target.read_text()
    page = Page()
    page.feed(content)
    assert page.open == []
    assert page.fetched == []
    assert page.num_pictures >= 6
    assert "prefers-color-scheme: dark" in content
    assert "width=device-width" in content
    assert "1 of 1" in content
    for policy in ("default", "fifo"):
        assert f"<figcaption>{policy}</figcaption>" in content


def test_a_name_cannot_break_the_page(command: Command, tmp_path: Path) -> None:
    path, target = tmp_path / "odd.toml", tmp_path / "page.html"
    path.write_text(TWO.replace("Two residents", "<script>alert(1)</script>"))
    assert command("simulate", path, "--seeds", 1, "--report", target, "--quiet")[0] == 0
    assert "<script>" not in target.read_text()


def test_the_list_names_scenarios_policies_and_machines(command: Command) -> None:
    status, out, _ = command("simulate", "--list")
    assert status == 0
    for expected in ("H12", "overload", "vllm-priority", "rtx4090-8b", "256 pages of 256 tokens"):
        assert expected in out


def test_a_settings_file_is_a_policy(command: Command, two: Path, tmp_path: Path) -> None:
    settings, target = tmp_path / "calm.toml", tmp_path / "out.json"
    settings.write_text("[policy]\nmax_chunk_tokens = 256\n")
    status, _, _ = command("simulate", two, "--policy", settings, "--seeds", 1, "--json", target, "--quiet")
    assert status == 0
    assert json.loads(target.read_text())["policies"]["calm"][0]["chunk"] == 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate",), "simulate needs a scenario"),
        (("simulate", "H99"), "there is no scenario 'H99'"),
        (("simulate", "{two}", "--policy", "lifo"), "there is no policy 'lifo'; there are default"),
        (("simulate", "{two}", "--policy", "gone.toml"), "gone.toml: cannot be read"),
        (("simulate", "{two}", "--policy", "{bad_policy}"), "policy.max_skip is not a known key"),
        (("simulate", "{two}", "--policy", "{bad_zone}"), "must be an IANA time zone"),
        (("simulate", "{two}", "--profile", "abacus"), "must be one of rtx4090-8b"),
        (("simulate", "{two}", "--profile", "{two}"), "is not an event log"),
        (("simulate", "{bad}"), "bad.toml: duration_s is missing"),
        (("simulate", "{two}", "--json", "/nowhere/out.json"), "there is no folder /nowhere"),
        (("simulate", "{two}", "--report", "{folder}"), "is a folder, not a file"),
        (("simulate", "{two}", "--seeds", "0"), "must be a whole number >= 1, not '0'"),
        (("replay", "gone.jsonl"), "gone.jsonl: cannot be read"),
        (("replay", "{two}"), "is not an event log"),
        (("replay", "{empty}"), "holds no requests"),
    ],
)
def test_a_mistake_exits_with_2_and_writes_nothing(
    arguments: tuple[str, ...], message: str, command: Command, two: Path, tmp_path: Path
) -> None:
    files = {
        "two": two,
        "bad": tmp_path / "bad.toml",
        "bad_policy": tmp_path / "bad_policy.toml",
        "bad_zone": tmp_path / "bad_zone.toml",
        "empty": tmp_path / "empty.jsonl",
        "folder": tmp_path / "folder",
    }
    files["bad"].write_text(TWO.replace("duration_s = 20\n", ""))
    files["bad_policy"].write_text("[policy]\nmax_skip = 3\n")
    files["bad_zone"].write_text('[policy]\ntime_zone = "Europe/Atlantis"\n')
    files["empty"].write_text('{"now":1.0,"event":{"type":"Ticked"},"decisions":[]}\n')
    files["folder"].mkdir()
    before = set(tmp_path.iterdir())
    filled = [argument.format(**files) for argument in arguments]
    status, out, err = command(*filled)
    assert status == 2
    assert message in err
    assert not out
    assert set(tmp_path.iterdir()) == before


def test_without_the_extra_a_picture_is_refused_before_anything_runs(
    command: Command, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "what_is_missing", lambda: "needs matplotlib: pip install x")
    status, _, err = command("simulate", two, "--plot", tmp_path / "out.png")
    assert status == 2
    assert "needs matplotlib" in err
    assert not (tmp_path / "out.png").exists()


def test_with_the_extra_a_picture_is_written(command: Command, two: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "out.png"
    status, _, _ = command(
        "simulate", two, "--policy", "default", "--policy", "fifo", "--seeds", 1, "--plot", target, "--quiet"
    )
    assert status == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_another_machine_gives_other_times(command: Command, two: Path, tmp_path: Path) -> None:
    waits = {}
    for machine in ("rtx4090-8b", "h200"):
        target = tmp_path / f"{machine}.json"
        status, _, _ = command(
            "simulate", two, "--seeds", 1, "--profile", machine, "--json", target, "--quiet"
        )
        assert status == 0
        run = json.loads(target.read_text())["policies"]["default"][0]
        waits[machine] = run["groups"]["voice"]["ttft"]["p95"]
    assert waits["h200"] < waits["rtx4090-8b"] / 2


def test_a_narrow_terminal_keeps_the_units(
    command: Command, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = command("simulate", two, "--seeds", 1)
    assert status == 0
    row = next(line for line in out.splitlines() if "voice/anna" in line)
    assert len(re.findall(r"[\d.]+\u00a0m?s\b", row)) == 4, row
    assert "\u2026" not in row


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (r"rate = [\d.]+", "rate = 1e9", "rate must be a number > 0 and <= 1000, not 1000000000.0"),
        (r"duration_s = [\d.]+", "duration_s = 1e12", "duration_s must be a number > 0 and <= 2678400"),
    ],
)
def test_a_scenario_without_end_is_refused(
    command: Command, tmp_path: Path, before: str, after: str, words: str
) -> None:
    path = tmp_path / "endless.toml"
    path.write_text(re.sub(before, after, TWO, count=1))
    status, out, err = command("simulate", path)
    assert (status, out) == (2, "")
    assert words in err
