"""Every language has every text, with the same places to fill in, and is spoken to whoever speaks it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

import custom_components.fairhearth
from engine_service.errors import QuotaExhausted
from homeassistant.components import conversation
from homeassistant.core import Context, HomeAssistant
from tests.ha.fake_engine import Answer, FakeEngine

FOLDER = Path(custom_components.fairhearth.__file__).parent / "translations"
LANGUAGES = ("de", "ja", "sv")
SAME_IN_EVERY_LANGUAGE = {"{name}"}


def texts(value: dict[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from texts(inner, f"{place}{key}.")
        else:
            yield f"{place}{key}", inner


def texts_in(language: str) -> dict[str, str]:
    return dict(texts(json.loads((FOLDER / f"{language}.json").read_text(encoding="utf-8"))))


def places_in(text: str) -> list[str]:
    return sorted(re.findall(r"\{(\w+)\}", text))


ENGLISH = texts_in("en")


def test_no_language_is_forgotten() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {"en", *LANGUAGES}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_there_in_order(language: str) -> None:
    assert list(texts_in(language)) == list(ENGLISH)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_places_to_fill_in_are_the_same(language: str) -> None:
    assert {key: places_in(text) for key, text in texts_in(language).items()} == {
        key: places_in(text) for key, text in ENGLISH.items()
    }


@pytest.mark.parametrize("language", LANGUAGES)
def test_sentences_are_translated_not_copied(language: str) -> None:
    copied = {
        text
        for key, text in texts_in(language).items()
        if text == ENGLISH[key] and " " in text and text not in SAME_IN_EVERY_LANGUAGE
    }
    assert copied == set()


@pytest.mark.parametrize("language", ["en", *LANGUAGES])
def test_what_is_said_to_someone_who_waits_is_long_enough_to_be_spoken_at_once(language: str) -> None:
    """Home Assistant begins to speak after 60 characters."""
    assert len(texts_in(language)["exceptions.please_wait.message"].format(count=2)) > 60


@pytest.mark.parametrize(
    ("language", "today", "lately"),
    [
        ("sv", "Dagens token är slut.", "Minuter tills det finns några igen: 2."),
        ("ja", "今日のトークンは使い切りました。", "約2分後にまた使えるようになります。"),
        ("de", "Die Token für heute sind verbraucht.", "Minuten, bis es wieder welche gibt: 2."),
        ("fi", "Today's tokens are spent.", "Minutes until there are some again: 2."),
    ],
)
async def test_an_error_is_spoken_in_the_language_of_whoever_asked(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry, language: str, today: str, lately: str
) -> None:
    for param, spoken in (("daily_tokens", today), ("rolling_tokens", lately)):
        engine.answers.append(Answer(refusal=QuotaExhausted("none left", param=param, retry_after_s=90.0)))
        result = await conversation.async_converse(
            hass, "?", None, Context(), agent_id="conversation.agent", language=language
        )
        assert spoken in result.response.speech["plain"]["speech"]
