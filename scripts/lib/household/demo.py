"""The command `scripts/demo`: shows the household at work, or checks what it promises.

Both start Home Assistant and the engine on loopback, measure the evening under first come, first served,
start the engine anew with Fairhearth's policy under the running Home Assistant, and run the same evening
again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import aiohttp
from rich.console import Console
from rich.live import Live
from rich.table import Table

from household import checks, dashboard, measure, table, workload
from household.client import CommandFailed
from household.phases import (
    LONGEST_PACE_S,
    NUM_COMMANDS,
    Phase,
    pace,
    plan_for,
    run_idle_commands,
    run_phase,
)
from household.places import ROOT
from household.process import ProcessDied
from household.residence import ALICE, BOB
from household.stage import ENGINE_PORT, HOME_PORT, Stage, StageTaken

FOLDER: Final = ROOT / ".demo"
LEAST_SECONDS: Final = 20
MOST_SECONDS: Final = 240

EXIT_FAILED: Final = 1
EXIT_BROKEN: Final = 3
EXIT_INTERRUPTED: Final = 130

_TOLERABLE_STALL: Final = 0.02
"""Share of an evening in which the machine may stand still before its times are called into question."""

_PLAIN_LINE_EVERY_S: Final = 10.0


class Show:
    """The picture on the terminal, kept up to date while a block runs."""

    def __init__(self, stage: Stage, console: Console) -> None:
        """Show what goes on in a stage."""
        self.scene = table.Scene()
        self._stage = stage
        self._console = console

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Draw until the block ends."""
        drawing = asyncio.create_task(self._draw())
        try:
            yield
        finally:
            drawing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await drawing

    async def _draw(self) -> None:
        if not self._console.is_terminal:
            return await self._print_lines()
        with Live(console=self._console, refresh_per_second=4, transient=False) as live:
            while True:
                live.update(table.render(self.scene, await self._snapshot()))
                await asyncio.sleep(0.5)

    async def _print_lines(self) -> None:
        while True:
            await asyncio.sleep(_PLAIN_LINE_EVERY_S)
            if (snapshot := await self._snapshot()) is not None:
                say(self._console, table.one_line(self.scene, snapshot))

    async def _snapshot(self) -> dict[str, object] | None:
        """Return the engine's picture, None while it is not there."""
        try:
            return await self._stage.engine_api.fairness()
        except (aiohttp.ClientError, TimeoutError):
            return None


