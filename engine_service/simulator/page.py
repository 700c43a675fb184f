"""What a suite found as one HTML page that needs nothing else: pictures first, then the figures.

Decides what a household sees: the policy beside first come, first served, in the colours of day and night,
on a screen as narrow as a phone's (page.css). Everything on it is a figure of `summary`; nothing is computed
here but medians.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from types import MappingProxyType
from typing import Final

from engine_service.simulator import charts, report
from engine_service.simulator.charts import Line, Range
from engine_service.simulator.policies import Choice
from engine_service.simulator.report import seconds
from engine_service.simulator.suite import Outcome, Verdict, median
from engine_service.simulator.summary import RunSummary, Timeline

_MOST_POINTS: Final = 900  #: dots per class in a picture
_MOST_LIVES: Final = 60  #: requests of a run that are drawn one by one
_LABELS: Final = {
    "voice": "Voice", "accessibility": "Accessibility", "chat": "Chat", "agent": "Agent",
    "embedding": "Embeddings", "background": "Background",
}  # fmt: skip


def as_html(outcome: Outcome) -> str:
    """Return the page."""
    scenario = outcome.scenario
    seeds = f"{len(outcome.seeds)} runs" if len(outcome.seeds) > 1 else "one run"
    parts = [
        f"<h1>{escape(scenario.name)}: {escape(scenario.title)}</h1>",
        f"<p>{escape(scenario.description)}</p>",
        f'<p class="soft">{escape(outcome.profile.name)}, {scenario.duration_s / 60:.4g} simulated minutes, '
        f"{seeds} per policy; figures are medians over the runs, pictures show the first.</p>",
        _verdicts(outcome.verdicts),
        _first_words(outcome),
        _lives(outcome) or _answers(outcome),
        _shares(outcome),
        _waiting(outcome),
        _gap(outcome),
        _tables(outcome),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(scenario.name)}: {escape(scenario.title)}</title>"
        f"<style>{style()}</style></head><body>"
        + "\n".join(part for part in parts if part)
        + "</body></html>\n"
    )


def style() -> str:
    """Return the page's style sheet."""
    return (resources.files("engine_service.simulator") / "page.css").read_text("utf-8")


# ---- words


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    kept = sum(verdict.holds for verdict in verdicts)
    items = "".join(_verdict(verdict) for verdict in verdicts)
    word = "pass" if kept == len(verdicts) else "fail"
    return (
        "<h2>What was promised</h2>"
        f'<p><span class="{word}">{kept} of {len(verdicts)}</span> promises are kept.</p>'
        f'<ul class="verdict">{items}</ul>'
    )


def _verdict(verdict: Verdict) -> str:
    word, css = ("kept", "pass") if verdict.holds else ("not kept", "fail")
    note = f' <span class="soft">{escape(verdict.criterion.note)}</span>' if verdict.criterion.note else ""
    over = " in at least half of the seeds" if verdict.criterion.over == "median" else ""
    return (
        f'<li><span class="{css}">{word}</span> {escape(verdict.criterion.name)} '
        f'<span class="soft">({escape(verdict.policy)}{over})</span>{note}'
        f'<div class="numbers">{escape(verdict.criterion.text)}: '
        f"{escape(report.sides(verdict, verdict.middle))}; "
        f"worst {escape(report.sides(verdict, verdict.worst))}</div></li>"
    )


def _section(title: str, text: str, figures: Sequence[str], *, legend: str = "") -> str:
    shown = [figure for figure in figures if figure]
    if not shown:
        return ""
    return f'<h2>{title}</h2><p class="soft">{text}</p>{legend}<div class="grid2">{"".join(shown)}</div>'


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" if svg else ""


# ---- pictures


def _first_words(outcome: Outcome) -> str:
    rows = []
    for class_id, label in _LABELS.items():
        for i, choice in enumerate(outcome.choices):
            row = _range(outcome, choice, i, class_id, label, "ttft") or _range(
                outcome, choice, i, class_id, label, "e2e"
            )
            if row is not None:
                rows.append(row)
    return _section(
        "How long until the first word",
        "The dot is the wait that 95 of 100 stay below; the bar reaches from the usual wait to the 99th. "
        "Work without words (embeddings) counts to its end.",
        [_figure("", charts.ranges(rows, title="time to first token by class and policy"))],
        legend=_policy_legend(outcome),
    )


