"""What the grammars allow, asked of the library that will enforce them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine_service.backends.base import Constraint, ConstraintKind
from engine_service.chat import structured, tools
from engine_service.errors import InvalidRequest
from engine_service.protocol import ResponseFormat, Tool

TOKENIZER = LLTokenizer("byte")

TURN_ON = Tool(
    name="HassTurnOn",
    description="Turns on a device. Use it for lights, too.",
    parameters={
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "domain": {"type": "array", "items": {"enum": ["light", "fan"]}},
        },
        "required": ["name"],
    },
)
TIME = Tool(name="GetTime")


def compiled(constraint: Constraint) -> str:
    match constraint.kind:
        case ConstraintKind.LARK:
            return str(LLMatcher.grammar_from_lark(constraint.text))
        case ConstraintKind.JSON_SCHEMA:
            return str(LLMatcher.grammar_from_json_schema(constraint.text))
        case ConstraintKind.REGEX:
            return str(LLMatcher.grammar_from_regex(constraint.text))


def allows(constraint: Constraint, text: str) -> bool:
    """Whether text is a complete output under the constraint."""
    matcher = LLMatcher(TOKENIZER, compiled(constraint))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def call(tool: str, /, **arguments: Any) -> str:
    return json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)


AUTO = tools.constraint_for([TURN_ON, TIME], must_call=False, answer=None)
FORCED = tools.constraint_for([TURN_ON, TIME], must_call=True, answer=None)


@pytest.mark.parametrize(
    ("text", "in_auto", "when_forced"),
    [
        ("The light is on.", True, False),
        (" \nThe light: {on}\n", True, False),
        ("Größe 🙂", True, False),
        (call("HassTurnOn", name="kitchen light"), True, True),
        (call("HassTurnOn", name="Küche 🙂", domain=["light", "fan"]), True, True),
        (call("GetTime"), True, True),
        ("", False, False),
        (" ", False, False),
        ("{", False, False),
        ('{"name": "HassTurnOn"}', False, False),
        (call("HassTurnOn"), False, False),
        (call("HassTurnOn", name="x", colour="red"), False, False),
        (call("HassTurnOn", name="x", domain=["door"]), False, False),
        (call("HassTurnOff", name="x"), False, False),
        (call("GetTime") * 2, False, False),
        (call("GetTime") + " Done.", False, False),
    ],
)
def test_an_output_is_text_or_exactly_one_call_of_a_tool(text: str, in_auto: bool, when_forced: bool) -> None:
    assert allows(AUTO, text) is in_auto
    assert allows(FORCED, text) is when_forced


def test_a_named_tool_is_the_only_one_that_can_be_called() -> None:
    only = tools.constraint_for([TIME], must_call=True, answer=None)
    assert allows(only, call("GetTime"))
    assert not allows(only, call("HassTurnOn", name="x"))


def test_beside_a_response_format_the_output_is_a_call_or_that_json() -> None:
    answer = structured.schema_for(
        ResponseFormat(
            kind="json_schema", name="a", schema={"type": "object", "properties": {"n": {"type": "integer"}}}
        )
    )
    both = tools.constraint_for([TIME], must_call=False, answer=answer)
    assert allows(both, call("GetTime"))
    assert allows(both, '{"n": 3}')
    assert not allows(both, "three")


def test_definitions_of_several_tools_do_not_mix() -> None:
    def tool(name: str, kind: str) -> Tool:
        schema = {
            "properties": {"x": {"$ref": "#/$defs/X"}},
            "required": ["x"],
            "$defs": {"X": {"type": kind}},
        }
        return Tool(name=name, parameters={"type": "object", **schema})

    both = tools.constraint_for(
        [tool("text", "string"), tool("count", "integer")], must_call=True, answer=None
    )
    assert allows(both, call("text", x="a"))
    assert allows(both, call("count", x=3))
    assert not allows(both, call("text", x=3))
    assert not allows(both, call("count", x="a"))


def test_unknown_keywords_of_a_tool_are_passed_over() -> None:
    odd = Tool(
        name="f", parameters={"type": "object", "properties": {"x": {"type": "string", "format": "entity"}}}
    )
    assert allows(tools.constraint_for([odd], must_call=True, answer=None), call("f", x="a"))


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"type": "string"}, "tools[0].function.parameters.type"),
        ({"type": "object", "properties": []}, "tools[0].function.parameters.properties"),
        ({"type": "object", "properties": {"x": 3}}, "tools[0].function.parameters.properties.x"),
        ({"properties": {"x": {"type": "text"}}}, "tools[0].function.parameters.properties.x.type"),
        ({"properties": {"x": {"enum": []}}}, "tools[0].function.parameters.properties.x.enum"),
        ({"required": "x"}, "tools[0].function.parameters.required"),
        ({"required": [1]}, "tools[0].function.parameters.required"),
        ({"properties": {"x": {"$ref": "http://x/y"}}}, "tools[0].function.parameters.properties.x.$ref"),
        ({"properties": {"x": {"anyOf": {}}}}, "tools[0].function.parameters.properties.x.anyOf"),
    ],
)
def test_a_schema_that_is_none_is_refused_where_it_is_wrong(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        tools.calls_schema([Tool(name="f", parameters=parameters)])
    assert refused.value.param == param
    assert "must" in refused.value.message


def test_a_schema_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(InvalidRequest, match="nested deeper"):
        tools.calls_schema([Tool(name="f", parameters=schema)])


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    ],
)
def test_a_schema_that_only_leads_back_to_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"schema: the \$ref '#.*' leads back to itself without end"):
        structured.check_schema(schema, "schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"x": {"$ref": "#"}}},
        {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
        {"type": "array", "items": {"$ref": "#"}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/anyOf/0"}}, "anyOf": [{"type": "null"}]},
        {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["next"],
        },
    ],
)
def test_a_schema_that_names_itself_and_can_end_is_taken(schema: dict[str, Any]) -> None:
    structured.check_schema(schema, "schema")
    assert structured.schema_for(ResponseFormat(kind="json_schema", schema=schema)) is not None


@pytest.mark.parametrize("x", [{"allOf": 5}, {"properties": [1]}, {"anyOf": 1}, {"required": [[]]}, 7])
def test_what_a_reference_leads_to_is_checked_like_the_rest(x: Any) -> None:
    with pytest.raises(InvalidRequest, match="leads to"):
        structured.check_schema({"$ref": "#/x", "x": x}, "schema")


def test_more_references_than_can_be_followed_are_refused() -> None:
    many = {f"p{i}": {"$ref": f"#/$defs/{i}"} for i in range(structured.MAX_REFERENCES + 1)}
    with pytest.raises(InvalidRequest, match="more than 1000 different"):
        structured.check_schema({"properties": many}, "schema")


def test_tools_are_described_in_one_short_line_each() -> None:
    assert tools.describe([TURN_ON, TIME]) == (
        "Tools:\n"
        '- HassTurnOn(name: string, domain?: ["light"|"fan"]): Turns on a device\n'
        "- GetTime()\n"
        "To use a tool, answer only with JSON:\n"
        '{"name": "HassTurnOn", "arguments": {"name": "…"}}'
    )


def test_a_households_own_examples_are_shown_last_instead_of_a_made_up_one() -> None:
    example = '{"name": "HassTurnOn", "arguments": {"name": "Lamp"}}'
    said = f'You serve.\nLamp on!\n{example}\nFly!\n{{"name": "Fly", "arguments": {{}}}}\n{{"name": 1}}'
    assert tools.describe([TIME, TURN_ON], said).endswith(f"answer only with JSON:\nLamp on!\n{example}")


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({"type": "integer"}, "integer"),
        ({"type": ["string", "null"]}, "string|null"),
        ({"anyOf": [{"type": "string"}, {"type": "string"}, {"type": "null"}]}, "string|null"),
        ({"const": "on"}, '"on"'),
        ({"type": "object", "properties": {"a": {"type": "number"}}}, "{a: number}"),
        ({}, "any"),
        (True, "any"),
        ({"enum": list(range(20))}, "0|1|2|3|4|5|6|7|8|9|10|11|…"),
    ],
)
def test_types_are_shown_in_the_shortest_readable_form(schema: object, shown: str) -> None:
    tool = Tool(name="f", parameters={"type": "object", "properties": {"x": schema}})
    assert f"f(x?: {shown})" in tools.describe([tool])


def test_a_structured_answer_has_the_schema_and_no_loose_white_space() -> None:
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["clear", "cloudy"]}, "degrees": {"type": "integer"}},
        "required": ["sky", "degrees"],
        "additionalProperties": False,
    }
    constraint = structured.constraint_for(
        ResponseFormat(kind="json_schema", name="w", schema=schema, strict=True)
    )
    assert constraint is not None
    assert allows(constraint, '{"sky": "clear", "degrees": 21}')
    assert not allows(constraint, '{"sky": "clear",\n\n "degrees": 21}')
    assert not allows(constraint, '{"sky": "green", "degrees": 21}')


def test_json_object_means_an_object() -> None:
    constraint = structured.constraint_for(ResponseFormat(kind="json_object"))
    assert constraint is not None
    assert allows(constraint, '{"a": [1, {"b": null}]}')
    assert not allows(constraint, "[1]")


@pytest.mark.parametrize("response_format", [None, ResponseFormat(kind="text")])
def test_plain_text_has_no_grammar(response_format: ResponseFormat | None) -> None:
    assert structured.constraint_for(response_format) is None


def test_a_bad_response_schema_is_refused_where_it_is_wrong() -> None:
    wrong = ResponseFormat(kind="json_schema", name="w", schema={"type": "objekt"})
    with pytest.raises(InvalidRequest) as refused:
        structured.constraint_for(wrong)
    assert refused.value.param == "response_format.json_schema.schema.type"
