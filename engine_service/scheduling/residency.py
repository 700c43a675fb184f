"""Which models are in memory, and which of them serves: a function of what waits and of the time.

Decides when a model is loaded, unloaded, left and entered. One model serves at a time; others may stay in
memory beside it and are entered without loading. Knows no backend, no thread and no clock; the shell carries
out one `Step` after the other and tells how it went.

Rules
* No more than `max_loaded` models are in memory; a pinned one is unloaded only where `releases_pinned`.
* Turns: a model that has work keeps its turn for `min_stay_s`, and beyond that while nobody has waited for
  another one for `patience_s`. Of the models that are waited for, the one whose last turn is longest ago is
  next, so a model waits for at most one turn of every other.
* Speech interrupts: where somebody waits to be spoken to by a model in memory, it is entered at once. That is
  a visit, not a turn: the turn goes on behind it.
* Before a model is left, answers under way have `drain_s` to end, then they are put back (they go on at its
  next turn). Where speech waits they are put back at once. Speech itself has `speech_drain_s`.
* A switch to an absent model that nobody waits for any more is called off: nothing is loaded for nobody.
* A model that could not be loaded is not tried again for `retry_s`.

Source: the hysteresis of Llumnix's rescheduling (Sun et al., OSDI 2024) in spirit; turns by the longest time
without one are least-recently-served round robin, which bounds the wait by the number of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from engine_service.scheduling.model import ModelId, ResidencyPolicy

_NEVER: Final = float("-inf")


class Residence(StrEnum):
    """Where a model is."""

    LOADED = "loaded"  #: in memory, and it serves
    IDLE = "idle"  #: in memory, another one serves
    LOADING = "loading"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRule:
    """What the household says of one model."""

    model_id: ModelId
    is_pinned: bool = False  #: stays in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked of one model at the moment."""

    num_waiting: int = 0
    oldest_at: float | None = None  #: when the request that waits longest arrived
    speech_at: float | None = None  #: the same of speech within its bucket
    num_held: int = 0  #: requests that run, and one for an iteration under way
    holds_speech: bool = False

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return self.num_waiting > 0 or self.num_held > 0


