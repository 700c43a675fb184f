"""What a suite found, as tables for a terminal and as JSON. Medians over the seeds, worst beside."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from engine_service.simulator.quantiles import Quantiles
from engine_service.simulator.suite import Outcome, Verdict, median, without_timeline
from engine_service.simulator.summary import GroupSummary, RunSummary

SCHEMA: Final = 1
_NARROW: Final = 100  #: columns below which not all figures find room
_NARROW_COLUMNS: Final = 8  #: those that are shown then
_WIDE: Final = 170  #: columns of a terminal that has room for three quantiles


def seconds(value: float | None) -> str:
    """Return a time as people read it: three digits."""
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1000:.0f}\u00a0ms" if value >= 0.001 else "0"
    return f"{value:.2f}\u00a0s" if value < 10 else f"{value:.0f}\u00a0s"


def count(value: float | None) -> str:
    """Return a whole number with thousands apart."""
    return "–" if value is None else f"{value:,.0f}"


def compact(value: float | None) -> str:
    """Return a number of tokens in at most five characters."""
    if value is None:
        return "–"
    for limit, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if sign == 'k' else limit):.3g}{sign}"
    return f"{value:.0f}"


def percent(value: float | None) -> str:
    """Return a fraction as per cent."""
    return "–" if value is None else f"{100 * value:.1f} %"


def figure(value: float | None) -> str:
    """Return a number of unknown kind, with four digits."""
    return "–" if value is None else f"{value:.4g}"


# ---- tables


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print everything that is said about a suite."""
    scenario = outcome.scenario
    seeds = f"seeds {outcome.seeds[0]} to {outcome.seeds[-1]}" if len(outcome.seeds) > 1 else "one seed"
    console.print(Text(f"{scenario.name}: {scenario.title}", style="bold"))
    if scenario.description:
        console.print(Text(" ".join(scenario.description.split()), style="dim"))
    console.print(f"{outcome.profile.name}, {scenario.duration_s:g} s, {seeds}; medians over the seeds\n")
    for choice in outcome.choices:
        runs = outcome.runs[choice.name]
        console.print(_cells(choice.name, choice.summary, runs, width=console.width))
    console.print(_comparison(outcome))
    console.print(_shares(outcome))
    if outcome.verdicts:
        console.print(Group(*criteria_table(outcome.verdicts)))


