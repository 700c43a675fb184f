"""What is said stays out of the log, at every level, unless the settings ask for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_service.logs import set_up_logging
from engine_service.settings import LogSettings, load
from tests.server.household import Household, payloads

QUESTION = "Where is the elderberry syrup?"


@pytest.fixture(autouse=True)
def logging_as_before(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let no test change how the next one's engine logs."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    set_up_logging(LogSettings())
    root.handlers[:], root.level = handlers, level


def begin(caplog: pytest.LogCaptureFixture, settings: LogSettings) -> None:
    set_up_logging(settings)
    logging.getLogger().addHandler(caplog.handler)


async def test_no_level_logs_a_word_of_what_is_said(
    home: Household, caplog: pytest.LogCaptureFixture
) -> None:
    begin(caplog, LogSettings(level="debug"))
    answer = await home.chat(QUESTION, max_tokens=8)
    assert answer.status == 200
    said = answer.json()["choices"][0]["message"]["content"]
    assert caplog.records, "something is logged"
    assert "elderberry" not in caplog.text
    assert said not in caplog.text


async def test_prompts_and_answers_are_logged_where_the_settings_ask(
    home: Household, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "texts.toml"
    path.write_text('[log]\nlevel = "warning"\ntexts = true\n')
    begin(caplog, load(path, environment={}).log)
    message = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "stream": True}
    async with home.stream("/v1/chat/completions", message) as lines:
        chunks = payloads([line async for line in lines])
    said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1] if c["choices"])
    logged = [record.getMessage() for record in caplog.records if record.name == "engine_service.texts"]
    assert len(logged) == 2
    assert ", prompt: " in logged[0]
    assert QUESTION in logged[0]
    assert logged[1].endswith(f", answer: {said}")
    set_up_logging(LogSettings(level="warning"))  # as SIGHUP does
    logging.getLogger().addHandler(caplog.handler)
    caplog.clear()
    await home.chat(QUESTION, max_tokens=8)
    assert "elderberry" not in caplog.text
