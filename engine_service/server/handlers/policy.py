"""The policy: read it, try a change, make it, see what was before, take it back."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from engine_service.engine import memory
from engine_service.errors import InvalidRequest
from engine_service.protocol import PolicyRequest, parse_policy_request, parse_rollback_request
from engine_service.scheduling.model import Policy
from engine_service.server.service import CALLER, SERVICE, Service, read_json, respond
from engine_service.settings import changed_policy, policy_as_table


async def read(request: web.Request) -> web.StreamResponse:
    """GET /v1/policy: what holds, and what held before."""
    return respond(_body(request.app[SERVICE]))


async def replace(request: web.Request) -> web.StreamResponse:
    """PUT /v1/policy: the defaults with these changes hold from now on."""
    return await _changed(request, lambda _: Policy())


async def change(request: web.Request) -> web.StreamResponse:
    """PATCH /v1/policy: what holds, with these changes, holds from now on."""
    return await _changed(request, lambda current: current)


async def validate(request: web.Request) -> web.StreamResponse:
    """POST /v1/policy/validate: what PATCH would make of it; changes nothing."""
    message = parse_policy_request(await read_json(request))
    current = request.app[SERVICE].policies.current.policy
    policy = changed_policy(current, message.policy)
    return respond({"policy": policy_as_table(policy), "notes": _notes(request.app[SERVICE], policy)})


async def roll_back(request: web.Request) -> web.StreamResponse:
    """POST /v1/policy/rollback: an earlier revision holds again, as a new one."""
    service = request.app[SERVICE]
    revision = parse_rollback_request(await read_json(request))
    await service.changes.carry_out(
        service.policies.roll_back(service.engine, revision, by=request[CALLER].name)
    )
    return respond(_body(service))


async def _changed(request: web.Request, base: Callable[[Policy], Policy]) -> web.StreamResponse:
    service = request.app[SERVICE]
    message: PolicyRequest = parse_policy_request(await read_json(request))

    def make(current: Policy) -> Policy:
        policy = changed_policy(base(current), message.policy)
        _notes(service, policy)
        return policy

    await service.changes.carry_out(
        service.policies.change(service.engine, make, by=request[CALLER].name, note=message.note or "")
    )
    return respond(_body(service))


def _body(service: Service) -> dict[str, object]:
    current = service.policies.current
    return {
        "scheduler": service.engine.policy_name,
        **current.as_wire(is_whole=True),
        "history": [entry.as_wire(is_whole=False) for entry in service.policies.history],
        "notes": _doubts(service, current.policy),
    }


def _notes(service: Service, policy: Policy) -> list[str]:
    """Return what the policy probably does not mean; raise InvalidRequest where it would serve nobody."""
    for capacity in service.engine.capacities:
        if reason := memory.is_useless(capacity, policy):
            raise InvalidRequest(reason, param="policy")
    return _doubts(service, policy)


def _doubts(service: Service, policy: Policy) -> list[str]:
    """Return what the policy probably does not mean with one of the models, each doubt once."""
    found = [doubt for capacity in service.engine.capacities for doubt in memory.doubts(capacity, policy)]
    return list(dict.fromkeys(found))
