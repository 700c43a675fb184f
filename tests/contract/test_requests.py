"""Requests: the golden ones read and written without loss, wrong ones refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_service import protocol
from engine_service.errors import InvalidRequest
from engine_service.identity.caller import Caller
from engine_service.scheduling.model import WorkloadClass

GOLDEN = Path(__file__).parent / "golden"
PARSERS: dict[str, Callable[[Any], Any]] = {
    "chat_request": protocol.parse_chat_request,
    "completion_request": protocol.parse_completion_request,
    "prefix_request": protocol.parse_prefix_request,
    "resident_request": protocol.parse_resident_request,
    "pair_request": protocol.parse_pair_request,
    "job_request": protocol.parse_job_request,
    "policy_request": protocol.parse_policy_request,
    "rehearsal_request": protocol.parse_rehearsal_request,
    "embeddings_request": protocol.parse_embeddings_request,
}
REQUESTS = [(kind, path) for kind in PARSERS for path in sorted(GOLDEN.glob(f"{kind}*.json"))]

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(("kind", "path"), REQUESTS, ids=[path.stem for _, path in REQUESTS])
def test_a_golden_request_is_read_and_written_without_loss(kind: str, path: Path) -> None:
    message = protocol.parse_json(path.read_bytes())
    assert PARSERS[kind](message).as_wire() == json.loads(path.read_text(encoding="utf-8"))


def test_every_kind_of_request_has_a_golden_example() -> None:
    assert {kind for kind, _ in REQUESTS} == set(PARSERS)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff{}", "not UTF-8: byte 0"),
        ('{"a": "ö"}'.encode("latin-1"), "not UTF-8: byte 7"),
        (b"", "not JSON: Expecting value at line 1, column 1"),
        (b'{"a": 1,}', "not JSON: .* at line 1, column"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": Infinity}', "Infinity is not a JSON number"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "holds a number of more than 4300 digits"),
        (rb'{"a": "\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_body_that_is_no_json_is_refused_with_its_place(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        protocol.parse_json(body)


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"messages": None}, "messages", "must be a list"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": "Hello"}, "messages", "must be a list, not 'Hello'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a string or a list"),
        ({"messages": [{"role": "cat", "content": "x"}]}, "messages[0].role", "must be one of system"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0]",
            "not of the type 'input_audio'",
        ),
        ({"max_token": 5}, "max_token", "did you mean 'max_tokens'"),
        ({"colour": 5}, "colour", "not a known field"),
        ({"a\nb": 5}, "'a\\nb'", "not a known field"),
        ({"x" * 500: 5}, "'" + "x" * 58 + "…", "not a known field"),
        ({"max_tokens": 0}, "max_tokens", "a whole number >= 1, not 0"),
        ({"max_tokens": -1}, "max_tokens", ">= 1"),
        ({"max_tokens": 1.5}, "max_tokens", "a whole number"),
        ({"max_tokens": True}, "max_tokens", "a whole number"),
        ({"max_tokens": "many"}, "max_tokens", "not 'many'"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", ">= 1"),
        ({"n": 2}, "n", "must be 1"),
        ({"temperature": -0.1}, "temperature", "from 0 to 100"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_p": 1.1}, "top_p", "<= 1"),
        ({"min_p": 2}, "min_p", "from 0 to 1"),
        ({"top_k": -1}, "top_k", "from 0"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty", "a number from 0.01 to 100"),
        ({"seed": 1.0}, "seed", "a whole number"),
        ({"stop": ""}, "stop", "must not be empty"),
        ({"stop": 5}, "stop", "must be a string or a list of strings, not 5"),
        ({"stop": ["a", ""]}, "stop[1]", "must not be empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 entries"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids as keys"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "known are include_"),
        ({"fairhearth": {"resident": ""}}, "fairhearth.resident", "must not be empty"),
        ({"fairhearth": {"workload_class": "urgent"}}, "fairhearth.workload_class", "one of voice, acc"),
        ({"fairhearth": {"class": "voice"}}, "fairhearth.class", "not a known field"),
        ({"fairhearth": "alice"}, "fairhearth", "must be an object"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools[1]", "names must differ"),
        ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
        ({"tool_choice": "always"}, "tool_choice", "must be auto, none, required"),
        ({"functions": []}, "functions", "not a known field"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "one of text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
            "response_format.json_schema.schema",
            "must be a JSON schema",
        ),
        ({"modalities": ["audio"]}, "modalities", "hears and draws nothing"),
        ({"chat_template_kwargs": True}, "chat_template_kwargs", "must be an object"),
        (
            {"chat_template_kwargs": {"enable_thinking": "no"}},
            "chat_template_kwargs.enable_thinking",
            "true or false",
        ),
        ({"chat_template_kwargs": {"thinks": 1}}, "chat_template_kwargs.thinks", "known are enable_thinking"),
    ],
)
def test_a_wrong_field_is_named_with_what_would_be_right(
    changes: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        protocol.parse_chat_request({**HELLO, **changes})
    assert refused.value.param == param
    assert message in refused.value.message
    assert refused.value.message.startswith(param)


@pytest.mark.parametrize("value", [None, [], "Hello", 5])
def test_a_request_that_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="the body must be an object"):
        protocol.parse_chat_request(value)


def test_a_named_tool_must_be_offered() -> None:
    tools = [{"type": "function", "function": {"name": "a"}}]
    choice = {"type": "function", "function": {"name": "b"}}
    with pytest.raises(InvalidRequest, match="must be one of a, not 'b'"):
        protocol.parse_chat_request({**HELLO, "tools": tools, "tool_choice": choice})


@pytest.mark.parametrize("arguments", ["[1]", "{", "x", "null"])
def test_arguments_of_an_earlier_call_must_be_the_json_of_an_object(arguments: str) -> None:
    called = {"id": "c", "type": "function", "function": {"name": "a", "arguments": arguments}}
    with pytest.raises(InvalidRequest, match="must be the JSON text of an object"):
        protocol.parse_chat_request({"messages": [{"role": "assistant", "tool_calls": [called]}]})


def test_fields_of_openai_without_a_meaning_here_are_accepted() -> None:
    unused = dict.fromkeys(protocol.UNUSED, "anything")
    assert protocol.parse_chat_request({**HELLO, **unused}) == protocol.parse_chat_request(HELLO)


def test_null_means_not_said() -> None:
    fields = (
        "max_tokens",
        "temperature",
        "seed",
        "stop",
        "tools",
        "tool_choice",
        "stream",
        "n",
        "fairhearth",
    )
    nothing = dict.fromkeys(fields)
    assert protocol.parse_chat_request({**HELLO, **nothing}) == protocol.parse_chat_request(HELLO)


def test_who_asks_is_the_chatting_guest_unless_said() -> None:
    options = protocol.parse_chat_request(HELLO).options
    assert options.asked is None
    caller = Caller(name="any", scopes=frozenset()).attribute(options.asked)
    assert (caller.resident_id, caller.class_id, caller.program_id) == ("guest", WorkloadClass.CHAT, None)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    request = protocol.parse_chat_request({"messages": [{"role": "user", "content": parts}]})
    assert request.messages[0].content == "Hello"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 1.5]}, "prompt[1]"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        protocol.parse_completion_request({"prompt": "Once", **changes})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"weight": 0}, "weight"),
        ({"weight": 1.5}, "weight"),
        ({"weight": None}, "weight"),
        ({"daily_tokens": 0}, "daily_tokens"),
        ({"daily_tokens": 10**12 + 1}, "daily_tokens"),
        ({"rolling_tokens": 10**40}, "rolling_tokens"),
        ({"daily_is_hard": 1}, "daily_is_hard"),
        ({"rolling_tokens": 0}, "rolling_tokens"),
        ({"rolling_window_s": 0}, "rolling_window_s"),
        ({"rolling_window_s": 1e9}, "rolling_window_s"),
        ({"rolling_window_s": None}, "rolling_window_s"),
        ({"rolling_is_hard": None}, "rolling_is_hard"),
        ({"max_running": 0}, "max_running"),
        ({"max_waiting": None}, "max_waiting"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"page_cap": "few"}, "page_cap"),
        ({"name": ""}, "name"),
        ({"id": "alice"}, "id"),
    ],
)
def test_a_wrong_field_of_a_resident_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        protocol.parse_resident_request(body)
    assert refused.value.param == param


def test_the_most_tokens_a_resident_may_be_given_are_named() -> None:
    most = protocol.parse_resident_request({"daily_tokens": 10**12}).daily_tokens
    assert most == 10**12
    with pytest.raises(InvalidRequest, match="from 1 to 1000000000000"):
        protocol.parse_resident_request({"daily_tokens": 10**40})


@pytest.mark.parametrize("resident_id", [".", "..", "system", "", "Alice", "a/b", "x" * 65])
def test_an_id_that_cannot_be_a_resident_is_refused(resident_id: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        protocol.parse_resident_id(resident_id)
    assert refused.value.param == "resident"


@pytest.mark.parametrize("resident_id", ["...", ".a", "a.b", "x" * 64])
def test_a_point_may_stand_in_an_id(resident_id: str) -> None:
    assert protocol.parse_resident_id(resident_id) == resident_id


@pytest.mark.parametrize("resident_id", ["", "a" * 65, "Alice", "a b", "ä", "a/b", "system"])
def test_an_illegal_resident_id_is_refused(resident_id: str) -> None:
    with pytest.raises(InvalidRequest):
        protocol.parse_resident_id(resident_id)


@pytest.mark.parametrize(
    ("kind", "message", "param"),
    [
        ("resident_request", {"name": "Alice\x1b[2J"}, "name"),
        ("resident_request", {"name": "Alice\nBob"}, "name"),
        ("pair_request", {"code": "123456", "name": "hall\x07"}, "name"),
        ("job_request", {"request": HELLO, "title": "Day\u2028"}, "title"),
        ("policy_request", {"policy": {}, "note": "quiet\r"}, "note"),
    ],
)
def test_what_people_are_shown_holds_no_control_characters(kind: str, message: object, param: str) -> None:
    with pytest.raises(InvalidRequest, match="must have printable characters only, on one line") as refused:
        PARSERS[kind](message)
    assert refused.value.param == param


IMAGE = "data:image/png;base64,iVBORw0KGgo="
URL = "messages[1].content[1].image_url.url"


def showing(*urls: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    pictures = [{"type": "image_url", "image_url": {"url": url, **more}} for url in urls]
    content = [{"type": "text", "text": "What is there?"}, *pictures]
    return {"messages": [*HELLO["messages"], {"role": role, "content": content}]}


def test_pictures_stand_where_they_were_sent() -> None:
    request = protocol.parse_chat_request(json.loads((GOLDEN / "chat_request_pictures.json").read_text()))
    message = request.messages[1]
    assert message.content == "Who is at the door? And here?"
    assert [picture.place for picture in message.pictures] == [19, 29]
    assert all(picture.file.startswith(b"\x89PNG") for picture in message.pictures)


def test_what_a_picture_shows_is_in_no_representation_of_its_request() -> None:
    request = protocol.parse_chat_request(showing(IMAGE, detail="low"))
    assert len(request.messages[1].pictures) == 1
    assert "PNG" not in repr(request)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/cat.png", "this engine fetches nothing, so it takes no http: or https:"),
        ("http://192.168.1.2/snapshot.jpg", "fetches nothing"),
        ("file:///etc/passwd", "must hold the picture itself"),
        ("", "must hold the picture itself"),
        ("data:image/png;base64", "must hold the picture itself"),
        (
            "data:image/tiff;base64,SUkqAA==",
            "one of the types image/png, image/jpeg, image/webp, image/gif",
        ),
        ("data:text/html;base64,SUkqAA==", "one of the types"),
        ("data:image/png,%89PNG", "one of the types"),
        ("data:image/png;base64,", "there is nothing"),
        ("data:image/png;base64,iVBORw0KGgo", "base64 after the comma"),
        ("data:image/png;base64,iVBO Rw0KGgo=", "without blanks"),
        ("data:image/png;base64,ä", "base64 after the comma"),
        (IMAGE + "A" * (protocol.MAX_PICTURE_BYTES * 4 // 3), f"at most {protocol.MAX_PICTURE_BYTES} bytes"),
        (5, "must be a string"),
    ],
)
def test_a_picture_that_is_not_in_the_message_or_not_known_is_refused(url: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as refused:
        protocol.parse_chat_request(showing(url))
    assert refused.value.param == URL


def test_a_refusal_repeats_nothing_of_a_picture() -> None:
    for wrong in (showing("data:image/tiff;base64,c2VjcmV0"), showing("data:image/png;base64,c2VjcmV0!")):
        with pytest.raises(InvalidRequest) as refused:
            protocol.parse_chat_request(wrong)
        assert "c2VjcmV0" not in refused.value.message
    part = {"type": "image", "source": "c2VjcmV0"}
    with pytest.raises(InvalidRequest) as refused:
        protocol.parse_chat_request({"messages": [{"role": "user", "content": [part]}]})
    assert "c2VjcmV0" not in refused.value.message


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_only_a_user_shows_pictures(role: str) -> None:
    with pytest.raises(InvalidRequest, match="of the role user only") as refused:
        protocol.parse_chat_request(showing(IMAGE, role=role))
    assert refused.value.param == "messages[1].content"


def test_the_number_of_pictures_is_bounded_over_all_messages() -> None:
    most = showing(*[IMAGE] * protocol.MAX_PICTURES)
    assert len(protocol.parse_chat_request(most).messages[1].pictures) == protocol.MAX_PICTURES
    with pytest.raises(InvalidRequest, match="at most 8 pictures in all, not 9"):
        protocol.parse_chat_request({"messages": most["messages"] + showing(IMAGE)["messages"]})


def test_a_prefix_has_no_pictures() -> None:
    with pytest.raises(InvalidRequest, match="a prefix is text"):
        protocol.parse_prefix_request(showing(IMAGE))


def test_an_input_that_is_neither_text_nor_list_is_told_all_that_is_allowed() -> None:
    with pytest.raises(
        InvalidRequest, match="input must be a text, a list of token ids, or a list of those, not 5"
    ):
        protocol.parse_embeddings_request({"input": 5})