def _table(title: str, *columns: str, caption: str | None = None) -> Table:
    table = Table(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        pad_edge=False,
        collapse_padding=True,
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _cells(name: str, summary: str, runs: Sequence[RunSummary], *, width: int) -> Table:
    is_wide, is_narrow = width >= _WIDE, width < _NARROW
    if is_wide:
        times = [f"{what} p50  p95  p99" for what in ("queue", "first token", "between tokens", "completion")]
        heads, caption = (
            ("class / resident", "asked", "done", *times, "tokens", "preempted", "recomputed"),
            None,
        )
    else:
        heads = (
            "class / resident",
            "asked",
            "done",
            "queue",
            "first",
            "gap",
            "end",
            "tokens",
            "moved",
            "again",
        )
        caption = (
            "queue, first token, gap between tokens, end: 95 of 100 stay below; moved: preempted; again: "
            f"tokens computed twice. More in a terminal of {_WIDE} columns, with --json and with --report."
        )
    if is_narrow:  # a figure that has lost its unit is worse than one that is not shown
        heads = heads[:_NARROW_COLUMNS]
        caption = f"queue, first, gap, end: 95 of 100 stay below. More in a terminal of {_NARROW} columns."
    table = _table(f"{name}: {summary}", *heads, caption=caption)
    for column in table.columns[1 if is_narrow else 0 :]:
        column.no_wrap = True
    for row in cell_rows(runs, ("p50", "p95", "p99") if is_wide else ("p95",)):
        table.add_row(*row[: len(heads)])
    return table


def cell_rows(
    runs: Sequence[RunSummary], quantiles: Sequence[str] = ("p50", "p95", "p99")
) -> list[tuple[str, ...]]:
    """Return a row per class and resident: name, asked, done, four times three quantiles and so on."""
    return [
        (
            cells[0].name,
            count(median([c.requests for c in cells])),
            count(median([c.finished for c in cells])),
            _at([c.queue for c in cells], quantiles),
            _at([c.ttft for c in cells], quantiles),
            _at([c.itl for c in cells], quantiles),
            _at([c.e2e for c in cells], quantiles),
            compact(median([c.tokens for c in cells])),
            count(median([c.preemptions for c in cells])),
            compact(median([c.recomputed for c in cells])),
        )
        for cells in _same_cells(runs)
    ]


def _same_cells(runs: Sequence[RunSummary]) -> list[list[GroupSummary]]:
    """Return the cells of all runs by name, in the order of the first run."""
    names = dict.fromkeys(cell.name for run in runs for cell in run.cells)
    return [[cell for run in runs for cell in run.cells if cell.name == name] for name in names]


def _at(measured: Sequence[Quantiles], names: Sequence[str]) -> str:
    return "  ".join(seconds(median([getattr(q, name) for q in measured])) for name in names)


Reader = Callable[[RunSummary], float | None]
_ROWS: Final[tuple[tuple[str, Reader, Callable[[float | None], str]], ...]] = (
    ("tokens per second", lambda r: r.throughput, count),
    ("tokens of finished requests", lambda r: r.completed_tokens, count),
    ("answers within their targets per second", lambda r: r.goodput, figure),
    ("device busy", lambda r: r.utilisation, percent),
    ("idle although somebody waits", lambda r: r.idle_waiting, seconds),
    ("longest iteration", lambda r: r.longest_iteration, seconds),
    ("longest iteration in which somebody reads along", lambda r: r.longest_stall, seconds),
    ("iterations over T_prefill(chunk) + T_decode", lambda r: r.over_bound, count),
    ("service difference, share of VTC's bound", lambda r: r.bound_used, percent),
    ("counter spread, share of U + V + A", lambda r: r.spread_used, percent),
    ("VTC's window difference, units per second", lambda r: r.window_difference.mean, figure),
    ("Jain's index over 5 minutes, mean", lambda r: r.jain.mean, figure),
    ("preemptions", lambda r: r.preemptions, count),
    ("computed twice", lambda r: r.recompute_share, percent),
)


def comparison_rows(outcome: Outcome) -> list[tuple[str, list[str]]]:
    """Return (what, value per policy) of the figures of whole runs."""
    return [
        (title, [shown(median([read(run) for run in outcome.runs[c.name]])) for c in outcome.choices])
        for title, read, shown in _ROWS
    ]


def _comparison(outcome: Outcome) -> Table:
    table = _table("The whole", "", *(choice.name for choice in outcome.choices))
    for title, values in comparison_rows(outcome):
        table.add_row(title, *values)
    return table


def share_rows(outcome: Outcome) -> list[tuple[str, list[str]]]:
    """Return (resident, "share of entitlement" per policy)."""
    residents = dict.fromkeys(
        name
        for choice in outcome.choices
        for run in outcome.runs[choice.name]
        for name, group in run.groups.items()
        if group.kind == "resident"
    )
    return [
        (name, [_share([r.groups.get(name) for r in outcome.runs[c.name]]) for c in outcome.choices])
        for name in residents
    ]


def _share(groups: Sequence[GroupSummary | None]) -> str:
    share = median([g.share if g else None for g in groups])
    entitled = median([g.entitlement if g else None for g in groups])
    return f"{percent(share)} of {percent(entitled)}"


def _shares(outcome: Outcome) -> Table:
    table = _table(
        "Share of the service, and what each resident was entitled to",
        "resident",
        *(choice.name for choice in outcome.choices),
        caption="entitled: the weighted max-min fair split of what was served, given what all asked for",
    )
    for name, values in share_rows(outcome):
        table.add_row(name, *values)
    return table


def criteria_table(verdicts: Sequence[Verdict]) -> list[Table | Text]:
    """Return the verdicts by policy, and a line that counts them."""
    parts: list[Table | Text] = []
    for policy in dict.fromkeys(v.policy for v in verdicts):
        table = _table(f"Criteria: {policy}", "", "criterion", "median seed", "worst seed")
        table.columns[1].justify = "left"
        for verdict in verdicts:
            if verdict.policy == policy:
                over = " (in at least half of the seeds)" if verdict.criterion.over == "median" else ""
                mark = Text("pass", style="green") if verdict.holds else Text("FAIL", style="bold red")
                table.add_row(
                    mark,
                    verdict.criterion.name + over,
                    sides(verdict, verdict.middle),
                    sides(verdict, verdict.worst),
                )
        parts.append(table)
    failed = [verdict for verdict in verdicts if not verdict.holds]
    for verdict in failed:
        parts.append(Text(f"FAIL {verdict.policy}: {verdict.criterion.text}", style="red"))
        if verdict.criterion.note:
            parts.append(Text(f"     {verdict.criterion.note}", style="dim"))
    kept = len(verdicts) - len(failed)
    parts.append(Text(f"{kept} of {len(verdicts)} criteria hold", style="red" if failed else "green"))
    return parts


def sides(verdict: Verdict, judgement: Any) -> str:
    """Return both sides of a comparison as numbers."""
    return f"{figure(judgement.left)} {verdict.criterion.sign} {figure(judgement.right)}"


# ---- JSON


def as_json(outcome: Outcome) -> str:
    """Return the whole outcome as a JSON document; its schema is described in docs/simulator.md."""
    document = {
        "schema": SCHEMA,
        "scenario": outcome.scenario.name,
        "title": outcome.scenario.title,
        "duration_s": outcome.scenario.duration_s,
        "profile": {
            "name": outcome.profile.name,
            "cost": dataclasses.asdict(outcome.profile.cost),
            "capacity": dataclasses.asdict(outcome.scenario.machine(outcome.profile).capacity),
        },
        "seeds": list(outcome.seeds),
        "passes": outcome.passes,
        "criteria": [verdict_as_dict(verdict) for verdict in outcome.verdicts],
        "policies": {
            name: [dataclasses.asdict(without_timeline(run)) for run in runs]
            for name, runs in outcome.runs.items()
        },
        "alone": [
            {
                "policy": policy,
                "group": group,
                "runs": [dataclasses.asdict(without_timeline(r)) for r in runs],
            }
            for (policy, group), runs in outcome.alone.items()
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def verdict_as_dict(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON has it."""
    return {
        "policy": verdict.policy,
        "name": verdict.criterion.name,
        "check": verdict.criterion.text,
        "over": verdict.criterion.over,
        "note": verdict.criterion.note,
        "holds": verdict.holds,
        "seeds": [{"left": j.left, "right": j.right, "holds": j.holds} for j in verdict.judgements],
    }
