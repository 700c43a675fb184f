"""Every parser, whatever it is given: an answer or a named refusal, never another exception."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from engine_service import protocol
from engine_service.errors import EngineError, InvalidRequest, SettingsError
from engine_service.identity.tokens import TokenBook
from engine_service.scheduling.model import Policy
from engine_service.server.policies import PolicyBook
from engine_service.settings import changed_policy, load
from engine_service.state import StateFolder
from tests.contract.test_requests import PARSERS
from tests.server.mutations import JSON, mutated


def refusal(call: Callable[[], object], kind: type[EngineError] = InvalidRequest) -> EngineError | None:
    """Return the refusal of a call, None for an answer; any other exception is the test's failure."""
    try:
        call()
    except kind as refused:
        return refused
    return None


@pytest.mark.parametrize("kind", PARSERS)
@settings(deadline=None)
@given(data=st.data())
def test_a_mutated_request_is_read_or_refused_with_its_field(kind: str, data: st.DataObject) -> None:
    message = data.draw(mutated(kind))
    refused = refusal(lambda: PARSERS[kind](message))
    if refused is not None:
        assert refused.message
        assert "\n" not in refused.message
        return
    # What was read and is written again reads the same.
    written = PARSERS[kind](message).as_wire()
    assert PARSERS[kind](json.loads(json.dumps(written))).as_wire() == written


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_json_or_refused(body: bytes) -> None:
    refused = refusal(lambda: protocol.parse_json(body))
    assert refused is None or refused.message.startswith("the body ")


@settings(deadline=None)
@given(JSON)
def test_any_json_is_read_back_or_refused(value: Any) -> None:
    assert protocol.parse_json(json.dumps(value).encode()) == value


@settings(deadline=None)
@given(JSON)
def test_any_change_of_the_policy_is_made_or_refused(changes: Any) -> None:
    refused = refusal(lambda: changed_policy(Policy(), changes))
    assert refused is None or refused.param


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["max_skips", "fairness", "classes", "sprint", "max_pause_s"]), JSON))
def test_any_value_of_a_policys_key_is_taken_or_refused(changes: dict[str, Any]) -> None:
    refused = refusal(lambda: changed_policy(Policy(), changes))
    assert refused is None or refused.param


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_resident_id_is_taken_or_refused(value: str) -> None:
    refused = refusal(lambda: protocol.parse_resident_id(value))
    assert refused is None or refused.param == "resident"


_LINES = st.sampled_from(
    [
        "[server]",
        "port = 8321",
        "port = -1",
        "[[server.tokens]]",
        'name = "x"',
        "[policy.classes.voice]",
        "max_wait_s = 1",
        "max_wait_s = nan",
        "[residents.alice]",
        "weight = 0",
        "[log]",
        'level = "debug"',
        "users = { a = 1 }",
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(max_size=80), st.lists(_LINES, max_size=8).map("\n".join)))
def test_any_settings_file_is_read_or_refused_with_its_name(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fairhearth.toml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        refused = refusal(lambda: load(path, environment={}), SettingsError)
        assert refused is None or "fairhearth.toml" in refused.message


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=80), JSON.map(lambda value: json.dumps(value).encode())))
def test_any_state_file_is_read_or_refused_with_its_name(body: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tokens.json", "policy.json", "residents.json"):
            (Path(folder) / name).write_bytes(body)
        state = StateFolder(Path(folder))
        for name, read in (
            ("tokens.json", lambda: TokenBook(Path(folder))),
            ("policy.json", lambda: PolicyBook(Policy(), state)),
            ("residents.json", state.residents),
        ):
            refused = refusal(read, SettingsError)
            assert refused is None or name in refused.message
