"""Whatever is said gets an answer that makes sense, in the speaker's language, and nothing in the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine_service import errors as sent
from homeassistant.components import conversation
from homeassistant.core import Context, HomeAssistant
from tests.ha.fake_engine import Answer, FakeEngine

pytestmark = pytest.mark.usefixtures("loaded")

AGENT = "conversation.agent"


async def say(hass: HomeAssistant, text: str, **options: Any) -> tuple[str, str]:
    """Return the kind of answer and what is spoken."""
    result = await conversation.async_converse(hass, text, None, Context(), agent_id=AGENT, **options)
    return result.response.response_type.value, result.response.speech["plain"]["speech"]


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "cut",
    [
        Answer(pieces=(), finish_reason="length"),
        Answer(pieces=(), reasoning="Let me think about", finish_reason="length"),
    ],
    ids=["in a tool call", "in a thought"],
)
async def test_an_answer_cut_off_before_its_first_word_says_so(
    hass: HomeAssistant, engine: FakeEngine, caplog: pytest.LogCaptureFixture, cut: Answer
) -> None:
    engine.answers.append(cut)
    kind, spoken = await say(hass, "Lamp on")
    assert kind == "error"
    assert spoken.startswith("The answer was longer than allowed and had to be cut off.")
    assert complaints(caplog) == []
    assert await say(hass, "Again") == ("action_done", "Hello from the fake engine.")


async def test_a_call_cut_off_after_a_tool_ran_says_so_at_once(
    hass: HomeAssistant, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.answers.append(Answer(pieces=(), tool_calls=[("llm__GetDateTime", {})]))
    engine.answers.append(Answer(pieces=(), finish_reason="length"))
    _, spoken = await say(hass, "What time is it?")
    assert "had to be cut off" in spoken
    assert len(engine.chats) == 2
    assert complaints(caplog) == []


async def test_a_model_that_says_nothing_is_reported_not_repeated(
    hass: HomeAssistant, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.answers.append(Answer(pieces=()))
    assert await say(hass, "Hello") == ("error", "The model gave no answer.")
    assert len(engine.chats) == 1
    assert complaints(caplog) == []


@pytest.mark.parametrize("nothing", ["", "   ", "\n\t"])
async def test_nothing_said_is_asked_for_again_without_the_engine(
    hass: HomeAssistant, engine: FakeEngine, nothing: str
) -> None:
    assert await say(hass, nothing) == ("error", "I did not hear anything. Please say it again.")
    assert engine.chats == []


@pytest.mark.parametrize(
    "text",
    [
        "🙂👩‍👩‍👧‍👦 lamp on 🕯️",
        "שלום, תדליק את האור במטבח",
        "مرحبا‏ كم الساعة؟",
        "台所の電気をつけてください",
        "Åse sa: »Tänd ljuset i köket.«",
        'e\u0301 and é, \u202eright to left\u202c, \u0000 and \\ and "',
        "word " * 20_000,
    ],
    ids=["emoji", "hebrew", "arabic", "japanese", "swedish", "odd signs", "100 kB"],
)
async def test_every_script_and_length_arrives_as_it_was_said(
    hass: HomeAssistant, engine: FakeEngine, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    engine.answers.append(Answer(pieces=tuple("ברור 🙂 分かりました。")))
    assert await say(hass, text) == ("action_done", "ברור 🙂 分かりました。")
    assert engine.chats[0].messages[-1].content == text
    assert complaints(caplog) == []


async def test_a_text_too_long_for_the_model_says_so(hass: HomeAssistant, engine: FakeEngine) -> None:
    engine.answers.append(Answer(refusal=sent.PromptTooLong("30000 of 8192 tokens")))
    _, spoken = await say(hass, "word " * 20_000)
    assert spoken == "The request is too long for the model: 30000 of 8192 tokens"