_NOTHING: Final = Demand()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Begin to load an absent model beside whatever serves; answer with `loaded` or `failed`."""

    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload:
    """Free an idle model; answer with `unloaded`."""

    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Admit nobody any more. Put back who runs and is no more urgent than that; None: let all of them end."""

    puts_back_from: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """Let a model in memory serve; answer with `entered`. Nobody runs, or it is the model that was left."""

    model_id: ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Let no model serve for now; answer with `exited`."""


Step = Load | Unload | Leave | Enter | Exit

_BUT_SPEECH: Final = 1  #: urgency from which on it is not speech
_ALL: Final = 0


class Residency:
    """The models of one engine, and whose turn it is."""

    def __init__(self, models: Sequence[ModelRule], policy: ResidencyPolicy) -> None:
        """Know the models (at least one, ids differ), none of which is in memory."""
        self.policy = policy
        self._rules = {model.model_id: model for model in models}
        if not models or len(self._rules) != len(models):
            raise ValueError("there must be at least one model, and their names must differ")
        self._states = dict.fromkeys(self._rules, Residence.ABSENT)
        self._last_turn: dict[ModelId, float] = dict.fromkeys(self._rules, _NEVER)
        self._failed_until: dict[ModelId, float] = dict.fromkeys(self._rules, _NEVER)
        self.serving: ModelId | None = None
        self.turn: ModelId | None = None
        self._turn_since: float | None = None  #: None: its model has not served yet in this turn
        self._leaving_since: float | None = None
        self._puts_back_from: int | None = None
        self._is_busy = False

    # ---- what can be asked

    def state(self, model_id: ModelId) -> Residence:
        """Return where the model is."""
        return self._states[model_id]

    def can_load(self, model_id: ModelId) -> bool:
        """Return whether there could ever be room for the model beside those that stay."""
        pinned = sum(rule.is_pinned for rule in self._rules.values())
        is_pinned = self._rules[model_id].is_pinned
        return is_pinned or self.policy.releases_pinned or pinned < self.policy.max_loaded

    def retry_in_s(self, model_id: ModelId, *, now: float) -> float:
        """Return how long a model that could not be loaded is not tried again (0: it would be)."""
        return max(0.0, self._failed_until[model_id] - now)

    # ---- what happened

    def loaded(self, model_id: ModelId) -> None:
        """Note that the model is in memory."""
        self._states[model_id] = Residence.IDLE

    def failed(self, model_id: ModelId, *, now: float) -> None:
        """Note that the model could not be loaded."""
        self._states[model_id] = Residence.ABSENT
        self._failed_until[model_id] = now + self.policy.retry_s
        if self.turn == model_id:
            self.turn = None

    def unloaded(self, model_id: ModelId) -> None:
        """Note that the model's memory is free."""
        self._is_busy = False
        self._states[model_id] = Residence.ABSENT

    def entered(self, model_id: ModelId, *, now: float) -> None:
        """Note that the model serves."""
        if self.serving is not None:
            self._states[self.serving] = Residence.IDLE
        self._states[model_id] = Residence.LOADED
        self.serving = model_id
        self._stop_leaving()
        if self.turn is None:
            self.turn = model_id
            self._turn_since = None
        if self.turn == model_id and self._turn_since is None:
            self._turn_since = now

    def exited(self) -> None:
        """Note that no model serves."""
        if self.serving is not None:
            self._states[self.serving] = Residence.IDLE
        self.serving = None
        self._stop_leaving()

    def interrupted(self) -> None:
        """Note that the step under way was not carried out (the backend was lost meanwhile)."""
        self._is_busy = False

    def _stop_leaving(self) -> None:
        self._is_busy = False
        self._leaving_since = self._puts_back_from = None

    # ---- what to do

    def plan(self, demand: Mapping[ModelId, Demand], *, now: float) -> Step | None:
        """Return the next thing to do, None if all is as it should be; call again after each."""
        if self._is_busy:
            return None
        self._hand_on_turn(demand, now=now)
        return self._plan_memory(now=now) or self._plan_serving(demand, now=now)

    def _hand_on_turn(self, demand: Mapping[ModelId, Demand], *, now: float) -> None:
        holder = self.turn
        waiting = [m for m in self._rules if m != holder and self._is_wanted(m, demand, now=now)]
        if holder is None or not demand.get(holder, _NOTHING).has_work:
            following = waiting or self._called_off(holder, demand) or self._to_return(holder, now=now)
        elif self._turn_since is None or now - self._turn_since < self.policy.min_stay_s:
            return
        else:
            following = [m for m in waiting if self._ends_a_turn(demand[m], m, now=now)]
        if following:
            if holder is not None:
                self._last_turn[holder] = now
            self.turn = min(following, key=lambda m: self._last_turn[m])  # the first listed of equals
            self._turn_since = now if self.turn == self.serving else None

    def _called_off(self, holder: ModelId | None, demand: Mapping[ModelId, Demand]) -> list[ModelId]:
        """Return who goes on serving where nobody waits any more for the absent model whose turn it is.

        A pinned one comes back all the same, but not while answers are under way.
        """
        if holder is None or self._states[holder] is not Residence.ABSENT:
            return []
        here = [m for m in self._rules if self._is_here(m)] if self.serving is None else [self.serving]
        is_needed = any(demand.get(m, _NOTHING).num_held for m in here)
        return here if is_needed or not self._rules[holder].is_pinned else []

    def _is_wanted(self, model_id: ModelId, demand: Mapping[ModelId, Demand], *, now: float) -> bool:
        is_waited_for = demand.get(model_id, _NOTHING).num_waiting > 0
        return is_waited_for and self._may_come(model_id, now=now)

    def _may_come(self, model_id: ModelId, *, now: float) -> bool:
        return self._is_here(model_id) or (self.can_load(model_id) and not self.retry_in_s(model_id, now=now))

    def _is_here(self, model_id: ModelId) -> bool:
        return self._states[model_id] in (Residence.LOADED, Residence.IDLE)

    def _ends_a_turn(self, demand: Demand, model_id: ModelId, *, now: float) -> bool:
        """Return whether somebody has waited long enough; speech that needs a load has at once."""
        if demand.speech_at is not None and not self._is_here(model_id):
            return True
        return demand.oldest_at is not None and now - demand.oldest_at >= self.policy.patience_s

    def _to_return(self, holder: ModelId | None, *, now: float) -> list[ModelId]:
        """Return the pinned models that gave way and come back now that nobody asks for another."""
        if self._turn_since is not None and now - self._turn_since < self.policy.min_stay_s:
            return []
        return [
            rule.model_id
            for rule in self._rules.values()
            if rule.is_pinned
            and rule.model_id != holder
            and self._states[rule.model_id] is Residence.ABSENT
            and self._may_come(rule.model_id, now=now)
        ]

    # ---- memory

    def _plan_memory(self, *, now: float) -> Step | None:
        if Residence.LOADING in self._states.values():
            return None  # one at a time
        coming = self._coming(now=now)
        if coming is None:
            return None
        if self._has_room:
            self._states[coming] = Residence.LOADING
            return Load(model_id=coming)
        victim = self._victim()
        if victim is None or self._states[victim] is not Residence.IDLE:
            return None  # it is left first
        self._is_busy = True
        return Unload(model_id=victim)

    def _coming(self, *, now: float) -> ModelId | None:
        """Return the absent model to load: the one whose turn it is; with room to spare, a pinned one."""
        if self.turn is not None and self._states[self.turn] is Residence.ABSENT:
            return self.turn
        pinned = [m for m, rule in self._rules.items() if rule.is_pinned and not self._is_here(m)]
        return next((m for m in pinned if self._has_room and self._may_come(m, now=now)), None)

    @property
    def _has_room(self) -> bool:
        return self._num_in_memory() < self.policy.max_loaded

    def _num_in_memory(self) -> int:
        return sum(state is not Residence.ABSENT for state in self._states.values())

    def _victim(self) -> ModelId | None:
        """Return the model to unload: whose last turn is longest ago, pinned ones last, if at all."""
        here = [m for m in self._rules if self._is_here(m) and m != self.turn]
        free = [m for m in here if not self._rules[m].is_pinned]
        if not free and self.policy.releases_pinned:
            free = here
        # Between equals the one that serves stays: leaving it costs its answers time.
        return min(free, key=lambda m: (self._last_turn[m], m == self.serving), default=None)

    def _is_to_go(self, model_id: ModelId) -> bool:
        """Return whether the model that serves is in the way of the one that is to come."""
        coming = self.turn
        return (
            coming is not None
            and self._states[coming] is Residence.ABSENT
            and Residence.LOADING not in self._states.values()
            and not self._has_room
            and self._victim() == model_id
        )

    # ---- who serves

    def _plan_serving(self, demand: Mapping[ModelId, Demand], *, now: float) -> Step | None:
        serving, following = self.serving, self._following(demand)
        if serving == following:
            if serving is None or self._leaving_since is None:
                return None
            return self._ordered(Enter(model_id=serving))  # what called it away is gone
        if serving is not None and self._leaving_since is None:
            self._leaving_since = now
            self._puts_back_from = self._patience(demand, now=now)
            return Leave(puts_back_from=self._puts_back_from)
        if serving is not None and demand.get(serving, _NOTHING).num_held:
            return self._hurry(demand, now=now)
        return self._ordered(Exit() if following is None else Enter(model_id=following))

    def _ordered(self, step: Step) -> Step:
        self._is_busy = True
        return step

    def _following(self, demand: Mapping[ModelId, Demand]) -> ModelId | None:
        """Return the model in memory that should serve now: speech first, then the turn."""
        speaking = {
            m: at
            for m in self._rules
            if self._is_here(m) and (at := demand.get(m, _NOTHING).speech_at) is not None
        }
        if speaking:
            return min(speaking, key=lambda m: speaking[m])
        serving = self.serving
        if serving is not None and self._leaving_since is None and demand.get(serving, _NOTHING).holds_speech:
            return serving
        if self.turn is not None and self._is_here(self.turn):
            return self.turn
        if serving is not None and not self._is_to_go(serving):
            return serving
        others = [m for m in self._rules if m != serving and self._is_here(m)]
        return others[0] if others else None

    def _patience(self, demand: Mapping[ModelId, Demand], *, now: float) -> int | None:
        """Return from which urgency on answers under way are put back now; None: none is."""
        left_s = now - (now if self._leaving_since is None else self._leaving_since)
        if left_s >= self.policy.speech_drain_s:
            return _ALL
        rushes = any(demand.get(m, _NOTHING).speech_at is not None for m in self._rules if self._is_here(m))
        return _BUT_SPEECH if rushes or left_s >= self.policy.drain_s else None

    def _hurry(self, demand: Mapping[ModelId, Demand], *, now: float) -> Step | None:
        """Put more of them back than so far, if it is time."""
        puts_back_from, before = self._patience(demand, now=now), self._puts_back_from
        if puts_back_from is None or (before is not None and puts_back_from >= before):
            return None
        self._puts_back_from = puts_back_from
        return Leave(puts_back_from=puts_back_from)
