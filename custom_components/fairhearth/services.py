"""The actions: ask the engine for a text directly, or order one as a durable job, and look after jobs.

Whoever calls is charged. Naming another resident, a more urgent class or somebody else's job takes an
administrator, or the home itself: automations without a user are written by administrators.
"""

from __future__ import annotations

import json
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

from .attribution import Attribution, Origin, WorkloadClass, attribute, least_urgent
from .const import CONF_MAX_TOKENS, CONF_TEMPERATURE, DEFAULT_TASK_MAX_TOKENS, DOMAIN
from .coordinator import FairhearthConfigEntry, FairhearthCoordinator
from .engine_client import ChatRequest, EngineError, Finished, Job, JobOrder, JsonObject, Message, TextDelta
from .errors import as_home_assistant_error
from .jobs import job_fields
from .residents import rules_of

SERVICE_GENERATE: Final = "generate"
SERVICE_SUBMIT_SUMMARY: Final = "submit_summary"
SERVICE_GET_JOB: Final = "get_job"
SERVICE_CANCEL_JOB: Final = "cancel_job"
SERVICE_LIST_JOBS: Final = "list_jobs"
SERVICE_SET_POLICY: Final = "set_policy"
SERVICE_REHEARSE: Final = "rehearse"

ATTR_PROMPT: Final = "prompt"
ATTR_INSTRUCTIONS: Final = "instructions"
ATTR_RESIDENT: Final = "resident"
ATTR_WORKLOAD_CLASS: Final = "workload_class"
ATTR_TEXT: Final = "text"
ATTR_TITLE: Final = "title"
ATTR_IDEMPOTENCY_KEY: Final = "idempotency_key"
ATTR_DEADLINE: Final = "deadline"
ATTR_KEEP: Final = "keep"
ATTR_JOB_ID: Final = "job_id"
ATTR_STATE: Final = "state"
ATTR_LIMIT: Final = "limit"
ATTR_POLICY: Final = "policy"
ATTR_REVISION: Final = "revision"
ATTR_NOTE: Final = "note"
ATTR_FROM_DEFAULTS: Final = "from_defaults"
ATTR_DRY_RUN: Final = "dry_run"
ATTR_SCENARIO: Final = "scenario"
ATTR_SEEDS: Final = "seeds"

MAX_TITLE_CHARACTERS: Final = 128
MAX_NOTE_CHARACTERS: Final = 200
MAX_SEEDS: Final = 5

CHOSEN_CLASSES: Final = (WorkloadClass.CHAT, WorkloadClass.AGENT, WorkloadClass.BACKGROUND)
"""Classes that a caller may choose; that someone speaks is known from where a request comes from, not
claimed."""

JOB_STATES: Final = ("submitted", "running", "finished", "failed", "cancelled", "expired")

SUMMARY_INSTRUCTIONS: Final = (
    "Sum up the text. Keep names, numbers and dates as they are, leave out what does not matter, and invent "
    "nothing. Answer in the language of the text."
)


def _policy_table(value: object) -> JsonObject:
    """Return a table of the policy; raise Invalid where something in it cannot be sent, such as a date."""
    if not isinstance(value, dict):
        raise probatio.Invalid("expected a table of the policy's keys")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as err:
        raise probatio.Invalid(f"a value of the policy cannot be sent: {err}") from err
    return value


_ENGINE: Final = {probatio.Optional(ATTR_CONFIG_ENTRY_ID): cv.string}
_ORDER: Final = {
    **_ENGINE,
    probatio.Optional(ATTR_INSTRUCTIONS): cv.string,
    probatio.Optional(ATTR_RESIDENT): cv.string,
    probatio.Optional(CONF_MAX_TOKENS, default=DEFAULT_TASK_MAX_TOKENS): probatio.All(
        probatio.Coerce(int), probatio.Range(min=1)
    ),
    probatio.Optional(CONF_TEMPERATURE): probatio.All(probatio.Coerce(float), probatio.Range(min=0, max=2)),
}

