"""The paths that lead to a request in a running Home Assistant, and who the engine is told to charge."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

from homeassistant.auth.models import User
from homeassistant.components import ai_task, conversation
from homeassistant.core import Context, HomeAssistant
from homeassistant.helpers import area_registry as ar, device_registry as dr, entity_registry as er, llm
from homeassistant.setup import async_setup_component
from tests.ha.conftest import until
from tests.ha.fake_engine import FakeEngine, caller_of

AGENT = "conversation.agent"
TASK = "ai_task.task"
SPEAK = {"action": "conversation.process", "data": {"text": "Report", "agent_id": AGENT}}
ORDER = {
    "action": "ai_task.generate_data",
    "data": {"task_name": "report", "instructions": "Report", "entity_id": TASK},
    "response_variable": "answer",
}


@pytest.fixture
async def alice(hass: HomeAssistant, loaded: MockConfigEntry) -> User:
    """The user behind the resident's person; she also owns a satellite and the office."""
    user = await hass.auth.async_create_user("Alice", group_ids=["system-admin"])
    hass.states.async_set("person.alice", "home", {"user_id": user.id})
    subentry = next(item for item in loaded.subentries.values() if item.subentry_type == "resident")
    data = {
        **subentry.data,
        "person": "person.alice",
        "satellites": ["assist_satellite.alice"],
        "areas": ["office"],
    }
    hass.config_entries.async_update_subentry(loaded, subentry, data=data)
    await hass.async_block_till_done()
    return user


@pytest.fixture
async def stranger(hass: HomeAssistant) -> User:
    """A user who is no resident."""
    return await hass.auth.async_create_user("Stranger", group_ids=["system-admin"])


def charged(engine: FakeEngine) -> list[tuple[str, str]]:
    callers = [caller_of(chat) for chat in engine.chats]
    return [(caller.resident_id, caller.class_id) for caller in callers]


async def speak(hass: HomeAssistant, context: Context, **options: Any) -> None:
    await conversation.async_converse(hass, "Hello", None, context, agent_id=AGENT, **options)


async def call_script(hass: HomeAssistant, action: dict[str, Any], context: Context) -> None:
    assert await async_setup_component(hass, "script", {"script": {"report": {"sequence": [action]}}})
    await hass.services.async_call("script", "report", blocking=True, context=context)


async def automate(hass: HomeAssistant, action: dict[str, Any]) -> None:
    """Report when the switch is turned, and when the event comes."""
    assert await async_setup_component(hass, "input_boolean", {"input_boolean": {"switch": {}}})
    automation = {
        "id": "report",
        "alias": "Report",
        "triggers": [
            {"trigger": "state", "entity_id": "input_boolean.switch", "to": "on"},
            {"trigger": "event", "event_type": "night"},
        ],
        "actions": [action],
    }
    assert await async_setup_component(hass, "automation", {"automation": [automation]})


async def turn_switch(hass: HomeAssistant, context: Context) -> None:
    await hass.services.async_call(
        "input_boolean", "turn_on", {"entity_id": "input_boolean.switch"}, blocking=True, context=context
    )


async def test_typing_over_rest_is_charged_to_the_user(
    hass: HomeAssistant, engine: FakeEngine, alice: User, hass_client: Any, hass_admin_user: User
) -> None:
    client = await hass_client()
    response = await client.post("/api/conversation/process", json={"text": "Hello", "agent_id": AGENT})
    assert response.status == 200
    assert charged(engine) == [("guest", "chat")]
    hass.states.async_set("person.alice", "home", {"user_id": hass_admin_user.id})
    await client.post("/api/conversation/process", json={"text": "Hello", "agent_id": AGENT})
    assert charged(engine)[1:] == [("alice", "chat")]


