"""The policy as the API changes it: told to the engine, kept on disk with its history, one change at a time.

Decides which policy holds at a start: the last one set through the API, else that of the settings. Numbers of
revisions only ever grow, also when one is taken back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import voluptuous as vol

from engine_service.checks import (
    list_of,
    mapping,
    number,
    or_none,
    path_and_message,
    table,
    text,
    whole_number,
)
from engine_service.engine.loop import Engine
from engine_service.errors import InvalidRequest, StorageUnavailable
from engine_service.scheduling.model import Policy
from engine_service.settings import changed_policy, policy_as_table
from engine_service.state import StateFolder

MAX_REVISIONS: Final = 50

_FILE: Final = table(
    {
        vol.Required("revisions"): list_of(
            table(
                {
                    vol.Required("revision"): whole_number(1),
                    vol.Required("at"): number(0),
                    vol.Required("by"): text(),
                    vol.Required("note"): text(),
                    vol.Required("policy"): or_none(mapping),
                }
            ),
            at_most=MAX_REVISIONS,
        )
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A policy and how it came about."""

    number: int  #: 0: the settings' own
    at: float  #: seconds since 1970
    by: str  #: name of the token
    note: str
    policy: Policy
    is_settings: bool = False  #: its policy is that of the settings, whatever they come to say

    def as_kept(self) -> dict[str, Any]:
        """Return the revision as it is kept; without a policy it is the settings'."""
        return self.as_wire(is_whole=True) | ({"policy": None} if self.is_settings else {})

    def as_wire(self, *, is_whole: bool) -> dict[str, Any]:
        """Return the revision as it is sent and kept."""
        line = {"revision": self.number, "at": round(self.at, 3), "by": self.by, "note": self.note}
        return line | ({"policy": policy_as_table(self.policy)} if is_whole else {})


class PolicyBook:
    """The policy in force and those before it."""

    def __init__(self, configured: Policy, state: StateFolder, *, clock: Callable[[], float] = time.time):
        """Read what was kept; raise SettingsError where it is damaged. clock gives seconds since 1970."""
        self._state = state
        self._clock = clock
        self._lock = asyncio.Lock()
        self._revisions = [_settings(configured, clock()), *_read(state, configured)]

    @property
    def current(self) -> Revision:
        """Return the policy in force."""
        return self._revisions[-1]

    @property
    def history(self) -> list[Revision]:
        """Return all revisions known, newest first."""
        return self._revisions[::-1]

    def find(self, revision: int) -> Revision:
        """Return a revision; raise InvalidRequest naming those known."""
        for entry in self._revisions:
            if entry.number == revision:
                return entry
        known = ", ".join(str(entry.number) for entry in self._revisions)
        raise InvalidRequest(f"revision must be one of {known}, not {revision}", param="revision")

    async def roll_back(self, engine: Engine, revision: int, *, by: str) -> Revision:
        """Put an earlier revision in force again; raise InvalidRequest naming those known."""
        earlier, note = self.find(revision), f"back to revision {revision}"
        return await self.change(
            engine, lambda _: earlier.policy, by=by, note=note, is_settings=earlier.is_settings
        )

    async def change(
        self,
        engine: Engine,
        make: Callable[[Policy], Policy],
        *,
        by: str,
        note: str,
        is_settings: bool = False,
    ) -> Revision:
        """Put what make returns in force, once it is on disk; raise StorageUnavailable if it cannot be kept.

        make is given the policy in force; of two changes at the same moment, the later is given what the
        earlier made. What it raises is raised, and nothing is changed.
        """
        async with self._lock:
            policy = make(self.current.policy)
            number_ = max(entry.number for entry in self._revisions) + 1
            made = Revision(
                number=number_,
                at=self._clock(),
                by=by,
                note=note,
                policy=policy,
                is_settings=is_settings,
            )
            first, *later = self._revisions
            kept = [*later, made][-MAX_REVISIONS:]
            message = {"revisions": [entry.as_kept() for entry in kept]}
            try:
                await asyncio.to_thread(self._state.keep_policies, message)
            except OSError as error:
                raise StorageUnavailable(
                    f"the policy cannot be kept ({error.strerror}), and was not changed"
                ) from None
            self._revisions = [first, *kept]
            await engine.set_policy(policy)
        return made

    async def reconfigure(self, engine: Engine, configured: Policy) -> bool:
        """Take over the settings' policy anew; return whether it is in force (none of the API's wins)."""
        async with self._lock:
            self._revisions = [
                dataclasses.replace(entry, policy=configured) if entry.is_settings else entry
                for entry in self._revisions
            ]
            if self.current.is_settings:
                await engine.set_policy(configured)
            return self.current.is_settings


def _settings(configured: Policy, at: float) -> Revision:
    return Revision(number=0, at=at, by="settings", note="", policy=configured, is_settings=True)


def _read(state: StateFolder, configured: Policy) -> list[Revision]:
    message = state.policies()
    if message is None:
        return []
    try:
        return [_revision(entry, configured) for entry in _FILE(message)["revisions"]]
    except vol.Invalid as error:
        where, reason = path_and_message(error)
        raise state.damaged_policies(f"{where} {reason}") from None
    except InvalidRequest as error:
        raise state.damaged_policies(error.message) from None


def _revision(entry: dict[str, Any], configured: Policy) -> Revision:
    is_settings = entry["policy"] is None
    return Revision(
        number=entry["revision"],
        at=entry["at"],
        by=entry["by"],
        note=entry["note"],
        policy=configured if is_settings else changed_policy(Policy(), entry["policy"]),
        is_settings=is_settings,
    )
