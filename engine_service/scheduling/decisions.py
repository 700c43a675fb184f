"""What the scheduler can order. The shell carries decisions out in the order they come."""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.scheduling.model import PreemptionMode, RejectReason, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Give the request pages and a sequence: waiting -> running."""

    request_id: RequestId
    reserved_tokens: int  #: token slots it may fill until a `Grow`, shared prefix included


@dataclass(frozen=True, slots=True, kw_only=True)
class Grow:
    """The running request may fill more token slots (a new total, shared prefix included)."""

    request_id: RequestId
    reserved_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """Take pages or compute away from a running request; it resumes exactly where it was."""

    request_id: RequestId
    mode: PreemptionMode
    beneficiary_id: RequestId | None  #: None: it made room for its own growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Leave the request out of iterations; it keeps its pages."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Take a paused request into iterations again."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Drop the request from the backend and free what it holds."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Refuse a request that arrived."""

    request_id: RequestId
    reason: RejectReason
    limit: int | None = None  #: the number that would have been accepted (tokens, requests)
    retry_after_s: float | None = None  #: when trying again makes sense; None: never as it is
    eta_s: float | None = None  #: when it would start at the end of the queue; None: unknown, or never


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """The next tokens of one prompt (or of a recomputation)."""

    request_id: RequestId
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compose:
    """Run one iteration over exactly these; the shell answers with `IterationDone`."""

    decode_ids: tuple[RequestId, ...]
    prefills: tuple[PrefillChunk, ...]
    predicted_s: float | None = None  #: the cost model's forecast; None while it knows nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortIteration:
    """Stop the iteration under way as soon as the backend can; `IterationDone` still follows."""


Decision = Admit | Grow | Preempt | Pause | Resume | Cancel | Reject | Compose | AbortIteration
