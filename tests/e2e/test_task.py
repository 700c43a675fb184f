import asyncio

import pytest
from household import workload
from household.residence import Household
from household.stage import Stage

from tests.e2e.ledger import charged

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

STRUCTURE = {
    "title": {"selector": {"text": {}}, "required": True},
    "minutes": {"selector": {"number": {"min": 0, "max": 600}}, "required": True},
    "is_urgent": {"selector": {"boolean": {}}, "required": True},
    "room": {"selector": {"select": {"options": ["kitchen", "garden", "garage"]}}, "required": True},
}


async def test_a_task_with_a_structure_returns_data_that_fits_it(stage: Stage, home: Household) -> None:
    async with charged(stage) as seen:
        response = await home.socket.act(
            "ai_task.generate_data",
            {
                "task_name": "Chore",
                "entity_id": home.task,
                "instructions": "Make up one chore for a Saturday.",
                "structure": STRUCTURE,
            },
            timeout_s=120,
            returns=True,
        )
    data = response["data"]
    assert data.keys() == STRUCTURE.keys()
    assert isinstance(data["title"], str)
    assert 0 <= data["minutes"] <= 600
    assert isinstance(data["is_urgent"], bool)
    assert data["room"] in ("kitchen", "garden", "garage")
    assert seen == {"alice": 1, "background": 1}, "whoever calls the action is charged for it"


async def test_an_automation_that_nobody_set_off_is_background_of_the_house(
    stage: Stage, home: Household
) -> None:
    automation = {
        "alias": "Clockwork",
        "triggers": [{"trigger": "time_pattern", "seconds": "/2"}],
        "actions": [
            {
                "action": "ai_task.generate_data",
                "data": {"task_name": "Tick", "entity_id": home.task, "instructions": "Say one word."},
                "response_variable": "said",
            },
            {"event": workload.SUMMARY_EVENT, "event_data": {"title": "Tick", "text": "{{ said.data }}"}},
        ],
        "mode": "single",
        "max_exceeded": "silent",
    }
    async with charged(stage) as seen:
        async with home.socket.events("subscribe_events", event_type=workload.SUMMARY_EVENT) as told:
            await home.rest.post("/api/config/automation/config/clockwork", automation)
            event = await told.next(120)
            await home.rest.delete("/api/config/automation/config/clockwork")
        assert event["data"]["text"]
        await asyncio.sleep(1)  # a run that began before the deletion
    assert seen["house"] >= 1
    assert seen == {"house": seen["house"], "background": seen["house"]}
