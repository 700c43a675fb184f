"""Sensors as tables: what is shown of a resident, of a workload class and of the engine, and how it is read.

Times are the 95th percentile over the engine's window: nineteen of twenty waited no longer. Shares are shown
as percentages. Values are rounded to what a person can use, so that the recorder is not filled with noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, override

from homeassistant.components.sensor import (
    SensorDeviceClass,
    SensorEntity,
    SensorEntityDescription,
    SensorStateClass,
)
from homeassistant.const import PERCENTAGE, EntityCategory, UnitOfTime
from homeassistant.core import HomeAssistant
from homeassistant.helpers.device_registry import DeviceInfo
from homeassistant.helpers.entity_platform import AddConfigEntryEntitiesCallback
from homeassistant.helpers.typing import StateType

from .attribution import ACCOUNTS, WorkloadClass
from .const import CONF_DAILY_TOKENS, CONF_RESIDENT_ID, SUBENTRY_RESIDENT, UNIT_TOKENS
from .coordinator import FairhearthConfigEntry, FairhearthCoordinator
from .devices import account_key
from .engine_client import ClassReport, FairnessSnapshot, Quantiles, Report, ResidentReport
from .entity import FairhearthEntity, account_device, engine_device, subentry_device
from .jobs import job_fields

PARALLEL_UPDATES = 0

UNIT_TOKENS_PER_SECOND: Final = "tokens/s"

MAX_JOBS_SHOWN: Final = 20
"""An attribute with more would be too large for the recorder and for a card."""

ENABLED_CLASSES: Final = frozenset({WorkloadClass.VOICE, WorkloadClass.CHAT, WorkloadClass.BACKGROUND})
"""Classes that every household sees; the others can be enabled."""

ANSWERED_CLASSES: Final = frozenset(WorkloadClass) - {WorkloadClass.EMBEDDING, WorkloadClass.BACKGROUND}
"""Classes that somebody waits for; the engine measures them by targets."""


@dataclass(frozen=True, kw_only=True)
class FairhearthSensorDescription[ReportT](SensorEntityDescription):
    """One sensor: how it looks, and how its value is read from a report."""

    value_fn: Callable[[ReportT], StateType]
    attributes_fn: Callable[[ReportT], dict[str, Any]] | None = None


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def _whole_percent(share: float | None) -> int | None:
    return None if share is None else round(100 * share)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _spread(quantiles: Quantiles) -> dict[str, Any]:
    """Return what stands beside the state: the median, the worst of a hundred, and how many were measured."""
    return {
        "p50": _rounded(quantiles.p50, 3),
        "p99": _rounded(quantiles.p99, 3),
        "count": quantiles.count,
    }


def _duration[ReportT: Report](
    key: str, read: Callable[[ReportT], Quantiles], *, is_enabled: bool = True, precision: int = 2
) -> FairhearthSensorDescription[ReportT]:
    """Describe a measured time by its 95th percentile."""
    return _seconds(
        key,
        lambda report: read(report).p95,
        precision=precision,
        is_enabled=is_enabled,
        attributes_fn=lambda report: _spread(read(report)),
    )


def _seconds[ReportT](
    key: str,
    read: Callable[[ReportT], float | None],
    *,
    precision: int,
    category: EntityCategory | None = None,
    is_enabled: bool = False,
    attributes_fn: Callable[[ReportT], dict[str, Any]] | None = None,
) -> FairhearthSensorDescription[ReportT]:
    """Describe a time; off by default, for one that changes all the while is for who looks for a cause."""
    return FairhearthSensorDescription(
        key=key,
        translation_key=key,
        device_class=SensorDeviceClass.DURATION,
        native_unit_of_measurement=UnitOfTime.SECONDS,
        suggested_unit_of_measurement=UnitOfTime.SECONDS,
        suggested_display_precision=precision,
        state_class=SensorStateClass.MEASUREMENT,
        entity_registry_enabled_default=is_enabled,
        entity_category=category,
        value_fn=lambda report: _rounded(read(report), 3),
        attributes_fn=attributes_fn,
    )


def _counter[ReportT](
    key: str, read: Callable[[ReportT], int], *, unit: str | None = UNIT_TOKENS, is_enabled: bool = True
) -> FairhearthSensorDescription[ReportT]:
    return FairhearthSensorDescription(
        key=key,
        translation_key=key,
        native_unit_of_measurement=unit,
        suggested_display_precision=0,
        state_class=SensorStateClass.TOTAL_INCREASING,
        entity_registry_enabled_default=is_enabled,
        value_fn=read,
    )


def _gauge[ReportT](
    key: str,
    read: Callable[[ReportT], StateType],
    *,
    unit: str | None = None,
    precision: int = 0,
    is_enabled: bool = True,
    category: EntityCategory | None = None,
) -> FairhearthSensorDescription[ReportT]:
    return FairhearthSensorDescription(
        key=key,
        translation_key=key,
        native_unit_of_measurement=unit,
        suggested_display_precision=precision,
        state_class=SensorStateClass.MEASUREMENT,
        entity_registry_enabled_default=is_enabled,
        entity_category=category,
        value_fn=read,
    )


RESIDENT_SENSORS: Final[tuple[FairhearthSensorDescription[ResidentReport], ...]] = (
    _counter("tokens_served", lambda report: report.tokens_served),
    _counter("prefill_tokens", lambda report: report.tokens.prefill, is_enabled=False),
    _counter("decode_tokens", lambda report: report.tokens.decode, is_enabled=False),
    _counter("cached_tokens", lambda report: report.tokens.cached, is_enabled=False),
    _gauge("service_share", lambda report: _percent(report.service_share), unit=PERCENTAGE, precision=1),
    _gauge("entitled_share", lambda report: _percent(report.entitled_share), unit=PERCENTAGE, precision=1),
    _duration("queue_time_p95", lambda report: report.queue_time),
    _duration("time_to_first_token_p95", lambda report: report.time_to_first_token),
    _duration("inter_token_latency_p95", lambda report: report.inter_token_latency, precision=3),
    _duration("completion_time_p95", lambda report: report.completion_time, is_enabled=False),
    _gauge("requests_waiting", lambda report: report.requests_waiting),
    _gauge("requests_running", lambda report: report.requests_running),
    _counter("preemptions", lambda report: report.preemptions, unit=None),
    _counter("rejected", lambda report: report.rejected, unit=None, is_enabled=False),
    _gauge("tokens_left_today", lambda report: report.tokens_left_today, unit=UNIT_TOKENS, is_enabled=False),
)

CLASS_SENSORS: Final[tuple[FairhearthSensorDescription[ClassReport], ...]] = (
    _duration("queue_time_p95", lambda report: report.queue_time),
    _duration("time_to_first_token_p95", lambda report: report.time_to_first_token),
    _gauge("requests_waiting", lambda report: report.requests_waiting),
    _seconds("starvation_age", lambda report: report.starvation_age_s, precision=0),
)
"""Per class; key and name end in the class."""

ANSWER_SENSORS: Final[tuple[FairhearthSensorDescription[ClassReport], ...]] = (
    _gauge("slo_attainment", lambda report: _percent(report.slo_attainment), unit=PERCENTAGE),
)
"""The same, of the classes that have targets."""


def _kv_memory_used(snapshot: FairnessSnapshot) -> float | None:
    load = snapshot.engine
    return _percent(load.kv_pages_used / load.kv_pages_total) if load.kv_pages_total else None


ENGINE_SENSORS: Final[tuple[FairhearthSensorDescription[FairnessSnapshot], ...]] = (
    _gauge(
        "kv_memory_used", _kv_memory_used, unit=PERCENTAGE, precision=1, category=EntityCategory.DIAGNOSTIC
    ),
    _gauge("requests_running", lambda snapshot: snapshot.engine.requests_running),
    _gauge("requests_waiting", lambda snapshot: snapshot.engine.requests_waiting),
    _gauge(
        "tokens_per_second",
        lambda snapshot: _rounded(snapshot.engine.tokens_per_second, 1),
        unit=UNIT_TOKENS_PER_SECOND,
        precision=1,
    ),
    _gauge("fairness_index", lambda snapshot: _rounded(snapshot.engine.fairness_index, 3), precision=2),
    _gauge(
        "bound_used",
        lambda snapshot: _whole_percent(snapshot.engine.bound_used),
        unit=PERCENTAGE,
        category=EntityCategory.DIAGNOSTIC,
    ),
    _seconds(
        "longest_iteration",
        lambda snapshot: snapshot.engine.longest_iteration_s,
        precision=3,
        category=EntityCategory.DIAGNOSTIC,
    ),
    _counter("tokens_served", lambda snapshot: snapshot.engine.tokens_served),
    FairhearthSensorDescription(
        key="model",
        translation_key="model",
        entity_category=EntityCategory.DIAGNOSTIC,
        value_fn=lambda snapshot: snapshot.model,
    ),
)


async def async_setup_entry(
    hass: HomeAssistant, entry: FairhearthConfigEntry, async_add_entities: AddConfigEntryEntitiesCallback
) -> None:
    """Add the engine's sensors, those of each resident, and those of the engine's own accounts."""
    coordinator = entry.runtime_data
    async_add_entities([*_engine_sensors(coordinator), JobsSensor(coordinator)])
    for account in ACCOUNTS:
        key, device_info = account_key(entry.entry_id, account), account_device(coordinator, account)
        async_add_entities(_resident_sensors(coordinator, key, account, device_info, has_quota=False))
    for subentry in entry.get_subentries_of_type(SUBENTRY_RESIDENT):
        async_add_entities(
            _resident_sensors(
                coordinator,
                subentry.subentry_id,
                subentry.data[CONF_RESIDENT_ID],
                subentry_device(coordinator, subentry),
                has_quota=subentry.data.get(CONF_DAILY_TOKENS) is not None,
            ),
            config_subentry_id=subentry.subentry_id,
        )


def _engine_sensors(coordinator: FairhearthCoordinator) -> Iterator[SensorEntity]:
    for description in ENGINE_SENSORS:
        yield EngineSensor(coordinator, description)
    for workload_class in WorkloadClass:
        answered = ANSWER_SENSORS if workload_class in ANSWERED_CLASSES else ()
        for class_description in (*CLASS_SENSORS, *answered):
            yield ClassSensor(coordinator, class_description, workload_class)


def _resident_sensors(
    coordinator: FairhearthCoordinator,
    key: str,
    resident_id: str,
    device_info: DeviceInfo,
    *,
    has_quota: bool,
) -> Iterator[SensorEntity]:
    for description in RESIDENT_SENSORS:
        if description.key == "tokens_left_today" and has_quota:
            description = replace(description, entity_registry_enabled_default=True)
        yield ResidentSensor(coordinator, description, key, resident_id, device_info)


class FairhearthSensor[ReportT](FairhearthEntity, SensorEntity):
    """One value of the live picture."""

    entity_description: FairhearthSensorDescription[ReportT]
    _unrecorded_attributes = frozenset({"p50", "p99", "count"})

    def _report(self) -> ReportT | None:
        """Return the part of the picture that the value is in, None where the engine does not tell it."""
        raise NotImplementedError

    @property
    @override
    def available(self) -> bool:
        """Return whether the engine is there and tells of it."""
        return super().available and self._report() is not None

    @property
    @override
    def native_value(self) -> StateType:
        """Return the value in the latest picture."""
        report = self._report()
        return None if report is None else self.entity_description.value_fn(report)

    @property
    @override
    def extra_state_attributes(self) -> dict[str, Any] | None:
        """Return what stands beside the value."""
        report, read = self._report(), self.entity_description.attributes_fn
        return None if report is None or read is None else read(report)

    @override
    def _shown(self) -> object:
        return self.native_value, self.extra_state_attributes


class EngineSensor(FairhearthSensor[FairnessSnapshot]):
    """One value of the engine as a whole."""

    def __init__(
        self, coordinator: FairhearthCoordinator, description: FairhearthSensorDescription[FairnessSnapshot]
    ) -> None:
        """Show one value on the engine's device."""
        unique_id = f"{coordinator.config_entry.entry_id}_{description.key}"
        super().__init__(coordinator, unique_id, engine_device(coordinator))
        self.entity_description = description

    @override
    def _report(self) -> FairnessSnapshot:
        return self.coordinator.data


