"""The live table: who waits, who is served, what each share comes to, and how soon the first word came.

Draws what it is given; asks nobody. Where the output is no terminal, one line now and then says the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from household.measure import Spread
from household.residence import RESIDENTS

CLASSES: Final = {"voice": "Voice", "chat": "Chat", "background": "Summaries"}
_BAR_CELLS: Final = 20


@dataclass(slots=True)
class Scene:
    """What the table shows besides the engine's snapshot."""

    title: str = ""
    hint: str = ""
    fifo: dict[str, Spread] = field(default_factory=dict)  #: time to first token under FIFO, by class
    sayings: list[str] = field(default_factory=list)  #: the latest questions and answers

    def say(self, line: str) -> None:
        """Keep the latest few lines."""
        self.sayings = [*self.sayings[-3:], line]


def render(scene: Scene, snapshot: Mapping[str, Any] | None) -> RenderableType:
    """Return the picture of one moment."""
    parts: list[RenderableType] = [Text(scene.title, style="bold")]
    if snapshot is None:
        parts.append(Text("the engine is starting …", style="dim"))
    else:
        parts += [_residents(snapshot), Text(), _classes(snapshot, scene.fifo), Text(), _engine(snapshot)]
    parts += [Text(line, overflow="ellipsis", no_wrap=True) for line in scene.sayings]
    if scene.hint:
        parts.append(Text(scene.hint, style="dim"))
    return Panel(Group(*parts), title="Fairhearth", border_style="cyan")


def _residents(snapshot: Mapping[str, Any]) -> Table:
    table = Table(box=None, expand=True, header_style="bold cyan")
    for header in ("Resident", "Waits", "Is served", "Tokens"):
        table.add_column(header, justify="left" if header == "Resident" else "right")
    table.add_column("Share of the service (| = fair share)", no_wrap=True)
    for name in RESIDENTS:
        report = snapshot["residents"].get(name)
        if report is None:
            continue
        table.add_row(
            report["name"],
            _count(report["requests_waiting"], "yellow"),
            _count(report["requests_running"], "green"),
            f"{report['tokens_served']:,}",
            _bar(report["service_share"], report["entitled_share"]),
        )
    return table


def _classes(snapshot: Mapping[str, Any], fifo: Mapping[str, Spread]) -> Table:
    table = Table(box=None, expand=True, header_style="bold cyan")
    headers = ["Work", "Waits", "Is served", "First word", "19 of 20 within"]
    if fifo:
        headers.append("First come, first served")
    for header in headers:
        table.add_column(header, justify="left" if header == "Work" else "right")
    for name, title in CLASSES.items():
        report = snapshot["classes"][name]
        times = report["time_to_first_token_s"]
        table.add_row(
            title,
            _count(report["requests_waiting"], "yellow"),
            _count(report["requests_running"], "green"),
            _seconds(times["p50"]),
            _seconds(times["p95"]),
            *([_seconds(fifo[name].p95_s) if name in fifo else "-"] if fifo else []),
        )
    return table


def _engine(snapshot: Mapping[str, Any]) -> Text:
    load = snapshot["engine"]
    memory = 100 * load["kv_pages_used"] / max(1, load["kv_pages_total"])
    text = Text(f"{load['tokens_per_second']:.0f} tokens/s, memory {memory:.0f} %, policy ")
    text.append(
        "met" if load["policy_met"] else f"not met: {'; '.join(load['policy_notes'])}",
        style="green" if load["policy_met"] else "red",
    )
    return text


def _count(number: int, style: str) -> Text:
    return Text(str(number), style=style if number else "dim")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _bar(share: float, entitled: float) -> Text:
    filled, mark = round(_BAR_CELLS * share), min(_BAR_CELLS - 1, round(_BAR_CELLS * entitled))
    text = Text()
    for cell in range(_BAR_CELLS):
        text.append("|" if entitled and cell == mark else "█" if cell < filled else "·", style="cyan")
    return text.append(f" {100 * share:4.0f} %")


def one_line(scene: Scene, snapshot: Mapping[str, Any]) -> str:
    """Return the moment in one line, for output that is no terminal."""
    classes = snapshot["classes"]
    parts = [
        f"{title.lower()} {classes[name]['requests_waiting']} waiting, "
        f"{classes[name]['requests_running']} served"
        for name, title in CLASSES.items()
    ]
    p95 = _seconds(classes["voice"]["time_to_first_token_s"]["p95"])
    return f"{scene.title}: {'; '.join(parts)}; voice p95 {p95}"
