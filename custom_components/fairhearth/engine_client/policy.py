"""The engine's policy as the client sees it: what holds, and how it is changed.

The table of a policy is the engine's affair; it is carried as it is. Source: docs/wire.md, "The policy".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from .errors import ProtocolError
from .reading import JsonObject, JsonValue, Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What decides who is served when."""

    scheduler: str  #: fairhearth or fifo
    revision: int
    by: str  #: name of the token that made it so
    note: str
    table: JsonObject

    @property
    def fairness(self) -> str | None:
        """Return what the household means by equal: service, waiting, completions or class_only."""
        goal: JsonValue = self.table.get("fairness")
        return goal if isinstance(goal, str) else None

    @classmethod
    def from_wire(cls, body: object) -> Self:
        """Read the answer of GET, PATCH and PUT `/v1/policy`."""
        reader = Reader(body, "policy")
        return cls(
            scheduler=reader.text("scheduler"),
            revision=reader.integer("revision"),
            by=reader.text("by") if reader.has("by") else "",
            note=reader.text("note") if reader.has("note") else "",
            table=table_from_wire(body),
        )


def table_from_wire(body: object) -> JsonObject:
    """Read the policy's table of an answer, as also `/v1/policy/validate` gives it."""
    table = body.get("policy") if isinstance(body, dict) else None
    if not isinstance(table, dict):
        raise ProtocolError("policy.policy should be an object")
    return table
