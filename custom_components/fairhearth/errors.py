"""Errors as Home Assistant shows them, in the user's language: of the engine, and of what a dialog was given.

The only place where an `EngineError` becomes a `HomeAssistantError`. Each class has its own text, so that a
spoken answer names the cause; what only the engine can word is passed on as a placeholder.
"""

from __future__ import annotations

import math
from typing import Final

from homeassistant.core import HomeAssistant
from homeassistant.exceptions import HomeAssistantError, ServiceValidationError
from homeassistant.helpers.translation import async_get_cached_translations, async_get_translations

from .const import DOMAIN
from .engine_client import (
    CannotConnect,
    EngineError,
    EngineStopping,
    GenerationFailed,
    IdempotencyConflict,
    InvalidRequest,
    InvalidToken,
    MethodNotAllowed,
    ModelUnavailable,
    NotAllowed,
    NotFound,
    NotSupported,
    PromptTooLong,
    ProtocolError,
    QueueFull,
    QuotaExhausted,
    RequestTooLarge,
    StorageUnavailable,
    TooManyFailures,
    TooManyRequests,
    UnknownJob,
    UnknownModel,
    UnknownResident,
)

QUOTA_KEY: Final = "quota_exhausted"
"""Where the engine does not say which limit of the resident is spent."""

_LIMITS: Final = {"daily_tokens": "quota_exhausted_today", "rolling_tokens": "quota_exhausted_lately"}
"""By the limit that the engine names."""

_KEYS: Final[dict[type[EngineError], str]] = {
    CannotConnect: "cannot_connect",
    ProtocolError: "protocol_error",
    InvalidRequest: "invalid_request",
    InvalidToken: "invalid_token",
    NotAllowed: "not_allowed",
    UnknownResident: "unknown_resident",
    UnknownModel: "unknown_model",
    ModelUnavailable: "model_unavailable",
    PromptTooLong: "prompt_too_long",
    RequestTooLarge: "prompt_too_long",
    QuotaExhausted: QUOTA_KEY,
    TooManyRequests: "too_many_requests",
    TooManyFailures: "too_many_failures",
    QueueFull: "queue_full",
    EngineStopping: "engine_unavailable",
    GenerationFailed: "generation_failed",
    UnknownJob: "unknown_job",
    IdempotencyConflict: "idempotency_conflict",
    StorageUnavailable: "storage_unavailable",
    NotSupported: "not_supported",
    NotFound: "not_supported",
    MethodNotAllowed: "not_supported",
}

_CALLERS: Final = (
    InvalidRequest,
    UnknownResident,
    UnknownModel,
    UnknownJob,
    NotFound,
    MethodNotAllowed,
    IdempotencyConflict,
    PromptTooLong,
    RequestTooLarge,
    NotSupported,
)
"""The engine works and says that it was asked for what there is not or cannot be: no failure to log."""


def translation_key(err: EngineError) -> str:
    """Return the key in `exceptions` of the translations that fits the error."""
    key = _KEYS.get(type(err), "engine_error")
    return _LIMITS.get(err.param or "", key) if key == QUOTA_KEY else key


def as_home_assistant_error(
    err: EngineError, kind: type[HomeAssistantError] | None = None
) -> HomeAssistantError:
    """Return the translated error to raise instead (`raise as_home_assistant_error(err) from err`).

    Without a kind, what the caller can mend is a ServiceValidationError, and the rest a HomeAssistantError.
    """
    if kind is None:
        kind = ServiceValidationError if isinstance(err, _CALLERS) else HomeAssistantError
    return kind(
        translation_domain=DOMAIN,
        translation_key=translation_key(err),
        translation_placeholders={"message": err.message, "minutes": _minutes(err.retry_after_s)},
    )


def _minutes(seconds: float | None) -> str:
    """Return whole minutes, rounded up so that nobody comes back too early."""
    return "?" if seconds is None else str(max(1, math.ceil(seconds / 60)))


async def async_localized(hass: HomeAssistant, err: HomeAssistantError, language: str) -> str:
    """Return what one of our errors says, in a language; another's error says what it always says.

    Home Assistant words an error in English when it is raised, whoever is listening.
    """
    if err.translation_domain != DOMAIN or err.translation_key is None:
        return str(err)
    text = await async_text(hass, err.translation_key, language)
    return str(err) if text is None else text.format(**(err.translation_placeholders or {}))


async def async_text(hass: HomeAssistant, key: str, language: str) -> str | None:
    """Return one of the texts in `exceptions`, the place for what is spoken, in a language."""
    return (await async_get_translations(hass, language, "exceptions", [DOMAIN])).get(_path(key))


def cached_text(hass: HomeAssistant, key: str) -> str:
    """Return one of these texts in the language of the home, which Home Assistant has read; else its key."""
    return async_get_cached_translations(hass, hass.config.language, "exceptions", DOMAIN).get(
        _path(key), key
    )


def cached_class_name(hass: HomeAssistant, class_id: str) -> str:
    """Return what a workload class is called in the language of the home; its id where it has no name."""
    names = async_get_cached_translations(hass, hass.config.language, "selector", DOMAIN)
    return names.get(f"component.{DOMAIN}.selector.class_name.options.{class_id}", class_id)


def _path(key: str) -> str:
    return f"component.{DOMAIN}.exceptions.{key}.message"


class Refused(Exception):
    """A dialog's input does not work; holds the field and the key of the text that says why."""

    def __init__(self, key: str, field: str = "base") -> None:
        """Name the text and the field it belongs to."""
        super().__init__(key)
        self.errors = {field: key}