GENERATE_SCHEMA: Final = probatio.Schema(
    {
        **_ORDER,
        probatio.Required(ATTR_PROMPT): cv.string,
        probatio.Optional(ATTR_WORKLOAD_CLASS): probatio.In([str(item) for item in CHOSEN_CLASSES]),
    }
)
SUBMIT_SUMMARY_SCHEMA: Final = probatio.Schema(
    {
        **_ORDER,
        probatio.Required(ATTR_TEXT): probatio.All(cv.string, probatio.Length(min=1)),
        probatio.Optional(ATTR_TITLE): probatio.All(cv.string, probatio.Length(max=MAX_TITLE_CHARACTERS)),
        probatio.Optional(ATTR_IDEMPOTENCY_KEY): probatio.All(cv.string, probatio.Length(min=1, max=128)),
        probatio.Optional(ATTR_DEADLINE): cv.positive_time_period,
        probatio.Optional(ATTR_KEEP): cv.positive_time_period,
    }
)
SET_POLICY_SCHEMA: Final = probatio.Schema(
    probatio.All(
        {
            **_ENGINE,
            probatio.Optional(ATTR_POLICY): _policy_table,
            probatio.Optional(ATTR_REVISION): probatio.All(probatio.Coerce(int), probatio.Range(min=0)),
            probatio.Optional(ATTR_NOTE): probatio.All(cv.string, probatio.Length(max=MAX_NOTE_CHARACTERS)),
            probatio.Optional(ATTR_FROM_DEFAULTS, default=False): cv.boolean,
            probatio.Optional(ATTR_DRY_RUN, default=False): cv.boolean,
        },
        cv.has_at_least_one_key(ATTR_POLICY, ATTR_REVISION),
        cv.has_at_most_one_key(ATTR_POLICY, ATTR_REVISION),
    )
)
REHEARSE_SCHEMA: Final = probatio.Schema(
    {
        **_ENGINE,
        probatio.Required(ATTR_SCENARIO): cv.string,
        probatio.Optional(ATTR_POLICY, default=dict): _policy_table,
        probatio.Optional(ATTR_SEEDS, default=1): probatio.All(
            probatio.Coerce(int), probatio.Range(min=1, max=MAX_SEEDS)
        ),
    }
)
JOB_SCHEMA: Final = probatio.Schema({**_ENGINE, probatio.Required(ATTR_JOB_ID): cv.string})
LIST_JOBS_SCHEMA: Final = probatio.Schema(
    {
        **_ENGINE,
        probatio.Optional(ATTR_STATE): probatio.In(JOB_STATES),
        probatio.Optional(ATTR_RESIDENT): cv.string,
        probatio.Optional(ATTR_LIMIT, default=100): probatio.All(
            probatio.Coerce(int), probatio.Range(min=1, max=1000)
        ),
    }
)


@callback
def async_setup_services(hass: HomeAssistant) -> None:
    """Register the actions."""
    only, optional = SupportsResponse.ONLY, SupportsResponse.OPTIONAL
    for name, handler, schema, supports_response in (
        (SERVICE_GENERATE, _async_generate, GENERATE_SCHEMA, only),
        (SERVICE_SUBMIT_SUMMARY, _async_submit_summary, SUBMIT_SUMMARY_SCHEMA, optional),
        (SERVICE_GET_JOB, _async_get_job, JOB_SCHEMA, only),
        (SERVICE_CANCEL_JOB, _async_cancel_job, JOB_SCHEMA, optional),
        (SERVICE_SET_POLICY, _async_set_policy, SET_POLICY_SCHEMA, optional),
        (SERVICE_REHEARSE, _async_rehearse, REHEARSE_SCHEMA, only),
        (SERVICE_LIST_JOBS, _async_list_jobs, LIST_JOBS_SCHEMA, only),
    ):
        hass.services.async_register(
            DOMAIN, name, handler, schema=schema, supports_response=supports_response
        )