def say(console: Console, text: str) -> None:
    """Print one line of progress."""
    console.print(f"[demo] {text}", highlight=False, markup=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parsed = _parser().parse_args(arguments)
    if parsed.seconds is not None and not LEAST_SECONDS <= parsed.seconds <= MOST_SECONDS:
        _parser().error(
            f"--seconds is the length of the evening's commands: {LEAST_SECONDS} to {MOST_SECONDS}, "
            f"not {parsed.seconds:g}"
        )
    console = Console(soft_wrap=False)
    try:
        return asyncio.run(_interruptible(parsed, console))
    except StageTaken as error:
        print(f"[demo] error: {error}: end it first", file=sys.stderr)
    except (ProcessDied, CommandFailed, TimeoutError) as error:
        print(f"[demo] error: {error}\n[demo] logs are in {FOLDER}", file=sys.stderr)
    return EXIT_BROKEN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Home Assistant with Fairhearth: residents talk, summaries run, voice does not wait.",
        epilog="Ctrl-C ends both programs. Everything is kept in .demo/ and made anew at each start.",
    )
    parser.add_argument(
        "--check", action="store_true", help="without a person: exit 0 only if every promise holds"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --check: write the figures there too")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help=f"how long commands are spoken (default: {NUM_COMMANDS} commands, "
        f"{LONGEST_PACE_S:g} s apart or less on a fast machine)",
    )
    parser.add_argument(
        "--engine-port", type=int, default=ENGINE_PORT, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--home-port", type=int, default=HOME_PORT, metavar="N", help="default: %(default)s")
    return parser


async def _interruptible(parsed: argparse.Namespace, console: Console) -> int:
    """Run until done or interrupted; both programs are ended either way, further signals wait for it."""
    loop = asyncio.get_running_loop()
    work = asyncio.create_task(_run(parsed, console))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, work.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        say(console, "ended; nothing is left running")
        return EXIT_INTERRUPTED if parsed.check else 0


async def _run(parsed: argparse.Namespace, console: Console) -> int:
    stage = Stage(FOLDER, engine_port=parsed.engine_port, home_port=parsed.home_port)
    started = time.monotonic()
    async with stage:
        show = Show(stage, console)
        say(console, "starting Home Assistant and the engine, and setting the household up …")
        await stage.start(policy="fifo")
        await workload.add_automation(stage.household)
        await dashboard.create(stage.household)
        _welcome(stage, console, time.monotonic() - started)
        async with show.running():
            show.scene.title = "finding out how fast this machine is"
            plan = plan_for(*await _tempo(stage, parsed.seconds))
            fifo, reconnect_s = await _measure_fifo(stage, show, plan)
            if not parsed.check:
                await _go_on(stage, show, plan)
            fair = await _measure_fair(stage, show, plan)
    fair.facts = measure.read_event_log(stage.event_log("fairhearth"))
    evidence = checks.Evidence(fair=fair, fifo=fifo, reconnect_s=reconnect_s, faults=stage.faults())
    return _report(evidence, parsed.json, console, time.monotonic() - started)


def _welcome(stage: Stage, console: Console, seconds: float) -> None:
    """Say where everything is and how to sign in."""
    say(console, f"ready after {seconds:.0f} s")
    say(console, f"  Home Assistant  {stage.home.url}{dashboard.PATH}")
    for login in (ALICE, BOB):
        say(console, f"  sign in as      {login.username} / {login.password}")
    say(console, f"  engine          {stage.engine.url} (token: {stage.engine.token})")
    say(console, f"  logs            {stage.home.log}, {stage.engine.log}")


async def _tempo(stage: Stage, seconds: float | None) -> tuple[float, int]:
    """Return the pace of the evening and the number of its commands."""
    pace_s = await pace(stage)
    return pace_s, NUM_COMMANDS if seconds is None else max(1, round(seconds / pace_s))


async def _measure_fifo(stage: Stage, show: Show, plan: Sequence[workload.Arrival]) -> tuple[Phase, float]:
    """Measure the yardstick, put Fairhearth in its place; return the phase and how long that took."""
    show.scene.title = "1 of 2: first come, first served, as a plain server does it (measured for comparison)"
    show.scene.hint = "Commands wait behind the summaries. Fairhearth's turn comes when all is answered."
    fifo = await run_phase(stage, "fifo", plan, on_answer=show.scene.say)
    show.scene.title = "the engine starts anew, with Fairhearth's policy; Home Assistant finds it by itself"
    reconnect_s = await stage.restart_engine(policy="fairhearth")
    fifo.facts = measure.read_event_log(stage.event_log("fifo"))
    show.scene.fifo = {name: measure.first_tokens(fifo.facts, name) for name in table.CLASSES}
    fifo_s = {name: spread.p95_s for name, spread in show.scene.fifo.items()}
    await dashboard.create(stage.household, fifo_s)
    return fifo, reconnect_s


async def _measure_fair(stage: Stage, show: Show, plan: Sequence[workload.Arrival]) -> Phase:
    show.scene.title = "2 of 2: Fairhearth, the same evening again"
    show.scene.hint = f"Home Assistant: {stage.home.url}{dashboard.PATH}"
    return await run_phase(stage, "fairhearth", plan, on_answer=show.scene.say)


async def _go_on(stage: Stage, show: Show, plan: Sequence[workload.Arrival]) -> None:
    """Repeat the evening until interrupted."""
    show.scene.title = "2 of 2: Fairhearth, the same evening again and again"
    address = f"{stage.home.url}{dashboard.PATH} ({ALICE.username} / {ALICE.password})"
    show.scene.hint = f"Home Assistant: {address}. Ctrl-C ends both."
    while True:
        await stage.while_both_live(workload.run_evening(stage.household, plan, on_answer=show.scene.say))
        await stage.while_both_live(run_idle_commands(stage.household))


def _conditions(phase: Phase) -> str:
    """Say under what conditions a phase was measured, and warn where they were bad."""
    text = f"{phase.policy}: evening {phase.evening_s:.1f} s, the engine got {phase.cores:.2f} cores"
    if phase.stalled_s > _TOLERABLE_STALL * phase.evening_s:
        text += f"; THE MACHINE ITSELF STOOD STILL FOR {phase.stalled_s:.1f} s: its times cannot be trusted"
    return text


def _report(evidence: checks.Evidence, path: Path | None, console: Console, seconds: float) -> int:
    """Print every check with its figures; return the exit code."""
    judged = checks.judge(evidence)
    shown = Table(show_lines=True, expand=True)
    for header in ("", "What must hold", "Measured"):
        shown.add_column(header)
    for check in judged:
        mark = "[green]holds[/]" if check.holds else "[bold red]FAILS[/]"
        shown.add_row(mark, check.promise, check.measured)
    console.print(shown)
    for phase in (evidence.fifo, evidence.fair):
        say(console, _conditions(phase))
    num_failed = sum(not check.holds for check in judged)
    say(console, f"{len(judged) - num_failed} of {len(judged)} hold; {seconds:.0f} s in all")
    if path is not None:
        figures = {
            "checks": [asdict(check) for check in judged],
            **checks.figures(evidence),
            "seconds": seconds,
        }
        path.write_text(json.dumps(figures, indent=2) + "\n")
    return EXIT_FAILED if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
