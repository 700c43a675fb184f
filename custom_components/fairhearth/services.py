"""The actions: ask the engine for a text directly, from an automation or a script."""

from __future__ import annotations

from contextlib import aclosing
from typing import Final

import probatio

from homeassistant.const import ATTR_CONFIG_ENTRY_ID
from homeassistant.core import (
    HomeAssistant,
    ServiceCall,
    ServiceResponse,
    SupportsResponse,
    callback,
)
from homeassistant.exceptions import ServiceValidationError, Unauthorized
from homeassistant.helpers import config_validation as cv
from homeassistant.helpers.trace import trace_id_get

from .attribution import Attribution, Origin, WorkloadClass, attribute
from .const import CONF_MAX_TOKENS, CONF_TEMPERATURE, DEFAULT_TASK_MAX_TOKENS, DOMAIN
from .coordinator import FairhearthConfigEntry, FairhearthCoordinator
from .engine_client import ChatRequest, EngineError, Finished, JsonObject, Message, TextDelta
from .errors import as_home_assistant_error
from .residents import rules_of

SERVICE_GENERATE: Final = "generate"

ATTR_PROMPT: Final = "prompt"
ATTR_INSTRUCTIONS: Final = "instructions"
ATTR_RESIDENT: Final = "resident"
ATTR_WORKLOAD_CLASS: Final = "workload_class"

CHOSEN_CLASSES: Final = (WorkloadClass.CHAT, WorkloadClass.AGENT, WorkloadClass.BACKGROUND)
"""Classes that a caller may choose; that someone speaks is known from where a request comes from, not
claimed."""

GENERATE_SCHEMA: Final = probatio.Schema(
    {
        probatio.Optional(ATTR_CONFIG_ENTRY_ID): cv.string,
        probatio.Required(ATTR_PROMPT): cv.string,
        probatio.Optional(ATTR_INSTRUCTIONS): cv.string,
        probatio.Optional(ATTR_RESIDENT): cv.string,
        probatio.Optional(ATTR_WORKLOAD_CLASS): probatio.In([str(item) for item in CHOSEN_CLASSES]),
        probatio.Optional(CONF_MAX_TOKENS, default=DEFAULT_TASK_MAX_TOKENS): probatio.All(
            probatio.Coerce(int), probatio.Range(min=1)
        ),
        probatio.Optional(CONF_TEMPERATURE): probatio.All(
            probatio.Coerce(float), probatio.Range(min=0, max=2)
        ),
    }
)


@callback
def async_setup_services(hass: HomeAssistant) -> None:
    """Register the actions."""
    hass.services.async_register(
        DOMAIN,
        SERVICE_GENERATE,
        _async_generate,
        schema=GENERATE_SCHEMA,
        supports_response=SupportsResponse.ONLY,
    )


async def _async_generate(call: ServiceCall) -> ServiceResponse:
    """Answer one prompt and tell what it cost."""
    coordinator = _coordinator(call)
    attribution = await _async_attribution(call, coordinator)
    instructions = call.data.get(ATTR_INSTRUCTIONS)
    messages = [Message(role="system", content=instructions)] if instructions else []
    request = ChatRequest(
        messages=(*messages, Message(role="user", content=call.data[ATTR_PROMPT])),
        resident=attribution.resident_id,
        workload_class=attribution.workload_class,
        max_tokens=call.data[CONF_MAX_TOKENS],
        temperature=call.data.get(CONF_TEMPERATURE),
    )
    try:
        text, finished = await _async_collect(coordinator, request)
    except EngineError as err:
        raise as_home_assistant_error(err) from err
    return {"text": text, **attribution_fields(attribution), **measured_fields(finished)}


async def _async_collect(
    coordinator: FairhearthCoordinator, request: ChatRequest
) -> tuple[str, Finished | None]:
    pieces: list[str] = []
    finished: Finished | None = None
    async with aclosing(coordinator.async_chat(request)) as events:
        async for event in events:
            match event:
                case TextDelta(text=text):
                    pieces.append(text)
                case Finished():
                    finished = event
                case _:
                    pass
    return "".join(pieces), finished


def attribution_fields(attribution: Attribution) -> JsonObject:
    """Return who was charged and as what."""
    return {"resident": attribution.resident_id, "workload_class": str(attribution.workload_class)}


def measured_fields(finished: Finished | None) -> JsonObject:
    """Return how the answer ended and what was measured, as far as the engine told."""
    if finished is None:
        return {}
    fields: JsonObject = {
        "finish_reason": finished.reason,
        "queue_s": finished.queue_s,
        "time_to_first_token_s": finished.time_to_first_token_s,
        "completion_s": finished.completion_s,
        "preemptions": finished.preemptions,
    }
    if finished.tokens is not None:
        fields["tokens"] = {
            "prefill": finished.tokens.prefill,
            "cached": finished.tokens.cached,
            "decode": finished.tokens.decode,
        }
    return fields


def _coordinator(call: ServiceCall) -> FairhearthCoordinator:
    """Return the coordinator of the entry that was named, or of the only one."""
    entries: list[FairhearthConfigEntry] = call.hass.config_entries.async_loaded_entries(DOMAIN)
    entry_id = call.data.get(ATTR_CONFIG_ENTRY_ID)
    if entry_id is not None:
        entries = [entry for entry in entries if entry.entry_id == entry_id]
    if not entries:
        raise ServiceValidationError(translation_domain=DOMAIN, translation_key="no_engine")
    if len(entries) > 1:
        raise ServiceValidationError(translation_domain=DOMAIN, translation_key="several_engines")
    return entries[0].runtime_data


async def _async_attribution(call: ServiceCall, coordinator: FairhearthCoordinator) -> Attribution:
    """Return who is charged: the resident who was named where the caller may name one, else who called."""
    caller = attribute(
        Origin(
            user_id=call.context.user_id,
            parent_user_id=coordinator.context_users.user_of(call.context.parent_id),
            is_traced=trace_id_get() is not None,
            is_task=True,
        ),
        rules_of(call.hass, coordinator.config_entry),
    )
    resident_id = call.data.get(ATTR_RESIDENT, caller.resident_id)
    if resident_id not in coordinator.data.residents:
        raise ServiceValidationError(
            translation_domain=DOMAIN,
            translation_key="resident_not_set_up",
            translation_placeholders={
                "resident": resident_id,
                "residents": ", ".join(sorted(coordinator.data.residents)),
            },
        )
    if resident_id != caller.resident_id and not await _async_may_charge_others(call):
        raise Unauthorized(context=call.context)
    chosen = call.data.get(ATTR_WORKLOAD_CLASS)
    return Attribution(
        resident_id=resident_id,
        workload_class=WorkloadClass(chosen) if chosen else caller.workload_class,
    )


async def _async_may_charge_others(call: ServiceCall) -> bool:
    """Return whether the caller may spend another resident's share: an administrator, or the home itself."""
    if call.context.user_id is None:
        return True
    user = await call.hass.auth.async_get_user(call.context.user_id)
    return user is not None and user.is_admin
