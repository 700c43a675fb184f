"""What the KV pages are worth: how many conversations of which length, who holds how much of them.

Decides nothing; reads the scheduler's state (the caller holds it still), or counts for a cache only planned.
The numbers are the core's own: the same pages, headroom and caps that it admits by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from engine_service.errors import PromptTooLong
from engine_service.scheduling.admission import is_preemptible, most_tokens_ever
from engine_service.scheduling.model import Capacity, Policy, ResidentId, WorkloadClass, pages_for
from engine_service.scheduling.state import State

REFERENCE_TOKENS: Final = 1024
"""The conversation that others are counted in: a house's prompt, a few turns, an answer."""

_SHORTEST: Final = 2  #: a word to read, a word to say
_SHORT: Final = 512  #: tokens; a house's prompt alone is longer

LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What conversations of one length (prompt and output together, tokens) come to."""

    context_tokens: int
    pages: int  #: that one of them holds
    active: int  #: of them at once, on an otherwise empty machine
    beside: int  #: of REFERENCE_TOKENS that are active beside one of them

    def as_dict(self) -> dict[str, int]:
        """Return the wire form."""
        return {
            "context_tokens": self.context_tokens,
            "pages": self.pages,
            "active": self.active,
            "beside": self.beside,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Pages and places that requests which are not spoken can have."""

    pages: int
    sequences: int
    page_tokens: int
    max_context_tokens: int  #: that one of them may have; longer ones are refused

    def fits(self, lengths: Iterable[int] = LENGTHS) -> list[Fit]:
        """Return what every length up to the longest possible one comes to; that one is the last."""
        longest = min(self.max_context_tokens, self.pages * self.page_tokens)
        chosen = [length for length in lengths if length < longest]
        return [self._fit(length) for length in (*chosen, longest) if length > 0]

    def _fit(self, length: int) -> Fit:
        pages = pages_for(length, self.page_tokens)
        return Fit(
            context_tokens=length,
            pages=pages,
            active=self.active(length),
            beside=min(
                self.sequences - 1, (self.pages - pages) // pages_for(REFERENCE_TOKENS, self.page_tokens)
            ),
        )

    def active(self, length: int) -> int:
        """Return how many conversations of length tokens run at once."""
        return max(0, min(self.sequences, self.pages // pages_for(length, self.page_tokens)))


def planned(capacity: Capacity, policy: Policy, *, pinned_pages: int = 0) -> Room:
    """Return the room on an otherwise empty machine, what is kept for speech taken off."""
    state = State(policy)
    state.capacity = capacity
    return Room(
        pages=max(0, capacity.num_pages - pinned_pages - state.headroom_pages(1)),
        sequences=capacity.max_sequences - state.headroom_sequences(1),
        page_tokens=capacity.page_tokens,
        max_context_tokens=most_tokens_ever(state, WorkloadClass.CHAT),
    )


def longest_conversation(state: State) -> int | None:
    """Return the tokens (prompt, output) that a conversation may have; None before the memory is known."""
    return None if state.capacity is None else planned(state.capacity, state.policy).max_context_tokens


def longest_request(capacity: Capacity, policy: Policy, class_id: WorkloadClass) -> int:
    """Return the tokens (prompt, output) that a request of the class may have under a policy."""
    state = State(policy)
    state.capacity = capacity
    return most_tokens_ever(state, class_id)


def too_long(num_tokens: int, most: int) -> PromptTooLong:
    """Return the refusal of a prompt where most tokens (prompt, output) fit."""
    return PromptTooLong(
        f"the prompt has {num_tokens} tokens; with room for an answer at most {max(0, most - 1)} fit "
        "beside what is kept for speech and for pinned prefixes",
        param="messages",
    )


def is_useless(capacity: Capacity, policy: Policy) -> str | None:
    """Return why a policy would refuse every request of some class on this memory; None if it does not."""
    state = State(policy)
    state.capacity = capacity
    for class_id in WorkloadClass:
        longest = most_tokens_ever(state, class_id)
        if longest < _SHORTEST:
            return (
                f"every {class_id.value} request would be refused: at most {longest} tokens would fit; "
                f"{_limits(state, class_id)}"
            )
    return None


def doubts(capacity: Capacity, policy: Policy) -> list[str]:
    """Return what a policy probably does not mean on this memory, each with the figure that holds."""
    state, found = State(policy), []
    state.capacity = capacity
    for class_id in WorkloadClass:
        longest = most_tokens_ever(state, class_id)
        if longest < min(_SHORT, capacity.max_context_tokens // 4):
            found.append(
                f"{class_id.value} requests of more than {longest} tokens are refused; "
                f"{_limits(state, class_id)}"
            )
    if policy.voice_headroom_pages > state.headroom_pages(1):
        found.append(
            f"voice_headroom_pages is {policy.voice_headroom_pages} of {capacity.num_pages} pages: "
            f"a quarter at most is kept free, so {state.headroom_pages(1)} are"
        )
    if policy.voice_headroom_sequences >= capacity.max_sequences:
        found.append(
            f"voice_headroom_sequences is {policy.voice_headroom_sequences} of {capacity.max_sequences}: "
            f"{capacity.max_sequences - state.headroom_sequences(1)} other request runs at a time"
        )
    return found


def _limits(state: State, class_id: WorkloadClass) -> str:
    """Return what bounds the longest request of a class, with the keys that would change it."""
    capacity, own = state.known_capacity, state.policy.classes[class_id].max_context_tokens
    if own is not None and own <= most_tokens_ever(state, class_id):
        return f"policy.classes.{class_id.value}.max_context_tokens is {own}"
    return (
        f"of {capacity.num_pages} pages of {capacity.page_tokens} tokens prefix_share keeps "
        f"{state.prefix_allowance()} and voice_headroom_pages {state.headroom_pages(1)}"
    )


def offer(capacity: Capacity, policy: Policy) -> dict[str, Any]:
    """Return the part of the wire message `capacity` that tells what one model's memory is worth."""
    room = planned(capacity, policy)
    return {
        "page_tokens": capacity.page_tokens,
        "kv_pages_total": capacity.num_pages,
        "max_sequences": capacity.max_sequences,
        "max_context_tokens": room.max_context_tokens,
        "conversations": [fit.as_dict() for fit in room.fits()],
    }


def report(state: State) -> dict[str, Any]:
    """Return the part of the wire message `capacity` that the engine knows (docs/wire.md)."""
    capacity, pages = state.known_capacity, state.pages
    room = planned(capacity, state.policy, pinned_pages=pages.num_pinned)
    now = Room(
        pages=max(0, pages.free - state.headroom_pages(1)),
        sequences=max(0, capacity.max_sequences - len(state.holding) - state.headroom_sequences(1)),
        page_tokens=capacity.page_tokens,
        max_context_tokens=room.max_context_tokens,
    )
    holders = _holders(state)
    return {
        "page_tokens": capacity.page_tokens,
        "kv_pages_total": pages.total,
        "kv_pages_free": max(0, pages.free),
        "kv_pages_pinned": pages.num_pinned,
        "kv_pages_for_speech": state.headroom_pages(1),
        "max_sequences": capacity.max_sequences,
        "max_context_tokens": room.max_context_tokens,
        "reference_tokens": REFERENCE_TOKENS,
        "conversations": [
            {**fit.as_dict(), "more_now": now.active(fit.context_tokens)} for fit in room.fits()
        ],
        "holders": holders,
        "reclaimable_pages": sum(holder["reclaimable_pages"] for holder in holders),
    }


def _holders(state: State) -> list[dict[str, Any]]:
    """Return who holds how many pages, by resident and class; reclaimable is what speech could take back."""
    found: dict[tuple[ResidentId, WorkloadClass], dict[str, Any]] = {}
    for record in state.holding.values():
        key = (record.resident_id, record.class_id)
        entry = found.setdefault(
            key,
            {
                "resident": record.resident_id,
                "workload_class": record.class_id.value,
                "requests": 0,
                "pages": 0,
                "reclaimable_pages": 0,
            },
        )
        entry["requests"] += 1
        entry["pages"] += record.pages
        if not record.class_id.is_spoken and is_preemptible(state, record):
            entry["reclaimable_pages"] += record.pages
    return [found[key] for key in sorted(found, key=lambda key: (key[0], key[1].urgency, key[1]))]
