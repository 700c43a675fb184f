"""What the engine says: every message that goes out, built from what was generated.

Decides how pieces of text become chunks or one whole answer. Pure: no clock, no socket. Source: docs/wire.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, assert_never

from engine_service.chat.parsing import Call, OutputParser, Piece, Reasoning, Text
from engine_service.engine.sessions import Accepted, Delta, Finished, SessionEvent, Timings
from engine_service.errors import EngineError
from engine_service.jobs.model import Job, JobState
from engine_service.protocol import Extension, ResidentRequest, ToolCall
from engine_service.settings import NamedResident

Message = dict[str, Any]

_SECONDS_DIGITS: Final = 6


def error_body(error: EngineError) -> Message:
    """Return the one shape of all errors."""
    return {"error": error.as_wire()}


def resident_body(entry: NamedResident) -> Message:
    """Return a resident as the wire knows it."""
    return {"id": entry.resident_id, **ResidentRequest.of(entry.resident, name=entry.name).as_wire()}


def job_body(job: Job, *, eta_s: float | None, is_whole: bool) -> Message:
    """Return a job as the wire knows it; is_whole: with what it has written, and its result."""
    ended_at = job.ended_at
    written = {
        "partial": "" if job.state is JobState.FINISHED else job.output.text,
        "result": job.result,
    }
    return {
        "id": job.job_id,
        "state": job.state.value,
        "title": job.title,
        "resident": job.who.resident_id,
        "workload_class": job.who.class_id.value,
        "model": job.model,
        "idempotency_key": job.idempotency_key,
        "created_at": round(job.created_at, 3),
        "started_at": _rounded(job.started_at),
        "ended_at": _rounded(ended_at),
        "deadline_at": _rounded(job.deadline_at),
        "kept_until": None if ended_at is None else round(ended_at + job.keep_s, 3),
        "attempts": job.attempts,
        "progress": {"output_tokens": len(job.output.token_ids), "max_tokens": job.max_tokens},
        "eta_s": None if eta_s is None else round(eta_s, 1),
        **(written if is_whole else {}),
        "result_sha256": job.result_sha256,
        "error": job.error,
        "webhook": _webhook_body(job),
    }


def _webhook_body(job: Job) -> Message | None:
    """Return how telling goes; an address may be a secret, so only its host is shown."""
    if job.webhook is None:
        return None
    host, _ = job.webhook.address
    return {"host": host, "state": job.webhook_state.value, "tries": job.webhook_tries}


def _rounded(at: float | None) -> float | None:
    return None if at is None else round(at, 3)


def usage(prompt_tokens: int, timings: Timings) -> Message:
    """Return OpenAI's account of one answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": timings.decode_tokens,
        "total_tokens": prompt_tokens + timings.decode_tokens,
        "prompt_tokens_details": {"cached_tokens": timings.cached_tokens},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all messages of one answer begin with."""

    request_id: str
    created: int  #: seconds since 1970
    model: str
    caller: Extension
    prompt_tokens: int

    def who(self) -> Message:
        """Return the part of the `fairhearth` object that is known from the start."""
        return {
            "request_id": self.request_id,
            "resident": self.caller.resident_id,
            "workload_class": self.caller.class_id.value,
        }

    def accepted(self, accepted: Accepted) -> Message:
        """Return the `fairhearth` object of a stream's first chunk."""
        return self.who() | {"num_ahead": accepted.num_ahead}

    def measured(self, timings: Timings) -> Message:
        """Return the `fairhearth` object of a finished answer."""
        first = timings.time_to_first_token_s
        return self.who() | {
            "queue_s": round(timings.queue_s, _SECONDS_DIGITS),
            "time_to_first_token_s": None if first is None else round(first, _SECONDS_DIGITS),
            "completion_s": round(timings.completion_s, _SECONDS_DIGITS),
            "tokens": {
                "prefill": timings.prefill_tokens,
                "cached": timings.cached_tokens,
                "decode": timings.decode_tokens,
                "recomputed": timings.recomputed_tokens,
            },
            "preemptions": timings.preemptions,
        }


class Reply(Protocol):
    """One answer under way: events of the session in, messages out."""

    def begin(self, accepted: Accepted) -> Iterator[Message]:
        """Yield the chunks of a stream's start."""
        ...

    def more(self, delta: Delta) -> Iterator[Message]:
        """Yield the chunks of new text."""
        ...

    def end(self, finished: Finished) -> Iterator[Message]:
        """Yield the chunks of a stream's end."""
        ...

    def whole(self) -> Message:
        """Return the answer in one message; only after `end` was used up."""
        ...


def messages_of(reply: Reply, event: SessionEvent) -> Iterator[Message]:
    """Return what a stream says of the event."""
    match event:
        case Accepted():
            return reply.begin(event)
        case Delta():
            return reply.more(event)
        case Finished():
            return reply.end(event)
        case _:
            assert_never(event)


