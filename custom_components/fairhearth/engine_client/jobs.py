"""Durable jobs as the client sees them: what is ordered, and how far it is.

Moments are seconds since the epoch by the engine's clock, durations seconds, counts tokens. Source:
docs/wire.md, section "Durable jobs".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from .protocol import ChatRequest
from .reading import JsonObject, Reader

FINAL_STATES: Final = frozenset({"finished", "failed", "cancelled", "expired"})
"""States that a job does not leave; before them it is submitted, then running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """One answer that is wanted even if the engine restarts meanwhile."""

    request: ChatRequest
    title: str | None = None
    idempotency_key: str | None = None  #: the same key with the same request is the same job
    deadline_s: float | None = None  #: not finished by then, it expires
    keep_s: float | None = None  #: how long it is kept once it has ended

    def as_wire(self) -> JsonObject:
        """Return the body of POST `/v1/jobs`."""
        request = self.request.as_wire()
        del request["stream"], request["stream_options"]
        body: JsonObject = {"request": request}
        options = {
            "title": self.title,
            "idempotency_key": self.idempotency_key,
            "deadline_s": self.deadline_s,
            "keep_s": self.keep_s,
        }
        body.update({key: value for key, value in options.items() if value is not None})
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job as it stands."""

    job_id: str
    state: str
    title: str | None
    resident: str
    workload_class: str
    created_at: float
    started_at: float | None
    ended_at: float | None
    output_tokens: int
    max_tokens: int | None
    attempts: int  #: how often it was begun
    eta_s: float | None  #: seconds until it is likely done
    text: str  #: of the result, else what was written so far; empty in lists and on the stream
    finish_reason: str | None
    error: str | None  #: in the engine's own words

    @property
    def has_ended(self) -> bool:
        """Return whether the job stays as it is."""
        return self.state in FINAL_STATES

    @property
    def progress(self) -> float | None:
        """Return the part of the longest answer that is written, in [0, 1]; None while that is not known."""
        if self.state == "finished":
            return 1.0
        return min(1.0, self.output_tokens / self.max_tokens) if self.max_tokens else None

    @classmethod
    def from_wire(cls, body: object) -> Self:
        """Read one Job."""
        return cls.from_reader(Reader(body, "job"))

    @classmethod
    def from_reader(cls, reader: Reader) -> Self:
        """Read one Job of an answer."""
        progress = reader.reader("progress") if reader.has("progress") else None
        choice = reader.reader("result").readers("choices")[0] if reader.has("result") else None
        partial = reader.text("partial") if reader.has("partial") else ""
        return cls(
            job_id=reader.text("id"),
            state=reader.text("state"),
            title=reader.text("title") if reader.has("title") else None,
            resident=reader.text("resident"),
            workload_class=reader.text("workload_class"),
            created_at=reader.number("created_at"),
            started_at=reader.number_or_none("started_at"),
            ended_at=reader.number_or_none("ended_at"),
            output_tokens=(progress.integer_or_none("output_tokens") or 0) if progress else 0,
            max_tokens=progress.integer_or_none("max_tokens") if progress else None,
            attempts=reader.integer_or_none("attempts") or 0,
            eta_s=reader.number_or_none("eta_s"),
            text=_content(choice) if choice else partial,
            finish_reason=choice.text("finish_reason") if choice and choice.has("finish_reason") else None,
            error=reader.reader("error").text("message") if reader.has("error") else None,
        )


def _content(choice: Reader) -> str:
    message = choice.reader("message")
    return message.text("content") if message.has("content") else ""


def jobs_from_wire(body: object) -> list[Job]:
    """Read the answer of GET `/v1/jobs`, newest first."""
    return [Job.from_reader(row) for row in Reader(body, "jobs").readers("jobs")]