async def test_typing_over_the_websocket_is_charged_to_the_user(
    hass: HomeAssistant, engine: FakeEngine, alice: User, hass_ws_client: Any, hass_admin_user: User
) -> None:
    hass.states.async_set("person.alice", "home", {"user_id": hass_admin_user.id})
    client = await hass_ws_client(hass)
    await client.send_json_auto_id({"type": "conversation/process", "text": "Hello", "agent_id": AGENT})
    assert (await client.receive_json())["success"]
    assert charged(engine) == [("alice", "chat")]


async def test_speaking_is_charged_by_satellite_then_by_area(
    hass: HomeAssistant,
    engine: FakeEngine,
    alice: User,
    area_registry: ar.AreaRegistry,
    device_registry: dr.DeviceRegistry,
    entity_registry: er.EntityRegistry,
) -> None:
    area_registry.async_create("Office")
    owner = MockConfigEntry(domain="esphome")
    owner.add_to_hass(hass)
    device = device_registry.async_get_or_create(config_entry_id=owner.entry_id, identifiers={("x", "y")})
    by_device = entity_registry.async_get_or_create(
        "assist_satellite", "esphome", "by_device", device_id=device.id
    )
    by_itself = entity_registry.async_get_or_create("assist_satellite", "esphome", "by_itself")
    entity_registry.async_update_entity(by_itself.entity_id, area_id="office")

    await speak(hass, Context(), satellite_id="assist_satellite.alice")
    await speak(hass, Context(), satellite_id=by_device.entity_id, device_id=device.id)
    device_registry.async_update_device(device.id, area_id="office")
    await speak(hass, Context(), satellite_id=by_device.entity_id, device_id=device.id)
    await speak(hass, Context(), satellite_id=by_itself.entity_id)
    await speak(hass, Context(), satellite_id="assist_satellite.unknown")
    assert charged(engine) == [
        ("alice", "voice"),
        ("guest", "voice"),
        ("alice", "voice"),
        ("alice", "voice"),
        ("guest", "voice"),
    ]


@pytest.mark.parametrize("action", [SPEAK, ORDER], ids=["conversation", "ai_task"])
async def test_a_script_is_charged_to_who_called_it(
    hass: HomeAssistant, engine: FakeEngine, alice: User, stranger: User, action: dict[str, Any]
) -> None:
    await call_script(hass, action, Context(user_id=alice.id))
    await hass.services.async_call("script", "report", blocking=True, context=Context(user_id=stranger.id))
    await hass.services.async_call("script", "report", blocking=True, context=Context())
    assert charged(engine) == [("alice", "background"), ("guest", "background"), ("house", "background")]


@pytest.mark.parametrize("action", [SPEAK, ORDER], ids=["conversation", "ai_task"])
async def test_an_automation_is_charged_to_who_set_it_off(
    hass: HomeAssistant, engine: FakeEngine, alice: User, action: dict[str, Any]
) -> None:
    await automate(hass, action)
    await turn_switch(hass, Context(user_id=alice.id))
    await hass.async_block_till_done()
    assert charged(engine) == [("alice", "background")]


@pytest.mark.parametrize("action", [SPEAK, ORDER], ids=["conversation", "ai_task"])
async def test_an_automation_nobody_set_off_is_charged_to_the_house(
    hass: HomeAssistant, engine: FakeEngine, alice: User, action: dict[str, Any]
) -> None:
    await automate(hass, action)
    hass.bus.async_fire("night")
    await hass.async_block_till_done()
    assert charged(engine) == [("house", "background")]


async def test_an_automation_triggered_by_hand_is_charged_to_the_hand(
    hass: HomeAssistant, engine: FakeEngine, alice: User
) -> None:
    await automate(hass, SPEAK)
    await hass.services.async_call(
        "automation",
        "trigger",
        {"entity_id": "automation.report"},
        blocking=True,
        context=Context(user_id=alice.id),
    )
    await hass.async_block_till_done()
    assert charged(engine) == [("alice", "background")]


