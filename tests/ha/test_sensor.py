"""What is shown of residents, classes and the engine: values, units, kinds, and when it is not available."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry
from pytest_homeassistant_custom_component.components.recorder.common import (
    async_wait_recording_done,
    do_adhoc_statistics,
)

from custom_components.fairhearth.attribution import ACCOUNTS
from custom_components.fairhearth.const import DOMAIN
from custom_components.fairhearth.engine_client import FairnessSnapshot
from custom_components.fairhearth.number import RESIDENT_NUMBERS
from custom_components.fairhearth.sensor import (
    ANSWER_SENSORS,
    CLASS_SENSORS,
    ENABLED_CLASSES,
    ENGINE_SENSORS,
    RESIDENT_SENSORS,
)
from homeassistant.components.recorder import get_instance
from homeassistant.components.recorder.statistics import statistics_during_period
from homeassistant.components.sensor import SensorDeviceClass, SensorStateClass
from homeassistant.const import ATTR_UNIT_OF_MEASUREMENT
from homeassistant.core import Event, EventStateChangedData, HomeAssistant, callback
from homeassistant.helpers import entity_registry as er
from homeassistant.util import dt as dt_util
from tests.ha.conftest import until
from tests.ha.fake_engine import FakeEngine, golden

QUANTILES = {"count": 20, "p50": 0.5, "p95": 1.23456, "p99": 2.0, "last": 0.1}


def busy(snapshot: dict[str, Any]) -> None:
    """Make something of everything happen to Alice, who speaks."""
    snapshot["classes"]["voice"].update(slo_attainment=0.9512, starvation_age_s=7.0)
    for row in (snapshot["residents"]["alice"], snapshot["classes"]["voice"]):
        row.update(
            tokens={"prefill": 800, "cached": 1200, "decode": 230},
            tokens_served=1030,
            requests_running=1,
            requests_waiting=3,
            preemptions=2,
            rejected=4,
            queue_time_s=QUANTILES,
            time_to_first_token_s={**QUANTILES, "p95": 0.25},
            inter_token_latency_s={**QUANTILES, "p95": 0.0421},
            completion_time_s={**QUANTILES, "p95": 12.5},
        )
    snapshot["residents"]["alice"].update(
        service_share=0.41234, entitled_share=1 / 3, tokens_left_today=198_970
    )
    snapshot["engine"].update(
        kv_pages_used=64,
        requests_running=2,
        requests_waiting=5,
        tokens_per_second=61.04,
        fairness_index=0.98765,
        bound_used=0.12345,
        longest_iteration_s=0.23456,
        tokens_served=1030,
        policy_met=False,
        policy_notes=["A spoken request of Alice waited 3.1 s, 2 s are the most."],
    )


@pytest.fixture
async def everything(
    hass: HomeAssistant, loaded: MockConfigEntry, engine: FakeEngine, entity_registry: er.EntityRegistry
) -> er.EntityRegistry:
    """Every sensor enabled, after something of everything happened."""
    for row in er.async_entries_for_config_entry(entity_registry, loaded.entry_id):
        entity_registry.async_update_entity(row.entity_id, disabled_by=None)
    await hass.config_entries.async_reload(loaded.entry_id)
    await until(lambda: engine.num_streams == 2)
    await engine.publish(busy)
    await until(lambda: loaded.runtime_data.data.engine.requests_waiting == 5)
    await hass.async_block_till_done()
    return entity_registry


def keys_of(loaded: MockConfigEntry) -> dict[str, str]:
    """Return the keys that unique ids begin with: the engine's, Alice's, the guests'."""
    resident = next(item for item in loaded.subentries.values() if item.subentry_type == "resident")
    entry_id = loaded.entry_id
    return {"engine": entry_id, "alice": resident.subentry_id, "guest": f"{entry_id}_guest"}


