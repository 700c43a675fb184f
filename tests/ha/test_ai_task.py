"""An AI task returns text, or data in the structure that was asked for, or says what was wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

from engine_service import errors as sent
from homeassistant.core import HomeAssistant
from homeassistant.exceptions import HomeAssistantError
from tests.ha.fake_engine import Answer, FakeEngine

pytestmark = pytest.mark.usefixtures("loaded")

STRUCTURE = {
    "title": {"selector": {"text": {}}, "required": True, "description": "A short title"},
    "stars": {"selector": {"number": {"min": 1, "max": 5}}, "required": True},
}


async def generate(hass: HomeAssistant, **options: Any) -> Any:
    data = {"task_name": "Rate a film", "entity_id": "ai_task.task", "instructions": "Rate it", **options}
    return await hass.services.async_call(
        "ai_task", "generate_data", data, blocking=True, return_response=True
    )


async def test_text_is_returned_as_it_is(hass: HomeAssistant, engine: FakeEngine) -> None:
    result = await generate(hass)
    assert result["data"] == "Hello from the fake engine."
    (chat,) = engine.chats
    assert chat.response_format is None
    assert (chat.options.max_tokens, chat.options.temperature) == (256, 0.1)


async def test_data_is_returned_in_the_structure_asked_for(hass: HomeAssistant, engine: FakeEngine) -> None:
    answer = {"title": "Größe 🙂", "stars": 4}
    engine.answers.append(Answer(pieces=tuple(json.dumps(answer, ensure_ascii=False))))
    result = await generate(hass, structure=STRUCTURE)
    assert result["data"] == answer
    (chat,) = engine.chats
    assert chat.response_format is not None
    assert (chat.response_format.kind, chat.response_format.name) == ("json_schema", "rate_a_film")
    assert chat.response_format.strict is True
    schema = chat.response_format.schema
    assert schema is not None
    assert schema["required"] == ["title", "stars"]
    assert schema["properties"]["stars"]["maximum"] == 5


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Answer(pieces=("not", " json")), "does not have the structure"),
        (Answer(pieces=('{"title": "x"}',)), "stars"),
        (Answer(pieces=('{"title": "x", "stars": 9}',)), "stars"),
        (Answer(pieces=('["title"]',)), "does not have the structure"),
        (Answer(pieces=('{"title": ',), finish_reason="length"), "had to be cut off"),
        (Answer(pieces=()), "gave no answer"),
        (Answer(refusal=sent.InvalidRequest("the schema cannot be compiled")), "cannot be compiled"),
        (Answer(error=sent.GenerationFailed("out of pages")), "out of pages"),
    ],
)
async def test_data_that_is_not_as_asked_is_an_error_that_says_why(
    hass: HomeAssistant, engine: FakeEngine, answer: Answer, complaint: str
) -> None:
    engine.answers.append(answer)
    with pytest.raises(HomeAssistantError, match=complaint):
        await generate(hass, structure=STRUCTURE)


async def test_text_that_was_cut_off_is_still_text(hass: HomeAssistant, engine: FakeEngine) -> None:
    engine.answers.append(Answer(pieces=("Half a",), finish_reason="length"))
    assert (await generate(hass))["data"] == "Half a"


async def test_a_lost_engine_is_an_error(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    await engine.stop()
    with pytest.raises(HomeAssistantError, match="cannot be reached"):
        await generate(hass)
