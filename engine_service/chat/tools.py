"""Tool calls for models whose template knows nothing of tools: what the prompt says, what the grammar forces.

Decides how a tool is described in few tokens (a small model reads a short list, not JSON schemas) and which
outputs are possible: plain text that does not begin with a brace, or exactly one call

    {"name": "…", "arguments": {…}}

whose name and arguments match a tool. Knows no template and no stream.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine_service.backends.base import Constraint, ConstraintKind
from engine_service.chat.structured import check_schema, hoist, with_options
from engine_service.errors import InvalidRequest
from engine_service.protocol import Json, Tool, ToolCall

HEADING: Final = "Tools:"
FORMAT: Final = "To use a tool, answer only with JSON:"
"""Followed by an example call, as the last line of the system prompt. Of a dozen wordings tried with the
embedded model, this one made it call for commands most often and never for small talk."""

CALL_BIAS: Final = 3.0
"""Added to the logits of an opening brace where a model not trained for calls may choose call or text.

Such a model sees that a command asks for a call, but rarely begins with it: measured with the embedded model,
the brace's probability is about 0.1 for commands and at most 0.004 for talk, and a word wins over both. Three
nats put the threshold between them.
"""

REPORT_BIAS: Final = 6.0
"""Taken from the logits of an opening brace once such a model has a result to report.

It saw itself call a moment ago and would do so again, with the same arguments, as often as it is let.
"""

_DESCRIPTION_CHARACTERS: Final = 120
_SHOWN_CHOICES: Final = 12
_TEXT_RULE: Final = r"/\s*[^{\s](.|\n)*/"


def describe(tools: Sequence[Tool], said: str = "") -> str:
    """Return what the system prompt says about the tools: one line each, then what a call looks like.

    said is the system prompt's own text. Calls that the household wrote there as examples, a line each, are
    shown last, with the line before, which they answer; a made-up one stands there only where there are none.
    A small model does what it saw last: Home Assistant's tools begin with one that broadcasts a message, and
    with an example of that one the embedded model broadcast whatever it was told.
    """
    examples = _own_examples(tools, said) or [_example(tools)]
    return "\n".join([HEADING, *(_line(tool) for tool in tools), FORMAT, *examples])


def _own_examples(tools: Sequence[Tool], said: str) -> list[str]:
    """Return the lines of said that are calls of the tools, each after the line before it."""
    names = {tool.name for tool in tools}
    lines = said.splitlines()
    pairs = itertools.pairwise(lines)
    return [line for pair in pairs if _called_name(pair[1]) in names for line in pair]


def _called_name(line: str) -> str | None:
    """Return the name of the tool if the line is a call and nothing else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # the second: a caller's line may be nested without end
        return None
    is_call = isinstance(value, dict) and value.keys() == {"name", "arguments"}
    return value["name"] if is_call and isinstance(value["name"], str) else None


def _example(tools: Sequence[Tool]) -> str:
    """Return a call of the first tool that takes arguments, with its required ones (or one) filled in."""
    tool = next((t for t in tools if (t.parameters or {}).get("properties")), tools[0])
    properties = (tool.parameters or {}).get("properties", {})
    shown = [name for name in properties if name in (tool.parameters or {}).get("required", ())]
    arguments = {name: _example_value(properties[name]) for name in shown or list(properties)[:1]}
    return json.dumps({"name": tool.name, "arguments": arguments}, ensure_ascii=False)


def _example_value(schema: object) -> Any:
    if not isinstance(schema, Mapping):
        return "…"
    examples: dict[str, Any] = {"integer": 1, "number": 1, "boolean": True, "null": None, "object": {}}
    if schema.get("type") == "array":
        return [_example_value(schema.get("items"))]
    kind = schema.get("type")
    return examples.get(kind, "…") if isinstance(kind, str) else "…"


def _line(tool: Tool) -> str:
    parameters = tool.parameters or {}
    required = parameters.get("required", ())
    arguments = ", ".join(
        f"{name}{'' if name in required else '?'}: {_short(schema)}"
        for name, schema in parameters.get("properties", {}).items()
    )
    description = _first_sentence(tool.description or "")
    return f"- {tool.name}({arguments})" + (f": {description}" if description else "")


def _first_sentence(text: str) -> str:
    line = " ".join(text.strip().partition("\n\n")[0].split())
    sentence = line.partition(". ")[0].rstrip(".")
    if len(sentence) <= _DESCRIPTION_CHARACTERS:
        return sentence
    return sentence[: _DESCRIPTION_CHARACTERS - 1].rpartition(" ")[0] + "…"


def _short(schema: object) -> str:
    """Return a type in the shortest readable form."""
    if not isinstance(schema, Mapping):
        return "any"
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if choices:
        texts = [json.dumps(choice, ensure_ascii=False) for choice in choices[:_SHOWN_CHOICES]]
        return "|".join(texts + (["…"] if len(choices) > _SHOWN_CHOICES else []))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return "|".join(dict.fromkeys(_short(inner) for inner in schema[key]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"[{_short(schema.get('items'))}]"
    if kind == "object" and schema.get("properties"):
        inner = ", ".join(f"{name}: {_short(value)}" for name, value in schema["properties"].items())
        return f"{{{inner}}}"
    return "|".join(kind) if isinstance(kind, list) else str(kind)


def written_call(call: ToolCall) -> str:
    """Return an earlier call as the model would have written it."""
    arguments = json.dumps(json.loads(call.arguments), ensure_ascii=False)
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {arguments}}}'


def constraint_for(tools: Sequence[Tool], *, must_call: bool, answer: Json | None) -> Constraint:
    """Return the grammar of "a call", "a call or text" or "a call or JSON" (answer is its schema)."""
    rules = ["call: %json " + _dump(calls_schema(tools))]
    if must_call:
        start = "start: call"
    elif answer is not None:
        start = "start: call | answer"
        rules.append("answer: %json " + _dump(answer))
    else:
        start = "start: call | text"
        rules.append(f"text: {_TEXT_RULE}")
    return Constraint(kind=ConstraintKind.LARK, text="\n".join([start, *rules]) + "\n")


def _dump(schema: Json) -> str:
    return json.dumps(schema, ensure_ascii=False)


def calls_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the schema of one call of one of the tools; raise InvalidRequest for a bad schema of a tool."""
    definitions: dict[str, Any] = {}
    check(tools)
    calls = [_call_schema(tool, index, definitions) for index, tool in enumerate(tools)]
    schema: dict[str, Any] = {"anyOf": calls} if len(calls) > 1 else calls[0]
    if definitions:
        schema = {"$defs": definitions, **schema}
    return with_options(schema, lenient=not all(tool.strict for tool in tools))


def _call_schema(tool: Tool, index: int, definitions: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            "arguments": _arguments_schema(tool, index, definitions),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def check(tools: Sequence[Tool]) -> None:
    """Raise InvalidRequest naming the first place where a tool's parameters are no schema of an object."""
    for index, tool in enumerate(tools):
        path = f"tools[{index}].function.parameters"
        parameters = tool.parameters or {}
        check_schema(parameters, path)
        if parameters.get("type", "object") != "object":
            raise InvalidRequest(
                f"{path}.type must be object (arguments have names), not {parameters['type']!r:.60}",
                param=f"{path}.type",
            )


def _arguments_schema(tool: Tool, index: int, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return what the arguments must match: an object that holds nothing but the declared properties."""
    parameters = tool.parameters or {}
    closed = {"properties": {}, "additionalProperties": False, **parameters, "type": "object"}
    return hoist(closed, f"t{index}.", definitions)
