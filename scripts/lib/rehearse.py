"""Run the project's scenarios and publish the figures in docs/results: results.json, and README.md from it.

Nothing in docs/results is written by hand. Every scenario carries the commit, the seeds and the machine of
its run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from engine_service.simulator import charts, page, report, scenario as scenarios, suite
from engine_service.simulator.suite import Outcome, median
from engine_service.simulator.summary import RunSummary

ROOT: Final = Path(__file__).resolve().parents[2]
JSON_NAME, PAGE_NAME = "results.json", "README.md"
EVERYBODY: Final = ("default", "fifo", "fifo-chunked", "class_only", "vtc", "vllm-priority")
POLICIES: Final = {"kitchen_light": EVERYBODY, "overload": ("default", "fifo", "fifo-chunked", "vtc")}
USUAL: Final = ("default", "fifo")
PICTURES: Final = ("kitchen_light", "homework")  #: of docs/policy.md
CAPTIONS: Final = {"default": "Fairhearth", "fifo": "First come, first served"}

FIGURES: Final = (
    "throughput", "completed_tokens", "utilisation", "longest_iteration", "longest_stall", "over_bound",
    "service_difference", "bound_used", "spread_used", "preemptions", "recompute_share", "idle_waiting",
)  # fmt: skip
TIMES: Final = ("queue", "ttft", "itl", "e2e")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/rehearse", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="default: all of them")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results", metavar="DIR")
    given = parser.parse_args(arguments)
    known = scenarios.names()
    unknown = [name for name in given.scenarios if name not in known]
    if unknown or given.seeds < 1 or given.jobs < 1:
        parser.error(
            f"unknown scenario {unknown[0]!r}; known are {', '.join(known)}" if unknown else "N >= 1"
        )
    given.output.mkdir(parents=True, exist_ok=True)
    passes = True
    for name in given.scenarios or known:
        started = time.monotonic()
        outcome = suite.simulate(
            name, POLICIES.get(name, USUAL), num_seeds=given.seeds, num_processes=given.jobs
        )
        passes &= outcome.passes
        publish(name, outcome, given.output)
        if name in PICTURES:
            drawn = page.lives_by_policy(outcome, CAPTIONS)
            picture = charts.standalone([drawn[policy] for policy in ("fifo", "default")], page.style())
            (given.output / f"{name}.svg").write_text(picture, "utf-8")
        word = "holds" if outcome.passes else "DOES NOT HOLD"
        print(f"{name}: {word}, {time.monotonic() - started:.0f} s", flush=True)
    return 0 if passes else 1


def publish(name: str, outcome: Outcome, folder: Path) -> None:
    """Replace the scenario's figures, and write the page anew."""
    path = folder / JSON_NAME
    document: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {"scenarios": {}}
    document["scenarios"][name] = condensed(outcome)
    order = {known: i for i, known in enumerate(scenarios.names())}
    document["scenarios"] = dict(
        sorted(document["scenarios"].items(), key=lambda item: order.get(item[0], len(order)))
    )
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    (folder / PAGE_NAME).write_text(as_page(document), "utf-8")