class ClassSensor(FairhearthSensor[ClassReport]):
    """One value of one workload class, on the engine's device."""

    def __init__(
        self,
        coordinator: FairhearthCoordinator,
        description: FairhearthSensorDescription[ClassReport],
        workload_class: WorkloadClass,
    ) -> None:
        """Show one value of a class; its key and its name end in the class."""
        key = f"{description.key}_{workload_class}"
        super().__init__(
            coordinator, f"{coordinator.config_entry.entry_id}_{key}", engine_device(coordinator)
        )
        self.entity_description = replace(
            description,
            key=key,
            translation_key=key,
            entity_registry_enabled_default=(
                description.entity_registry_enabled_default and workload_class in ENABLED_CLASSES
            ),
        )
        self._workload_class = workload_class

    @override
    def _report(self) -> ClassReport | None:
        return self.coordinator.data.classes.get(self._workload_class)


class ResidentSensor(FairhearthSensor[ResidentReport]):
    """One value of one resident, on the resident's device."""

    def __init__(
        self,
        coordinator: FairhearthCoordinator,
        description: FairhearthSensorDescription[ResidentReport],
        key: str,
        resident_id: str,
        device_info: DeviceInfo,
    ) -> None:
        """Show one value of a resident; key makes its unique id, resident_id finds it in the picture."""
        super().__init__(coordinator, f"{key}_{description.key}", device_info)
        self.entity_description = description
        self._resident_id = resident_id

    @override
    def _report(self) -> ResidentReport | None:
        return self.coordinator.data.residents.get(self._resident_id)


