"""Decides who is charged for a request and what kind of work it is.

Pure: everything Home Assistant knows about the caller arrives in an `Origin`; nothing is looked up here. The
engine never guesses either, so this table is the only place where a person becomes a resident.

Rules, first match wins:
* A voice satellite is heard: the work is `voice`, even inside a script, because a person stands there and
  waits; `accessibility` where the household marked the satellite, or the agent that is spoken to.
* An AI task is what the task is set to, `background` if nothing else was chosen.
* Inside an automation or script the work is `background`.
* Everything else is someone typing: what the agent is set to, `chat` if nothing else was chosen. After many
  calls of tools it is an `agent` at work rather than a conversation.
* A known user decides the resident; then the user who set off the automation; then, for someone who speaks or
  types, the agent that is theirs; then the satellite; then its area.
* A user who belongs to no resident, and a voice or chat without any hint, is `guest`. Background work nobody
  asked for by name is `house`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

GUEST: Final = "guest"
"""Everyone who is not set up shares this resident."""

HOUSE: Final = "house"
"""Work that nobody asked for by name."""

ACCOUNTS: Final = (GUEST, HOUSE)
"""The engine's own residents, which nobody sets up."""

RESERVED_RESIDENT_IDS: Final = frozenset({*ACCOUNTS, "system"})
"""Accounts of the engine itself; no person can be given one of these ids."""


class WorkloadClass(StrEnum):
    """What the work is, in the engine's words; the most urgent first."""

    VOICE = "voice"
    ACCESSIBILITY = "accessibility"
    CHAT = "chat"
    AGENT = "agent"
    EMBEDDING = "embedding"
    BACKGROUND = "background"


def least_urgent(one: WorkloadClass, other: WorkloadClass) -> WorkloadClass:
    """Return the class that waits longer; they stand in order of urgency."""
    order = list(WorkloadClass)
    return max(one, other, key=order.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What Home Assistant knows about where a request comes from. None and False are "not known"."""

    user_id: str | None = None  #: of the request itself
    parent_user_id: str | None = None  #: of the action that set off the automation
    satellite_id: str | None = None  #: entity id of the voice satellite
    area_id: str | None = None  #: where the satellite or device stands
    agent_id: str | None = None  #: entity id of the agent that is asked
    is_traced: bool = False  #: runs inside an automation or script
    is_task: bool = False  #: an AI task, not a conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRule:
    """How one resident is recognised."""

    resident_id: str
    user_ids: frozenset[str] = field(default_factory=frozenset)
    satellite_ids: frozenset[str] = field(default_factory=frozenset)
    area_ids: frozenset[str] = field(default_factory=frozenset)
    agent_ids: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRule:
    """What work counts as, as the household set it up for an agent or a task."""

    voice: WorkloadClass = WorkloadClass.VOICE
    chat: WorkloadClass = WorkloadClass.CHAT
    task: WorkloadClass = WorkloadClass.BACKGROUND
    accessibility_satellite_ids: frozenset[str] = field(default_factory=frozenset)


AGENT_AFTER_CALLS: Final = 3
"""Rounds of tool calls after which a typed conversation counts as an agent at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Who is charged, and what the work is."""

    resident_id: str
    workload_class: WorkloadClass


def attribute(origin: Origin, rules: Sequence[ResidentRule], classes: ClassRule = ClassRule()) -> Attribution:
    """Return who is charged and as what; where two residents claim one thing, the first in order has it."""
    return Attribution(
        resident_id=_resident_id(origin, rules), workload_class=_workload_class(origin, classes)
    )


def after_calls(attribution: Attribution, num_rounds: int) -> Attribution:
    """Return how a turn counts after rounds of tool calls: as it began, but for a chat that became work."""
    if attribution.workload_class is WorkloadClass.CHAT and num_rounds >= AGENT_AFTER_CALLS:
        return replace(attribution, workload_class=WorkloadClass.AGENT)
    return attribution


def _workload_class(origin: Origin, classes: ClassRule) -> WorkloadClass:
    if origin.satellite_id is not None:
        is_marked = origin.satellite_id in classes.accessibility_satellite_ids
        return WorkloadClass.ACCESSIBILITY if is_marked else classes.voice
    if origin.is_task:
        return classes.task
    return WorkloadClass.BACKGROUND if origin.is_traced else classes.chat


def _resident_id(origin: Origin, rules: Sequence[ResidentRule]) -> str:
    for user_id in (origin.user_id, origin.parent_user_id):
        for rule in rules:
            if user_id in rule.user_ids:
                return rule.resident_id
    asked_by_someone = origin.user_id is not None or origin.parent_user_id is not None
    is_present = origin.satellite_id is not None or not (origin.is_traced or origin.is_task)
    if not is_present:
        return GUEST if asked_by_someone else HOUSE
    if not asked_by_someone or origin.satellite_id is not None:
        for rule in rules:
            if origin.agent_id in rule.agent_ids:
                return rule.resident_id
    if origin.satellite_id is not None:
        for rule in rules:
            if origin.satellite_id in rule.satellite_ids:
                return rule.resident_id
        for rule in rules:
            if origin.area_id in rule.area_ids:
                return rule.resident_id
    return GUEST


class ContextUsers:
    """Remembers which user stands behind the latest contexts, so that an automation's parent can be named.

    An automation set off by a person carries only the id of the context that set it off, not the user.
    """

    def __init__(self, capacity: int = 512) -> None:
        """Keep the users of the last `capacity` contexts."""
        self._capacity = capacity
        self._users: OrderedDict[str, str] = OrderedDict()

    def remember(self, context_id: str, user_id: str) -> None:
        """Note the user of a context."""
        self._users[context_id] = user_id
        self._users.move_to_end(context_id)
        if len(self._users) > self._capacity:
            self._users.popitem(last=False)

    def user_of(self, context_id: str | None) -> str | None:
        """Return the user of a context, None where it is unknown or too long ago."""
        return None if context_id is None else self._users.get(context_id)
