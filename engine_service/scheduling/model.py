"""Nouns of the scheduler: residents, workload classes, requests, policy, capacity.

Decides nothing. Knows no clock, no backend and no wire format. Every other module of the package may
import this one; this one imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NewType

ResidentId = NewType("ResidentId", str)
RequestId = NewType("RequestId", str)
ModelId = NewType("ModelId", str)

GUEST: Final = ResidentId("guest")
"""Every unknown speaker shares this one resident, so that identities cannot be minted."""

HOUSE: Final = ResidentId("house")
"""Work that nobody asked for by name (automations without an owner)."""

SYSTEM: Final = ResidentId("system")
"""The account that pays for what the scheduler itself caused (recompute after preemption)."""

THE_MODEL: Final = ModelId("")
"""The model of an engine that has only one."""

MICRO: Final = 1_000_000
"""Virtual counters are whole micro-units: one unit of service of a weight-1 resident is MICRO."""


class WorkloadClass(StrEnum):
    """What the work is. Set once by the server, never changed by waiting."""

    VOICE = "voice"
    ACCESSIBILITY = "accessibility"
    CHAT = "chat"
    AGENT = "agent"
    EMBEDDING = "embedding"
    BACKGROUND = "background"

    @property
    def urgency(self) -> int:
        """Return the urgency tier: 0 is served first. Voice and accessibility are equals."""
        return _URGENCY[self]

    @property
    def is_spoken(self) -> bool:
        """Return whether a person waits for speech (voice, accessibility)."""
        return self.urgency == 0


_URGENCY: Final[Mapping[WorkloadClass, int]] = MappingProxyType(
    {
        WorkloadClass.VOICE: 0,
        WorkloadClass.ACCESSIBILITY: 0,
        WorkloadClass.CHAT: 1,
        WorkloadClass.AGENT: 2,
        WorkloadClass.EMBEDDING: 3,
        WorkloadClass.BACKGROUND: 4,
    }
)


FIRST_LOWER_URGENCY: Final = WorkloadClass.AGENT.urgency
"""From here on the background reserve serves, and classes may be paused: nobody reads along."""


class RequestState(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"  #: holds no pages
    RUNNING = "running"  #: holds pages
    PAUSED = "paused"  #: holds pages but sits iterations out
    FINISHED = "finished"  #: done, cancelled, rejected or failed; holds nothing


class FairnessGoal(StrEnum):
    """What the household means by equal."""

    SERVICE = "service"
    WAITING = "waiting"
    COMPLETIONS = "completions"
    CLASS_ONLY = "class_only"


class PreemptionMode(StrEnum):
    """How a request gives way."""

    PAUSE = "pause"  #: keeps its pages, yields compute
    RELEASE = "release"  #: gives its pages back; resumes with a new prefill
    SWAP = "swap"  #: its KV moves to host memory


class ServiceUnit(StrEnum):
    """What one unit of service is."""

    TOKENS = "tokens"
    ACCELERATOR_TIME = "accelerator_time"


class RejectReason(StrEnum):
    """Why a request is refused. Each is the caller's to understand, so each has a plain message."""

    PROMPT_TOO_LONG = "prompt_too_long"
    OUTPUT_TOO_LONG = "output_too_long"
    NEVER_FITS = "never_fits"
    UNKNOWN_RESIDENT = "unknown_resident"
    QUOTA_EXHAUSTED = "quota_exhausted"  #: of the day
    ROLLING_EXHAUSTED = "rolling_exhausted"  #: the quota of the rolling window
    TOO_MANY_REQUESTS = "too_many_requests"
    QUEUE_FULL = "queue_full"
    DUPLICATE_REQUEST = "duplicate_request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A person of the household (or guest, house) to whom service is charged."""

    resident_id: ResidentId
    weight: int = 1  #: >= 1; twice the weight is entitled to twice the service
    daily_tokens: int | None = None  #: service tokens per local day; None is unlimited
    daily_is_hard: bool = False  #: over quota: True rejects, False falls to background
    rolling_tokens: int | None = None  #: tokens in any window of `rolling_window_s`; None is unlimited
    rolling_window_s: float = 3600.0
    rolling_is_hard: bool = False  #: over it: True rejects, False falls to background
    page_cap: int | None = None  #: most KV pages while others wait; lendable; None is no cap
    max_running: int | None = None  #: most requests running at once
    max_waiting: int = 64  #: most requests waiting at once

    def __post_init__(self) -> None:
        """Refuse a resident that could not be scheduled."""
        if not self.resident_id:
            raise ValueError("resident_id must not be empty")
        if self.weight < 1:
            raise ValueError(f"weight of {self.resident_id} must be a whole number >= 1, not {self.weight}")
        if self.rolling_window_s <= 0:
            raise ValueError(
                f"rolling_window_s of {self.resident_id} must be > 0, not {self.rolling_window_s}"
            )
        for name in ("daily_tokens", "rolling_tokens", "page_cap", "max_running", "max_waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} of {self.resident_id} must be >= 1, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPolicy:
    """What one workload class may use and how long it may wait."""

    max_wait_s: float  #: a request that waited longer is due
    inter_token_target_s: float | None  #: None: nobody reads along
    max_context_tokens: int | None = None  #: prompt plus output; None is the model's own limit
    max_output_tokens: int | None = None  #: None is the model's own limit


def _default_classes() -> Mapping[WorkloadClass, ClassPolicy]:
    return MappingProxyType(
        {
            WorkloadClass.VOICE: ClassPolicy(max_wait_s=2.0, inter_token_target_s=0.12),
            WorkloadClass.ACCESSIBILITY: ClassPolicy(max_wait_s=2.0, inter_token_target_s=0.12),
            WorkloadClass.CHAT: ClassPolicy(max_wait_s=30.0, inter_token_target_s=0.2),
            WorkloadClass.AGENT: ClassPolicy(max_wait_s=120.0, inter_token_target_s=0.5),
            WorkloadClass.EMBEDDING: ClassPolicy(max_wait_s=300.0, inter_token_target_s=None),
            WorkloadClass.BACKGROUND: ClassPolicy(max_wait_s=900.0, inter_token_target_s=None),
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything the household may choose. Immutable; a change arrives as `PolicyChanged`."""

    fairness: FairnessGoal = FairnessGoal.SERVICE
    unit: ServiceUnit = ServiceUnit.TOKENS
    prefill_cost: int = 1  #: service units per computed prompt token (w_p)
    decode_cost: int = 2  #: service units per output token (w_q)
    classes: Mapping[WorkloadClass, ClassPolicy] = field(default_factory=_default_classes)

    voice_bucket: int = 20_000  #: service units a resident may spend ahead of the order per window
    voice_window_s: float = 60.0
    due_budget: int = 8_000  #: service units the due tier may spend per window (A)
    due_window_s: float = 60.0
    background_reserve: float = 0.1  #: share of service promised to lower classes (beta), [0, 1)
    reserve_window_s: float = 60.0

    voice_headroom_pages: int = 16  #: pages only spoken classes may take
    voice_headroom_sequences: int = 1
    output_slice_tokens: int = 64  #: growth reserved ahead of a running request
    max_skips: int = 4
    max_preemptions: int = 3  #: afterwards the request is pinned
    max_prefilling: int = 1
    max_prefilling_spoken: int = 2
    max_chunk_tokens: int = 512
    min_chunk_tokens: int = 64
    efficient_chunk_tokens: int = 128  #: below this a chunk waits for slack, unless the rest is shorter
    sprint: bool = True  #: speech under way: no other prefill, and no decode that costs as much apart
    max_pause_s: float = 2.0
    abort_patience_s: float = 0.1  #: speech waits for an iteration that is expected to end this soon
    max_waiting: int = 1_000  #: most requests waiting over all residents
    prefix_share: float = 0.25  #: most of the pages that pinned prefixes may hold, [0, 1)
    predict_output: bool = False  #: charge what an answer will probably cost at admission, settle at its end
    paused_classes: tuple[WorkloadClass, ...] = ()  #: their requests wait until it is taken back
    pace_ahead_s: float | None = None  #: an answer this far ahead of its reader sits out while others wait

    def __post_init__(self) -> None:
        """Refuse a policy that breaks a promise by construction."""
        if not 0 <= self.background_reserve < 1:
            raise ValueError(f"background_reserve must be in [0, 1), not {self.background_reserve}")
        if not 0 <= self.prefix_share < 1:
            raise ValueError(f"prefix_share must be in [0, 1), not {self.prefix_share}")
        missing = [c.value for c in WorkloadClass if c not in self.classes]
        if missing:
            raise ValueError(f"policy lacks the classes {', '.join(missing)}")
        for name in (
            "prefill_cost",
            "decode_cost",
            "voice_headroom_pages",
            "voice_headroom_sequences",
            "abort_patience_s",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, not {getattr(self, name)}")
        if not self.prefill_cost and not self.decode_cost:
            raise ValueError("prefill_cost and decode_cost must not both be 0: nobody would be charged")
        positive = (
            "voice_bucket", "voice_window_s", "due_budget", "due_window_s", "reserve_window_s",
            "output_slice_tokens", "max_prefilling", "max_prefilling_spoken", "min_chunk_tokens",
            "max_waiting", "max_pause_s",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, not {getattr(self, name)}")
        if self.efficient_chunk_tokens < 1:
            raise ValueError(f"efficient_chunk_tokens must be > 0, not {self.efficient_chunk_tokens}")
        unpausable = [c for c in self.paused_classes if WorkloadClass(c).urgency < FIRST_LOWER_URGENCY]
        if unpausable:
            raise ValueError(
                f"paused_classes may hold agent, embedding and background, not {', '.join(unpausable)}: "
                "somebody waits for it"
            )
        if self.pace_ahead_s is not None and self.pace_ahead_s <= 0:
            raise ValueError(f"pace_ahead_s must be > 0, not {self.pace_ahead_s}")
        if self.max_chunk_tokens < self.min_chunk_tokens:
            raise ValueError(
                f"max_chunk_tokens ({self.max_chunk_tokens}) must be >= "
                f"min_chunk_tokens ({self.min_chunk_tokens})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPolicy:
    """How models share memory and time; all times in seconds."""

    max_loaded: int = 1  #: models in memory at once
    min_stay_s: float = 30.0  #: a model with work serves so long before another has its turn
    patience_s: float = 5.0  #: others' requests wait at least so long before they end a turn
    drain_s: float = 10.0  #: answers under way may end within this before they are put back
    speech_drain_s: float = 30.0  #: the same for speech
    retry_s: float = 60.0  #: until a model that could not be loaded is tried again
    releases_pinned: bool = False  #: a pinned model gives way where there is no other room

    def __post_init__(self) -> None:
        """Refuse numbers nobody could be served by."""
        if self.max_loaded < 1:
            raise ValueError(f"max_loaded must be >= 1, not {self.max_loaded}")
        for name in ("min_stay_s", "patience_s", "drain_s", "speech_drain_s", "retry_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number >= 0, not {getattr(self, name)}")
        if not self.min_stay_s:
            raise ValueError("min_stay_s must be > 0: models would take turns without end and serve nobody")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a backend offers. All counts are whole and > 0."""

    num_pages: int  #: KV pages in all; the ledger takes pinned prefixes out
    page_tokens: int  #: token slots per page
    max_sequences: int  #: requests that may hold pages at once
    max_context_tokens: int  #: prompt plus output of one request
    chunk_granularity: int = 1  #: prefill chunks are multiples of this (except the last)
    row_multiple: int = 1  #: prompt tokens that fill whole passes; a few more would cost another
    can_release: bool = True  #: a running request can be put back and resumed exactly
    can_abort: bool = False  #: an iteration under way can be stopped
    mixes_prefill_and_decode: bool = True  #: several prompts and decodes share one forward pass

    def __post_init__(self) -> None:
        """Refuse a capacity nobody could be served with."""
        for name in (
            "page_tokens",
            "max_sequences",
            "max_context_tokens",
            "chunk_granularity",
            "row_multiple",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, not {getattr(self, name)}")
        if self.num_pages < 0:
            raise ValueError(f"num_pages must be >= 0, not {self.num_pages}")

    @property
    def longest_request(self) -> int:
        """The tokens (prompt and output) of the longest request that any policy could make room for."""
        return min(self.max_context_tokens, self.num_pages * self.page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One order for generated tokens. Immutable: its class survives every split and retry."""

    request_id: RequestId
    resident_id: ResidentId
    class_id: WorkloadClass
    prompt_tokens: int  #: length of the prompt, > 0
    max_tokens: int  #: most output tokens; 0 computes the prompt only (embeddings, prefixes)
    shared_prefix_tokens: int = 0  #: leading tokens held by a pinned prefix: no pages, no compute
    program_id: str | None = None  #: the agent run or conversation this call belongs to
    keep_prefix: bool = False  #: on finish its pages stay as a pinned prefix instead of being freed
    paid_by_system: bool = False  #: computed for everybody (pinned prefixes): charged to `system`
    model_id: ModelId = THE_MODEL  #: the model that is to answer

    def __post_init__(self) -> None:
        """Refuse lengths that cannot be."""
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens must be >= 1, not {self.prompt_tokens}")
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens must be >= 0, not {self.max_tokens}")
        if not 0 <= self.shared_prefix_tokens < self.prompt_tokens:
            raise ValueError("shared_prefix_tokens must be in [0, prompt_tokens)")


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Return the pages that hold num_tokens (>= 0), rounded up."""
    return -(-num_tokens // page_tokens)
