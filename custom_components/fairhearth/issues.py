"""Tells the household what only it can mend.

The engine is gone, a model is missing, versions are apart, a kind of work is starving, two residents claim
the same thing, an agent's prompt changes with each sentence. What is wrong is worked out here; Home Assistant
shows it under Repairs, and it goes away when it is mended. Knows no entity.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from homeassistant.config_entries import ConfigSubentry
from homeassistant.const import CONF_MODEL, CONF_PROMPT
from homeassistant.core import CALLBACK_TYPE, HomeAssistant, callback
from homeassistant.helpers import issue_registry as ir
from homeassistant.helpers.event import async_call_later

from .attribution import ResidentRule
from .const import CONF_RESIDENT_ID, DOMAIN, SUBENTRY_AI_TASK, SUBENTRY_CONVERSATION, SUBENTRY_RESIDENT
from .engine_client import SCHEMA_VERSION, ClassReport, FairnessSnapshot
from .errors import cached_class_name
from .residents import rules_of

if TYPE_CHECKING:
    from datetime import datetime

    from .coordinator import FairhearthConfigEntry, FairhearthCoordinator

GONE_AFTER_S: Final = 600.0
"""How long an engine may be away before the household is told; a restart or an update takes less."""

STARVING_AFTER_S: Final = 900.0
"""How long requests of a class may wait without any of them moving."""

_CHANGING: Final = re.compile(r"\b(now|utcnow|today_at|random|states|state_attr|is_state|user_name)\b")
_EXPRESSION: Final = re.compile(r"{[{%].*?[%}]}", re.DOTALL)


def changing_parts(template: str) -> list[str]:
    """Return what in an agent's instructions differs from one sentence to the next, in order, each once."""
    found = (match[0] for part in _EXPRESSION.findall(template) for match in _CHANGING.finditer(part))
    return list(dict.fromkeys(found))


def claimed_twice(rules: Iterable[ResidentRule]) -> list[tuple[str, str]]:
    """Return pairs of residents that claim the same account, satellite, area or agent; the first has it."""
    owners: dict[tuple[str, str], str] = {}
    pairs: dict[tuple[str, str], None] = {}
    for rule in rules:
        claims = {"user": rule.user_ids, "satellite": rule.satellite_ids, "area": rule.area_ids}
        for kind, ids in {**claims, "agent": rule.agent_ids}.items():
            for claim in sorted(ids):
                owner = owners.setdefault((kind, claim), rule.resident_id)
                if owner != rule.resident_id:
                    pairs[owner, rule.resident_id] = None
    return list(pairs)


@callback
def async_forget_issues(hass: HomeAssistant, entry_id: str) -> None:
    """Take away everything that was told about an entry, as when it is deleted."""
    for domain, issue_id in list(ir.async_get(hass).issues):
        if domain == DOMAIN and issue_id.startswith(entry_id):
            ir.async_delete_issue(hass, DOMAIN, issue_id)


class StarvationWatch:
    """Finds classes whose requests wait and do not move at all."""

    def __init__(self) -> None:
        """Begin without having seen anything."""
        self._moved: dict[str, tuple[tuple[int, int], float]] = {}

    def starving(
        self, classes: Mapping[str, ClassReport], now: float, *, paused: Collection[str] = ()
    ) -> set[str]:
        """Return the classes in which nothing has moved for long although something waits; now in seconds.

        What somebody paused is to wait.
        """
        found = set()
        for class_id, report in classes.items():
            seen = (report.tokens_served, report.finished)
            before, since = self._moved.get(class_id, (None, now))
            is_to_wait = class_id in paused or not report.requests_waiting
            if seen != before or is_to_wait or report.requests_running:
                since = now
            self._moved[class_id] = (seen, since)
            if now - since >= STARVING_AFTER_S:
                found.add(class_id)
        return found


