"""Reads JSON field by field and names the place of what is missing or of the wrong kind (`ProtocolError`).

Tolerates fields that nobody asks for. Knows no message of the contract.
"""

from __future__ import annotations

import json

from .errors import ProtocolError

type JsonValue = bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None
type JsonObject = dict[str, JsonValue]


class Reader:
    """Reads one JSON object field by field and knows where it stands, so that a complaint names the place."""

    __slots__ = ("_value", "_where")

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(f"{where} should be an object, got {kind_of(value)}")
        self._value: dict[str, object] = value
        self._where = where

    def has(self, key: str) -> bool:
        """Return whether the field is there and not null."""
        return self._value.get(key) is not None

    def text(self, key: str) -> str:
        """Return a text field."""
        value = self._value.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def flag(self, key: str) -> bool:
        """Return a true or false field."""
        value = self._value.get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def integer(self, key: str) -> int:
        """Return a whole number; a float without a fraction is one."""
        value = self._value.get(key)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "a whole number", value)
        return value

    def number(self, key: str) -> float:
        """Return a number."""
        value = self._value.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """Return a number, or None where the field is null or absent."""
        return self.number(key) if self.has(key) else None

    def integer_or_none(self, key: str) -> int | None:
        """Return a whole number, or None where the field is null or absent."""
        return self.integer(key) if self.has(key) else None

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts."""
        value = self._value.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts", value)
        return tuple(value)

    def reader(self, key: str) -> Reader:
        """Return a reader of a nested object."""
        return Reader(self._value.get(key), f"{self._where}.{key}")

    def readers(self, key: str) -> list[Reader]:
        """Return one reader per object of a list."""
        value = self._value.get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return [Reader(item, f"{self._where}.{key}[{index}]") for index, item in enumerate(value)]

    def named(self, key: str) -> dict[str, Reader]:
        """Return one reader per value of an object whose keys are names."""
        value = self._value.get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return {name: Reader(item, f"{self._where}.{key}.{name}") for name, item in value.items()}

    def _wrong(self, key: str, expected: str, value: object) -> ProtocolError:
        return ProtocolError(f"{self._where}.{key} should be {expected}, got {kind_of(value)}")


def kind_of(value: object) -> str:
    """Return a value in few words, for a complaint."""
    match value:
        case None:
            return "nothing"
        case bool() | int() | float() | str():
            return repr(value)[:80]
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return type(value).__name__


def loads(text: str | bytes, *, where: str) -> object:
    """Decode JSON; raise ProtocolError that names the place."""
    try:
        return json.loads(text)
    except ValueError as err:
        raise ProtocolError(f"{where} is not JSON: {err}") from err
