"""The engine's fairness snapshot as the client sees it: who was served how, at one moment.

Durations are seconds, counts are tokens or requests, shares are fractions in [0, 1]. Quantiles are over the
snapshot's window. Source: docs/wire.md, section "A fairness snapshot".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from .protocol import TokenCounts, check_schema_version
from .reading import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """One measured time over the window; None where nothing was measured."""

    count: int = 0
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    last: float | None = None

    @classmethod
    def from_reader(cls, reader: Reader) -> Self:
        """Read one of the `…_s` objects."""
        return cls(
            count=reader.integer("count"),
            p50=reader.number_or_none("p50"),
            p95=reader.number_or_none("p95"),
            p99=reader.number_or_none("p99"),
            last=reader.number_or_none("last"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What the engine holds and does right now."""

    kv_pages_total: int
    kv_pages_used: int
    kv_pages_pinned: int
    max_context_tokens: int | None  #: prompt plus output of one request; None: not told
    requests_running: int
    requests_waiting: int
    requests_paused: int
    tokens_served: int
    recomputed_tokens: int
    paused_classes: tuple[str, ...] | None  #: kept waiting by the policy; None: the engine cannot do that
    policy_met: bool
    policy_notes: tuple[str, ...]
    tokens_per_second: float | None
    fairness_index: float | None  #: Jain's index, 1 is perfectly even
    bound_used: float | None  #: widest difference between two who wait alike, as part of what is allowed
    longest_iteration_s: float | None  #: of the window

    @classmethod
    def from_reader(cls, reader: Reader) -> Self:
        """Read `engine` of a snapshot."""
        return cls(
            kv_pages_total=reader.integer("kv_pages_total"),
            kv_pages_used=reader.integer("kv_pages_used"),
            kv_pages_pinned=reader.integer("kv_pages_pinned"),
            max_context_tokens=reader.integer_or_none("max_context_tokens"),
            requests_running=reader.integer("requests_running"),
            requests_waiting=reader.integer("requests_waiting"),
            requests_paused=reader.integer("requests_paused"),
            tokens_served=reader.integer("tokens_served"),
            recomputed_tokens=reader.integer("recomputed_tokens"),
            paused_classes=reader.texts("paused_classes") if reader.has("paused_classes") else None,
            policy_met=reader.flag("policy_met"),
            policy_notes=reader.texts("policy_notes"),
            tokens_per_second=reader.number_or_none("tokens_per_second"),
            fairness_index=reader.number_or_none("fairness_index"),
            bound_used=reader.number_or_none("bound_used"),
            longest_iteration_s=reader.number_or_none("longest_iteration_s"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What residents and classes have in common."""

    tokens: TokenCounts
    tokens_served: int  #: prefill plus decode since the engine started
    requests_running: int
    requests_waiting: int
    finished: int
    cancelled: int  #: given up by their callers, or failed
    preemptions: int
    rejected: int
    queue_time: Quantiles
    time_to_first_token: Quantiles
    inter_token_latency: Quantiles
    completion_time: Quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport(Report):
    """What one workload class got."""

    slo_attainment: float | None  #: part of its answers within their targets; None: none judged
    starvation_age_s: float | None  #: how long the one that waits longest has got nothing

    @classmethod
    def from_reader(cls, reader: Reader) -> Self:
        """Read one of `classes` of a snapshot."""
        return cls(
            **_report_fields(reader),
            slo_attainment=reader.number_or_none("slo_attainment"),
            starvation_age_s=reader.number_or_none("starvation_age_s"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentReport(Report):
    """What one resident got, and what it was entitled to."""

    name: str
    weight: int
    service_share: float | None  #: of the service of the window
    entitled_share: float | None  #: by weight, among residents with demand in the window
    kv_pages_used: int
    tokens_left_today: int | None  #: None is unlimited

    @classmethod
    def from_reader(cls, reader: Reader) -> Self:
        """Read one of `residents` of a snapshot."""
        return cls(
            **_report_fields(reader),
            name=reader.text("name"),
            weight=reader.integer("weight"),
            service_share=reader.number_or_none("service_share"),
            entitled_share=reader.number_or_none("entitled_share"),
            kv_pages_used=reader.integer("kv_pages_used"),
            tokens_left_today=reader.integer_or_none("tokens_left_today"),
        )


def _report_fields(reader: Reader) -> dict[str, Any]:
    """Read what residents and classes have in common."""
    return {
        "tokens": TokenCounts.from_reader(reader.reader("tokens")),
        "tokens_served": reader.integer("tokens_served"),
        "requests_running": reader.integer("requests_running"),
        "requests_waiting": reader.integer("requests_waiting"),
        "finished": reader.integer("finished"),
        "cancelled": reader.integer("cancelled"),
        "preemptions": reader.integer("preemptions"),
        "rejected": reader.integer("rejected"),
        "queue_time": Quantiles.from_reader(reader.reader("queue_time_s")),
        "time_to_first_token": Quantiles.from_reader(reader.reader("time_to_first_token_s")),
        "inter_token_latency": Quantiles.from_reader(reader.reader("inter_token_latency_s")),
        "completion_time": Quantiles.from_reader(reader.reader("completion_time_s")),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessSnapshot:
    """Who was served how, at one moment."""

    schema_version: int
    engine_id: str
    version: str
    model: str
    backend: str
    policy: str  #: fairhearth or fifo
    at: float = field(compare=False)  #: seconds since the epoch, by the engine's clock
    uptime_s: float = field(compare=False)
    window_s: float
    engine: EngineLoad
    residents: Mapping[str, ResidentReport]
    classes: Mapping[str, ClassReport]

    @classmethod
    def from_wire(cls, body: object) -> Self:
        """Read a snapshot; a `schema_version` of another kind is refused before anything else is read."""
        reader = Reader(body, "snapshot")
        check_schema_version(reader.integer("schema_version"))
        return cls(
            schema_version=reader.integer("schema_version"),
            engine_id=reader.text("engine_id"),
            version=reader.text("version"),
            model=reader.text("model"),
            backend=reader.text("backend"),
            policy=reader.text("policy"),
            at=reader.number("at"),
            uptime_s=reader.number("uptime_s"),
            window_s=reader.number("window_s"),
            engine=EngineLoad.from_reader(reader.reader("engine")),
            residents={
                key: ResidentReport.from_reader(item) for key, item in reader.named("residents").items()
            },
            classes={key: ClassReport.from_reader(item) for key, item in reader.named("classes").items()},
        )