def _lives(outcome: Outcome) -> str:
    """Return every request's life where there are few, else nothing."""
    pictures = lives_by_policy(outcome)
    return _section(
        "Every request",
        "A thin line while it waits for its first word, a thick one while its answer comes.",
        [_figure(name, svg) for name, svg in pictures.items()],
        legend=charts.legend(_classes(outcome)),
    )


def lives_by_policy(outcome: Outcome, captions: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return a picture of all requests per policy, on one time axis; nothing where there are too many."""
    timelines = {
        choice.name: timeline
        for choice in outcome.choices
        if (timeline := outcome.runs[choice.name][0].timeline) is not None
    }
    ends = [
        life.ended for timeline in timelines.values() for life in timeline.lives if life.ended is not None
    ]
    if not ends or max(len(timeline.lives) for timeline in timelines.values()) > _MOST_LIVES:
        return {}
    colours = {class_id: i for i, class_id in enumerate(_LABELS)}
    return {
        name: charts.lives(
            [
                charts.Bar(
                    label=life.resident,
                    colour=colours[life.class_id],
                    start=life.arrived,
                    turn=life.first_token or life.ended,
                    end=life.ended,
                )
                for life in sorted(timeline.lives, key=lambda life: (life.resident, life.arrived))
            ],
            end_s=max(ends),
            title=f"requests under {name}",
            caption=captions.get(name, ""),
        )
        for name, timeline in timelines.items()
    }


def _classes(outcome: Outcome) -> list[tuple[str, int]]:
    return [
        (label, i) for i, (class_id, label) in enumerate(_LABELS.items()) if _has_class(outcome, class_id)
    ]


def _answers(outcome: Outcome) -> str:
    figures = []
    for choice in outcome.choices:
        timeline = outcome.runs[choice.name][0].timeline
        if timeline is not None:
            svg = charts.points(
                _waits(timeline), title=f"waits under {choice.name}", y_title="until the first word"
            )
            figures.append(_figure(choice.name, svg))
    return _section(
        "Every request", "One dot per request: when it came, and how long it waited.", figures,
        legend=charts.legend(_classes(outcome)),
    )  # fmt: skip


def _has_class(outcome: Outcome, class_id: str) -> bool:
    return any(class_id in run.groups for runs in outcome.runs.values() for run in runs)


def _waits(timeline: Timeline) -> list[Line]:
    series = []
    for i, class_id in enumerate(_LABELS):
        waits = [
            (life.arrived, max(0.01, (life.first_token or life.ended or 0.0) - life.arrived))
            for life in timeline.lives
            if life.class_id == class_id and (life.first_token or life.ended)
        ]
        every = max(1, len(waits) // _MOST_POINTS)
        series.append(Line(name=class_id, colour=i, points=waits[::every]))
    return [line for line in series if line.points]


def _range(
    outcome: Outcome, choice: Choice, index: int, class_id: str, label: str, what: str
) -> Range | None:
    measured = [getattr(r.groups[class_id], what) for r in outcome.runs[choice.name] if class_id in r.groups]
    low, middle, high = (median([getattr(q, name) for q in measured]) for name in ("p50", "p95", "p99"))
    if low is None or middle is None or high is None:
        return None
    return Range(
        label=choice.name, group=label, colour=index, low=low, middle=middle, high=high,
        text=f"{seconds(low)} · {seconds(middle)} · {seconds(high)}",
    )  # fmt: skip


def _policy_legend(outcome: Outcome) -> str:
    return charts.legend([(f"{c.name}: {c.summary}", i) for i, c in enumerate(outcome.choices)])


def _shares(outcome: Outcome) -> str:
    names = _busiest(outcome.runs[outcome.choices[0].name][0])
    figures = []
    for choice in outcome.choices:
        timeline = outcome.runs[choice.name][0].timeline
        if timeline is not None:
            figures.append(_figure(choice.name, _share_chart(timeline, names, choice.name)))
    return _section(
        "Who got the accelerator",
        "Service per second: a computed prompt token counts once, an output token twice.",
        figures,
        legend=charts.legend([(name, i) for i, name in enumerate([*names, "others"])]),
    )


def _busiest(run: RunSummary) -> list[str]:
    groups = [group for group in run.groups.values() if group.kind == "resident"]
    groups.sort(key=lambda group: (-group.service, group.name))
    return [group.name for group in groups[: charts.NUM_COLOURS - 1]]


def _share_chart(timeline: Timeline, names: Sequence[str], policy: str) -> str:
    length = max((len(row) for row in timeline.served.values()), default=0)
    rest = [0.0] * length
    for name, row in timeline.served.items():
        if name not in names:
            rest = [total + value for total, value in zip(rest, row, strict=False)]
    series = [
        (name, i, [value / timeline.step_s for value in timeline.served.get(name, [0] * length)])
        for i, name in enumerate(names)
    ]
    series.append(("others", len(names), [value / timeline.step_s for value in rest]))
    return charts.stacked(
        series, step_s=timeline.step_s, title=f"service by resident, {policy}", y_title="units/s"
    )


def _waiting(outcome: Outcome) -> str:
    series = []
    for i, choice in enumerate(outcome.choices):
        timeline = outcome.runs[choice.name][0].timeline
        if timeline is not None:
            rows = list(timeline.waiting.values())
            totals = [float(sum(row[k] for row in rows)) for k in range(min(map(len, rows), default=0))]
            points = [(k * timeline.step_s, value) for k, value in enumerate(totals)]
            series.append(Line(name=choice.name, colour=i, points=points))
    return _section(
        "How many wait", "Requests that have arrived and not been started.",
        [_figure("", charts.lines(series, title="requests waiting", y_title="requests"))],
        legend=charts.legend([(c.name, i) for i, c in enumerate(outcome.choices)]),
    )  # fmt: skip


def _gap(outcome: Outcome) -> str:
    series = []
    for i, choice in enumerate(outcome.choices):
        timeline = outcome.runs[choice.name][0].timeline
        if timeline is not None and any(value is not None for _, value in timeline.gap):
            points = [(at, None if value is None else max(1.0, value)) for at, value in timeline.gap]
            series.append(Line(name=choice.name, colour=i, points=points))
    if not series:
        return ""
    bound = outcome.runs[outcome.choices[0].name][0].bound
    end = outcome.scenario.duration_s
    series.append(
        Line(name="bound", colour=charts.NUM_COLOURS - 2, points=[(0.0, bound), (end, bound)], is_dashed=True)
    )
    svg = charts.lines(series, title="difference in service", y_title="units", is_log=True)
    return _section(
        "How far apart",
        "Service of the most and the least served among those who wait in the same class. Who came at "
        "different times starts apart; what matters is whether it grows. Dashed: VTC's bound.",
        [_figure("", svg)],
        legend=charts.legend([(c.name, i) for i, c in enumerate(outcome.choices)]),
    )


# ---- figures


def _tables(outcome: Outcome) -> str:
    names = [choice.name for choice in outcome.choices]
    whole = _table(["", *names], report.comparison_rows(outcome))
    shares = _table(["resident", *names], report.share_rows(outcome))
    details = "".join(
        f"<details><summary>{escape(choice.name)}: every class and resident</summary>"
        f"{_cells(outcome.runs[choice.name])}</details>"
        for choice in outcome.choices
    )
    return (
        f"<h2>In figures</h2>{whole}"
        f"<h3>Share of the service, of what each was entitled to</h3>{shares}{details}"
        f'<p class="soft">Times are medians of p50, p95 and p99 over the runs.</p>'
    )


def _cells(runs: Sequence[RunSummary]) -> str:
    head = ["class / resident", "asked", "done", "queue", "first word", "between words", "completion",
            "tokens", "preempted", "recomputed"]  # fmt: skip
    return _table(head, [(row[0], list(row[1:])) for row in report.cell_rows(runs)])


def _table(head: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for name, values in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
