"""The last line of scripts/test counts what really happened."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def counts(report: Path) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "lib" / "count_tests.py"), str(report)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_every_outcome_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "test_outcomes.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError\n"
        "def test_passes(): pass\n"
        "def test_passes_too(): pass\n"
        "def test_fails(): assert 0\n"
        "def test_cannot_be_set_up(broken): pass\n"
        "@pytest.mark.skip\n"
        "def test_is_skipped(): pass\n"
    )
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:homeassistant",
        "-q",
        f"--junitxml={report}",
        "--rootdir=.",
    ]
    assert subprocess.run([*command, "-c", "/dev/null", "."], cwd=tmp_path, check=False).returncode == 1
    assert counts(report) == "2 2 1"


def test_a_run_that_broke_off_counts_nothing(tmp_path: Path) -> None:
    assert counts(tmp_path / "absent.xml") == "0 0 0"
