"""Every script reads its arguments before it installs or begins anything."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCENARIOS = Path("engine_service/simulator/scenarios")
SCRIPTS = [
    "bench-peer",
    "bench-scheduler",
    "demo",
    "gpu-check",
    "lint",
    "rehearse",
    "screenshots",
    "setup",
    "test",
]
BEGAN = 99


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout in which the first thing installed ends the script with status 99."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / SCENARIOS, root / SCENARIOS)
    (root / "scripts/real-setup").write_text((root / "scripts/setup").read_text())
    (root / "scripts/real-setup").chmod(0o755)
    (root / "scripts/setup").write_text(f"#!/bin/sh\nexit {BEGAN}\n")
    return root


def run(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    name = words[0].replace("setup", "real-setup")
    command = [str(checkout / "scripts" / name), *words[1:]]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_shown_and_nothing_else_happens(checkout: Path, script: str) -> None:
    done = run(checkout, script, "--help")
    assert done.returncode == 0, done
    assert f"scripts/{script}" in done.stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("demo --chek", "--chek"),
        ("demo --json x.json", "--check"),
        ("demo --check --json /nodir/x.json", "folder that is there"),
        ("demo --check --seconds 10", "20 to 240"),
        ("demo --check=yes", "takes no value"),
        ("bench-peer --json /nodir/x.json", "folder that is there"),
        ("bench-peer --threads", "needs a value"),
        ("bench-peer --threads 0", "whole number from 1"),
        ("bench-peer --model /nope", "q8_0, or q4_1, or a file"),
        ("bench-peer --only voices", "streams, or mix"),
        ("bench-scheduler --iterations 0", "whole number from 1"),
        ("bench-scheduler --iterations=-1", "whole number from 1"),
        ("bench-scheduler --waiting 0", "whole number from 1"),
        ("bench-scheduler --residents 0", "whole number from 1"),
        ("rehearse --output /proc/x", "folder that can be written"),
        ("rehearse --seeds x", "whole number from 1"),
        ("rehearse H99", "kitchen_light"),
        ("screenshots --nope", "--output"),
        ("gpu-check --nope", "--nope"),
        ("gpu-check --tiny --json /proc/x.json", "file that can be written"),
        ("lint --nope", "--fix"),
        ("lint everything", "everything"),
        ("setup enigne", "enigne"),
        ("test cor", "cor"),
    ],
)
def test_wrong_usage_is_named_before_anything_begins(checkout: Path, line: str, said: str) -> None:
    done = run(checkout, *line.split())
    assert done.returncode == 2, done
    assert said in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "demo",
        "demo --check --json out.json --seconds 30",
        "bench-peer --quick --only=mix --model q4_1 --json out.json",
        "bench-scheduler --iterations 10 --waiting 5 --residents 2",
        "rehearse H1 kitchen_light --seeds=2 --output results/new",
        "screenshots --output pictures",
        "gpu-check --tiny --seconds 2",
        "lint --fix",
        "test core -k lift -x",
    ],
)
def test_what_is_right_is_let_through(checkout: Path, line: str) -> None:
    done = run(checkout, *line.split())
    assert done.returncode == BEGAN, done
    assert not (checkout / "out.json").exists()
