"""What a suite found as one PNG, for a chat or a forum. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING, Any

from engine_service.simulator.suite import Outcome, median

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_service.simulator.quantiles import Quantiles


def what_is_missing() -> str | None:
    """Return why no picture can be made, None if one can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "needs matplotlib: pip install matplotlib (--report needs nothing)"
    return None


def as_png(outcome: Outcome) -> bytes:
    """Return the picture: waits for the first token by class, and service over time by resident."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    policies = outcome.choices
    figure = Figure(figsize=(11, 3.2 + 2.6 * len(policies)), layout="constrained", dpi=120)
    axes: Any = figure.subplots(
        1 + len(policies), 1, gridspec_kw={"height_ratios": [1.3] + [1] * len(policies)}
    )
    figure.suptitle(f"{outcome.scenario.name}: {outcome.scenario.title}")
    _draw_waits(axes[0], outcome)
    for axis, choice in zip(axes[1:], policies, strict=True):
        timeline = outcome.runs[choice.name][0].timeline
        if timeline is not None and timeline.served:
            steps = [i * timeline.step_s / 60 for i in range(len(next(iter(timeline.served.values()))))]
            rows = [[v / timeline.step_s for v in row] for row in timeline.served.values()]
            axis.stackplot(steps, rows, labels=list(timeline.served), alpha=0.85)
            if len(timeline.served) <= 10:
                axis.legend(loc="upper right", fontsize="small", ncols=2)
        axis.set_title(f"service by resident: {choice.name}", loc="left", fontsize="medium")
        axis.set_ylabel("units/s")
    axes[-1].set_xlabel("minutes")
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()


def _draw_waits(axis: Any, outcome: Outcome) -> None:
    classes = list(dict.fromkeys(n for rs in outcome.runs.values() for r in rs for n, g in r.groups.items()
                                 if g.kind == "class" and g.ttft.n))  # fmt: skip
    width = 0.8 / len(outcome.choices)
    for i, choice in enumerate(outcome.choices):
        for j, class_id in enumerate(classes):
            waits = [r.groups[class_id].ttft for r in outcome.runs[choice.name] if class_id in r.groups]
            low, middle, high = (_median(waits, name) for name in ("p50", "p95", "p99"))
            if low is None or middle is None or high is None:
                continue
            at = j + (i - (len(outcome.choices) - 1) / 2) * width
            axis.vlines(at, low, high, colors=f"C{i}", linewidth=8, alpha=0.4)
            axis.plot([at], [middle], "o", color=f"C{i}", label=choice.name if not j else None)
    axis.set_yscale("log")
    axis.set_xticks(range(len(classes)), classes)
    axis.set_title("time to first token: p50 to p99, the dot is p95", loc="left", fontsize="medium")
    axis.set_ylabel("seconds")
    axis.legend(fontsize="small")


def _median(measured: Sequence[Quantiles], name: str) -> float | None:
    return median([getattr(q, name) for q in measured])