async def _async_generate(call: ServiceCall) -> ServiceResponse:
    """Answer one prompt and tell what it cost."""
    coordinator = _coordinator(call)
    attribution = await _async_attribution(call, coordinator)
    request = _request(call, attribution, call.data.get(ATTR_INSTRUCTIONS), call.data[ATTR_PROMPT])
    try:
        text, finished = await _async_collect(coordinator, request)
    except EngineError as err:
        raise as_home_assistant_error(err) from err
    return {"text": text, **attribution_fields(attribution), **measured_fields(finished)}


def _request(call: ServiceCall, attribution: Attribution, instructions: str | None, text: str) -> ChatRequest:
    messages = [Message(role="system", content=instructions)] if instructions else []
    return ChatRequest(
        messages=(*messages, Message(role="user", content=text)),
        resident=attribution.resident_id,
        workload_class=attribution.workload_class,
        max_tokens=call.data[CONF_MAX_TOKENS],
        temperature=call.data.get(CONF_TEMPERATURE),
    )


async def _async_submit_summary(call: ServiceCall) -> ServiceResponse:
    """Order a summary that arrives even if the engine restarts meanwhile; return the job at once."""
    coordinator = _coordinator(call)
    attribution = await _async_attribution(call, coordinator)
    instructions = call.data.get(ATTR_INSTRUCTIONS, SUMMARY_INSTRUCTIONS)
    deadline, keep = call.data.get(ATTR_DEADLINE), call.data.get(ATTR_KEEP)
    order = JobOrder(
        request=_request(call, attribution, instructions, call.data[ATTR_TEXT]),
        title=call.data.get(ATTR_TITLE),
        idempotency_key=call.data.get(ATTR_IDEMPOTENCY_KEY),
        deadline_s=None if deadline is None else deadline.total_seconds(),
        keep_s=None if keep is None else keep.total_seconds(),
    )
    try:
        job = await coordinator.async_submit_job(order)
    except EngineError as err:
        raise as_home_assistant_error(err) from err
    return job_fields(job)


async def _async_get_job(call: ServiceCall) -> ServiceResponse:
    """Return one job with its text, or with what is written of it so far."""
    job = await _async_own_job(call, _coordinator(call))
    return {**job_fields(job), "text": job.text, "finish_reason": job.finish_reason}


async def _async_cancel_job(call: ServiceCall) -> ServiceResponse:
    """Cancel one job; return how it stands now."""
    coordinator = _coordinator(call)
    await _async_own_job(call, coordinator)
    try:
        return job_fields(await coordinator.client.cancel_job(call.data[ATTR_JOB_ID]))
    except EngineError as err:
        raise as_home_assistant_error(err) from err


async def _async_list_jobs(call: ServiceCall) -> ServiceResponse:
    """Return the jobs that the caller may see, newest first."""
    coordinator = _coordinator(call)
    resident = call.data.get(ATTR_RESIDENT)
    if not await _async_may_act_for_others(call):
        own = _caller(call, coordinator).resident_id
        if resident not in (None, own):
            raise Unauthorized(context=call.context)
        resident = own
    try:
        jobs = await coordinator.client.jobs(
            state=call.data.get(ATTR_STATE), resident=resident, limit=call.data[ATTR_LIMIT]
        )
    except EngineError as err:
        raise as_home_assistant_error(err) from err
    if resident is not None and not jobs:  # one who was removed may have left some
        _check_set_up(resident, coordinator)
    return {"jobs": [job_fields(job) for job in jobs]}


async def _async_set_policy(call: ServiceCall) -> ServiceResponse:
    """Change the engine's policy, or only say what it would become."""
    coordinator = _coordinator(call)
    if not await _async_may_act_for_others(call):
        raise Unauthorized(context=call.context)
    changes = call.data.get(ATTR_POLICY)
    if call.data[ATTR_DRY_RUN] and (changes is None or call.data[ATTR_FROM_DEFAULTS]):
        # The engine tries changes of the policy in force alone; the rest would be made.
        raise ServiceValidationError(translation_domain=DOMAIN, translation_key="cannot_be_tried")
    try:
        if changes is None:
            policy = await coordinator.async_roll_back_policy(call.data[ATTR_REVISION])
        elif call.data[ATTR_DRY_RUN]:
            return {"policy": await coordinator.client.validate_policy(changes)}
        else:
            policy = await coordinator.async_change_policy(
                changes, note=call.data.get(ATTR_NOTE), from_defaults=call.data[ATTR_FROM_DEFAULTS]
            )
    except EngineError as err:
        raise as_home_assistant_error(err) from err
    return {"policy": policy.table, "revision": policy.revision, "note": policy.note}


