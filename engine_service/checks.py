"""Validators for voluptuous that say what would be right, and one way to report what was wrong.

Decides how a bad value is described. Knows neither the wire nor the settings; both are checked with it. Every
validator knows the JSON schema of what it accepts, so that a document of the API needs no second description.
"""

from __future__ import annotations

import difflib
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final, TypeVar

import voluptuous as vol

Validator = Callable[[Any], Any]
E = TypeVar("E", bound=Enum)

JsonSchema = dict[str, Any]

_SHOWN: Final = 60  #: characters of a bad value repeated in a message
_DEPTH: Final = 3  #: lists within lists that are repeated


_SCHEMAS: Final[weakref.WeakKeyDictionary[Validator, Callable[[], JsonSchema]]] = weakref.WeakKeyDictionary()
_PLAIN: Final[Mapping[Any, JsonSchema]] = {str: {"type": "string"}, dict: {"type": "object"}}


def described(check: Validator, schema: Callable[[], JsonSchema]) -> Validator:
    """Return check, known to accept what the JSON schema allows (or less); it is built when asked for."""
    _SCHEMAS[check] = schema
    return check


def schema_of(check: Any) -> JsonSchema:
    """Return the JSON schema of what a validator accepts; raise TypeError for one nobody described."""
    try:
        return _PLAIN[check] if check in _PLAIN else _SCHEMAS[check]()
    except KeyError:
        raise TypeError(f"the validator {check!r} has no JSON schema") from None


def or_none(check: Validator) -> Validator:
    """Accept null, which OpenAI clients send for "not set", or what check accepts."""
    return described(
        lambda value: None if value is None else check(value),
        lambda: {"anyOf": [schema_of(check), {"type": "null"}]},
    )