async def test_an_automation_set_off_by_another_is_charged_to_who_set_off_the_first(
    hass: HomeAssistant, engine: FakeEngine, alice: User
) -> None:
    assert await async_setup_component(hass, "input_boolean", {"input_boolean": {"first": {}, "second": {}}})
    turn_on = {"action": "input_boolean.turn_on", "target": {"entity_id": "input_boolean.second"}}
    automations = [
        {
            "alias": name,
            "triggers": [{"trigger": "state", "entity_id": f"input_boolean.{name}", "to": "on"}],
            "actions": [action],
        }
        for name, action in (("first", turn_on), ("second", SPEAK))
    ]
    assert await async_setup_component(hass, "automation", {"automation": automations})
    await hass.services.async_call(
        "input_boolean",
        "turn_on",
        {"entity_id": "input_boolean.first"},
        blocking=True,
        context=Context(user_id=alice.id),
    )
    await hass.async_block_till_done()
    assert charged(engine) == [("alice", "background")]


async def test_tasks_at_once_are_each_charged_to_their_own_caller(
    hass: HomeAssistant, engine: FakeEngine, alice: User, stranger: User
) -> None:
    """The entity's own context is the last caller's; charging by it would mix them up."""

    def order(context: Context | None) -> Any:
        return ai_task.async_generate_data(
            hass,
            task_name="report",
            entity_id=TASK,
            instructions=str(context and context.user_id),
            context=context,
        )

    contexts = [Context(user_id=alice.id), Context(user_id=stranger.id), Context(), None]
    await asyncio.gather(*(order(context) for context in contexts))
    by_prompt = {chat.messages[-1].content: caller_of(chat).resident_id for chat in engine.chats}
    assert by_prompt == {alice.id: "alice", stranger.id: "guest", "None": "house"}
    assert len(engine.chats) == 4
    assert {caller_of(chat).class_id for chat in engine.chats} == {"background"}


class ToolsThatTakeTime(llm.API):
    """An API as an integration may provide it, which has to look something up first."""

    async def async_get_api_instance(self, llm_context: llm.LLMContext) -> llm.APIInstance:
        await asyncio.sleep(0.1)
        return llm.APIInstance(api=self, api_prompt="", llm_context=llm_context, tools=[])


async def test_tasks_of_automations_at_once_are_each_charged_to_who_set_off_theirs(
    hass: HomeAssistant, engine: FakeEngine, alice: User, loaded: MockConfigEntry
) -> None:
    """Neither context has a user, only the parent tells them apart; and both are under way before either is
    sent."""
    pressed, ticked = Context(user_id=alice.id), Context()
    loaded.runtime_data.context_users.remember(pressed.id, alice.id)
    await asyncio.gather(
        *(
            ai_task.async_generate_data(
                hass,
                task_name="report",
                entity_id=TASK,
                instructions=name,
                llm_api=ToolsThatTakeTime(hass=hass, id="slow", name="Slow"),
                context=Context(parent_id=parent.id),
            )
            for name, parent in (("pressed", pressed), ("ticked", ticked))
        )
    )
    by_prompt = {chat.messages[-1].content: caller_of(chat).resident_id for chat in engine.chats}
    assert by_prompt == {"pressed": "alice", "ticked": "house"}


async def test_a_task_ordered_by_an_integration_is_not_charged_to_the_last_caller(
    hass: HomeAssistant, engine: FakeEngine, alice: User
) -> None:
    options: dict[str, Any] = {"task_name": "report", "entity_id": TASK, "instructions": "Report"}
    await ai_task.async_generate_data(hass, **options, context=Context(user_id=alice.id))
    await ai_task.async_generate_data(hass, **options)
    assert charged(engine) == [("alice", "background"), ("house", "background")]


async def test_what_the_ledger_says_is_what_the_sensors_show(
    hass: HomeAssistant, engine: FakeEngine, alice: User
) -> None:
    await speak(hass, Context(user_id=alice.id))
    served = engine.snapshot["residents"]["alice"]["tokens_served"]
    assert served > 0
    await until(lambda: hass.states.get("sensor.alice_tokens_used").state == str(served))
    assert hass.states.get("sensor.house_tokens_used").state == "0"
