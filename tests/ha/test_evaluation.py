"""A question with alternatives is answered by how likely the model finds each of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

from custom_components.fairhearth.evaluation import odds_of
from engine_service import errors as sent
from homeassistant.components import ai_task
from homeassistant.core import Context, HomeAssistant
from homeassistant.exceptions import HomeAssistantError, ServiceValidationError
from tests.ha.fake_engine import Answer, FakeEngine, caller_of

pytestmark = pytest.mark.usefixtures("loaded")

WARM = {"type": "noul", "instructions": "Is it warm?"}
ROOM = {
    "type": "choice",
    "instructions": "Which room?",
    "criteria": {"kitchen": "Where one cooks", "bath": "Where one bathes", "hall": "Where one comes in"},
}
MESS = {"type": "score", "instructions": "How tidy?", "criteria": ["a mess", "fair", "tidy"]}


async def evaluate(hass: HomeAssistant, **questions: Any) -> Any:
    data = {
        "task_name": "Judge",
        "entity_id": "ai_task.task",
        "state": {"temperature": 24},
        "questions": questions,
    }
    result = await hass.services.async_call("ai_task", "evaluate", data, blocking=True, return_response=True)
    return result["answers"]


def odds(**chances: float) -> Answer:
    return Answer(pieces=("A",), odds={word: math.log(chance) for word, chance in chances.items()})


async def test_each_kind_of_question_is_answered_with_its_odds(
    hass: HomeAssistant, engine: FakeEngine
) -> None:
    engine.answers.append(odds(A=0.6, B=0.2, The=0.2))
    engine.answers.append(odds(B=0.5, A=0.25, C=0.25))
    engine.answers.append(odds(C=0.5, B=0.5))
    answers = await evaluate(hass, warm=WARM, room=ROOM, mess=MESS)
    assert answers["warm"] == {"type": "noul", "noul": pytest.approx(0.75)}
    assert answers["room"]["choice"] == "bath"
    assert answers["room"]["probabilities"] == pytest.approx({"kitchen": 0.25, "bath": 0.5, "hall": 0.25})
    assert answers["mess"]["score"] == pytest.approx(1.5)
    assert answers["mess"]["probabilities"] == pytest.approx([0.0, 0.5, 0.5])
    first, second, _ = engine.chats
    assert (first.options.max_tokens, first.options.num_logprobs) == (1, 20)
    assert "B) bath: Where one bathes" in second.messages[-1].content
    assert '{"temperature":24}' in first.messages[-1].content
    assert {(caller_of(chat).resident_id, caller_of(chat).class_id) for chat in engine.chats} == {
        ("house", "background")
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({" A": 0.5, "a": 0.25, "B": 0.25}, [0.75, 0.25]),
        ({"A)": 0.5, '"B"': 0.5}, [0.5, 0.5]),
        ({"AB": 0.5, "C": 0.3, "": 0.2}, None),
        ({}, None),
    ],
)
def test_only_letters_of_alternatives_count(words: dict[str, float], expected: list[float] | None) -> None:
    found = odds_of(2, [(word, math.log(chance)) for word, chance in words.items()])
    assert found == (expected and pytest.approx(expected))


async def test_a_model_that_names_no_alternative_gave_no_answer(
    hass: HomeAssistant, engine: FakeEngine
) -> None:
    engine.answers.append(odds(Hello=1.0))
    with pytest.raises(HomeAssistantError, match="gave no answer"):
        await evaluate(hass, warm=WARM)


async def test_too_many_alternatives_are_named(hass: HomeAssistant, engine: FakeEngine) -> None:
    many = {**MESS, "criteria": [f"level {number}" for number in range(21)]}
    with pytest.raises(ServiceValidationError, match="question many has more than 20 alternatives"):
        await evaluate(hass, many=many)
    assert engine.chats == []


async def test_a_refusal_of_the_engine_is_told(hass: HomeAssistant, engine: FakeEngine) -> None:
    engine.answers.append(Answer(refusal=sent.QueueFull("500 are waiting")))
    with pytest.raises(HomeAssistantError, match="Too much is waiting"):
        await evaluate(hass, warm=WARM)


async def test_an_evaluation_is_charged_to_who_ordered_it(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    user = await hass.auth.async_create_user("Owner", group_ids=["system-admin"])
    engine.answers.extend([odds(A=1.0), odds(A=1.0)])
    options: dict[str, Any] = {
        "task_name": "j",
        "questions": {"warm": WARM},
        "state": {},
        "entity_id": "ai_task.task",
    }
    options["state"] = {"temperature": 1}
    await ai_task.async_evaluate(hass, **options, context=Context(user_id=user.id))
    await ai_task.async_evaluate(hass, **options)
    assert [caller_of(chat).resident_id for chat in engine.chats] == ["guest", "house"]


@pytest.mark.parametrize("action", ["generate_data", "evaluate"])
async def test_a_picture_is_refused_in_clear_words_before_anything_is_asked(
    hass: HomeAssistant, engine: FakeEngine, action: str
) -> None:
    picture = {
        "media_content_id": "media-source://media_source/local/a.png",
        "media_content_type": "image/png",
    }
    data: dict[str, Any] = {"task_name": "Look", "entity_id": "ai_task.task", "attachments": [picture]}
    data |= {"questions": {"warm": WARM}} if action == "evaluate" else {"instructions": "What is there?"}
    with pytest.raises(HomeAssistantError, match=r"ai_task\.task does not support attachments"):
        await hass.services.async_call("ai_task", action, data, blocking=True, return_response=True)
    assert engine.chats == []
