"""Which of several machines a request of the one queue goes to, and what moves when they drift apart.

Reads; changes nothing. Knows no order (that is `admission`'s) and no queue of a machine: a machine is given
a request only when it could begin it with its next iteration, so that nothing is committed early.

Source: Llumnix (Sun et al., OSDI 2024): freeness from virtual usage, dispatch to the freest, migration from
the least free to the freest. Differs: freeness is in tokens, so that machines with other pages compare; a
move is a preemption on one machine and an admission on another, which computes the sequence again (their
KV is copied live), so moves are few, short and cheap ones first, and never speech.

Rules
* Nobody is moved unless the gap between the two machines shrinks by `min_gain` and does not turn round:
  what was moved is not moved back while nothing else changes.
* Equal views give equal answers, in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NewType

from engine_service.scheduling import admission
from engine_service.scheduling.model import RequestId, RequestState, WorkloadClass, pages_for
from engine_service.scheduling.records import Record
from engine_service.scheduling.state import State

InstanceId = NewType("InstanceId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One machine at one instant."""

    instance_id: InstanceId
    num_pages: int
    page_tokens: int
    max_sequences: int
    most_tokens: int  #: longest sequence (prompt and output) that it takes at all
    held_pages: int = 0  #: of running and paused requests and pinned prefixes
    headroom_pages: int = 0  #: kept for speech
    headroom_sequences: int = 0
    num_sequences: int = 0  #: requests that hold pages
    waiting_pages: int = 0  #: what it was given and has not admitted needs
    num_waiting: int = 0
    prompt_tokens_left: int = 0  #: of prompts that it computes
    chunk_tokens: int = 512  #: most prompt tokens of one iteration

    @property
    def virtual_usage(self) -> int:
        """Return the pages in use, promised, and kept for speech."""
        return self.held_pages + self.waiting_pages + self.headroom_pages

    @property
    def freeness(self) -> int:
        """Return the tokens by which each of its requests could still grow (negative: it has too many)."""
        free = (self.num_pages - self.virtual_usage) * self.page_tokens
        return free // max(1, self.num_sequences + self.num_waiting)

    def has_room(self, tokens: int, *, is_spoken: bool = False) -> bool:
        """Return whether a sequence of that length could be admitted now; speech may use the headroom."""
        pages = self.num_pages - self.held_pages - self.waiting_pages
        sequences = self.max_sequences - self.num_sequences - self.num_waiting
        if not is_spoken:
            pages -= self.headroom_pages
            sequences -= self.headroom_sequences
        return sequences >= 1 and pages_for(tokens, self.page_tokens) <= pages

    def could_begin(self, tokens: int) -> bool:
        """Return whether its next iteration could begin such a prompt: it fits, and nothing is before it."""
        return self.has_room(tokens) and not self.num_waiting and self.prompt_tokens_left <= self.chunk_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """A request that could be moved."""

    request_id: RequestId
    urgency: int  #: as of its flow; > 0
    tokens: int  #: slots that it would need at once elsewhere
    most_tokens: int  #: slots that it may need in the end
    pages: int  #: what its machine would get back
    is_waiting: bool = False  #: given to its machine, not admitted: costs nothing to move


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Take the request off one machine and give it to another."""

    request_id: RequestId
    source: InstanceId
    target: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRule:
    """When moving is worth what it costs."""

    min_gap_tokens: int = 2048  #: a smaller difference of freeness is left alone
    min_gain: float = 0.2  #: part of the gap by which a move must shrink it, (0, 1]
    max_moving: int = 1  #: moves under way at once

    def __post_init__(self) -> None:
        """Refuse rules that would move for nothing."""
        if self.min_gap_tokens < 1:
            raise ValueError(f"min_gap_tokens must be >= 1, not {self.min_gap_tokens}")
        if not 0 < self.min_gain <= 1:
            raise ValueError(f"min_gain must be in (0, 1], not {self.min_gain}")
        if self.max_moving < 0:
            raise ValueError(f"max_moving must be >= 0, not {self.max_moving}")


# --- what a machine looks like


def view(instance_id: InstanceId, state: State) -> Instance:
    """Return how a machine stands, seen through its scheduler's state."""
    capacity = state.known_capacity
    waiting = [r for r in state.records.values() if r.state is RequestState.WAITING]
    most_pages = admission.pages_ever_free(state, WorkloadClass.CHAT, keeps_prefix=False)
    return Instance(
        instance_id=instance_id,
        num_pages=capacity.num_pages,
        page_tokens=capacity.page_tokens,
        max_sequences=capacity.max_sequences,
        most_tokens=min(capacity.max_context_tokens, most_pages * capacity.page_tokens),
        held_pages=state.pages.num_held + state.pages.num_pinned,
        headroom_pages=state.headroom_pages(1),
        headroom_sequences=state.headroom_sequences(1),
        num_sequences=len(state.holding),
        waiting_pages=sum(state.pages_needed(r, state.admission_tokens(r)) for r in waiting),
        num_waiting=len(waiting),
        prompt_tokens_left=sum(r.remaining for r in state.prefilling.values()),
        chunk_tokens=state.policy.max_chunk_tokens,
    )


