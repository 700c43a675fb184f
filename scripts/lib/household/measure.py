"""What the engine measured, request by request, read from its event log.

The event log is what the scheduler was told, with the engine's own monotonic clock: when each request
arrived, was admitted, computed its first output token, and ended. It is the same under every policy, complete
once the engine has stopped, and independent of how long Home Assistant or this process took to look. Time to
the first token runs from the arrival at the engine to the end of the iteration that computed it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(slots=True)
class RequestFacts:
    """One request. Times are seconds of the engine's clock, None: it never came to that."""

    request_id: str
    resident: str
    workload_class: str
    arrived_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    ended_at: float | None = None  #: finished, failed or cancelled
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0

    @property
    def first_token_s(self) -> float:
        """Return the time to the first token; infinite where none came."""
        return math.inf if self.first_token_at is None else self.first_token_at - self.arrived_at

    def is_under_way(self, at: float) -> bool:
        """Return whether the request had arrived and not ended at a moment."""
        return self.arrived_at <= at and (self.ended_at is None or self.ended_at > at)


def read_event_log(path: Path) -> list[RequestFacts]:
    """Return every request of an event log in order of arrival, without those the engine made for itself."""
    facts: dict[str, RequestFacts] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            turn = json.loads(line)
            _note_event(facts, turn["event"], turn["now"])
            for decision in turn["decisions"]:
                _note_decision(facts, decision, turn["now"])
    return list(facts.values())


def _note_event(facts: dict[str, RequestFacts], event: dict[str, Any], now: float) -> None:
    match event["type"]:
        case "Arrived" if not event["request"]["paid_by_system"]:
            request = event["request"]
            facts[request["request_id"]] = RequestFacts(
                request_id=request["request_id"],
                resident=request["resident_id"],
                workload_class=request["class_id"],
                arrived_at=now,
                prompt_tokens=request["prompt_tokens"],
            )
        case "Cancelled":
            if known := facts.get(event["request_id"]):
                known.ended_at = now
        case "IterationDone":
            for result in event["results"]:
                if known := facts.get(result["request_id"]):
                    _note_result(known, result, now)


def _note_result(facts: RequestFacts, result: dict[str, Any], now: float) -> None:
    facts.prefill_tokens += result["prefill_tokens"]
    facts.cached_tokens += result["cached_tokens"]
    facts.decode_tokens += result["decode_tokens"]
    if result["decode_tokens"] and facts.first_token_at is None:
        facts.first_token_at = now
    if result["finished"] or result["failed"]:
        facts.ended_at = now
        facts.finished_at = now if result["finished"] else None


def _note_decision(facts: dict[str, RequestFacts], decision: dict[str, Any], now: float) -> None:
    known = facts.get(decision.get("request_id", ""))
    if known is None:
        return
    match decision["type"]:
        case "Admit" if known.admitted_at is None:
            known.admitted_at = now
        case "Preempt":
            known.preemptions += 1
        case "Reject":
            known.ended_at = now


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the values does not exceed (nearest rank).

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Some times, summed up."""

    count: int
    median_s: float
    p95_s: float
    most_s: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Sum up times; raise ValueError where there are none."""
        found = list(values)
        if not found:
            raise ValueError("no request of this kind was measured")
        return cls(count=len(found), median_s=median(found), p95_s=percentile(found, 0.95), most_s=max(found))


def _of_class(facts: Iterable[RequestFacts], workload_class: str) -> list[RequestFacts]:
    return [item for item in facts if item.workload_class == workload_class]


def idle_voice(facts: Sequence[RequestFacts]) -> Spread:
    """Return the time to the first token of commands that found the engine with nothing else to do."""
    return _voice(facts, lambda others: not others)


def saturated_voice(facts: Sequence[RequestFacts]) -> Spread:
    """Return the time to the first token of commands that came while a summary was under way."""
    return _voice(facts, lambda others: any(item.workload_class == "background" for item in others))


def _voice(facts: Sequence[RequestFacts], counts: Callable[[list[RequestFacts]], bool]) -> Spread:
    return Spread.of(
        item.first_token_s
        for item in _of_class(facts, "voice")
        if counts([other for other in facts if other is not item and other.is_under_way(item.arrived_at)])
    )


def first_tokens(facts: Sequence[RequestFacts], workload_class: str) -> Spread:
    """Return the time to the first token of every request of a class."""
    return Spread.of(item.first_token_s for item in _of_class(facts, workload_class))


def summaries_done_s(facts: Sequence[RequestFacts]) -> list[float]:
    """Return how long after the first summary's arrival each was finished (infinite: never); sorted."""
    tasks = _of_class(facts, "background")
    start = min((item.arrived_at for item in tasks), default=0.0)
    return sorted(math.inf if item.finished_at is None else item.finished_at - start for item in tasks)


def total_tokens(facts: Iterable[RequestFacts]) -> dict[str, int]:
    """Return what was computed, found in the cache and generated, over all requests."""
    found = list(facts)
    return {
        "prefill": sum(item.prefill_tokens for item in found),
        "cached": sum(item.cached_tokens for item in found),
        "decode": sum(item.decode_tokens for item in found),
    }
