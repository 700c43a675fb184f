"""JSON schemas from callers: checked, closed, merged, and turned into grammars.

Decides which schemas are understood well enough to promise a valid output. The grammar engine behind the
backend has the last word (`InvalidConstraint`); what is checked here gets a message that names the place.
Source: JSON Schema 2020-12 and the `x-guidance` options of llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from engine_service.backends.base import Constraint, ConstraintKind
from engine_service.errors import InvalidRequest
from engine_service.protocol import Json, ResponseFormat

MAX_DEPTH: Final = 64
MAX_REFERENCES: Final = 1000  #: different `$ref` in one schema

_TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")  #: of schemas
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")  #: of schemas
_NESTED: Final = ("items", "additionalProperties", "not")  #: schemas themselves


def constraint_for(response_format: ResponseFormat | None) -> Constraint | None:
    """Return the grammar of a response_format, None for plain text."""
    schema = schema_for(response_format)
    if schema is None:
        return None
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, text=json.dumps(schema, ensure_ascii=False))


def schema_for(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the JSON schema an answer must match, None for plain text."""
    if response_format is None or response_format.kind == "text":
        return None
    if response_format.kind == "json_object":
        return with_options({"type": "object"}, lenient=True)
    schema = response_format.schema or {}
    check_schema(schema, "response_format.json_schema.schema")
    return with_options(schema, lenient=not response_format.strict)


def with_options(schema: Json, *, lenient: bool) -> dict[str, Any]:
    """Return the schema with fixed white space; lenient ignores keywords the grammar cannot express.

    White space is fixed because a small model left free to write blanks may write nothing else.
    """
    options = {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "lenient": lenient,
    }
    return {"x-guidance": options, **schema}


def check_schema(schema: object, path: str, depth: int = 0) -> None:
    """Raise InvalidRequest naming the place of the first thing that is no JSON schema.

    Whole schemas (depth 0) also have to end: no value matches one that always asks for itself.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{path} must be a JSON schema (an object), not {schema!r:.60}", param=path)
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{path} is nested deeper than {MAX_DEPTH} schemas", param=path)
    _check_keywords(schema, path)
    for key in _MAPS:
        for name, inner in _expect(schema, key, Mapping, "an object of schemas", path, {}).items():
            check_schema(inner, f"{path}.{key}.{name}", depth + 1)
    for key in _LISTS:
        for index, inner in enumerate(_expect(schema, key, list, "a list of schemas", path, [])):
            check_schema(inner, f"{path}.{key}[{index}]", depth + 1)
    for key in _NESTED:
        if key in schema:
            check_schema(schema[key], f"{path}.{key}", depth + 1)
    if depth == 0:
        _check_references_end(schema, path)


def _check_keywords(schema: Json, path: str) -> None:
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if name not in _TYPES:
            raise InvalidRequest(
                f"{path}.type must be one of {', '.join(_TYPES)}, not {name!r}", param=f"{path}.type"
            )
    if _expect(schema, "enum", list, "a list of values", path, [None]) == []:
        raise InvalidRequest(f"{path}.enum must not be empty", param=f"{path}.enum")
    required = _expect(schema, "required", list, "a list of property names", path, [])
    if not all(isinstance(name, str) for name in required):
        raise InvalidRequest(f"{path}.required must be a list of property names", param=f"{path}.required")
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        raise InvalidRequest(
            f"{path}.$ref must stay inside the schema (#/$defs/…), not {reference!r:.60}",
            param=f"{path}.$ref",
        )


def _expect(schema: Json, key: str, kind: type, wanted: str, path: str, default: Any) -> Any:
    value = schema.get(key, default)
    if not isinstance(value, kind):
        raise InvalidRequest(f"{path}.{key} must be {wanted}, not {value!r:.60}", param=f"{path}.{key}")
    return value


def _check_references_end(schema: Json, path: str) -> None:
    """Raise InvalidRequest for a `$ref` that only ever leads back to itself.

    References that can end are found one after another, each by means of those found before.
    """
    references = sorted(_references(schema))
    if len(references) > MAX_REFERENCES:
        raise InvalidRequest(f"{path} has more than {MAX_REFERENCES} different $ref", param=path)
    open_ones = {name: _target(schema, name) for name in references}
    for name, target in open_ones.items():
        check_schema(target, f"{path}: what $ref {name!r:.60} leads to", 1)
    ended: set[str] = set()
    for turn in range(MAX_DEPTH):
        # There and back: a chain of references in either order is then settled in two turns.
        names = sorted(open_ones, reverse=bool(turn % 2))
        found = [name for name in names if _settle(open_ones[name], name, ended)]
        for name in found:
            del open_ones[name]
        if not open_ones:
            return
        if not found:
            name = min(open_ones)
            raise InvalidRequest(
                f"{path}: the $ref {name!r:.60} leads back to itself without end, so that no value can match",
                param=path,
            )


def _settle(target: object, name: str, ended: set[str]) -> bool:
    if _can_end(target, ended):
        ended.add(name)
    return name in ended


def _references(value: object) -> set[str]:
    """Return every `$ref` in a schema."""
    found: set[str] = set()
    todo = [value]
    while todo:
        entry = todo.pop()
        if isinstance(entry, list):
            todo += entry
        elif isinstance(entry, Mapping):
            todo += entry.values()
            if isinstance(entry.get("$ref"), str):
                found.add(entry["$ref"])
    return found


def _target(schema: Any, reference: str) -> object:
    """Return what a reference points at; True (anything) where only the grammar engine can tell."""
    target = schema
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and step.isascii() and step.isdigit() and len(step) < 6:
            target = dict(enumerate(target)).get(int(step), True)
        else:
            target = target.get(step, True) if isinstance(target, Mapping) else True
    return target if reference == "#" or reference.startswith("#/") else True


def _can_end(schema: object, ended: set[str]) -> bool:
    """Return whether a value may match, if only the references in ended lead anywhere."""
    if not isinstance(schema, Mapping):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in ended:
        return False
    if not all(_can_end(inner, ended) for inner in (*schema.get("allOf", ()), *_needed(schema))):
        return False
    choices = [schema[key] for key in ("anyOf", "oneOf") if schema.get(key)]
    return all(any(_can_end(inner, ended) for inner in choice) for choice in choices)


def _needed(schema: Json) -> list[object]:
    """Return the schemas of what every value must hold."""
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        return [properties[name] for name in schema.get("required", []) if name in properties]
    if schema.get("type") == "array" and schema.get("minItems") and not schema.get("prefixItems"):
        return [schema.get("items", True)]
    return []


def hoist(schema: Json, prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without its own `$defs`, which go to definitions under prefixed names.

    Several tools' schemas become one, and references count from its root. Raises InvalidRequest for a
    reference to anything but `#/$defs/name`.
    """
    own = schema.get("$defs", {})
    for name, inner in own.items():
        definitions[prefix + name] = _renamed(inner, prefix)
    rest = {key: value for key, value in schema.items() if key != "$defs"}
    result: dict[str, Any] = _renamed(rest, prefix)
    return result


def _renamed(value: Any, prefix: str) -> Any:
    if isinstance(value, list):
        return [_renamed(entry, prefix) for entry in value]
    if not isinstance(value, Mapping):
        return value
    renamed = {key: _renamed(inner, prefix) for key, inner in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str):
        start = "#/$defs/"
        if not reference.startswith(start):
            raise InvalidRequest(f"a tool's $ref must be #/$defs/name, not {reference!r:.60}", param="tools")
        renamed["$ref"] = start + prefix + reference[len(start) :]
    return renamed
