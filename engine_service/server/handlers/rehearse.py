"""Rehearse a policy in the simulator before living with it."""

from __future__ import annotations

from aiohttp import web

from engine_service.errors import EngineStopping
from engine_service.protocol import parse_rehearsal_request
from engine_service.server.service import SERVICE, read_json, respond, unless_stopping
from engine_service.settings import changed_policy


async def rehearse(request: web.Request) -> web.StreamResponse:
    """POST /v1/rehearse: what a scenario says of the policy in force, with the changes that are sent."""
    service = request.app[SERVICE]
    message = parse_rehearsal_request(await read_json(request))
    policy = changed_policy(service.policies.current.policy, message.policy)
    verdict = await unless_stopping(
        service, service.rehearsals.run(message.scenario, policy, num_seeds=message.seeds)
    )
    if verdict is None:
        raise EngineStopping("the engine is shutting down", retry_after_s=10)
    return respond(verdict)
