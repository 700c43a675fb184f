"""What can happen to the scheduler. Facts in the past tense; nothing here decides."""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.scheduling.model import (
    THE_MODEL,
    Capacity,
    ModelId,
    Policy,
    Request,
    RequestId,
    Resident,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request was accepted by the server."""

    request: Request
    may_have_company: bool = (
        False  #: an event follows soon: an idle device may wait for it, unless for speech
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The caller went away or changed its mind; legal in any state, also for unknown ids."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceResult:
    """What one request got out of one iteration."""

    request_id: RequestId
    prefill_tokens: int = 0  #: prompt (or recomputed) tokens computed and stored
    cached_tokens: int = 0  #: tokens found in the prefix cache, not computed
    decode_tokens: int = 0  #: new output tokens
    finished: bool = False
    failed: bool = False  #: the backend gave this request up; implies finished


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationDone:
    """The composed iteration ended (or was aborted: then results say what was kept)."""

    results: tuple[SequenceResult, ...]
    seconds: float  #: measured duration, >= 0
    aborted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityChanged:
    """The backend offers something else than before (first event; pinned prefix; new backend).

    Where another model serves from now on, nobody holds pages; pinned says what its memory still keeps.
    """

    capacity: Capacity
    model_id: ModelId = THE_MODEL  #: the model that serves
    pinned: tuple[tuple[RequestId, int], ...] = ()  #: of another model than before: prefixes and their pages
    switch_s: float = 0.0  #: seconds for which nobody could be served because of the change


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChanged:
    """The household chose another policy."""

    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentsChanged:
    """The list of residents was replaced; who is missing drains."""

    residents: tuple[Resident, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DayStarted:
    """A local day began. The shell knows the zone; days of 23 and 25 hours are its business."""

    day: str  #: ISO date of the local day; a day seen before resets nothing
    ends_at: float  #: monotonic seconds when the next day is expected to start


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLost:
    """The backend forgot everything it held. Running requests wait again; the next `CapacityChanged` says
    that there is a backend again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStopped:
    """Another model is to serve: nobody is admitted until the next `CapacityChanged`; who runs may end.

    Again, with a lower number: more of those who run are put back.
    """

    puts_back_from: int | None = None  #: who is no more urgent than that is put back at once; None: nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixDropped:
    """The prefix pinned by that request was given up; its pages are free. Unknown ids change nothing."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time passed and nothing else happened (windows roll, the due tier fills)."""


Event = (
    Arrived
    | Cancelled
    | IterationDone
    | CapacityChanged
    | PolicyChanged
    | ResidentsChanged
    | DayStarted
    | BackendLost
    | ServingStopped
    | PrefixDropped
    | Ticked
)