class ChatReply:
    """Answers /v1/chat/completions."""

    def __init__(self, head: Head, parser: OutputParser, *, include_usage: bool):
        """Take the text apart with parser."""
        self._head = head
        self._parser = parser
        self._include_usage = include_usage
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._logprobs: list[Message] = []
        self._unsent_logprobs: list[Message] = []
        self._finished: tuple[str, Timings] | None = None

    def begin(self, accepted: Accepted) -> Iterator[Message]:
        """Yield the role chunk."""
        first = {"role": "assistant", "content": ""}
        yield self._chunk(first) | {"fairhearth": self._head.accepted(accepted)}

    def more(self, delta: Delta) -> Iterator[Message]:
        """Yield what the new text turned out to be."""
        logprobs = [_chat_logprob(entry) for entry in delta.logprobs]
        self._logprobs += logprobs
        self._unsent_logprobs += logprobs
        for piece in self._parser.feed(delta.text):
            yield self._piece(piece)

    def end(self, finished: Finished) -> Iterator[Message]:
        """Yield what was held back, the finish reason with what was measured, and usage if asked for."""
        for piece in self._parser.finish():
            yield self._piece(piece)
        reason = "tool_calls" if self._calls else _finish_reason(finished)
        self._finished = (reason, finished.timings)
        yield self._chunk({}, reason) | {"fairhearth": self._head.measured(finished.timings)}
        if self._include_usage:
            tokens = usage(self._head.prompt_tokens, finished.timings)
            yield self._frame("chat.completion.chunk") | {"choices": [], "usage": tokens}

    def whole(self) -> Message:
        """Return the whole chat completion."""
        assert self._finished is not None, "the answer has not ended"
        reason, timings = self._finished
        choice: Message = {"index": 0, "message": self._message(), "finish_reason": reason}
        if self._logprobs:
            choice["logprobs"] = {"content": self._logprobs}
        return self._frame("chat.completion") | {
            "choices": [choice],
            "usage": usage(self._head.prompt_tokens, timings),
            "fairhearth": self._head.measured(timings),
        }

    def _message(self) -> Message:
        content = "".join(self._content)
        message: Message = {"role": "assistant", "content": None if self._calls and not content else content}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [call.as_wire() for call in self._calls]
        return message

    def _piece(self, piece: Piece) -> Message:
        match piece:
            case Text(text=text):
                self._content.append(text)
                return self._chunk({"content": text})
            case Reasoning(text=text):
                self._reasoning.append(text)
                return self._chunk({"reasoning_content": text})
            case Call(call=call):
                index = len(self._calls)
                self._calls.append(call)
                return self._chunk({"tool_calls": [{"index": index, **call.as_wire()}]})

    def _chunk(self, delta: Message, reason: str | None = None) -> Message:
        choice: Message = {"index": 0, "delta": delta, "finish_reason": reason}
        if self._unsent_logprobs and (delta or reason):
            choice["logprobs"] = {"content": self._unsent_logprobs}
            self._unsent_logprobs = []
        return self._frame("chat.completion.chunk") | {"choices": [choice]}

    def _frame(self, kind: str) -> Message:
        head = self._head
        return {
            "id": f"chatcmpl-{head.request_id}",
            "object": kind,
            "created": head.created,
            "model": head.model,
        }


class TextReply:
    """Answers /v1/completions."""

    def __init__(self, head: Head, *, include_usage: bool):
        """Pass text through as it comes."""
        self._head = head
        self._include_usage = include_usage
        self._text: list[str] = []
        self._num_characters = 0
        self._logprobs: list[Message] = []
        self._finished: tuple[str, Timings] | None = None

    def begin(self, accepted: Accepted) -> Iterator[Message]:
        """Yield an empty chunk that says who is ahead."""
        yield self._choice("", None) | {"fairhearth": self._head.accepted(accepted)}

    def more(self, delta: Delta) -> Iterator[Message]:
        """Yield the new text."""
        logprobs = _text_logprobs(delta, self._num_characters)
        self._text.append(delta.text)
        self._num_characters += len(delta.text)
        if logprobs:
            self._logprobs.append(logprobs)
        if delta.text or logprobs:
            yield self._choice(delta.text, None, logprobs)

    def end(self, finished: Finished) -> Iterator[Message]:
        """Yield the finish reason with what was measured, and usage if asked for."""
        reason = _finish_reason(finished)
        self._finished = (reason, finished.timings)
        yield self._choice("", reason) | {"fairhearth": self._head.measured(finished.timings)}
        if self._include_usage:
            tokens = usage(self._head.prompt_tokens, finished.timings)
            yield self._frame() | {"choices": [], "usage": tokens}

    def whole(self) -> Message:
        """Return the whole completion."""
        assert self._finished is not None, "the answer has not ended"
        reason, timings = self._finished
        return self._choice("".join(self._text), reason, _joined(self._logprobs)) | {
            "usage": usage(self._head.prompt_tokens, timings),
            "fairhearth": self._head.measured(timings),
        }

    def _choice(self, text: str, reason: str | None, logprobs: Message | None = None) -> Message:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self._frame() | {"choices": [choice]}

    def _frame(self) -> Message:
        head = self._head
        return {
            "id": f"cmpl-{head.request_id}",
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
        }


def _finish_reason(finished: Finished) -> str:
    return "length" if finished.reason.value == "length" else "stop"


def _shown(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def _chat_logprob(entry: Any) -> Message:
    def one(text: bytes, logprob: float) -> Message:
        return {"token": _shown(text), "logprob": logprob, "bytes": list(text)}

    top = [one(text, logprob) for _, text, logprob in entry.top]
    return one(entry.text, entry.logprob) | {"top_logprobs": top}


def _text_logprobs(delta: Delta, offset: int) -> Message | None:
    if not delta.logprobs:
        return None
    return {
        "tokens": [_shown(entry.text) for entry in delta.logprobs],
        "token_logprobs": [entry.logprob for entry in delta.logprobs],
        "top_logprobs": [
            {_shown(text): logprob for _, text, logprob in entry.top} for entry in delta.logprobs
        ],
        "text_offset": [offset] * len(delta.logprobs),
    }


def _joined(parts: list[Message]) -> Message | None:
    if not parts:
        return None
    joined: Mapping[str, list[Any]] = {key: [] for key in parts[0]}
    for part in parts:
        for key, values in part.items():
            joined[key].extend(values)
    return dict(joined)