def shown(value: object) -> str:
    """Return value as it may appear in a message: short, on one line, as JSON and TOML spell it."""
    text = _literal(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _literal(value: object, depth: int = 0) -> str:
    """Return what the caller wrote; Python's words for it (True, None, inf) would be news to them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, int) and value.bit_length() > _SHOWN * 4:
        return f"a number of more than {_SHOWN} digits"  # Python refuses to write out the longest ones
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"
    if isinstance(value, list | dict) and depth == _DEPTH:
        return "…"
    if isinstance(value, list):
        return f"[{', '.join(_literal(entry, depth + 1) for entry in value[:_SHOWN])}]"
    if isinstance(value, dict):
        entries = itertools.islice(value.items(), _SHOWN)
        return f"{{{', '.join(f'{key!r}: {_literal(entry, depth + 1)}' for key, entry in entries)}}}"
    return repr(value)


def whole_number(minimum: int | None = None, maximum: int | None = None) -> Validator:
    """Accept an int (no bool, no float) in [minimum, maximum]."""
    wanted = "a whole number" + _range(minimum, maximum)

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or _is_outside(value, minimum, maximum):
            raise vol.Invalid(f"must be {wanted}, not {shown(value)}")
        return value

    return described(check, lambda: {"type": "integer", **_bounds(minimum, maximum)})


def number(
    minimum: float | None = None, maximum: float | None = None, *, above: float | None = None
) -> Validator:
    """Accept a finite int or float in [minimum, maximum], strictly greater than above; return a float."""
    wanted = "a number" + _range(minimum, maximum, above)

    def check(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or _is_outside(value, minimum, maximum):
            raise vol.Invalid(f"must be {wanted}, not {shown(value)}")
        if above is not None and value <= above:
            raise vol.Invalid(f"must be {wanted}, not {shown(value)}")
        return float(value)

    return described(check, lambda: {"type": "number", **_bounds(minimum, maximum, above)})


def _bounds(minimum: float | None, maximum: float | None, above: float | None = None) -> JsonSchema:
    bounds = {"minimum": minimum, "maximum": maximum, "exclusiveMinimum": above}
    return {key: value for key, value in bounds.items() if value is not None}


def _lengths(of_what: str, at_least: int, at_most: int | None) -> JsonSchema:
    least = {f"min{of_what}": at_least} if at_least else {}
    return least if at_most is None else {**least, f"max{of_what}": at_most}


def _object_schema(keys: Mapping[Any, Any]) -> JsonSchema:
    return {
        "type": "object",
        "properties": {str(key): schema_of(check) for key, check in keys.items()},
        "required": [str(key) for key in keys if isinstance(key, vol.Required) and not _has_default(key)],
        "additionalProperties": False,
    }


def _has_default(key: vol.Required) -> bool:
    return not isinstance(key.default, vol.Undefined)


def _range(minimum: float | None, maximum: float | None, above: float | None = None) -> str:
    if minimum is not None and maximum is not None:
        return f" from {_figure(minimum)} to {_figure(maximum)}"
    bounds = ((">", above), (">=", minimum), ("<=", maximum))
    told = [f"{sign} {_figure(bound)}" for sign, bound in bounds if bound is not None]
    return f" {' and '.join(told)}" if told else ""


def _figure(value: float) -> str:
    """Return a bound with all its digits; 1e+06 is no number to type."""
    return str(int(value)) if value == int(value) else str(value)


def _is_outside(value: float, minimum: float | None, maximum: float | None) -> bool:
    return (minimum is not None and value < minimum) or (maximum is not None and value > maximum)


def _too_short(at_least: int, of_what: str) -> str:
    return "must not be empty" if at_least == 1 else f"must have at least {at_least} {of_what}"


def text(*, at_least: int = 0, at_most: int | None = None) -> Validator:
    """Accept a string of at_least..at_most characters."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise vol.Invalid(f"must be a string, not {shown(value)}")
        if len(value) < at_least:
            raise vol.Invalid(_too_short(at_least, "characters"))
        if at_most is not None and len(value) > at_most:
            raise vol.Invalid(f"must have at most {at_most} characters, not {len(value)}")
        return value

    return described(check, lambda: {"type": "string", **_lengths("Length", at_least, at_most)})


def line(*, at_least: int = 0, at_most: int | None = None) -> Validator:
    """Accept a string that may be shown to people as it is: no line breaks, no control characters."""
    check = text(at_least=at_least, at_most=at_most)

    def checked(value: Any) -> str:
        shown_as_is: str = check(value)
        if not shown_as_is.isprintable():
            raise vol.Invalid(f"must have printable characters only, on one line, not {shown(value)}")
        return shown_as_is

    return described(checked, lambda: schema_of(check))


def boolean(value: Any) -> bool:
    """Accept true or false, nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise vol.Invalid(f"must be true or false, not {shown(value)}")
    return value


described(boolean, lambda: {"type": "boolean"})


def mapping(value: Any) -> dict[str, Any]:
    """Accept an object, whatever it holds."""
    if not isinstance(value, dict):
        raise vol.Invalid(f"must be an object, not {shown(value)}")
    return value


described(mapping, lambda: {"type": "object"})


def one_of(values: Iterable[str]) -> Validator:
    """Accept one of the given strings."""
    known = tuple(values)

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise vol.Invalid(f"must be one of {', '.join(known)}, not {shown(value)}")
        return value

    return described(check, lambda: {"enum": list(known)})


def member(kind: type[E]) -> Validator:
    """Accept the value of an Enum member and return the member."""
    allowed = one_of(str(item.value) for item in kind)

    def check(value: Any) -> E:
        return kind(allowed(value))

    return described(check, lambda: schema_of(allowed))


def list_of(item: Validator, *, at_least: int = 0, at_most: int | None = None) -> Validator:
    """Accept a list whose entries pass item."""

    def check(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise vol.Invalid(f"must be a list, not {shown(value)}")
        if len(value) < at_least:
            raise vol.Invalid(_too_short(at_least, "entries"))
        if at_most is not None and len(value) > at_most:
            raise vol.Invalid(f"must have at most {at_most} entries, not {len(value)}")
        return [_entry(item, index, entry) for index, entry in enumerate(value)]

    return described(
        check, lambda: {"type": "array", "items": schema_of(item), **_lengths("Items", at_least, at_most)}
    )


def _entry(item: Validator, index: int, entry: Any) -> Any:
    try:
        return item(entry)
    except vol.Invalid as error:
        error.prepend([index])
        raise


def table(keys: Mapping[Any, Any], *, what: str = "field") -> Validator:
    """Accept an object with these keys only; a wrong key is answered with the nearest right one."""
    schema = vol.Schema(dict(keys))
    names = sorted(str(key) for key in keys)

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise vol.Invalid(f"must be an object, not {shown(value)}")
        for key in value:
            if key not in names:
                raise vol.Invalid(f"is not a known {what}{_nearest(str(key), names)}", path=[key])
        result: dict[str, Any] = schema(value)
        return result

    return described(check, lambda: _object_schema(keys))


def _nearest(key: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(names)}"


def _key(part: object) -> str:
    """Return a key as it may appear in a message; callers write anything there."""
    text = str(part)
    return text if text.isprintable() and len(text) <= _SHOWN else shown(text)


def path_and_message(error: vol.Invalid) -> tuple[str, str]:
    """Return where (`messages[0].content`) and what was wrong, for the first fault found."""
    # Missing keys come in no order of their own.
    faults = error.errors if isinstance(error, vol.MultipleInvalid) else [error]
    first = min(faults, key=lambda fault: [str(part) for part in fault.path])
    path = ""
    for part in first.path:
        path += f"[{part}]" if isinstance(part, int) else f".{_key(part)}" if path else _key(part)
    message = first.error_message
    return path, "is missing" if message == "required key not provided" else message