def commit() -> str:
    """Return the commit that ran, with a plus if the code differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (
        "+" if git("status", "--porcelain", "engine_service") else ""
    )


# ---- condensing


def condensed(outcome: Outcome) -> dict[str, Any]:
    """Return what is published of an outcome."""
    return {
        "title": outcome.scenario.title,
        "commit": commit(),
        "profile": outcome.profile.name,
        "duration_s": outcome.scenario.duration_s,
        "seeds": list(outcome.seeds),
        "passes": outcome.passes,
        "criteria": [report.verdict_as_dict(verdict) for verdict in outcome.verdicts],
        "policies": {name: _figures(runs) for name, runs in outcome.runs.items()},
        "alone": {
            f"{policy}: {group}": _group(group, runs) for (policy, group), runs in outcome.alone.items()
        },
    }


def _figures(runs: Sequence[RunSummary]) -> dict[str, Any]:
    whole = {name: _rounded(median([getattr(run, name) for run in runs])) for name in FIGURES}
    classes = dict.fromkeys(n for run in runs for n, group in run.groups.items() if group.kind == "class")
    return whole | {"classes": {name: _group(name, runs) for name in classes}}


def _group(name: str, runs: Sequence[RunSummary]) -> dict[str, Any]:
    groups = [run.groups[name] for run in runs if name in run.groups]
    found: dict[str, Any] = {
        "requests": median([g.requests for g in groups]), "finished": median([g.finished for g in groups])
    }  # fmt: skip
    for what in TIMES:
        found[what] = {q: _rounded(median([getattr(getattr(g, what), q) for g in groups]))
                       for q in ("p50", "p95", "p99")}  # fmt: skip
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


# ---- the page


def as_page(document: dict[str, Any]) -> str:
    """Return README.md."""
    parts = [
        "# What the simulator measured",
        "Written by `scripts/rehearse`, not by hand; the same figures and more are in [results.json]"
        f"({JSON_NAME}). What the scenarios and criteria mean: [docs/simulator.md](../simulator.md). The "
        "simulated machines are models, not measurements of a card: compare policies, do not quote seconds.",
        "Every figure of a policy is the median over the seeds. *median* and *worst* of a criterion are its "
        "two sides in the seed in the middle and in the one nearest to breaking it (or breaking it most). A "
        "criterion must hold in every seed, or where it says *median* in at least half of them.",
        "| scenario | | criteria | seeds | machine | commit |\n|---|---|---|---|---|---|\n"
        + "\n".join(_overview(name, entry) for name, entry in document["scenarios"].items()),
    ]
    parts += [_scenario(name, entry) for name, entry in document["scenarios"].items()]
    return "\n\n".join(parts) + "\n"


def _overview(name: str, entry: dict[str, Any]) -> str:
    kept = sum(criterion["holds"] for criterion in entry["criteria"])
    return (
        f"| [{name}](#{name.lower()}) | {entry['title']} | {kept} of {len(entry['criteria'])} hold | "
        f"{len(entry['seeds'])} | {entry['profile']} | {entry['commit']} |"
    )


def _scenario(name: str, entry: dict[str, Any]) -> str:
    rows = "\n".join(_criterion(criterion) for criterion in entry["criteria"])
    criteria = f"| | criterion | median | worst |\n|---|---|---|---|\n{rows}"
    return f"## {name}\n\n{entry['title']}.\n\n{criteria}\n\n{_classes(entry)}\n\n{_wholes(entry)}"


def _criterion(criterion: dict[str, Any]) -> str:
    ranked = sorted(criterion["seeds"], key=lambda seed: _badness(criterion["check"], seed))
    over = " *(median)*" if criterion["over"] == "median" else ""
    note = f" {criterion['note']}" if criterion["note"] else ""
    sides = [
        f"{report.figure(seed['left'])} / {report.figure(seed['right'])}"
        for seed in (ranked[(len(ranked) - 1) // 2], ranked[-1])
    ]
    holds = "holds" if criterion["holds"] else "**does not**"
    return f"| {holds} | {criterion['name']}{over}: `{criterion['check']}`.{note} | {sides[0]} | {sides[1]} |"


def _badness(check: str, seed: dict[str, Any]) -> float:
    left, right = seed["left"], seed["right"]
    if left is None or right is None:
        return float("-inf") if left is right else float("inf")
    excess: float = (left - right) / (abs(right) or 1.0)
    if "==" in check:
        return abs(excess)
    return excess if "<" in check else -excess


def _classes(entry: dict[str, Any]) -> str:
    head = "| class | policy | finished | queue p95 | first token p50 | p95 | p99 | completion p95 |"
    rows = [
        f"| {class_id} | {policy} | {report.count(group['finished'])} of {report.count(group['requests'])} | "
        + " | ".join(
            report.seconds(group[what][quantile]).replace("\u00a0", " ")
            for what, quantile in (
                ("queue", "p95"), ("ttft", "p50"), ("ttft", "p95"), ("ttft", "p99"), ("e2e", "p95"),
            )
        )
        + " |"
        for class_id in dict.fromkeys(c for figures in entry["policies"].values() for c in figures["classes"])
        for policy, figures in entry["policies"].items()
        if (group := figures["classes"].get(class_id)) is not None
    ]  # fmt: skip
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows])


def _wholes(entry: dict[str, Any]) -> str:
    head = "| policy | tokens/s | longest iteration | bound used | computed twice | preemptions |"
    rows = [
        f"| {policy} | {report.count(f['throughput'])} | "
        f"{report.seconds(f['longest_iteration']).replace(chr(0xA0), ' ')} | "
        f"{report.percent(f['bound_used'])} | {report.percent(f['recompute_share'])} | "
        f"{report.count(f['preemptions'])} |"
        for policy, f in entry["policies"].items()
    ]
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(main())
