"""Durable jobs: submit, list, look, cancel, listen."""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Any, Final

import voluptuous as vol
from aiohttp import web

from engine_service.checks import member, path_and_message, shown
from engine_service.errors import EngineError, InvalidRequest, UnknownJob
from engine_service.jobs.model import DEFAULT_KEEP_S, Job, JobState
from engine_service.protocol import JobRequest, parse_job_request, parse_resident_id
from engine_service.scheduling.model import WorkloadClass
from engine_service.server.plans import check_length, plan_chat
from engine_service.server.replies import job_body
from engine_service.server.service import (
    CALLER,
    SERVICE,
    Service,
    faults_told,
    read_json,
    respond,
    unless_stopping,
)
from engine_service.server.streaming import EventStream, ReaderGone

MAX_LISTED: Final = 1000


async def submit(request: web.Request) -> web.StreamResponse:
    """POST /v1/jobs: on disk before it is answered."""
    service, caller = request.app[SERVICE], request[CALLER]
    message = parse_job_request(await read_json(request))
    options = message.chat.options
    who = caller.attribute(
        options.asked,
        default=WorkloadClass.BACKGROUND,
        resident_id=service.users.get(options.user or ""),
    )
    now = time.time()
    job = Job(
        job_id=f"job-{secrets.token_hex(8)}",
        owner=caller.name,
        request=message.request,
        who=who,
        created_at=now,
        title=message.title,
        idempotency_key=message.idempotency_key,
        deadline_at=None if message.deadline_s is None else now + message.deadline_s,
        keep_s=DEFAULT_KEEP_S if message.keep_s is None else message.keep_s,
        webhook=message.webhook,
    )
    await _check(service, message, job)
    kept, is_new = await service.changes.carry_out(service.jobs.runner.submit(job))
    return respond(_whole(service, kept), status=202 if is_new else 200)


async def _check(service: Service, message: JobRequest, job: Job) -> None:
    """Refuse at once what the engine would refuse later."""
    if message.webhook is not None and not message.webhook.goes_to(service.webhook_hosts):
        known = ", ".join(sorted(service.webhook_hosts)) or "no host"
        raise InvalidRequest(
            f"webhook.url leads to {message.webhook.address[0]}; server.webhook_hosts allows {known}",
            param="webhook.url",
        )
    try:
        plan = await plan_chat(service, message.chat, job.who)
        check_length(service, plan, names_model=bool(message.chat.options.model))
        if plan.order.constraint is not None:
            await service.engine.prepare_constraint(plan.order.constraint)
    except EngineError as error:
        error.param = f"request.{error.param}" if error.param else "request"
        raise


async def list_newest(request: web.Request) -> web.StreamResponse:
    """GET /v1/jobs: newest first, without what they wrote."""
    service = request.app[SERVICE]
    found = await service.jobs.runner.newest(**_which(request))
    return respond({"jobs": [_line(service, job) for job in found]})


def _which(request: web.Request) -> dict[str, Any]:
    """Return what the query asks for; raise InvalidRequest naming what it cannot."""
    known = ("state", "resident", "limit")
    for key in request.query:
        if key not in known:
            raise InvalidRequest(f"{key} is not a known query field; known are {', '.join(known)}", param=key)
    state, resident = request.query.get("state"), request.query.get("resident")
    only_for = request[CALLER].only_for
    return {
        "state": None if state is None else _state(state),
        "resident_id": only_for or (None if resident is None else parse_resident_id(resident)),
        "limit": _limit(request.query.get("limit", "100")),
    }


def _state(value: str) -> JobState:
    try:
        state: JobState = member(JobState)(value)
    except vol.Invalid as error:
        raise InvalidRequest(f"state {path_and_message(error)[1]}", param="state") from None
    return state


def _limit(value: str) -> int:
    is_number = value.isascii() and value.isdigit() and len(value) < 6
    if not is_number or not 1 <= int(value) <= MAX_LISTED:
        raise InvalidRequest(
            f"limit must be a whole number from 1 to {MAX_LISTED}, not {shown(value)}", param="limit"
        )
    return int(value)


async def get(request: web.Request) -> web.StreamResponse:
    """GET /v1/jobs/{id}."""
    return respond(_whole(request.app[SERVICE], await _found(request)))


async def cancel(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/jobs/{id}: an ended job stays as it is."""
    service, job = request.app[SERVICE], await _found(request)
    await service.changes.carry_out(service.jobs.runner.cancel(job.job_id))
    return respond(_whole(service, await _found(request)))


async def _found(request: web.Request) -> Job:
    """Return the job of the address, if it is the caller's affair."""
    job_id = request.match_info["job_id"]
    job = await request.app[SERVICE].jobs.runner.get(job_id)
    if job is None or request[CALLER].only_for not in (None, job.who.resident_id):
        raise UnknownJob(f"there is no job {shown(job_id)} here; ended ones are kept for a while only")
    return job


async def stream(request: web.Request) -> web.StreamResponse:
    """GET /v1/jobs/stream: every open job, then what changes."""
    service, only_for = request.app[SERVICE], request[CALLER].only_for
    runner = service.jobs.runner
    events = EventStream(request)
    with contextlib.suppress(ReaderGone):
        async with events, faults_told(events), runner.listening() as feed:
            while (news := await unless_stopping(service, feed.next())) is not None:
                for job in news:
                    if only_for in (None, job.who.resident_id):
                        # By this runner: the service has none any more while it stops.
                        message = job_body(job, eta_s=runner.eta_s(job), is_whole=False)
                        await events.send(message, event="job")
    return events.response


def _whole(service: Service, job: Job) -> dict[str, Any]:
    return job_body(job, eta_s=service.jobs.runner.eta_s(job), is_whole=True)


def _line(service: Service, job: Job) -> dict[str, Any]:
    return job_body(job, eta_s=service.jobs.runner.eta_s(job), is_whole=False)
