"""What a durable job is. Pure data; times are seconds since 1970."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from engine_service.protocol import Extension, Webhook

Json = Mapping[str, Any]

DEFAULT_KEEP_S: Final = 7 * 86_400.0


class JobState(StrEnum):
    """Where a job stands; it only ever moves down this list, but for `running` back to `submitted`."""

    SUBMITTED = "submitted"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_final(self) -> bool:
        """Return whether nothing can change any more."""
        return self not in (JobState.SUBMITTED, JobState.RUNNING)


class TellState(StrEnum):
    """Whether the webhook of a job was told of its end."""

    WAITING = "waiting"  #: the job has not ended, or nobody took the message yet
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a job has written so far."""

    token_ids: tuple[int, ...] = ()
    text: str = ""  #: as the model wrote it; may lag behind token_ids by a held-back end


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job as it is kept."""

    job_id: str
    owner: str  #: name of the token it was submitted with
    request: Json  #: a chat completion request, as it was sent
    who: Extension
    created_at: float
    title: str | None = None
    idempotency_key: str | None = None
    deadline_at: float | None = None
    keep_s: float = DEFAULT_KEEP_S  #: how long it is kept after its end
    state: JobState = JobState.SUBMITTED
    started_at: float | None = None
    ended_at: float | None = None
    attempts: int = 0
    output: Output = Output()
    model: str | None = None  #: the model that wrote the output; None before it began, or not known
    result: Json | None = None
    result_sha256: str | None = None
    error: Json | None = None
    webhook: Webhook | None = None
    webhook_state: TellState = TellState.WAITING
    webhook_tries: int = 0

    @property
    def max_tokens(self) -> int | None:
        """Return the most output tokens the request asked for, None if it did not say."""
        most: int | None = self.request.get("max_completion_tokens") or self.request.get("max_tokens")
        return most

    def is_same_order(self, other: Job) -> bool:
        """Return whether both ask for the same thing."""
        return self._order() == other._order()

    def _order(self) -> tuple[object, ...]:
        return self.request, self.who, self.title, self.webhook


def sha256_of(message: Any) -> str:
    """Return the SHA-256 of a JSON value in its canonical form: sorted keys, no blanks, UTF-8."""
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