SHOWN = [
    ("alice", "tokens_served", "1030", "tokens"),
    ("alice", "prefill_tokens", "800", "tokens"),
    ("alice", "decode_tokens", "230", "tokens"),
    ("alice", "cached_tokens", "1200", "tokens"),
    ("alice", "service_share", "41.2", "%"),
    ("alice", "entitled_share", "33.3", "%"),
    ("alice", "queue_time_p95", "1.235", "s"),
    ("alice", "time_to_first_token_p95", "0.25", "s"),
    ("alice", "inter_token_latency_p95", "0.042", "s"),
    ("alice", "completion_time_p95", "12.5", "s"),
    ("alice", "requests_waiting", "3", None),
    ("alice", "requests_running", "1", None),
    ("alice", "preemptions", "2", None),
    ("alice", "rejected", "4", None),
    ("alice", "tokens_left_today", "198970", "tokens"),
    ("guest", "tokens_served", "0", "tokens"),
    ("guest", "queue_time_p95", "unknown", "s"),
    ("guest", "tokens_left_today", "unknown", "tokens"),
    ("engine", "kv_memory_used", "25.0", "%"),
    ("engine", "requests_running", "2", None),
    ("engine", "requests_waiting", "5", None),
    ("engine", "tokens_per_second", "61.0", "tokens/s"),
    ("engine", "fairness_index", "0.988", None),
    ("engine", "bound_used", "12", "%"),
    ("engine", "longest_iteration", "0.235", "s"),
    ("engine", "tokens_served", "1030", "tokens"),
    ("engine", "model", "SmolLM2-135M-Instruct", None),
    ("engine", "jobs", "0", None),
    ("engine", "queue_time_p95_voice", "1.235", "s"),
    ("engine", "requests_waiting_voice", "3", None),
    ("engine", "time_to_first_token_p95_voice", "0.25", "s"),
    ("engine", "time_to_first_token_p95_embedding", "unknown", "s"),
    ("engine", "slo_attainment_voice", "95.1", "%"),
    ("engine", "slo_attainment_chat", "unknown", "%"),
    ("engine", "starvation_age_voice", "7.0", "s"),
]


async def test_each_sensor_shows_its_number_in_its_unit(
    hass: HomeAssistant, loaded: MockConfigEntry, everything: er.EntityRegistry
) -> None:
    shown = []
    for whose, key, _, _ in SHOWN:
        entity_id = everything.async_get_entity_id("sensor", DOMAIN, f"{keys_of(loaded)[whose]}_{key}")
        state = hass.states.get(entity_id)
        shown.append((whose, key, state.state, state.attributes.get(ATTR_UNIT_OF_MEASUREMENT)))
    assert shown == SHOWN


def test_every_time_is_a_duration_in_seconds() -> None:
    times = [row for row in (*RESIDENT_SENSORS, *CLASS_SENSORS) if row.key.endswith("_p95")]
    assert len(times) == 6
    assert {(row.device_class, row.native_unit_of_measurement) for row in times} == {
        (SensorDeviceClass.DURATION, "s")
    }


def test_what_only_grows_is_a_counter() -> None:
    growing = {
        description.key
        for description in (*RESIDENT_SENSORS, *CLASS_SENSORS, *ENGINE_SENSORS)
        if description.state_class is SensorStateClass.TOTAL_INCREASING
    }
    assert growing == {
        "tokens_served",
        "prefill_tokens",
        "decode_tokens",
        "cached_tokens",
        "preemptions",
        "rejected",
    }


async def test_a_household_first_sees_what_it_needs(
    loaded: MockConfigEntry, entity_registry: er.EntityRegistry
) -> None:
    rows = er.async_entries_for_config_entry(entity_registry, loaded.entry_id)
    hidden = {row.unique_id for row in rows if row.disabled_by is not None}
    keys = keys_of(loaded)
    details = {"prefill_tokens", "decode_tokens", "cached_tokens", "completion_time_p95", "rejected"}
    assert {f"{keys['alice']}_{key}" for key in details} <= hidden
    assert f"{keys['alice']}_tokens_left_today" not in hidden
    assert f"{keys['guest']}_tokens_left_today" in hidden
    shown_classes = {
        row.unique_id.rpartition("_")[2]
        for row in rows
        if "_queue_time_p95_" in row.unique_id and row.disabled_by is None
    }
    noisy = {"longest_iteration", "starvation_age_voice", "slo_attainment_agent"}
    assert {f"{keys['engine']}_{key}" for key in noisy} <= hidden
    assert f"{keys['engine']}_slo_attainment_voice" not in hidden
    assert shown_classes == {item.value for item in ENABLED_CLASSES}
    assert len(rows) == (
        len(ENGINE_SENSORS)
        + 6 * len(CLASS_SENSORS)
        + 4 * len(ANSWER_SENSORS)
        + (1 + len(ACCOUNTS)) * len(RESIDENT_SENSORS)
        + len(RESIDENT_NUMBERS)
        + 10  # agent, task, policy met, connection, fairness, jobs, button, switch and two events
    )


