"""A large household: fifty residents with every entity shown, and an engine that reports without pause."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

from pytest_homeassistant_custom_component.common import MockConfigEntry

from custom_components.fairhearth.const import DOMAIN
from custom_components.fairhearth.coordinator import LISTENERS_AT_ONCE
from homeassistant.const import CONF_TOKEN, CONF_URL
from homeassistant.core import Event, EventStateChangedData, HomeAssistant, callback
from homeassistant.helpers import entity_registry as er
from tests.ha.conftest import until
from tests.ha.fake_engine import ENGINE_ID, TOKEN, FakeEngine

NUM_RESIDENTS = 50
NUM_SNAPSHOTS = 40


def busier(snapshot: dict[str, Any], number: int) -> None:
    """Change every number that there is."""
    times = {"count": number, "p50": number / 7, "p95": number / 5, "p99": number / 3, "last": 0.1}
    for row in (*snapshot["residents"].values(), *snapshot["classes"].values()):
        row.update(
            tokens={"prefill": number, "cached": number, "decode": number},
            tokens_served=2 * number,
            requests_running=number,
            requests_waiting=number,
            rejected=number,
            preemptions=number,
            queue_time_s=times,
            time_to_first_token_s=times,
            inter_token_latency_s=times,
            completion_time_s=times,
        )
    for row in snapshot["residents"].values():
        row.update(service_share=number / 100, entitled_share=number / 200)
    snapshot["engine"].update(tokens_served=number, requests_waiting=number, requests_running=number)


async def test_no_entity_is_written_more_than_once_a_second_whatever_the_engine_reports(
    hass: HomeAssistant, core: None, engine: FakeEngine, entity_registry: er.EntityRegistry
) -> None:
    residents = [
        {
            "subentry_type": "resident",
            "title": f"Resident {number}",
            "unique_id": f"r{number}",
            "data": {"resident_id": f"r{number}", "weight": 1, "daily_is_hard": False},
        }
        for number in range(NUM_RESIDENTS)
    ]
    entry = MockConfigEntry(
        domain=DOMAIN,
        unique_id=ENGINE_ID,
        title="Kitchen engine",
        data={CONF_URL: engine.url, CONF_TOKEN: TOKEN},
        subentries_data=residents,
    )
    entry.add_to_hass(hass)
    assert await hass.config_entries.async_setup(entry.entry_id)
    await hass.async_block_till_done()
    for row in er.async_entries_for_config_entry(entity_registry, entry.entry_id):
        entity_registry.async_update_entity(row.entity_id, disabled_by=None)
    await hass.config_entries.async_reload(entry.entry_id)
    await until(lambda: engine.num_streams == 2, 60)
    writes: Counter[str] = Counter()
    slices = [0]

    @callback
    def note(event: Event[EventStateChangedData]) -> None:
        writes[event.data["entity_id"]] += 1
        slices[-1] += 1

    hass.bus.async_listen("state_changed", note)

    async def other_work() -> None:
        while True:
            slices.append(0)
            await asyncio.sleep(0)

    other = hass.async_create_background_task(other_work(), "other work")
    begun = hass.loop.time()
    for number in range(1, NUM_SNAPSHOTS + 1):
        await engine.publish(lambda snapshot, n=number: busier(snapshot, n))
        await asyncio.sleep(0.05)
    last = f"sensor.resident_{NUM_RESIDENTS - 1}_tokens_used"
    await until(lambda: hass.states.get(last).state == str(2 * NUM_SNAPSHOTS), 60)
    await hass.async_block_till_done()
    other.cancel()
    assert max(slices) <= 2 * LISTENERS_AT_ONCE  # others have their turn in between
    seconds = hass.loop.time() - begun
    assert len(writes) > 14 * NUM_RESIDENTS  # all of a resident but what is left of a quota
    assert max(writes.values()) <= math.ceil(seconds) + 1
