"""The client reads and writes the binding examples of the wire, and names the place of what is broken."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import pytest

from custom_components.fairhearth.engine_client import (
    SCHEMA_VERSION,
    Accepted,
    ChatRequest,
    EngineInfo,
    FairnessSnapshot,
    Finished,
    GenerationFailed,
    Health,
    Job,
    JobOrder,
    Message,
    PrefixPin,
    ProtocolError,
    ReasoningDelta,
    ResidentSettings,
    TextDelta,
    TokenCounts,
    ToolCall,
    ToolCalled,
    ToolSpec,
    Usage,
    WordOdds,
)
from custom_components.fairhearth.engine_client.protocol import (
    ChatEvent,
    chat_events,
    check_schema_version,
    models_from_wire,
    resident_from_wire,
    residents_from_wire,
)
from custom_components.fairhearth.engine_client.reading import Reader, kind_of
from tests.ha.fake_engine import golden

TURN_ON = golden("chat_request_tools")["tools"][0]["function"]


def events_of(name: str) -> list[ChatEvent]:
    return [event for chunk in golden(name) if chunk != "[DONE]" for event in chat_events(chunk)]


def test_a_plain_answer_is_read_in_order() -> None:
    assert events_of("chat_stream") == [
        Accepted(request_id="r1", resident="alice", workload_class="voice", num_ahead=2),
        TextDelta(text="The kitchen"),
        TextDelta(text=" light is on. 🙂"),
        Finished(
            reason="stop",
            queue_s=0.01,
            time_to_first_token_s=0.08,
            completion_s=0.9,
            tokens=TokenCounts(prefill=31, cached=180, decode=24, recomputed=0),
            preemptions=0,
        ),
        Usage(prompt_tokens=211, completion_tokens=24, cached_tokens=180),
    ]


def test_a_tool_call_is_read_complete() -> None:
    kinds = [type(event) for event in events_of("chat_stream_tools")]
    assert kinds == [Accepted, ToolCalled, Finished]
    call = ToolCall(call_id="call_1", name="intent__HassTurnOn", arguments={"name": "kitchen light"})
    assert ToolCalled(call=call) in events_of("chat_stream_tools")


def test_thoughts_are_kept_apart_from_the_answer() -> None:
    events = events_of("chat_stream_reasoning")
    assert ReasoningDelta(text="The user wants light.") in events
    assert [event for event in events if isinstance(event, TextDelta)] == [TextDelta(text="Done.")]


def test_an_error_in_a_stream_is_raised_as_what_it_is() -> None:
    with pytest.raises(GenerationFailed, match="failed inside the engine"):
        events_of("chat_stream_error")


def test_answers_about_the_engine_are_read() -> None:
    assert Health.from_wire(golden("health")).engine_id == golden("health")["engine_id"]
    info = EngineInfo.from_wire(golden("engine"))
    assert info.may("residents")
    assert info.max_context_tokens == 8192
    assert info.can_see is False
    assert models_from_wire(golden("models")) == {"SmolLM2-135M-Instruct": False, "coder": False}
    assert PrefixPin.from_wire(golden("prefix_response")) == PrefixPin(prefix_tokens=180, computed_tokens=172)


def test_residents_are_read_and_written_without_loss() -> None:
    resident_id, settings = resident_from_wire(golden("resident"))
    assert {"id": resident_id, **settings.as_wire()} == golden("resident")
    assert settings.as_wire() == golden("resident_request")
    rows = residents_from_wire(golden("residents"))
    assert {"residents": [{"id": key, **row.as_wire()} for key, row in rows.items()]} == golden("residents")


def test_a_snapshot_is_read_without_loss() -> None:
    """Every number of the example arrives, but for those the client has no use for."""
    wire = golden("fairness")
    snapshot = asdict(FairnessSnapshot.from_wire(wire))
    for name in ("page_tokens", "iterations", "switch_s", "pictures", "picture_s"):
        del wire["engine"][name]
    for name in ("policy_notes", "paused_classes"):
        wire["engine"][name] = tuple(wire["engine"][name])
    for rows in (wire["residents"], wire["classes"]):
        for row in rows.values():
            row["tokens"].setdefault("recomputed", 0)
            for name in ("queue_time", "time_to_first_token", "inter_token_latency", "completion_time"):
                row[name] = row.pop(f"{name}_s")
    assert snapshot == wire


def test_a_request_with_tools_is_written_as_the_example() -> None:
    wire = golden("chat_request_tools")
    call = ToolCall(call_id="call_1", name="intent__HassTurnOn", arguments={"name": "kitchen light"})
    request = ChatRequest(
        model="SmolLM2-135M-Instruct",
        messages=(
            Message(role="system", content="You are the voice of a home."),
            Message(role="user", content="Turn on the kitchen light"),
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content='{"success": true}', tool_call_id="call_1"),
        ),
        tools=(ToolSpec(**TURN_ON),),
        resident="alice",
        workload_class="voice",
    )
    del wire["tool_choice"]
    assert request.as_wire() == {**wire, "stream_options": {"include_usage": True}}


def test_a_structured_request_is_written_as_the_example() -> None:
    wire = golden("chat_request_structured")
    request = ChatRequest(
        messages=(Message(role="user", content="Describe the weather"),),
        json_schema_name="weather",
        json_schema=wire["response_format"]["json_schema"]["schema"],
        max_tokens=80,
        resident="house",
        workload_class="background",
    )
    assert request.as_wire() == {**wire, "stream": True, "stream_options": {"include_usage": True}}


def test_the_options_of_a_request_are_written_as_the_example() -> None:
    wire = golden("chat_request")
    request = ChatRequest(
        model=wire["model"],
        messages=tuple(Message(**message) for message in wire["messages"]),
        max_tokens=64,
        temperature=0.2,
        resident="alice",
        workload_class="voice",
        program="conversation-1",
    )
    sent = request.as_wire()
    assert sent == {key: value for key, value in wire.items() if key in sent}
    assert set(sent) >= {"model", "messages", "max_tokens", "temperature", "stream", "fairhearth"}


def test_a_request_for_an_answer_at_once_is_written_as_the_example() -> None:
    wire = golden("chat_request_no_thinking")
    request = ChatRequest(
        messages=tuple(Message(**message) for message in wire["messages"]),
        resident="alice",
        workload_class="voice",
        thinking=False,
    )
    assert request.as_wire() == {**wire, "stream_options": {"include_usage": True}}


def test_unknown_fields_are_ignored() -> None:
    wire = golden("fairness")
    wire["new"] = wire["engine"]["new"] = wire["residents"]["alice"]["new"] = {"deep": [1]}
    assert FairnessSnapshot.from_wire(wire) == FairnessSnapshot.from_wire(golden("fairness"))


def _without(path: str) -> Any:
    wire = golden("fairness")
    *parents, last = path.split(".")
    node = wire
    for key in parents:
        node = node[key]
    del node[last]
    return wire


@pytest.mark.parametrize(
    "path",
    [
        "engine_id",
        "engine.kv_pages_total",
        "engine.policy_met",
        "residents.alice.weight",
        "residents.alice.tokens.prefill",
        "classes.voice.queue_time_s.count",
    ],
)
def test_a_missing_field_is_named(path: str) -> None:
    with pytest.raises(ProtocolError, match=rf"snapshot\.{path} should be .*, got nothing"):
        FairnessSnapshot.from_wire(_without(path))


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("weight", "two", "snapshot.residents.alice.weight should be a whole number, got 'two'"),
        ("weight", True, "snapshot.residents.alice.weight should be a whole number, got True"),
        ("weight", 1.5, "snapshot.residents.alice.weight should be a whole number, got 1.5"),
        ("service_share", [], "snapshot.residents.alice.service_share should be a number, got a list"),
        ("tokens", 3, "snapshot.residents.alice.tokens should be an object, got 3"),
        ("name", None, "snapshot.residents.alice.name should be a text, got nothing"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(field: str, value: object, complaint: str) -> None:
    wire = deepcopy(golden("fairness"))
    wire["residents"]["alice"][field] = value
    with pytest.raises(ProtocolError) as raised:
        FairnessSnapshot.from_wire(wire)
    assert raised.value.message == complaint


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_what_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(ProtocolError, match="health should be an object"):
        Health.from_wire(body)


@pytest.mark.parametrize("arguments", ["{", "[1]", "3"])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    chunk = next(chunk for chunk in golden("chat_stream_tools") if "tool_calls" in json.dumps(chunk))
    chunk["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] = arguments
    with pytest.raises(ProtocolError, match="arguments of the call of intent__HassTurnOn"):
        chat_events(chunk)


def test_a_call_without_arguments_has_none() -> None:
    chunk = golden("chat_stream_tools")[1]
    chunk["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] = ""
    (event,) = chat_events(chunk)
    assert isinstance(event, ToolCalled)
    assert event.call.arguments == {}


def test_an_engine_of_another_version_is_refused_and_the_side_to_update_named() -> None:
    check_schema_version(SCHEMA_VERSION)
    with pytest.raises(ProtocolError, match="update the engine"):
        check_schema_version(SCHEMA_VERSION - 1)
    with pytest.raises(ProtocolError, match="update the Fairhearth integration"):
        check_schema_version(SCHEMA_VERSION + 1)


def test_a_snapshot_of_another_version_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="update the Fairhearth integration"):
        FairnessSnapshot.from_wire({"schema_version": 2, "everything": "else"})


def test_time_passing_alone_is_no_change() -> None:
    wire = golden("fairness")
    earlier = FairnessSnapshot.from_wire(wire)
    wire["at"] += 1
    wire["uptime_s"] += 1
    assert FairnessSnapshot.from_wire(wire) == earlier


def test_settings_say_no_limit_by_default() -> None:
    assert ResidentSettings(name="Bob").as_wire() == {
        "name": "Bob",
        "weight": 1,
        "daily_tokens": None,
        "daily_is_hard": False,
        "rolling_tokens": None,
        "rolling_window_s": 3600.0,
        "rolling_is_hard": False,
        "page_cap": None,
        "max_running": None,
        "max_waiting": 64,
    }


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (Reader.text, 1),
        (Reader.flag, "yes"),
        (Reader.integer, 1.5),
        (Reader.integer, True),
        (Reader.number, "1"),
        (Reader.number, False),
        (Reader.texts, ["a", 1]),
        (Reader.reader, []),
        (Reader.readers, {}),
        (Reader.readers, [1]),
        (Reader.named, []),
        (Reader.named, {"a": 1}),
    ],
)
def test_a_field_of_the_wrong_kind_is_named_with_its_place(read: Any, value: object) -> None:
    with pytest.raises(ProtocolError, match=r"answer\.field.* should be"):
        read(Reader({"field": value}, "answer"), "field")


def test_a_whole_number_may_come_with_a_point() -> None:
    assert Reader({"field": 3.0}, "answer").integer("field") == 3


def test_what_is_found_instead_is_said_in_few_words() -> None:
    assert [kind_of(value) for value in (None, True, "x" * 99, [1], {"a": 1}, b"")] == [
        "nothing",
        "True",
        repr("x" * 99)[:80],
        "a list",
        "an object",
        "bytes",
    ]


def test_the_example_of_a_job_is_read() -> None:
    job = Job.from_wire(golden("job"))
    assert job.has_ended
    assert job.text
    assert job.finish_reason == "stop"


def test_the_example_of_an_order_is_written() -> None:
    request = ChatRequest(
        messages=(Message(role="user", content="Sum up the day."),),
        resident="house",
        workload_class="background",
        max_tokens=400,
    )
    order = JobOrder(
        request=request,
        title="Summary of Monday",
        idempotency_key="summary-2026-11-30",
        deadline_s=21600.0,
        keep_s=604800.0,
    )
    assert order.as_wire() == golden("job_request")


def test_the_odds_of_words_are_read() -> None:
    top = [{"token": "A", "logprob": -0.5}, {"token": "B", "logprob": -1.5}]
    choice = {
        "index": 0,
        "delta": {"content": "A"},
        "logprobs": {"content": [{"token": "A", "logprob": -0.5, "top_logprobs": top}]},
    }
    events = chat_events({"choices": [choice]})
    assert WordOdds(words=(("A", -0.5), ("B", -1.5))) in events
