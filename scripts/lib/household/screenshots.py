"""The command `scripts/screenshots`: photographs the way in, the dashboard and the live table.

Runs the demonstration's evening under Fairhearth's policy, in the middle of which the pictures are taken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.text import Text

from household import dashboard, table, workload
from household.browser import BrowserFailed, Visit, visit
from household.documents import DOCUMENTS
from household.homeassistant import sign_in_tokens
from household.phases import pace, plan_for, run_idle_commands
from household.places import ENGINE_COMMAND, ROOT
from household.process import ProcessDied
from household.residence import ALICE
from household.stage import Stage, StageTaken

FOLDER: Final = ROOT / ".demo"
OUTPUT: Final = ROOT / "docs/images"
MOST_BYTES: Final = 300_000

_DESKTOP: Final[dict[str, Any]] = {"width": 1280, "height": 820}
_PHONE: Final[dict[str, Any]] = {"width": 412, "height": 915}
_LOOKS: Final[dict[str, dict[str, Any]]] = {
    f"dashboard-{name}-{scheme}": {**size, "scheme": scheme}
    for name, size in (("desktop", _DESKTOP), ("phone", _PHONE))
    for scheme in ("light", "dark")
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/screenshots",
        description="Photographs dialogs, dashboard and live table of the demonstration.",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="default: docs/images")
    parsed = parser.parse_args(arguments)
    parsed.output.mkdir(parents=True, exist_ok=True)
    try:
        return asyncio.run(_run(parsed.output))
    except (StageTaken, ProcessDied, TimeoutError, RuntimeError) as error:  # BrowserFailed is one
        print(f"[screenshots] error: {error}", file=sys.stderr)
        return 1


async def _run(output: Path) -> int:
    async with Stage(FOLDER) as stage:
        print("[screenshots] starting Home Assistant and the engine", flush=True)
        await stage.start()
        await workload.add_automation(stage.household)
        await dashboard.create(stage.household)
        print("[screenshots] the way in, while nothing else goes on", flush=True)
        files = [*await _photograph(stage, ways_in(output)), examined(output / "doctor.svg")]
        await run_idle_commands(stage.household)
        plan = plan_for(await pace(stage))
        print("[screenshots] the dashboard, in the middle of an evening", flush=True)
        files += await _photograph_evening(stage, plan, output)
    too_large = [file for file in files if file.stat().st_size > MOST_BYTES]
    for file in files:
        print(f"[screenshots] {file} ({file.stat().st_size // 1000} kB)")
    if too_large:
        print(f"[screenshots] error: larger than {MOST_BYTES} bytes: {too_large}", file=sys.stderr)
    return 1 if too_large else 0


async def _photograph_evening(stage: Stage, plan: list[workload.Arrival], output: Path) -> list[Path]:
    """Repeat the evening until every picture is taken in the middle of one."""
    scene = table.Scene(title="An evening")
    working = asyncio.create_task(_evenings(stage, plan, scene))
    for document in DOCUMENTS[:2]:
        job = {"title": document.title, "text": document.instructions, "max_tokens": 400}
        await stage.household.socket.act("fairhearth.submit_summary", job)
    try:
        await asyncio.sleep(max(arrival.at_s for arrival in plan) * 0.6 + 2)
        terminal = output / "demo-terminal.svg"
        _draw(scene, await stage.engine_api.fairness(), terminal)
        pictures = await _photograph(stage, dashboards(output))
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    return [*pictures, terminal]


async def _evenings(stage: Stage, plan: list[workload.Arrival], scene: table.Scene) -> None:
    while True:
        await workload.run_evening(stage.household, plan, on_answer=scene.say)


def _draw(scene: table.Scene, snapshot: dict[str, Any], file: Path) -> None:
    """Save the live table as it is now."""
    _save(table.render(scene, snapshot), "scripts/demo", file)


def _save(shown: RenderableType, title: str, file: Path) -> None:
    """Save what a terminal would show."""
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=110, file=nowhere)
        console.print(shown)
        picture = console.export_svg(title=title)
    # The fonts it would fetch from the internet; any fixed-width one will do.
    file.write_text(re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL))


def examined(file: Path) -> Path:
    """Save what `fairhearth doctor` says here, without what only this machine is called; return the file."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "110", "XDG_STATE_HOME": home}
        found = subprocess.run(
            [ENGINE_COMMAND, "doctor"], cwd=home, env=environment, capture_output=True, text=True, check=False
        )
    said = found.stdout.replace(home, "~/.local/state").replace(str(Path.home()), "~")
    said = said.replace(platform.platform(), platform.system())
    _save(Text.from_ansi(said), "fairhearth doctor", file)
    return file


def ways_in(output: Path) -> list[Visit]:
    """Return what is seen on the way to the dashboard: the dialogs and the integration's page."""
    dialog = (("click", "role=button[name='OK']"), ("wait", "ha-form >> text=Address"), ("settle",))
    page = (("wait", "ha-config-entry-row >> text=Fairhearth"), ("settle",))
    new_dashboard = (
        ("click", "role=button[name='Add dashboard']"),
        ("wait", "dashboard-card >> text=Fair share"),
        ("settle",),
    )
    ways = [
        ("config-flow", "/config/integrations/dashboard/add?domain=fairhearth", dialog),
        ("integration", "/config/integrations/integration/fairhearth", page),
        ("new-dashboard", "/config/lovelace/dashboards", new_dashboard),
    ]
    return [
        Visit(path=path, steps=steps, file=output / f"{name}.png", **_DESKTOP) for name, path, steps in ways
    ]


def dashboards(output: Path) -> list[Visit]:
    """Return the dashboard on every screen."""
    steps = (("wait", "fairhearth-card .lane"), ("settle",))
    return [
        Visit(path=dashboard.PATH, steps=steps, file=output / f"{name}.png", **look)
        for name, look in _LOOKS.items()
    ]


async def _photograph(stage: Stage, visits: list[Visit]) -> list[Path]:
    tokens = await sign_in_tokens(stage.session, stage.home.url, ALICE)
    reports = await visit(stage.home.url, tokens, visits)
    errors = [error for report in reports for error in report.errors]
    # Pictures of Home Assistant's own integrations come from the internet, which is left alone here.
    if faults := [error for error in errors if "/api/brands/" not in error]:
        raise BrowserFailed(f"pages logged errors: {faults}")
    return [report.file for report in reports if report.file is not None]


if __name__ == "__main__":
    sys.exit(main())