async def test_whether_the_policy_is_met_is_said_in_words(
    hass: HomeAssistant, everything: er.EntityRegistry
) -> None:
    state = hass.states.get("binary_sensor.kitchen_engine_policy_met")
    assert state.state == "off"
    assert state.attributes["notes"] == ["A spoken request of Alice waited 3.1 s, 2 s are the most."]


async def test_a_resident_the_engine_does_not_know_is_unavailable_alone(
    hass: HomeAssistant, loaded: MockConfigEntry, engine: FakeEngine
) -> None:
    await engine.publish(lambda snapshot: snapshot["residents"].pop("alice"))
    await until(lambda: hass.states.get("sensor.alice_tokens_used").state == "unavailable")
    assert hass.states.get("sensor.guests_tokens_used").state == "0"


async def test_an_engine_without_pages_shows_no_share_of_them(
    hass: HomeAssistant, loaded: MockConfigEntry, engine: FakeEngine
) -> None:
    await engine.publish(lambda snapshot: snapshot["engine"].update(kv_pages_total=0, kv_pages_used=0))
    await until(lambda: hass.states.get("sensor.kitchen_engine_memory_used").state == "unknown")


async def test_nothing_is_written_more_than_once_a_second_nor_when_it_did_not_change(
    hass: HomeAssistant, loaded: MockConfigEntry, engine: FakeEngine
) -> None:
    """Of many snapshots a second one is shown, and the last in any case; what did not change is left
    alone."""
    writes: list[tuple[str, str]] = []

    @callback
    def note(event: Event[EventStateChangedData]) -> None:
        assert event.data["new_state"] is not None
        writes.append((event.data["entity_id"], event.data["new_state"].state))

    hass.bus.async_listen("state_changed", note)
    hass.bus.async_listen("state_reported", note, event_filter=callback(lambda data: True))
    start = hass.loop.time()
    for number in range(10, 60):
        await engine.publish(lambda snapshot, n=number: snapshot["engine"].update(requests_waiting=n))
        await asyncio.sleep(0.02)  # so that each is a snapshot of its own on the wire
    await until(lambda: loaded.runtime_data.data.engine.requests_waiting == 59)
    await hass.async_block_till_done()
    seconds = hass.loop.time() - start
    assert {entity_id for entity_id, _ in writes} == {"sensor.kitchen_engine_requests_waiting"}
    assert writes[-1][1] == "59"
    assert len(writes) <= 2 + seconds


async def test_a_counter_that_starts_again_keeps_its_history(
    recorder_mock: Any, hass: HomeAssistant, loaded: MockConfigEntry, engine: FakeEngine
) -> None:
    """Long-term statistics add up what was counted before the engine's restart and after it."""
    entity_id = "sensor.alice_tokens_used"

    async def count(tokens: int) -> None:
        await engine.publish(lambda snapshot: snapshot["residents"]["alice"].update(tokens_served=tokens))
        await until(lambda: hass.states.get(entity_id).state == str(tokens))
        await async_wait_recording_done(hass)

    begun = dt_util.utcnow()
    await async_wait_recording_done(hass)
    await count(1000)
    await engine.stop()
    await until(lambda: hass.states.get(entity_id).state == "unavailable")
    engine.snapshot["residents"]["alice"]["tokens_served"] = 0
    await engine.start()
    await until(lambda: hass.states.get(entity_id).state == "0")
    await count(250)
    period = begun.replace(minute=begun.minute // 5 * 5, second=0, microsecond=0)
    while period <= dt_util.utcnow():
        do_adhoc_statistics(hass, start=period)
        period += timedelta(minutes=5)
    await async_wait_recording_done(hass)
    rows = await get_instance(hass).async_add_executor_job(
        statistics_during_period,
        hass,
        begun - timedelta(minutes=5),
        None,
        {entity_id},
        "5minute",
        None,
        {"sum"},
    )
    assert rows[entity_id][-1]["sum"] == 1250


def test_the_example_of_the_wire_fills_every_sensor() -> None:
    """No sensor reads a field that the binding example does not have."""
    snapshot = FairnessSnapshot.from_wire(golden("fairness"))
    for description in ENGINE_SENSORS:
        assert description.value_fn(snapshot) is not None, description.key
    for resident_description in RESIDENT_SENSORS:
        assert resident_description.value_fn(snapshot.residents["alice"]) is not None, (
            resident_description.key
        )
