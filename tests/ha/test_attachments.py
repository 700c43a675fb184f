"""What someone attaches to an AI task is shown to a model that sees, and to no other."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry

from custom_components.fairhearth.engine_client import MAX_PICTURE_BYTES
from engine_service import errors as sent
from engine_service.protocol import MAX_PICTURE_BYTES as MOST_READ, PICTURE_TYPES as TYPES_READ
from homeassistant.components.ai_task import AITaskEntityFeature
from homeassistant.core import HomeAssistant
from homeassistant.exceptions import HomeAssistantError, ServiceValidationError
from homeassistant.setup import async_setup_component
from tests.ha.conftest import until
from tests.ha.fake_engine import Answer, FakeEngine

PICTURE = b"\x89PNG\r\n\x1a\n" + b"the hall" * 20
ENTITY = "ai_task.task"


@pytest.fixture
async def media(hass: HomeAssistant, tmp_path: Path) -> Path:
    """The folder that Home Assistant shows as its media."""
    hass.config.media_dirs = {"local": str(tmp_path)}
    assert await async_setup_component(hass, "media_source", {})
    (tmp_path / "hall.png").write_bytes(PICTURE)
    return tmp_path


@pytest.fixture
async def seeing(
    hass: HomeAssistant, core: None, media: Path, engine: FakeEngine, entry: MockConfigEntry
) -> MockConfigEntry:
    """The entry, set up with an engine whose first model sees."""
    engine.can_see = True
    entry.add_to_hass(hass)
    assert await hass.config_entries.async_setup(entry.entry_id)
    await hass.async_block_till_done()
    await until(lambda: engine.num_streams == 1)
    return entry


def attached(*names: str, kind: str = "image/png") -> dict[str, Any]:
    source = "media-source://media_source/local/"
    return {
        "attachments": [{"media_content_id": source + name, "media_content_type": kind} for name in names]
    }


async def look(hass: HomeAssistant, **options: Any) -> Any:
    data = {"task_name": "Look", "entity_id": ENTITY, "instructions": "Who is there?", **options}
    return await hass.services.async_call(
        "ai_task", "generate_data", data, blocking=True, return_response=True
    )


def offers(hass: HomeAssistant) -> bool:
    state = hass.states.get(ENTITY)
    assert state is not None
    return bool(state.attributes["supported_features"] & AITaskEntityFeature.SUPPORT_ATTACHMENTS)


@pytest.mark.usefixtures("seeing")
async def test_a_picture_is_shown_to_a_model_that_sees(
    hass: HomeAssistant, engine: FakeEngine, media: Path
) -> None:
    (media / "door.jpg").write_bytes(b"\xff\xd8" + b"the door" * 200_000)  # 1.6 MB
    assert offers(hass)
    both = attached("hall.png")["attachments"] + attached("door.jpg", kind="image/jpeg")["attachments"]
    assert (await look(hass, attachments=both))["data"] == "Hello from the fake engine."
    [chat] = engine.chats
    message = chat.messages[-1]
    assert (message.role, message.content) == ("user", "Who is there?")
    assert [(picture.media_type, picture.place) for picture in message.pictures] == [
        ("image/png", 0),
        ("image/jpeg", 0),
    ]
    assert message.pictures[0].file == PICTURE
    assert message.pictures[1].file == (media / "door.jpg").read_bytes()


@pytest.mark.usefixtures("seeing")
async def test_data_is_had_from_a_picture(hass: HomeAssistant, engine: FakeEngine) -> None:
    engine.answers.append(Answer(pieces=(json.dumps({"people": 2}),)))
    structure = {"people": {"selector": {"number": {"min": 0, "max": 9}}, "required": True}}
    assert (await look(hass, structure=structure, **attached("hall.png")))["data"] == {"people": 2}
    assert engine.chats[0].messages[-1].pictures


@pytest.mark.usefixtures("seeing")
async def test_questions_are_answered_from_a_picture(hass: HomeAssistant, engine: FakeEngine) -> None:
    odds = {"A": math.log(0.9), "B": math.log(0.1)}
    engine.answers.extend([Answer(pieces=("A",), odds=odds), Answer(pieces=("A",), odds=odds)])
    question = {"type": "noul", "instructions": "Is somebody there?"}
    data = {
        "task_name": "Judge",
        "entity_id": ENTITY,
        "questions": {"one": question, "two": question},
        **attached("hall.png"),
    }
    result = await hass.services.async_call("ai_task", "evaluate", data, blocking=True, return_response=True)
    assert result is not None
    assert result["answers"]["one"]["noul"] == pytest.approx(0.9)
    assert [chat.messages[-1].pictures[0].file for chat in engine.chats] == [PICTURE, PICTURE]
    assert all(not message.pictures for chat in engine.chats for message in chat.messages[:-1])


@pytest.mark.usefixtures("media", "loaded")
async def test_a_model_that_sees_nothing_is_offered_nothing(hass: HomeAssistant, engine: FakeEngine) -> None:
    assert not offers(hass)
    with pytest.raises(ServiceValidationError, match="does not support attachments"):
        await look(hass, **attached("hall.png"))
    assert engine.chats == []


async def test_the_model_of_the_task_decides(
    hass: HomeAssistant, engine: FakeEngine, media: Path, loaded: MockConfigEntry
) -> None:
    engine.can_see_beside = True
    [subentry] = loaded.get_subentries_of_type("ai_task_data")
    hass.config_entries.async_update_subentry(loaded, subentry, data={**subentry.data, "model": "coder"})
    await hass.async_block_till_done()
    await until(lambda: offers(hass))
    await look(hass, **attached("hall.png"))
    assert engine.chats[0].options.model == "coder"
    assert engine.chats[0].messages[-1].pictures


async def test_an_engine_that_comes_back_with_another_model_is_offered_what_it_can(
    hass: HomeAssistant, engine: FakeEngine, seeing: MockConfigEntry
) -> None:
    await engine.stop()
    await until(lambda: not seeing.runtime_data.last_update_success)
    engine.can_see = False
    await engine.start()
    await until(lambda: seeing.runtime_data.last_update_success)
    await hass.async_block_till_done()
    assert not offers(hass)


@pytest.mark.usefixtures("seeing")
async def test_what_is_no_picture_is_named(hass: HomeAssistant, engine: FakeEngine, media: Path) -> None:
    (media / "song.mp3").write_bytes(b"ID3")
    with pytest.raises(
        ServiceValidationError, match=r"song\.mp3 is of the type audio/mpeg.*image/png, image/jpeg"
    ):
        await look(hass, **attached("song.mp3", kind="audio/mpeg"))
    (media / "large.png").write_bytes(bytes(MAX_PICTURE_BYTES + 1))
    with pytest.raises(ServiceValidationError, match=r"large\.png is larger than 8 MB"):
        await look(hass, **attached("large.png"))
    (media / "folder.png").mkdir()
    with pytest.raises(HomeAssistantError, match=r"folder\.png cannot be read"):
        await look(hass, **attached("folder.png"))
    assert engine.chats == []


@pytest.mark.usefixtures("seeing")
async def test_a_picture_that_the_engine_cannot_use_is_told_in_its_words(
    hass: HomeAssistant, engine: FakeEngine
) -> None:
    engine.answers.append(Answer(refusal=sent.InvalidRequest("picture 1 cannot be used: it is damaged")))
    with pytest.raises(ServiceValidationError, match="picture 1 cannot be used: it is damaged"):
        await look(hass, **attached("hall.png"))
    engine.answers.append(Answer(refusal=sent.NotSupported("the model cannot look at pictures")))
    with pytest.raises(ServiceValidationError, match="does not offer that: the model cannot look"):
        await look(hass, **attached("hall.png"))


@pytest.mark.usefixtures("seeing")
async def test_nothing_of_a_picture_is_logged(hass: HomeAssistant, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    await look(hass, **attached("hall.png"))
    assert base64.b64encode(PICTURE).decode()[:40] not in caplog.text
    assert "the hall" not in caplog.text


def test_both_sides_read_the_same_pictures() -> None:
    from custom_components.fairhearth.engine_client import PICTURE_TYPES

    assert (PICTURE_TYPES, MAX_PICTURE_BYTES) == (TYPES_READ, MOST_READ)
