"""The action that asks the engine directly: what it returns, who is charged, and who may charge another."""

from __future__ import annotations

from typing import Any

import probatio
import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

from custom_components.fairhearth.const import DOMAIN
from engine_service import errors as sent
from homeassistant.core import Context, HomeAssistant
from homeassistant.exceptions import HomeAssistantError, ServiceValidationError, Unauthorized
from homeassistant.setup import async_setup_component
from tests.ha.fake_engine import Answer, FakeEngine, caller_of


async def generate(hass: HomeAssistant, context: Context | None = None, **data: Any) -> Any:
    return await hass.services.async_call(
        DOMAIN, "generate", {"prompt": "Hi", **data}, blocking=True, return_response=True, context=context
    )


async def test_text_is_returned_with_what_it_cost(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    result = await generate(hass, instructions="Be brief.", max_tokens=7, temperature=0)
    assert result == {
        "text": "Hello from the fake engine.",
        "resident": "house",
        "workload_class": "background",
        "finish_reason": "stop",
        "queue_s": 0.01,
        "time_to_first_token_s": 0.08,
        "completion_s": 0.9,
        "preemptions": 0,
        "tokens": {"prefill": 3, "cached": 0, "decode": 5},
    }
    (chat,) = engine.chats
    assert [message.content for message in chat.messages] == ["Be brief.", "Hi"]
    assert (chat.options.max_tokens, chat.options.temperature) == (7, 0)


async def test_an_automation_may_name_the_resident_and_the_kind_of_work(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    result = await generate(hass, resident="alice", workload_class="chat")
    assert (result["resident"], result["workload_class"]) == ("alice", "chat")


async def test_only_an_administrator_may_charge_another_resident(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await hass.auth.async_create_user("Owner", group_ids=["system-admin"])  # the first one may do everything
    user = await hass.auth.async_create_user("Bob", group_ids=["system-users"])
    admin = await hass.auth.async_create_user("Admin", group_ids=["system-admin"])
    with pytest.raises(Unauthorized):
        await generate(hass, Context(user_id=user.id), resident="alice")
    assert (await generate(hass, Context(user_id=user.id)))["resident"] == "guest"
    assert (await generate(hass, Context(user_id=user.id), resident="guest"))["resident"] == "guest"
    assert (await generate(hass, Context(user_id=admin.id), resident="alice"))["resident"] == "alice"
    assert len(engine.chats) == 3


async def test_someone_who_is_no_administrator_can_only_lower_the_urgency(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    """Pressed by hand, chat is the most; in a script nobody waits."""
    await hass.auth.async_create_user("Owner", group_ids=["system-admin"])
    user = await hass.auth.async_create_user("Bob", group_ids=["system-users"])
    context = Context(user_id=user.id)
    assert (await generate(hass, context, workload_class="chat"))["workload_class"] == "chat"
    assert (await generate(hass, context, workload_class="agent"))["workload_class"] == "agent"
    assert (await generate(hass, context))["workload_class"] == "background"
    action = {
        "action": "fairhearth.generate",
        "data": {"prompt": "Hi", "workload_class": "chat"},
        "response_variable": "answer",
    }
    assert await async_setup_component(hass, "script", {"script": {"ask": {"sequence": [action]}}})
    await hass.services.async_call("script", "ask", blocking=True, context=context)
    assert caller_of(engine.chats[-1]).class_id == "background"


@pytest.mark.parametrize(
    "data",
    [
        {"workload_class": "voice"},
        {"workload_class": "faster"},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"temperature": 3},
        {"unknown": 1},
    ],
)
async def test_what_cannot_be_is_refused(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, data: dict[str, Any]
) -> None:
    with pytest.raises(probatio.Invalid):
        await generate(hass, **data)
    assert engine.chats == []


async def test_a_resident_who_is_not_set_up_is_named_with_those_who_are(
    hass: HomeAssistant, loaded: MockConfigEntry
) -> None:
    with pytest.raises(ServiceValidationError, match=r"no resident zoe\. Set up are: alice, guest, house"):
        await generate(hass, resident="zoe")


async def test_without_an_engine_it_says_so(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    with pytest.raises(ServiceValidationError, match="no engine with the entry other"):
        await generate(hass, config_entry_id="other")
    await hass.config_entries.async_unload(loaded.entry_id)
    with pytest.raises(ServiceValidationError, match="No engine is connected"):
        await generate(hass)


async def test_with_two_engines_one_must_be_named(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    second = MockConfigEntry(domain=DOMAIN, title="Second", data=loaded.data)
    second.add_to_hass(hass)
    assert await hass.config_entries.async_setup(second.entry_id)
    await hass.async_block_till_done()
    with pytest.raises(ServiceValidationError, match="More than one engine"):
        await generate(hass)
    assert (await generate(hass, config_entry_id=loaded.entry_id))["finish_reason"] == "stop"


async def test_an_error_of_the_engine_is_told(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    engine.answers.append(Answer(refusal=sent.QueueFull("500 are waiting")))
    with pytest.raises(HomeAssistantError, match="Too much is waiting"):
        await generate(hass)
