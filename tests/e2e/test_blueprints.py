import shutil
from typing import Any

import pytest
from household.places import ROOT
from household.residence import Household
from household.stage import Stage
from household.waiting import until

from tests.e2e.ledger import charged
from tests.e2e.phone import Phone, phone_of_alice

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

BLUEPRINTS = ROOT / "blueprints/automation/fairhearth"


async def add(stage: Stage, home: Household, name: str, inputs: dict[str, Any]) -> str:
    """Install a blueprint, make an automation of it as the editor does, return its entity id."""
    folder = stage.home.folder / "blueprints/automation/fairhearth"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(BLUEPRINTS / f"{name}.yaml", folder)
    config = {"alias": name, "use_blueprint": {"path": f"fairhearth/{name}.yaml", "input": inputs}}
    await home.rest.post(f"/api/config/automation/config/{name}", config)
    entity_id = f"automation.{name}"

    async def is_on() -> bool:
        return any(item["entity_id"] == entity_id for item in await home.rest.get("/api/states"))

    await until(is_on, bool, f"{entity_id} is there", timeout_s=30)
    return entity_id


async def pushed(phone: Phone) -> dict[str, Any]:
    """Return the first message to the phone."""

    async def count() -> int:
        return len(phone.pushed)

    await until(count, bool, "a message reaches the phone", timeout_s=240)
    return phone.pushed[0]


async def test_a_summary_of_the_day_reaches_the_phone_as_work_in_the_background(
    stage: Stage, home: Household
) -> None:
    async with phone_of_alice(home) as phone, charged(stage) as seen:
        inputs = {"task": home.task, "phone": phone.entity_id, "things": ["input_boolean.porch_lamp"]}
        automation = await add(stage, home, "nightly_summary", inputs)
        await home.socket.act("automation.trigger", {"entity_id": automation}, timeout_s=240)
        message = await pushed(phone)
        assert message["title"] == "Today"
        assert message["message"].strip()
        await home.rest.delete("/api/config/automation/config/nightly_summary")
    assert seen["background"] == 1


async def test_a_document_is_summed_up_by_a_durable_job_and_its_summary_reaches_the_phone(
    stage: Stage, home: Household
) -> None:
    async with phone_of_alice(home) as phone:
        inputs = {
            "occasion": [{"trigger": "event", "event_type": "minutes_arrived"}],
            "document": "{{ trigger.event.data.text }}",
            "title": "Minutes of the meeting",
            "phone": phone.entity_id,
            "max_tokens": 24,
        }
        await add(stage, home, "document_summary", inputs)
        await home.rest.post("/api/events/minutes_arrived", {"text": "They talked about the fence. " * 20})
        message = await pushed(phone)
        assert message["title"] == "Minutes of the meeting"
        assert message["message"].strip()
        await home.rest.delete("/api/config/automation/config/document_summary")
