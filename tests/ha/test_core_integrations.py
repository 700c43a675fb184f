"""Home Assistant's own `llama_cpp` and `open_router` against a real engine process with the embedded model.

Both are used as they ship. `open_router` has its address built in, so that alone is exchanged.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import voluptuous as vol
from pytest_homeassistant_custom_component.common import MockConfigEntry

from homeassistant.components import ai_task, conversation, open_router
from homeassistant.components.homeassistant.exposed_entities import async_expose_entity
from homeassistant.config_entries import ConfigEntry, ConfigEntryState
from homeassistant.core import Context, HomeAssistant
from homeassistant.data_entry_flow import FlowResultType
from homeassistant.helpers import entity_registry as er
from homeassistant.setup import async_setup_component

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/lib"))

from household.engine import EngineApi, EngineProcess
from household.places import free_port
from household.residence import CONTROL_PROMPT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OPEN_ROUTER = "https://openrouter.ai/api/v1"
LAMP = "input_boolean.kitchen_lamp"
SHORT = {"recommended": False, "max_tokens": 40, "temperature": 0.0, "top_p": 1.0}


@pytest.fixture
async def served(tmp_path: Path, socket_enabled: None) -> AsyncGenerator[EngineProcess]:
    """An engine of its own."""
    process = EngineProcess(tmp_path / "engine", free_port())
    await process.start()
    yield process
    await process.stop()


@pytest.fixture
async def api(served: EngineProcess) -> AsyncGenerator[EngineApi]:
    """What the engine itself says."""
    async with aiohttp.ClientSession() as session:
        yield EngineApi(session, served)


async def ask(hass: HomeAssistant, agent: str, text: str, conversation_id: str | None = None) -> Any:
    return await conversation.async_converse(hass, text, conversation_id, Context(), agent_id=agent)


def entity_of(hass: HomeAssistant, entry: ConfigEntry, domain: str) -> str:
    found = er.async_entries_for_config_entry(er.async_get(hass), entry.entry_id)
    (entity_id,) = [entity.entity_id for entity in found if entity.domain == domain]
    return entity_id


async def set_up_llama_cpp(hass: HomeAssistant, served: EngineProcess) -> ConfigEntry:
    """Go through its dialog as a person would; it asks the engine for a tool call, whole and as a stream."""
    flow = await hass.config_entries.flow.async_init("llama_cpp", context={"source": "user"})
    flow = await hass.config_entries.flow.async_configure(
        flow["flow_id"], {"base_url": f"{served.url}/v1", "api_key": served.token}
    )
    assert flow["step_id"] == "model", flow
    (model,) = flow["data_schema"].schema["chat_model"].config["options"]
    flow = await hass.config_entries.flow.async_configure(flow["flow_id"], {"chat_model": model})
    await hass.async_block_till_done()
    assert flow["type"] is FlowResultType.CREATE_ENTRY, flow
    entry: ConfigEntry = flow["result"]
    assert entry.state is ConfigEntryState.LOADED
    assert entry.data["streaming"] is True
    return entry


async def change(hass: HomeAssistant, entry: ConfigEntry, **options: Any) -> None:
    """Set options of the one conversation agent."""
    (subentry,) = entry.subentries.values()
    hass.config_entries.async_update_subentry(entry, subentry, data={**subentry.data, **options})
    await hass.async_block_till_done()


async def test_llama_cpp_is_set_up_by_its_dialog_and_holds_a_conversation(
    hass: HomeAssistant, core: None, served: EngineProcess, api: EngineApi
) -> None:
    entry = await set_up_llama_cpp(hass, served)
    await change(hass, entry, llm_hass_api=[], **SHORT)
    agent = entity_of(hass, entry, "conversation")
    before = (await api.fairness())["residents"]["guest"]["finished"]

    first = await ask(hass, agent, "What is the capital of France?")
    second = await ask(hass, agent, "And of Italy?", first.conversation_id)

    for answer in (first, second):
        assert answer.response.error_code is None
        assert answer.response.speech["plain"]["speech"].strip()
    assert second.conversation_id == first.conversation_id
    after = (await api.fairness())["residents"]["guest"]["finished"]
    assert after - before == 2, "one request a turn, charged to who asks without a name"


async def test_llama_cpp_turns_on_a_lamp_by_a_tool_call(
    hass: HomeAssistant, core: None, served: EngineProcess
) -> None:
    helpers = {"input_boolean": {"kitchen_lamp": {"name": "Kitchen lamp"}}}
    assert await async_setup_component(hass, "input_boolean", helpers)
    async_expose_entity(hass, "conversation", LAMP, True)
    entry = await set_up_llama_cpp(hass, served)
    await change(hass, entry, prompt=CONTROL_PROMPT, **SHORT)

    answer = await ask(hass, entity_of(hass, entry, "conversation"), "Turn on the kitchen lamp.")

    assert hass.states.get(LAMP).state == "on"
    assert answer.response.response_type.value == "action_done"


async def test_llama_cpp_tells_a_wrong_token_and_a_model_that_is_not_served(
    hass: HomeAssistant, core: None, served: EngineProcess, caplog: pytest.LogCaptureFixture
) -> None:
    flow = await hass.config_entries.flow.async_init("llama_cpp", context={"source": "user"})
    address = {"base_url": f"{served.url}/v1"}
    flow = await hass.config_entries.flow.async_configure(flow["flow_id"], {**address, "api_key": "wrong"})
    assert flow["errors"] == {"base": "invalid_auth"}
    flow = await hass.config_entries.flow.async_configure(
        flow["flow_id"], {**address, "api_key": served.token}
    )
    flow = await hass.config_entries.flow.async_configure(flow["flow_id"], {"chat_model": "gpt-4"})
    assert flow["errors"] == {"base": "api_error"}
    assert "the model 'gpt-4' is not served here" in caplog.text


@pytest.fixture
async def router(
    hass: HomeAssistant, core: None, served: EngineProcess, api: EngineApi, monkeypatch: pytest.MonkeyPatch
) -> MockConfigEntry:
    """`open_router` with an agent and an AI task, at the engine's address instead of its own."""

    def redirected(*, base_url: str, **options: Any) -> openai.AsyncOpenAI:
        assert base_url == OPEN_ROUTER
        return openai.AsyncOpenAI(base_url=f"{served.url}/v1", **options)

    monkeypatch.setattr(open_router, "AsyncOpenAI", redirected)
    model = (await api.get("/v1/models"))["data"][0]["id"]
    agent = {"model": model, "prompt": "Answer in one short sentence.", "web_search": "off"}
    task = {"model": model, "output_modalities": ["text"]}
    entry = MockConfigEntry(
        domain="open_router",
        version=1,
        minor_version=4,
        data={"api_key": served.token},
        subentries_data=[
            {"subentry_type": "conversation", "title": "Agent", "unique_id": None, "data": agent},
            {"subentry_type": "ai_task_data", "title": "Task", "unique_id": None, "data": task},
        ],
    )
    entry.add_to_hass(hass)
    assert await async_setup_component(hass, "ai_task", {})
    assert await hass.config_entries.async_setup(entry.entry_id)
    await hass.async_block_till_done()
    return entry


async def test_open_router_holds_a_conversation(hass: HomeAssistant, router: MockConfigEntry) -> None:
    agent = entity_of(hass, router, "conversation")
    first = await ask(hass, agent, "What is the capital of France?")
    second = await ask(hass, agent, "And of Italy?", first.conversation_id)
    for answer in (first, second):
        assert answer.response.error_code is None
        assert answer.response.speech["plain"]["speech"].strip()


async def test_open_router_generates_data_of_the_structure_it_asks_for(
    hass: HomeAssistant, router: MockConfigEntry
) -> None:
    result = await ai_task.async_generate_data(
        hass,
        task_name="weather",
        entity_id=entity_of(hass, router, "ai_task"),
        instructions="It rains in Paris at 12 degrees.",
        structure=vol.Schema({vol.Required("city"): str, vol.Required("degrees"): int}),
    )
    assert result.data.keys() == {"city", "degrees"}
    assert isinstance(result.data["city"], str)
    assert isinstance(result.data["degrees"], int)