class IssueKeeper:
    """Keeps Repairs in step with one engine."""

    def __init__(self, hass: HomeAssistant, coordinator: FairhearthCoordinator) -> None:
        """Tell of one engine and its residents and agents."""
        self._hass = hass
        self._coordinator = coordinator
        self._entry: FairhearthConfigEntry = coordinator.config_entry
        self._watch = StarvationWatch()
        self._starving: set[str] = set()
        self._cancel_gone: CALLBACK_TYPE | None = None

    @callback
    def async_start(self) -> None:
        """Check what is set up, and from now on each picture; ends when the entry is unloaded."""
        self._entry.async_on_unload(self._coordinator.async_add_listener(self._async_updated))
        self._entry.async_on_unload(self._async_stop_waiting)
        self._set("engine_gone", False)
        self._check_residents()
        self._check_prompts()

    @callback
    def async_check_version(self, schema_version: int) -> None:
        """Say which side to update, where the engine speaks another version."""
        self._set("update_engine", schema_version < SCHEMA_VERSION)
        self._set("update_integration", schema_version > SCHEMA_VERSION)

    @callback
    def async_check_models(self, served: Iterable[str]) -> None:
        """Name the agents and tasks whose model the engine does not have."""
        known = set(served)
        for subentry in self._agents():
            model = subentry.data.get(CONF_MODEL)
            is_missing = model is not None and model not in known
            placeholders = {"agent": subentry.title, "model": str(model), "models": ", ".join(sorted(known))}
            self._set(f"model_missing_{subentry.subentry_id}", is_missing, "model_missing", placeholders)

    def _agents(self) -> list[ConfigSubentry]:
        kinds = (SUBENTRY_CONVERSATION, SUBENTRY_AI_TASK)
        return [item for item in self._entry.subentries.values() if item.subentry_type in kinds]

    def _check_residents(self) -> None:
        names = {
            item.data[CONF_RESIDENT_ID]: item.title
            for item in self._entry.get_subentries_of_type(SUBENTRY_RESIDENT)
        }
        pairs = claimed_twice(rules_of(self._hass, self._entry))
        described = "; ".join(f"{names[first]} – {names[second]}" for first, second in pairs)
        self._set("claimed_twice", bool(pairs), placeholders={"residents": described})

    def _check_prompts(self) -> None:
        for subentry in self._entry.get_subentries_of_type(SUBENTRY_CONVERSATION):
            parts = changing_parts(subentry.data.get(CONF_PROMPT, ""))
            placeholders = {"agent": subentry.title, "parts": ", ".join(parts)}
            issue_id = f"changing_prompt_{subentry.subentry_id}"
            self._set(issue_id, bool(parts), "changing_prompt", placeholders)

    @callback
    def _async_updated(self) -> None:
        if not self._coordinator.last_update_success:
            if self._cancel_gone is None:
                self._cancel_gone = async_call_later(self._hass, GONE_AFTER_S, self._async_gone)
            return
        self._async_stop_waiting()
        self._set("engine_gone", False)
        self._check_starvation(self._coordinator.data)

    def _check_starvation(self, snapshot: FairnessSnapshot) -> None:
        paused = snapshot.engine.paused_classes or ()
        starving = self._watch.starving(snapshot.classes, self._hass.loop.time(), paused=paused)
        for class_id in starving ^ self._starving:
            is_starving = class_id in starving
            name = {"class": cached_class_name(self._hass, class_id)}
            self._set(f"class_starving_{class_id}", is_starving, "class_starving", name)
        self._starving = starving

    @callback
    def _async_gone(self, now: datetime) -> None:
        self._cancel_gone = None
        self._set("engine_gone", True, placeholders={"url": self._coordinator.client.url})

    @callback
    def _async_stop_waiting(self) -> None:
        if self._cancel_gone is not None:
            self._cancel_gone()
            self._cancel_gone = None

    @callback
    def _set(
        self,
        name: str,
        is_wrong: bool,
        translation_key: str | None = None,
        placeholders: Mapping[str, Any] | None = None,
    ) -> None:
        """Tell of an issue of this engine or take it away."""
        issue_id = f"{self._entry.entry_id}_{name}"
        if not is_wrong:
            ir.async_delete_issue(self._hass, DOMAIN, issue_id)
            return
        ir.async_create_issue(
            self._hass,
            DOMAIN,
            issue_id,
            is_fixable=False,
            severity=ir.IssueSeverity.WARNING,
            translation_key=translation_key or name,
            translation_placeholders={"engine": self._entry.title, **(placeholders or {})},
        )
