"""What must hold, by name, with the figures it is judged by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from household import measure
from household.documents import DOCUMENTS
from household.phases import Phase
from household.residence import RESIDENTS

VOICE_ALLOWANCE_S: Final = 0.3
SUMMARY_FACTOR: Final = 1.3
FIFO_FACTOR: Final = 20.0
LEAST_SAMPLES: Final = 12
SAME_WORK: Final = 0.1
_SHARE_TOLERANCE: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise, whether it held, and what was measured."""

    name: str
    promise: str
    holds: bool
    measured: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything the checks look at."""

    fair: Phase
    fifo: Phase
    reconnect_s: float
    faults: Sequence[str]  #: lines of both logs


def judge(evidence: Evidence) -> list[Check]:
    """Return every check, in the order of the report."""
    return [
        *_work_done(evidence),
        *_voice(evidence),
        *_summaries(evidence),
        *_household(evidence),
    ]


def _work_done(evidence: Evidence) -> Iterator[Check]:
    faults = [f"{phase.policy}: {fault}" for phase in _phases(evidence) for fault in phase.evening.faults]
    answered = [
        f"{len(phase.evening.spoken)} spoken, {len(phase.evening.typed)} typed under {phase.policy}"
        for phase in _phases(evidence)
    ]
    yield Check(
        name="answered",
        promise="every command, chat and summary was answered, under both policies",
        holds=not faults,
        measured="; ".join(faults or answered),
    )
    tokens = {phase.policy: measure.total_tokens(phase.facts) for phase in _phases(evidence)}
    decoded = [counts["decode"] for counts in tokens.values()]
    # Same questions, but not the same text to the letter: what runs beside an answer changes its rounding,
    # and so after some words what the small model says and where it ends.
    yield Check(
        name="same_work",
        promise=f"both policies had the same work (output tokens within {SAME_WORK:.0%})",
        holds=min(decoded) > 0 and max(decoded) <= (1 + SAME_WORK) * min(decoded),
        measured=", ".join(f"{name}: {counts}" for name, counts in tokens.items()),
    )


def _voice(evidence: Evidence) -> Iterator[Check]:
    idle, saturated = measure.idle_voice(evidence.fair.facts), measure.saturated_voice(evidence.fair.facts)
    fifo = measure.saturated_voice(evidence.fifo.facts)
    yield Check(
        name="enough_samples",
        promise=f"at least {LEAST_SAMPLES} commands came while a summary was under way, in both runs",
        holds=min(saturated.count, fifo.count) >= LEAST_SAMPLES,
        measured=f"{saturated.count} and {fifo.count}",
    )
    yield Check(
        name="voice_not_waiting",
        promise=f"voice, first token, p95 while saturated <= idle median + {VOICE_ALLOWANCE_S} s",
        holds=saturated.p95_s <= idle.median_s + VOICE_ALLOWANCE_S,
        measured=f"idle {_shown(idle)}; saturated {_shown(saturated)}",
    )
    factor = fifo.p95_s / saturated.p95_s
    yield Check(
        name="fifo_is_worse",
        promise=f"first come, first served gives a p95 at least {FIFO_FACTOR:g} times worse",
        holds=factor >= FIFO_FACTOR,
        measured=f"{fifo.p95_s:.2f} s against {saturated.p95_s:.3f} s: {factor:.0f} times",
    )


def _summaries(evidence: Evidence) -> Iterator[Check]:
    fair, fifo = (measure.summaries_done_s(phase.facts) for phase in (evidence.fair, evidence.fifo))
    titles = {document.title for document in DOCUMENTS}
    missing = sorted(titles - evidence.fair.evening.summaries.keys())
    yield Check(
        name="summaries_finish",
        promise="all three summaries finish and reach the automation",
        holds=not missing and len(fair) == len(titles) and not math.isinf(max(fair)),
        measured=f"missing: {', '.join(missing)}" if missing else f"finished after {_seconds(fair)}",
    )
    factor = max(fair, default=math.inf) / max(fifo, default=math.nan)
    yield Check(
        name="summaries_in_time",
        promise=f"the last summary is no later than {SUMMARY_FACTOR} times first come, first served",
        holds=factor <= SUMMARY_FACTOR,
        measured=f"{_seconds(fair)} against {_seconds(fifo)}: {factor:.2f} times",
    )


def _household(evidence: Evidence) -> Iterator[Check]:
    fair = evidence.fair
    ledger = {name: str(fair.snapshot["residents"][name]["tokens_served"]) for name in RESIDENTS}
    yield Check(
        name="sensors_equal_ledger",
        promise="tokens per resident in Home Assistant's sensors equal the engine's ledger exactly",
        holds=fair.sensors == ledger,
        measured=f"{fair.sensors}" + ("" if fair.sensors == ledger else f" against {ledger}"),
    )
    yield _shares(fair)
    yield Check(
        name="policy_met",
        promise="the household's policy was met, and Home Assistant says so",
        holds=fair.policy_met == "on" and fair.snapshot["engine"]["policy_met"],
        measured=f"{fair.policy_met}, notes: {fair.snapshot['engine']['policy_notes']}",
    )
    yield Check(
        name="came_back",
        promise="Home Assistant found the restarted engine by itself",
        holds=True,  # otherwise the run would have ended there
        measured=f"{evidence.reconnect_s:.1f} s after the engine was ready",
    )
    yield Check(
        name="no_errors",
        promise="no error in either log",
        holds=not evidence.faults,
        measured="none" if not evidence.faults else "; ".join(evidence.faults[:5]),
    )


def _shares(fair: Phase) -> Check:
    engine = {name: 100 * fair.snapshot["residents"][name]["service_share"] for name in RESIDENTS}
    try:
        shown = {name: float(fair.shares[name]) for name in RESIDENTS}
    except ValueError:
        shown = {}
    holds = (
        bool(shown)
        and abs(sum(shown.values()) - 100) <= _SHARE_TOLERANCE
        and all(abs(shown[name] - engine[name]) <= _SHARE_TOLERANCE for name in RESIDENTS)
    )
    entitled = {name: 100 * fair.snapshot["residents"][name]["entitled_share"] for name in RESIDENTS}
    return Check(
        name="shares_shown",
        promise="each resident's share of the service is shown, and they add up to 100 %",
        holds=holds,
        measured=", ".join(f"{n} {fair.shares[n]} % (fair share {entitled[n]:.0f} %)" for n in RESIDENTS),
    )


def _phases(evidence: Evidence) -> tuple[Phase, Phase]:
    return evidence.fair, evidence.fifo


def _shown(spread: measure.Spread) -> str:
    return f"median {spread.median_s:.3f} s, p95 {spread.p95_s:.3f} s (n = {spread.count})"


def _seconds(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values) + " s"


def figures(evidence: Evidence) -> dict[str, Any]:
    """Return what was measured, for a machine to read."""
    phases = {}
    for phase in _phases(evidence):
        heard = [answer.first_word_s for answer in phase.evening.spoken if answer.first_word_s is not None]
        phases[phase.policy] = {
            "voice_idle_s": asdict(measure.idle_voice(phase.facts)),
            "voice_saturated_s": asdict(measure.saturated_voice(phase.facts)),
            "voice_first_word_in_home_assistant_s": asdict(measure.Spread.of(heard)),
            "chat_s": asdict(measure.first_tokens(phase.facts, "chat")),
            "summaries_done_s": measure.summaries_done_s(phase.facts),
            "tokens": measure.total_tokens(phase.facts),
            "evening_s": phase.evening_s,
            "engine_cores": phase.cores,
            "stalled_s": phase.stalled_s,
        }
    return {
        "phases": phases,
        "reconnect_s": evidence.reconnect_s,
        "tokens_by_resident": evidence.fair.sensors,
        "service_shares_percent": evidence.fair.shares,
    }
