"""An automation as the editor makes it, of a resident's device, in a real Home Assistant."""

import pytest
from household.residence import Household

from tests.e2e.installing import installed

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


async def test_an_automation_of_a_resident_begins_when_their_job_has_finished(home: Household) -> None:
    sensor = home.resident_sensor("alice", "tokens_served")
    device_id = (await home.socket.call("config/entity_registry/get", entity_id=sensor))["device_id"]
    offered = await home.socket.call("device_automation/trigger/list", device_id=device_id)
    (trigger,) = [one for one in offered if one["type"] == "job_finished"]
    heard = {"event": "heard", "event_data": {"title": "{{ trigger.title }}"}}
    automation = {
        "alias": "Hear",
        "triggers": [{key: trigger[key] for key in ("domain", "device_id", "type")} | {"trigger": "device"}],
        "actions": [heard],
    }
    async with (
        installed(home, "automation", "hear", automation),
        home.socket.events("subscribe_events", event_type="heard") as told,
    ):
        order = {"text": "The fence is broken.", "title": "Fence", "max_tokens": 8}
        await home.socket.act("fairhearth.submit_summary", order)
        event = await told.next(120)
    assert event["data"] == {"title": "Fence"}
