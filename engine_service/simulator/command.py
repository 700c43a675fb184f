"""The commands `fairhearth simulate` and `fairhearth replay`: arguments, progress, files, exit status.

Decides nothing about scheduling. Exit status: 0 all criteria hold (or there are none), 1 one does not, 2 bad
usage or a file that cannot be read or written; then nothing was run and nothing is written.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine_service.simulator import fit, page, plot, policies, report, scenario as scenarios, suite
from engine_service.simulator.fit import FitError
from engine_service.simulator.policies import CHOICES, DEFAULT, PolicyError
from engine_service.simulator.profiles import PROFILES, DeviceProfile
from engine_service.simulator.recorded import RecordingError, replay_recording
from engine_service.simulator.scenario import ScenarioError
from engine_service.simulator.suite import Outcome, Task

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

_PIPED_WIDTH: Final = 120  #: columns where nobody looks at a terminal


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `simulate` and `replay`; each sets `run`: parsed arguments in, exit status out."""
    simulate = subparsers.add_parser("simulate", help="rehearse a policy on a household in virtual time")
    simulate.add_argument(
        "scenario", nargs="?", metavar="SCENARIO", help="a name (see --list) or a .toml file"
    )
    simulate.add_argument(
        "--list", action="store_true", help="say which scenarios, policies and machines there are"
    )
    simulate.add_argument("--seeds", type=_whole, default=3, metavar="N", help="runs per policy (default: 3)")
    simulate.add_argument(
        "--first-seed", type=_whole, default=1, metavar="N", help="the first seed (default: 1)"
    )
    _add_common(simulate)
    simulate.set_defaults(run=run_simulate)
    replay = subparsers.add_parser(
        "replay", help="run a recorded day of the engine again, under another policy"
    )
    replay.add_argument("event_log", type=Path, metavar="EVENTLOG", help="what --event-log wrote")
    _add_common(replay)
    replay.set_defaults(run=run_replay)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", action="append", metavar="NAME|FILE",
        help=f"{', '.join(CHOICES)}, or a settings file; may be repeated (default: {DEFAULT})",
    )  # fmt: skip
    parser.add_argument(
        "--profile",
        metavar="P",
        help=f"{', '.join(PROFILES)}, or an event log to fit the speed from",
    )
    parser.add_argument("--jobs", type=_whole, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures as JSON")
    parser.add_argument("--report", type=Path, metavar="OUT.html", help="write a page that stands alone")
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="write a picture (needs the extra `plot`)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no tables, only the verdict")


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, not {text!r}")
    return value


class _UsageError(Exception):
    """The command line asks for what cannot be; the message says what can."""


def run_simulate(arguments: argparse.Namespace) -> int:
    """Run `fairhearth simulate`."""
    if arguments.list:
        _print_list(Console())
        return EXIT_OK
    if arguments.scenario is None:
        return _fail("simulate needs a scenario; `fairhearth simulate --list` shows them")
    try:
        _check_outputs(arguments)
        machine = _machine(arguments.profile)
        outcome = _with_progress(arguments, machine)
    except (ScenarioError, PolicyError, FitError, _UsageError) as error:
        return _fail(str(error))
    return _finish(arguments, outcome)


def run_replay(arguments: argparse.Namespace) -> int:
    """Run `fairhearth replay`."""
    try:
        _check_outputs(arguments)
        outcome = replay_recording(
            arguments.event_log, arguments.policy or [DEFAULT], profile=_machine(arguments.profile)
        )
    except (RecordingError, PolicyError, FitError, _UsageError) as error:
        return _fail(str(error))
    return _finish(arguments, outcome)


def _fail(message: str) -> int:
    print(f"fairhearth: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USAGE


# ---- before the runs


def _check_outputs(arguments: argparse.Namespace) -> None:
    for option in ("json", "report", "plot"):
        path: Path | None = getattr(arguments, option)
        if path is not None and not path.absolute().parent.is_dir():
            raise _UsageError(f"--{option} {path}: there is no folder {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise _UsageError(f"--{option} {path}: is a folder, not a file")
    if arguments.plot is not None:
        missing = plot.what_is_missing()
        if missing:
            raise _UsageError(f"--plot {arguments.plot}: {missing}")


def _machine(name_or_path: str | None) -> DeviceProfile | None:
    if name_or_path is None:
        return None
    if name_or_path in PROFILES:
        return PROFILES[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise _UsageError(
            f"--profile {name_or_path}: must be one of {', '.join(PROFILES)}, or what --event-log wrote"
        )
    return fit.profile_from(path)


# ---- the runs


def _with_progress(arguments: argparse.Namespace, machine: DeviceProfile | None) -> Outcome:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=arguments.quiet, transient=True) as progress:
        bar = progress.add_task(arguments.scenario, total=None)

        def started(num_runs: int) -> None:
            progress.update(bar, total=num_runs)

        def done(task: Task) -> None:
            progress.update(bar, advance=1, description=f"{arguments.scenario} {task.label}")

        return suite.simulate(
            arguments.scenario,
            arguments.policy or [DEFAULT],
            num_seeds=arguments.seeds,
            first_seed=arguments.first_seed,
            profile=machine,
            num_processes=arguments.jobs,
            on_start=started,
            on_done=done,
        )


# ---- after the runs


def _finish(arguments: argparse.Namespace, outcome: Outcome) -> int:
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_PIPED_WIDTH)
    try:
        if arguments.json is not None:
            _write(arguments.json, report.as_json(outcome).encode())
        if arguments.report is not None:
            _write(arguments.report, page.as_html(outcome).encode())
        if arguments.plot is not None:
            _write(arguments.plot, plot.as_png(outcome))
    except OSError as error:
        return _fail(f"{error.filename}: cannot be written: {error.strerror}")
    if arguments.quiet and not outcome.verdicts:
        console.print("done; there were no criteria to judge by (the figures: --json, --report)")
    elif arguments.quiet:
        for part in report.criteria_table(outcome.verdicts)[-1:]:
            console.print(part)
    else:
        report.print_outcome(outcome, console)
    return EXIT_OK if outcome.passes else EXIT_FAILED


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _print_list(console: Console) -> None:
    _print_table(console, "Scenarios", [(name, scenarios.load(name).title) for name in scenarios.names()])
    _print_table(console, "Policies", [(c.name, c.summary) for c in policies.CHOICES.values()])
    _print_table(
        console,
        "Machines",
        [
            (p.name, f"{c.num_pages} pages of {c.page_tokens} tokens, {c.max_sequences} requests at once")
            for p in PROFILES.values()
            for c in [p.capacity]
        ],
    )


def _print_table(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    table = Table(title=title, box=None, title_justify="left", show_header=False, pad_edge=False)
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)
    console.print()
