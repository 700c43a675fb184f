"""What the scheduler remembers of one request, beside the immutable request itself.

Decides nothing; only `scheduler.py` changes a record.

    tokens of a sequence   [0 ........ prompt) [prompt ........ prompt + output)
    stored                 [0 ... stored)            in the KV cache
    charged                [0 ... charged)           highest position ever computed (or found) before
    reserved               [0 ... reserved)          token slots the backend may fill

A sequence decodes when all but its last token is stored; until then it prefills. After a preemption its
output so far is computed again like a prompt; positions below `charged` are then paid by the system.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_service.scheduling.flows import Bill, Flow
from engine_service.scheduling.model import (
    ModelId,
    Request,
    RequestId,
    RequestState,
    ResidentId,
    WorkloadClass,
)


@dataclass(slots=True, kw_only=True)
class Record:
    """The mutable part of a request's life."""

    request: Request
    arrived_at: float
    due_at: float
    shared: int  #: leading tokens held by a pinned prefix
    flow: Flow = field(init=False)  #: its class, resident and model; set when it is enqueued first
    bill: Bill | None = None  #: where its tokens are added up; None: to be looked up
    request_id: RequestId = field(init=False)
    length: int = field(init=False)  #: tokens of the sequence: prompt plus output so far
    state: RequestState = RequestState.WAITING
    admitted_at: float | None = None
    pages: int = 0
    reserved: int = 0
    stored: int = 0
    stored_at_admission: int = 0
    charged: int = 0  #: not kept up while it decodes: then `stored` is more
    skips: int = 0  #: requests admitted past this one while it did not fit
    preemptions: int = 0
    first_token_at: float | None = None
    last_served_at: float = 0.0  #: when an iteration last included it
    was_due: bool = False  #: admitted out of the due tier, whose budget pays for it
    is_promised: bool = False  #: admitted by the due tier or the reserve: only speech may take its pages
    is_cancelled: bool = False
    prepaid: int = 0  #: service units charged ahead and not yet computed
    attained: int = 0  #: service units its program was told of
    ticket: int = 0  #: how many of its flow were enqueued before it
    was_in_order: bool = False  #: admitted in the usual order (not spoken, due or from the reserve)
    decodes: bool = False  #: noted as decoding in `state` (see `is_decoding`)
    is_new_on_backend: bool = False  #: admitted, and the backend has not reported on it yet
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Derive what is asked for in every iteration."""
        self.request_id = self.request.request_id
        self.length = self.request.prompt_tokens

    @property
    def resident_id(self) -> ResidentId:
        """Who is charged."""
        return self.request.resident_id

    @property
    def model_id(self) -> ModelId:
        """Which model is asked."""
        return self.request.model_id

    @property
    def class_id(self) -> WorkloadClass:
        """What the work is."""
        return self.request.class_id

    @property
    def output(self) -> int:
        """Output tokens so far."""
        return self.length - self.request.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens that must be computed before the next output token."""
        return self.length - self.stored

    @property
    def is_decoding(self) -> bool:
        """Return whether the next iteration computes exactly its last output token."""
        return self.output > 0 and self.length - self.stored == 1

    def attained_units(self, prefill_cost: int, decode_cost: int) -> int:
        """Return the service it got so far, recomputation not counted."""
        prompt = min(max(self.charged, self.stored), self.request.prompt_tokens)
        return max(0, prompt - self.shared) * prefill_cost + self.output * decode_cost

    @property
    def holds_pages(self) -> bool:
        """Return whether it is running or paused."""
        return self.state in (RequestState.RUNNING, RequestState.PAUSED)

    @property
    def most_tokens(self) -> int:
        """Token slots it can ever need: prompt plus max_tokens."""
        return self.request.prompt_tokens + self.request.max_tokens

    def tell(self, what: str, *, now: float) -> None:
        """Add a line to the story that an `InvariantBroken` carries (the last 64 are kept)."""
        if len(self.story) >= 64:
            del self.story[:32]
        self.story.append(f"{now:.6f} {what}")