class JobsSensor(FairhearthEntity, SensorEntity):
    """How many durable jobs have not ended; the attribute says which, and how far each is."""

    _attr_translation_key = "jobs"
    _attr_state_class = SensorStateClass.MEASUREMENT
    _unrecorded_attributes = frozenset({"jobs"})

    def __init__(self, coordinator: FairhearthCoordinator) -> None:
        """Show the jobs on the engine's device."""
        unique_id = f"{coordinator.config_entry.entry_id}_jobs"
        super().__init__(coordinator, unique_id, engine_device(coordinator))

    @override
    async def async_added_to_hass(self) -> None:
        """Follow the jobs, which come on a stream of their own."""
        await super().async_added_to_hass()
        self.async_on_remove(self.coordinator.jobs.async_on_changed(self._handle_coordinator_update))

    @property
    @override
    def native_value(self) -> int:
        """Return how many jobs are under way."""
        return len(self.coordinator.jobs.active)

    @property
    @override
    def extra_state_attributes(self) -> dict[str, Any]:
        """Return the first of them."""
        first = list(self.coordinator.jobs.active.values())[:MAX_JOBS_SHOWN]
        return {"jobs": [job_fields(job) for job in first]}

    @override
    def _shown(self) -> object:
        return self.extra_state_attributes, self.native_value
