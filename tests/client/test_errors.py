"""Each code of the engine becomes its own class here; a new code becomes the base class."""

from __future__ import annotations

import inspect

import pytest

import engine_service.errors
from custom_components.fairhearth.engine_client import EngineError, ProtocolError
from custom_components.fairhearth.engine_client.errors import error_from_wire
from tests.ha.fake_engine import error_body, golden

NOT_SENT = {engine_service.errors.SettingsError, engine_service.errors.EngineError}
SENT = [
    cls
    for _, cls in inspect.getmembers(engine_service.errors, inspect.isclass)
    if issubclass(cls, engine_service.errors.EngineError) and cls not in NOT_SENT
]


@pytest.mark.parametrize("cls", SENT, ids=lambda cls: cls.code)
def test_every_error_of_the_engine_has_a_class_here(cls: type[engine_service.errors.EngineError]) -> None:
    sent = cls("in plain words", param="messages", retry_after_s=2.5)
    err = error_from_wire(error_body(sent), status=cls.http_status)
    assert type(err) is not EngineError
    assert (err.code, err.sent_code) == (cls.code, cls.code)
    assert (err.message, err.param, err.retry_after_s) == ("in plain words", "messages", 2.5)


def test_the_examples_are_read() -> None:
    assert error_from_wire(golden("error")).code == "unknown_resident"
    assert error_from_wire(golden("error_rate_limit")).retry_after_s == 3600.5


def test_an_unknown_code_becomes_the_base_class_and_is_kept() -> None:
    err = error_from_wire({"error": {"code": "solar_flare", "message": "the sun"}})
    assert type(err) is EngineError
    assert (err.sent_code, err.message) == ("solar_flare", "the sun")


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, "not_authenticated"), (403, "not_allowed"), (502, "engine_unavailable"), (404, "protocol_error")],
)
def test_an_answer_without_an_error_is_described_by_its_status(status: int, code: str) -> None:
    assert error_from_wire("<html>proxy</html>", status=status).code == code


def test_an_error_of_odd_kinds_still_tells_that_something_went_wrong() -> None:
    err = error_from_wire({"error": {"code": 7, "message": None, "retry_after_s": "soon", "param": []}})
    assert type(err) is EngineError
    assert not isinstance(err, ProtocolError)
    assert "7" in err.message
    assert (err.retry_after_s, err.param) == (None, None)
