"""Everything that can go wrong on the wire: one tree, a stable code and an HTTP status per class.

The client rebuilds the class from the code; a code it does not know becomes the base class. A message
names what was wrong and what would be right, in plain words.
"""

from __future__ import annotations

from typing import Any, ClassVar


class EngineError(Exception):
    """Base of all errors that reach a caller."""

    code: ClassVar[str] = "engine_error"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        """Keep the plain message, the offending request key and when trying again makes sense (seconds)."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def as_wire(self) -> dict[str, Any]:
        """Return the error object of docs/wire.md, without its wrapper."""
        if self.http_status == 429:
            kind = "rate_limit_error"
        else:
            kind = "server_error" if self.http_status >= 500 else "invalid_request_error"
        return {
            "code": self.code,
            "message": self.message,
            "type": kind,
            "param": self.param,
            "retry_after_s": self.retry_after_s,
        }


class InvalidRequest(EngineError):
    """The caller's message cannot be understood or has a value that cannot be."""

    code = "invalid_request"
    http_status = 400


class NotAuthenticated(EngineError):
    """No token, or one that is not known here."""

    code = "not_authenticated"
    http_status = 401


class NotAllowed(EngineError):
    """The token is known but may not do this."""

    code = "not_allowed"
    http_status = 403


class PairingClosed(EngineError):
    """No pairing code is open at the engine."""

    code = "pairing_closed"
    http_status = 403


class WrongCode(EngineError):
    """The caller's pairing code is not the one that is open."""

    code = "wrong_code"
    http_status = 403


class UnknownResident(EngineError):
    """The named resident is not set up on this engine."""

    code = "unknown_resident"
    http_status = 404


class UnknownModel(EngineError):
    """The named model is not served here."""

    code = "unknown_model"
    http_status = 404


class UnknownJob(EngineError):
    """There is no such job, or it is not the caller's."""

    code = "unknown_job"
    http_status = 404


class NotFound(EngineError):
    """There is no such thing under this address."""

    code = "not_found"
    http_status = 404


class MethodNotAllowed(EngineError):
    """The address exists but does not take this method."""

    code = "method_not_allowed"
    http_status = 405


class IdempotencyConflict(EngineError):
    """The caller used the key for another request before."""

    code = "idempotency_conflict"
    http_status = 409


class RequestTooLarge(EngineError):
    """The caller's body is larger than the engine reads."""

    code = "request_too_large"
    http_status = 413


class PromptTooLong(EngineError):
    """The caller's prompt and output can never fit the memory its class may hold."""

    code = "prompt_too_long"
    http_status = 413


class QuotaExhausted(EngineError):
    """The resident's tokens of the day or of its rolling window are spent; param names the limit."""

    code = "quota_exhausted"
    http_status = 429


class TooManyRequests(EngineError):
    """The resident has as many requests waiting as it may."""

    code = "too_many_requests"
    http_status = 429


class TooManyFailures(EngineError):
    """The caller's address presented too many unknown tokens lately."""

    code = "too_many_failures"
    http_status = 429


class QueueFull(EngineError):
    """The engine has as many requests waiting as it may."""

    code = "queue_full"
    http_status = 503


class EngineStopping(EngineError):
    """The engine is shutting down or its model is not ready."""

    code = "engine_unavailable"
    http_status = 503


class ModelUnavailable(EngineError):
    """The named model is set up here and cannot be loaded (for now)."""

    code = "model_unavailable"
    http_status = 503


class NotSupported(EngineError):
    """The model or backend loaded here cannot do this; another one might."""

    code = "not_supported"
    http_status = 422


class StorageUnavailable(EngineError):
    """The engine's disk does not take or give what must be kept."""

    code = "storage_unavailable"
    http_status = 503


class GenerationFailed(EngineError):
    """Our fault: this request failed inside the engine; others go on."""

    code = "generation_failed"
    http_status = 500


class SettingsError(EngineError):
    """A setting stops the start; the message names file, key and what was expected."""

    code = "bad_settings"
    http_status = 500
