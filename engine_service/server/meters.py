"""The engine's numbers for Prometheus: histograms of finished requests, the rest read off a snapshot.

Decides names and labels. Labels are the workload class and the resident, nothing a caller can invent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_service import __version__
from engine_service.engine.metrics import Snapshot
from engine_service.engine.sessions import Timings
from engine_service.protocol import Extension
from engine_service.scheduling.model import ResidentId

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_LABELS: Final = ("class", "resident")
_SECONDS: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 30, 60, 120, 300, 900, 3600)
OUTCOMES: Final = ("finished", "cancelled", "refused", "failed")
_KINDS: Final = ("prefill", "cached", "decode", "recomputed")


class Meters:
    """Everything /metrics shows of one engine."""

    def __init__(self, snapshot: Callable[[], Snapshot]):
        """Read the engine's present state through snapshot."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineState(snapshot))
        self._requests = Counter(
            "fairhearth_requests",
            "Requests by how they ended",
            (*_LABELS, "outcome"),
            registry=self._registry,
        )
        self._tokens = Counter(
            "fairhearth_tokens",
            "Tokens of finished requests: prefill, cached (found), decode, recomputed (paid by the system)",
            (*_LABELS, "kind"),
            registry=self._registry,
        )
        self._queue = self._histogram("queue", "Arrival to first admission")
        self._first_token = self._histogram("time_to_first_token", "Arrival to first output token")
        self._completion = self._histogram("completion", "Arrival to finish")

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(
            f"fairhearth_{name}_seconds", what, _LABELS, buckets=_SECONDS, registry=self._registry
        )

    def ended(self, caller: Extension, outcome: str) -> None:
        """Count a request that ended in one of OUTCOMES."""
        self._requests.labels(caller.class_id.value, caller.resident_id, outcome).inc()

    def finished(self, caller: Extension, timings: Timings) -> None:
        """Count a request that finished well."""
        labels = (caller.class_id.value, caller.resident_id)
        self.ended(caller, "finished")
        self._queue.labels(*labels).observe(timings.queue_s)
        self._completion.labels(*labels).observe(timings.completion_s)
        if timings.time_to_first_token_s is not None:
            self._first_token.labels(*labels).observe(timings.time_to_first_token_s)
        counts = (
            timings.prefill_tokens,
            timings.cached_tokens,
            timings.decode_tokens,
            timings.recomputed_tokens,
        )
        for kind, count in zip(_KINDS, counts, strict=True):
            self._tokens.labels(*labels, kind).inc(count)

    def forget(self, resident_id: ResidentId) -> None:
        """Drop a removed resident's series, so that they do not pile up."""
        for metric in (self._requests, self._tokens, self._queue, self._first_token, self._completion):
            metric.remove_by_labels({"resident": resident_id})

    def exposition(self) -> bytes:
        """Return the text format."""
        return generate_latest(self._registry)


class _EngineState(Collector):
    """The present, read when asked."""

    def __init__(self, snapshot: Callable[[], Snapshot]):
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot().as_dict()
        info = GaugeMetricFamily("fairhearth_info", "Always 1", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        yield GaugeMetricFamily("fairhearth_uptime_seconds", "Since start", value=snapshot["uptime_s"])
        for key, value in snapshot["engine"].items():
            if isinstance(value, int | float):
                yield GaugeMetricFamily(f"fairhearth_engine_{key}", _words(key), value=float(value))
        paused = snapshot["engine"]["paused_classes"]
        classes = {name: row | {"paused": name in paused} for name, row in snapshot["classes"].items()}
        of_a_class = ("requests_running", "requests_waiting", "slo_attainment", "starvation_age_s", "paused")
        yield from _per(classes, "class", of_a_class)
        shown = ("requests_running", "requests_waiting", "service_share", "entitled_share", "kv_pages_used")
        yield from _per(snapshot["residents"], "resident", shown)


def _per(entries: dict[str, dict[str, Any]], label: str, keys: tuple[str, ...]) -> Iterator[Metric]:
    """Yield a gauge for each key; what was not measured has no sample."""
    for key in keys:
        family = GaugeMetricFamily(f"fairhearth_{label}_{key}", f"{_words(key)} by {label}", labels=[label])
        for name, values in entries.items():
            if values[key] is not None:
                family.add_metric([name], float(values[key]))
        yield family


def _words(key: str) -> str:
    return key.replace("_", " ").capitalize()
