"""The models of one engine: what they can say without weights, where they are, what is kept of their answers.

Decides nothing: which model is loaded or serves comes out of `scheduling.residency`. Loads in a thread of its
own, so that another model serves meanwhile. Everything is called with the engine's lock held, except where
said.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from engine_service.backends.base import Backend, Language, ModelError, ModelInfo, ModelSource
from engine_service.errors import ModelUnavailable
from engine_service.scheduling.model import Capacity, ModelId, RequestId, ResidencyPolicy
from engine_service.scheduling.residency import (
    Demand,
    Enter,
    Exit,
    ModelRule,
    Residence as Place,
    Residency,
    Step,
)
from engine_service.scheduling.state import State

_LOGGER = logging.getLogger(__name__)

_TELL_EVERY_S: Final = 2.0
"""A load that takes long is told of this often on the console."""

LedgerPins = tuple[tuple[RequestId, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """Where one model is, for people and programs."""

    model_id: ModelId
    info: ModelInfo | None  #: None: it could not be read
    place: Place
    is_pinned: bool
    progress: float | None  #: part of the load that is done, while it is loading
    num_waiting: int  #: requests
    trouble: str | None  #: why it could not be read or loaded


@dataclass(slots=True)
class _Entry:
    """What is kept of one model."""

    source: ModelSource
    rule: ModelRule
    language: Language | None = None
    backend: Backend | None = None
    handed: Mapping[RequestId, Any] = field(default_factory=dict)  #: put-back answers of an unloaded backend
    pins: LedgerPins = ()  #: prefixes that its memory keeps while another model serves
    progress: float | None = None
    trouble: str | None = None


class Models:
    """Several models, one of which serves."""

    def __init__(
        self,
        sources: Mapping[ModelId, ModelSource],
        *,
        pinned: frozenset[ModelId] = frozenset(),
        policy: ResidencyPolicy | None = None,
    ) -> None:
        """Read what every model says without its weights; the first is the one for who names none.

        Raises ModelError if the first cannot be read. Another that cannot is told of where it is asked for.
        """
        rules = [ModelRule(model_id=m, is_pinned=m in pinned) for m in sources]
        self._residency = Residency(rules, policy or ResidencyPolicy())
        self._entries = {r.model_id: _Entry(sources[r.model_id], r) for r in rules}
        self.first = rules[0].model_id
        self._thread: threading.Thread | None = None
        self._switching_since: float | None = None
        for model_id, entry in self._entries.items():
            try:
                entry.language = entry.source.describe()
            except ModelError as error:
                if model_id == self.first:
                    raise
                entry.trouble = str(error)
                _LOGGER.error("The model %s cannot be used: %s", model_id, error)

    def open_first(self) -> Backend:
        """Load the first model and return its backend (before anything else; no lock)."""
        backend = self._open(self.first)
        self._entries[self.first].backend = backend
        self._residency.loaded(self.first)
        return backend

    # ---- what can be asked

    @property
    def names(self) -> tuple[ModelId, ...]:
        """All models, in the order of the settings (any thread)."""
        return tuple(self._entries)

    @property
    def policy(self) -> ResidencyPolicy:
        """How models share memory and time (any thread)."""
        return self._residency.policy

    def language(self, model_id: ModelId) -> Language:
        """Return what the model says without its weights (any thread); raise ModelUnavailable."""
        entry = self._entries[model_id]
        if entry.language is None:
            raise ModelUnavailable(f"the model {model_id!r} cannot be used: {entry.trouble}")
        return entry.language

    def backend(self, model_id: ModelId) -> Backend | None:
        """Return the model's backend, None while it is not in memory (any thread)."""
        return self._entries[model_id].backend

    def loaded_backend(self, model_id: ModelId) -> Backend:
        """Return the backend of a model that must be in memory (any thread)."""
        backend = self.backend(model_id)
        if backend is None:
            raise RuntimeError(f"the model {model_id} is not in memory")
        return backend

    def backends(self) -> list[Backend]:
        """Return the backends of all models in memory (any thread)."""
        return [entry.backend for entry in self._entries.values() if entry.backend is not None]

    @property
    def is_any_coming(self) -> bool:
        """Whether some model is in memory, or being loaded (any thread)."""
        return any(self._residency.state(m) is not Place.ABSENT for m in self._entries)

    def capacities(self) -> list[Capacity]:
        """Return what each model offers that could be read (any thread)."""
        return [entry.language.capacity for entry in self._entries.values() if entry.language is not None]

    def statuses(self, state: State) -> list[ModelStatus]:
        """Return where every model is."""
        demand = self._demand(state)
        return [
            ModelStatus(
                model_id=model_id,
                info=entry.language.info if entry.language else None,
                place=self._residency.state(model_id),
                is_pinned=entry.rule.is_pinned,
                progress=entry.progress,
                num_waiting=demand[model_id].num_waiting if model_id in demand else 0,
                trouble=entry.trouble,
            )
            for model_id, entry in self._entries.items()
        ]

    def check(self, model_id: ModelId, *, now: float) -> None:
        """Raise ModelUnavailable for a model that nobody can be served by at the moment."""
        entry = self._entries[model_id]
        if entry.backend is not None:
            return
        if not self._residency.can_load(model_id):
            pinned = " and ".join(repr(m) for m, e in self._entries.items() if e.rule.is_pinned)
            raise ModelUnavailable(
                f"the model {model_id!r} cannot be loaded: there is memory for {self.policy.max_loaded} at "
                f"once, and {pinned} stays there (pinned)"
            )
        wait_s = self._residency.retry_in_s(model_id, now=now)
        if wait_s > 0:
            raise ModelUnavailable(
                f"the model {model_id!r} could not be loaded: {entry.trouble}", retry_after_s=wait_s
            )

    # ---- what is to be done

    def plan(self, state: State, *, now: float) -> Step | None:
        """Return the next thing to do, None if nothing is."""
        step = self._residency.plan(self._demand(state), now=now)
        if isinstance(step, Enter | Exit) and self._switching_since is None:
            self._switching_since = now
        return step

    def _demand(self, state: State) -> dict[ModelId, Demand]:
        """Look at the flows: there are few, however much waits."""
        found: dict[ModelId, Demand] = {}
        for flow in state.flows.values():
            if not (flow.num_waiting or flow.num_held):
                continue
            so_far = found.get(flow.model_id, Demand())
            # Who waits for a paused class waits for the household, and for no model.
            takes_part = flow.num_waiting and flow.class_id not in state.policy.paused_classes
            oldest_at = flow.oldest(state.records).arrived_at if takes_part else None
            found[flow.model_id] = Demand(
                num_waiting=so_far.num_waiting + (flow.num_waiting if takes_part else 0),
                oldest_at=_earlier(so_far.oldest_at, oldest_at),
                speech_at=_earlier(so_far.speech_at, None if flow.urgency else oldest_at),
                num_held=so_far.num_held + flow.num_held,
                holds_speech=so_far.holds_speech or (flow.num_held > 0 and not flow.urgency),
            )
        return found

    # ---- loading

    def _open(self, model_id: ModelId) -> Backend:
        entry = self._entries[model_id]
        told_at = time.monotonic()

        def tell(part: float) -> None:
            nonlocal told_at
            entry.progress = part
            if time.monotonic() - told_at > _TELL_EVERY_S:
                told_at = time.monotonic()
                _LOGGER.info("The model %s is loaded to %.0f %%", model_id, 100 * part)

        entry.progress = 0.0
        try:
            return entry.source.open(tell)
        finally:
            entry.progress = None

    def reopen(self, model_id: ModelId) -> Backend:
        """Load a lost model again and return its backend (the engine's thread; no lock)."""
        self._entries[model_id].backend = None
        backend = self._open(model_id)
        self._entries[model_id].backend = backend
        return backend

    def begin_loading(
        self,
        model_id: ModelId,
        *,
        loaded: Callable[[ModelId, Backend], None],
        failed: Callable[[ModelId, Exception], None],
    ) -> None:
        """Load in a thread, which calls loaded or failed without the lock."""

        def load() -> None:
            started = time.perf_counter()
            try:
                backend = self._open(model_id)
            except Exception as error:  # whatever a library raises: the others go on
                _LOGGER.error("The model %s could not be loaded: %s", model_id, error)
                failed(model_id, error)
            else:
                _LOGGER.info("The model %s was loaded in %.1f s", model_id, time.perf_counter() - started)
                loaded(model_id, backend)

        _LOGGER.info("The model %s is being loaded", model_id)
        self._thread = threading.Thread(target=load, name="fairhearth-loader", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for a load under way (no lock)."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def loaded(self, model_id: ModelId, backend: Backend) -> None:
        """Note that the model is in memory."""
        entry = self._entries[model_id]
        entry.backend, entry.trouble = backend, None
        self._residency.loaded(model_id)

    def failed(self, model_id: ModelId, error: Exception, *, now: float) -> None:
        """Note that the model could not be loaded; what was kept for it is given up."""
        entry = self._entries[model_id]
        entry.trouble, entry.handed = str(error) or type(error).__name__, {}
        self._residency.failed(model_id, now=now)

    # ---- changing

    def put_aside(self, model_id: ModelId, pins: LedgerPins) -> None:
        """Keep what a model's memory holds while another one serves."""
        entry = self._entries[model_id]
        entry.pins = pins if entry.backend is not None else ()

    def take_pins(self, model_id: ModelId) -> LedgerPins:
        """Return the prefixes that the model's memory kept."""
        entry = self._entries[model_id]
        pins, entry.pins = entry.pins, ()
        return pins

    def take_handed(self, model_id: ModelId) -> Mapping[RequestId, Any]:
        """Return the put-back answers that the model's next backend is to go on with."""
        entry = self._entries[model_id]
        handed, entry.handed = entry.handed, {}
        return handed

    def forget(self, request_id: RequestId) -> None:
        """Give up what is kept of a cancelled request."""
        for entry in self._entries.values():
            if request_id in entry.handed:
                entry.handed = {r: kept for r, kept in entry.handed.items() if r != request_id}

    def entered(self, model_id: ModelId, *, now: float) -> float:
        """Note that the model serves; return for how long nobody could be served because of it (seconds)."""
        since, self._switching_since = self._switching_since, None
        self._residency.entered(model_id, now=now)
        return 0.0 if since is None else max(0.0, now - since)

    def exited(self) -> None:
        """Note that no model serves."""
        self._residency.exited()

    def unloading(self, model_id: ModelId, handed: Mapping[RequestId, Any]) -> None:
        """Note that the model's backend is given up, with the answers to go on with later."""
        entry = self._entries[model_id]
        entry.backend, entry.pins = None, ()
        entry.handed = {**entry.handed, **handed}

    def unloaded(self, model_id: ModelId) -> None:
        """Note that the model's memory is free."""
        _LOGGER.info("The model %s was unloaded", model_id)
        self._residency.unloaded(model_id)


def _earlier(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