def movables(state: State) -> list[Movable]:
    """Return who could leave: who waits there, and who may be preempted and has made a page of progress."""
    waiting = [
        _movable(state, r)
        for r in state.records.values()
        if r.state is RequestState.WAITING and r.flow.urgency
    ]
    return waiting + [_movable(state, r) for r in admission.losable(state, at_least=1)]


def _movable(state: State, record: Record) -> Movable:
    is_waiting = record.state is RequestState.WAITING
    tokens = state.admission_tokens(record) if is_waiting else record.reserved
    return Movable(
        request_id=record.request_id,
        urgency=record.flow.urgency,
        tokens=tokens,
        most_tokens=record.most_tokens,
        pages=state.pages_needed(record, tokens) if is_waiting else record.pages,
        is_waiting=is_waiting,
    )


# --- where a request goes


def choose_instance(
    instances: Iterable[Instance], *, tokens: int, most_tokens: int, is_spoken: bool = False
) -> InstanceId | None:
    """Return the freest machine that could begin the request at once; None: it stays in the one queue.

    tokens are the slots it needs at admission, most_tokens those it may need in the end. Speech never stays:
    where no machine has room for it, it goes to the freest, whose scheduler makes room.
    """
    fitting = [i for i in instances if most_tokens <= i.most_tokens]
    if is_spoken:
        ready = [i for i in fitting if i.has_room(tokens, is_spoken=True)] or fitting
    else:
        ready = [i for i in fitting if i.could_begin(tokens)]
    return _freest(ready).instance_id if ready else None


def _freest(instances: Iterable[Instance]) -> Instance:
    return min(instances, key=lambda i: (-i.freeness, i.instance_id))


def _least_free(instances: Iterable[Instance]) -> Instance:
    return min(instances, key=lambda i: (i.freeness, i.instance_id))


# --- who is moved


def plan_rebalance(
    loads: Mapping[InstanceId, tuple[Instance, Sequence[Movable]]], rule: MoveRule, *, num_moving: int = 0
) -> list[Move]:
    """Return what to move from the least free to the freest machine, while num_moving are under way."""
    instances = {instance_id: instance for instance_id, (instance, _) in loads.items()}
    staying = {instance_id: list(held) for instance_id, (_, held) in loads.items()}
    moves: list[Move] = []
    while len(instances) > 1 and num_moving + len(moves) < rule.max_moving:
        source, target = _least_free(instances.values()), _freest(instances.values())
        chosen = _first_worth_moving(source, target, staying[source.instance_id], rule)
        if chosen is None:
            break
        staying[source.instance_id].remove(chosen)
        instances[source.instance_id] = _without(source, chosen)
        instances[target.instance_id] = _with(target, chosen)
        moves.append(Move(request_id=chosen.request_id, source=source.instance_id, target=target.instance_id))
    return moves


def _first_worth_moving(
    source: Instance, target: Instance, held: Iterable[Movable], rule: MoveRule
) -> Movable | None:
    """Return the first that narrows the gap enough: low classes first, then whoever is short."""
    gap = target.freeness - source.freeness
    if gap < rule.min_gap_tokens:
        return None
    for movable in sorted(held, key=lambda m: (-m.urgency, m.tokens, m.request_id)):
        if not movable.urgency or movable.most_tokens > target.most_tokens:
            continue
        low, high = _without(source, movable).freeness, _with(target, movable).freeness
        is_between = source.freeness <= low <= high <= target.freeness
        if target.could_begin(movable.tokens) and is_between and gap - (high - low) >= rule.min_gain * gap:
            return movable
    return None


def _without(instance: Instance, movable: Movable) -> Instance:
    if movable.is_waiting:
        return replace(
            instance,
            waiting_pages=instance.waiting_pages - movable.pages,
            num_waiting=instance.num_waiting - 1,
        )
    return replace(
        instance, held_pages=instance.held_pages - movable.pages, num_sequences=instance.num_sequences - 1
    )


def _with(instance: Instance, movable: Movable) -> Instance:
    return replace(
        instance,
        waiting_pages=instance.waiting_pages + pages_for(movable.tokens, instance.page_tokens),
        num_waiting=instance.num_waiting + 1,
    )