async def _async_rehearse(call: ServiceCall) -> ServiceResponse:
    """Return what a scenario says of the policy, or of what it would become."""
    coordinator = _coordinator(call)
    if not await _async_may_act_for_others(call):
        raise Unauthorized(context=call.context)
    try:
        return await coordinator.client.rehearse(
            call.data[ATTR_SCENARIO], call.data[ATTR_POLICY], seeds=call.data[ATTR_SEEDS]
        )
    except EngineError as err:
        raise as_home_assistant_error(err) from err


async def _async_own_job(call: ServiceCall, coordinator: FairhearthCoordinator) -> Job:
    """Return the job that was named, if the caller may see it."""
    try:
        job = await coordinator.client.job(call.data[ATTR_JOB_ID])
    except EngineError as err:
        raise as_home_assistant_error(err) from err
    if job.resident != _caller(call, coordinator).resident_id and not await _async_may_act_for_others(call):
        raise Unauthorized(context=call.context)
    return job


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
        entry = call.hass.config_entries.async_get_entry(entry_id)
        if entry is None or entry.domain != DOMAIN:
            raise ServiceValidationError(
                translation_domain=DOMAIN,
                translation_key="no_such_engine",
                translation_placeholders={"entry": entry_id},
            )
        entries = [entry for entry in entries if entry.entry_id == entry_id]
    if not entries:
        raise ServiceValidationError(translation_domain=DOMAIN, translation_key="no_engine")
    if len(entries) > 1:
        raise ServiceValidationError(translation_domain=DOMAIN, translation_key="several_engines")
    return entries[0].runtime_data


def _caller(call: ServiceCall, coordinator: FairhearthCoordinator) -> Attribution:
    """Return who calls, and as what the work counts if nothing is said."""
    origin = Origin(
        user_id=call.context.user_id,
        parent_user_id=coordinator.context_users.user_of(call.context.parent_id),
        is_traced=trace_id_get() is not None,
        is_task=True,
    )
    return attribute(origin, rules_of(call.hass, coordinator.config_entry))


def _check_set_up(resident_id: str, coordinator: FairhearthCoordinator) -> None:
    """Raise a translated error that names the residents there are, where this is none of them."""
    if resident_id not in coordinator.data.residents:
        raise ServiceValidationError(
            translation_domain=DOMAIN,
            translation_key="resident_not_set_up",
            translation_placeholders={
                "resident": resident_id,
                "residents": ", ".join(sorted(coordinator.data.residents)),
            },
        )


async def _async_attribution(call: ServiceCall, coordinator: FairhearthCoordinator) -> Attribution:
    """Return who is charged: the resident who was named where the caller may name one, else who called."""
    caller = _caller(call, coordinator)
    resident_id = call.data.get(ATTR_RESIDENT, caller.resident_id)
    _check_set_up(resident_id, coordinator)
    may_act_for_others = await _async_may_act_for_others(call)
    if resident_id != caller.resident_id and not may_act_for_others:
        raise Unauthorized(context=call.context)
    chosen = WorkloadClass(call.data.get(ATTR_WORKLOAD_CLASS, caller.workload_class))
    if not may_act_for_others:
        # Someone who presses a button waits for it; in a script or an automation nobody does.
        most = WorkloadClass.BACKGROUND if trace_id_get() is not None else WorkloadClass.CHAT
        chosen = least_urgent(chosen, most)
    return Attribution(resident_id=resident_id, workload_class=chosen)


async def _async_may_act_for_others(call: ServiceCall) -> bool:
    """Return whether the caller may spend another resident's share: an administrator, or the home itself."""
    if call.context.user_id is None:
        return True
    user = await call.hass.auth.async_get_user(call.context.user_id)
    return user is not None and user.is_admin
