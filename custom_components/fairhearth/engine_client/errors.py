"""Everything that can go wrong between the client and the engine: one tree, rebuilt from `error.code`.

The code is stable and decides the class; the message is the engine's own plain words. A code this client does
not know becomes the base class, so that a newer engine can be refused politely. Source: docs/wire.md, section
Errors.
"""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    """Base of all errors of the client, and the class of a code that it does not know."""

    code: ClassVar[str] = "engine_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Keep the plain message, the code as sent, the offending key and when to try again (seconds)."""
        super().__init__(message)
        self.message = message
        self.sent_code = code or self.code
        self.param = param
        self.retry_after_s = retry_after_s


class CannotConnect(EngineError):
    """No engine answers there, or the connection was lost. Made by the client, never sent."""

    code = "cannot_connect"


class ProtocolError(EngineError):
    """The answer is not what the contract says. Made by the client, never sent."""

    code = "protocol_error"


class InvalidRequest(EngineError):
    """The engine cannot understand the request or a value in it."""

    code = "invalid_request"


class InvalidToken(EngineError):
    """No token, or one that the engine does not know."""

    code = "not_authenticated"


class NotAllowed(EngineError):
    """The token is known but may not do this."""

    code = "not_allowed"


class PairingClosed(EngineError):
    """The engine shows no code at the moment, or the code was used up."""

    code = "pairing_closed"


class WrongCode(EngineError):
    """The code is not the one that the engine shows."""

    code = "wrong_code"


class UnknownJob(EngineError):
    """There is no such job, or it was kept long enough."""

    code = "unknown_job"


class IdempotencyConflict(EngineError):
    """The key belongs to a job with another request."""

    code = "idempotency_conflict"


class StorageUnavailable(EngineError):
    """The engine's disk is full or cannot be written."""

    code = "storage_unavailable"


class NotSupported(EngineError):
    """The engine or its model cannot do this at all."""

    code = "not_supported"


class UnknownResident(EngineError):
    """The resident is not set up on the engine, as after its restart."""

    code = "unknown_resident"


class UnknownModel(EngineError):
    """The model is not served there."""

    code = "unknown_model"


class ModelUnavailable(EngineError):
    """The model is set up there and cannot be loaded, for now or beside those that stay in memory."""

    code = "model_unavailable"


class NotFound(EngineError):
    """There is no such address on the engine."""

    code = "not_found"


class MethodNotAllowed(EngineError):
    """The address exists but does not take this method."""

    code = "method_not_allowed"


class RequestTooLarge(EngineError):
    """The request's body is larger than the engine reads."""

    code = "request_too_large"


class PromptTooLong(EngineError):
    """Prompt and answer together can never fit."""

    code = "prompt_too_long"


class QuotaExhausted(EngineError):
    """The resident's tokens are spent; `param` names the limit, `daily_tokens` or `rolling_tokens`."""

    code = "quota_exhausted"


class TooManyRequests(EngineError):
    """The resident has as many requests waiting as it may."""

    code = "too_many_requests"


class TooManyFailures(EngineError):
    """Too many unknown tokens came from this address lately."""

    code = "too_many_failures"


class QueueFull(EngineError):
    """The engine has as many requests waiting as it may."""

    code = "queue_full"


class EngineStopping(EngineError):
    """The engine is shutting down or its model is not ready."""

    code = "engine_unavailable"


class GenerationFailed(EngineError):
    """The engine failed on this one request."""

    code = "generation_failed"


_SENT: dict[str, type[EngineError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        InvalidToken,
        NotAllowed,
        PairingClosed,
        WrongCode,
        UnknownJob,
        IdempotencyConflict,
        StorageUnavailable,
        NotSupported,
        UnknownResident,
        UnknownModel,
        ModelUnavailable,
        NotFound,
        MethodNotAllowed,
        RequestTooLarge,
        PromptTooLong,
        QuotaExhausted,
        TooManyRequests,
        TooManyFailures,
        QueueFull,
        EngineStopping,
        GenerationFailed,
    )
}


def error_from_wire(body: object, *, status: int | None = None) -> EngineError:
    """Return the error that a decoded body stands for; a body without one is described by its HTTP status.

    Tolerant on purpose: a proxy's error page must not hide that something went wrong.
    """
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return _error_from_status(status)
    code = error.get("code")
    message = error.get("message")
    retry_after_s = error.get("retry_after_s")
    param = error.get("param")
    cls = _SENT.get(code, EngineError) if isinstance(code, str) else EngineError
    return cls(
        message if isinstance(message, str) and message else f"the engine answered {code or 'with an error'}",
        code=code if isinstance(code, str) else None,
        param=param if isinstance(param, str) else None,
        retry_after_s=float(retry_after_s) if isinstance(retry_after_s, int | float) else None,
    )


def _error_from_status(status: int | None) -> EngineError:
    if status == 401:
        return InvalidToken("the engine does not know this token")
    if status == 403:
        return NotAllowed("the token may not do this")
    if status is not None and status >= 500:
        return EngineStopping(f"the engine or a proxy before it answered with HTTP status {status}")
    return ProtocolError(f"expected an answer of a Fairhearth engine, got HTTP status {status}")
