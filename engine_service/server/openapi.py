"""The OpenAPI 3.1 document of this engine, built from the validators that check its messages.

Decides how requests and answers are described; what is accepted is decided where it is checked
(`protocol.SCHEMAS`). Answers are described here, by the same kind of validators, and a test holds the running
service to them. Large answers that OpenAI or docs/wire.md describe are told by their outer fields only.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import voluptuous as vol
from aiohttp import web

from engine_service import __version__
from engine_service.checks import (
    Validator,
    boolean,
    described,
    list_of,
    mapping,
    member,
    number,
    one_of,
    or_none,
    schema_of,
    table,
    text,
    whole_number,
)
from engine_service.jobs.model import JobState, TellState
from engine_service.protocol import SCHEMAS
from engine_service.scheduling.model import WorkloadClass
from engine_service.scheduling.residency import Residence
from engine_service.server.service import respond
from engine_service.settings import POLICY_TABLE, Scope

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Message = dict[str, Any]

DOCUMENT: Final = web.AppKey("document", dict)
STREAM: Final = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One address: who serves it, what it needs, what it takes and gives."""

    method: str
    path: str
    handler: Handler
    is_open: bool = False  #: needs no token
    scope: Scope | None = None  #: None: any known token
    takes: str | None = None  #: a name of `protocol.SCHEMAS`
    gives: Mapping[int, str] = field(default_factory=dict)  #: status to a name of ANSWERS or a media type
    streams: bool = False  #: may answer 200 with a stream of events instead
    refuses: Iterable[int] = ()  #: statuses beside those that follow from the fields above
    query: Mapping[str, Validator] = field(default_factory=dict)

    def refusals(self) -> list[int]:
        """Return every status with which this address refuses, in order.

        A token may be missing or unknown (401), may not do this (403), may have been guessed too often (429);
        a body may be wrong (400) or too large (413); the engine may make a mistake anywhere (500).
        """
        statuses = {500, *self.refuses}
        if not self.is_open:
            statuses |= {401, 429}
        if self.scope is not None:
            statuses.add(403)
        if self.takes is not None:
            statuses |= {400, 413}
        return sorted(statuses - self.gives.keys())


_TEXT: Final = text()
_COUNT: Final = whole_number(0)
_SECONDS: Final = number(0)


def _message(**fields: Validator) -> Validator:
    return table({vol.Required(name): check for name, check in fields.items()})


_ERROR: Final = _message(
    code=text(at_least=1),
    message=text(at_least=1),
    type=one_of(["invalid_request_error", "rate_limit_error", "server_error"]),
    param=or_none(_TEXT),
    retry_after_s=or_none(_SECONDS),
)
_IDENTITY: Final[dict[str, Validator]] = {
    "engine_id": _TEXT,
    "version": _TEXT,
    "schema_version": _COUNT,
    "model": _TEXT,
}
_RESIDENT: Final = _message(
    id=_TEXT,
    name=_TEXT,
    weight=whole_number(1),
    daily_tokens=or_none(_COUNT),
    daily_is_hard=boolean,
    rolling_tokens=or_none(_COUNT),
    rolling_window_s=_SECONDS,
    rolling_is_hard=boolean,
    page_cap=or_none(_COUNT),
    max_running=or_none(_COUNT),
    max_waiting=whole_number(1),
)
_STATE: Final[dict[str, Validator]] = {
    "state": one_of(place.value for place in Residence),
    "progress": or_none(number(0, 1)),
}
_MODELS: Final = list_of(_message(id=_TEXT, **_STATE), at_least=1)
_MODEL: Final = _message(
    id=_TEXT,
    object=one_of(["model"]),
    created=_COUNT,
    owned_by=_TEXT,
    fairhearth=_message(
        **_STATE,
        is_default=boolean,
        is_pinned=boolean,
        requests_waiting=_COUNT,
        backend=or_none(_TEXT),
        max_context_tokens=or_none(_COUNT),
        can_embed=boolean,
        can_see=boolean,
        error=or_none(_TEXT),
    ),
)
_FITS: Final[dict[str, Validator]] = {
    "context_tokens": _COUNT,
    "pages": _COUNT,
    "active": _COUNT,
    "beside": _COUNT,
}
_SCOPES: Final = list_of(one_of(scope.value for scope in Scope))
_JOB_LINE: Final[dict[str, Validator]] = {
    "id": _TEXT,
    "state": one_of(state.value for state in JobState),
    "title": or_none(_TEXT),
    "resident": _TEXT,
    "workload_class": one_of(class_id.value for class_id in WorkloadClass),
    "model": or_none(_TEXT),
    "idempotency_key": or_none(_TEXT),
    "created_at": _SECONDS,
    "started_at": or_none(_SECONDS),
    "ended_at": or_none(_SECONDS),
    "deadline_at": or_none(_SECONDS),
    "kept_until": or_none(_SECONDS),
    "attempts": _COUNT,
    "progress": _message(output_tokens=_COUNT, max_tokens=or_none(_COUNT)),
    "eta_s": or_none(_SECONDS),
    "result_sha256": or_none(_TEXT),
    "error": or_none(_ERROR),
    "webhook": or_none(_message(host=_TEXT, state=one_of(state.value for state in TellState), tries=_COUNT)),
}
_REVISION: Final[dict[str, Validator]] = {"revision": _COUNT, "at": _SECONDS, "by": _TEXT, "note": _TEXT}


def _vector(value: Any) -> Any:
    return text()(value) if isinstance(value, str) else list_of(number())(value)


described(_vector, lambda: {"anyOf": [schema_of(list_of(number())), schema_of(text())]})

_ANSWER: Final[dict[str, Validator]] = {
    "id": _TEXT,
    "created": _COUNT,
    "model": _TEXT,
    "choices": list_of(mapping, at_least=1, at_most=1),
    "usage": mapping,
    "fairhearth": mapping,
}

ANSWERS: Final[Mapping[str, Validator]] = {
    "Error": _message(error=_ERROR),
    "Health": _message(status=one_of(["ok"]), **_IDENTITY),
    "Ready": _message(ready=boolean, models=_MODELS, **_IDENTITY),
    "NotReady": _message(ready=boolean, models=_MODELS, error=_ERROR, **_IDENTITY),
    "Engine": _message(
        **_IDENTITY,
        name=_TEXT,
        backend=_TEXT,
        max_context_tokens=_COUNT,
        max_sequences=_COUNT,
        can_embed=boolean,
        can_see=boolean,
        policy=_TEXT,
        scopes=_SCOPES,
    ),
    "Model": _MODEL,
    "Models": _message(object=one_of(["list"]), data=list_of(_MODEL, at_least=1)),
    "ChatCompletion": _message(object=one_of(["chat.completion"]), **_ANSWER),
    "Completion": _message(object=one_of(["text_completion"]), **_ANSWER),
    "Embeddings": _message(
        object=one_of(["list"]),
        data=list_of(_message(object=one_of(["embedding"]), index=_COUNT, embedding=_vector)),
        model=_TEXT,
        usage=mapping,
        fairhearth=mapping,
    ),
    "Prefix": _message(prefix_tokens=_COUNT, computed_tokens=_COUNT),
    "Resident": _RESIDENT,
    "Residents": _message(residents=list_of(_RESIDENT)),
    "Job": _message(**_JOB_LINE, partial=_TEXT, result=or_none(mapping)),
    "Jobs": _message(jobs=list_of(_message(**_JOB_LINE))),
    "Pairing": _message(token=_TEXT, name=_TEXT, scopes=_SCOPES, engine_id=_TEXT),
    "Policy": _message(
        scheduler=_TEXT,
        **_REVISION,
        policy=POLICY_TABLE,
        history=list_of(_message(**_REVISION)),
        notes=list_of(_TEXT),
    ),
    "PolicyTrial": _message(policy=POLICY_TABLE, notes=list_of(_TEXT)),
    "Rehearsal": _message(
        scenario=_TEXT,
        title=_TEXT,
        machine=_TEXT,
        simulated_s=_SECONDS,
        seeds=list_of(_COUNT),
        passes=boolean,
        criteria=list_of(
            _message(name=_TEXT, check=_TEXT, over=_TEXT, holds=boolean, seeds=list_of(mapping))
        ),
    ),
    "Capacity": _message(
        **_IDENTITY,
        backend=_TEXT,
        parking_bytes=_COUNT,
        page_tokens=_COUNT,
        kv_pages_total=_COUNT,
        kv_pages_free=_COUNT,
        kv_pages_pinned=_COUNT,
        kv_pages_for_speech=_COUNT,
        max_sequences=_COUNT,
        max_context_tokens=_COUNT,
        reference_tokens=_COUNT,
        conversations=list_of(_message(**_FITS, more_now=_COUNT)),
        serving=_TEXT,
        models=list_of(
            _message(
                id=_TEXT,
                **_STATE,
                page_tokens=_COUNT,
                kv_pages_total=_COUNT,
                max_sequences=_COUNT,
                max_context_tokens=_COUNT,
                conversations=list_of(_message(**_FITS)),
            ),
            at_least=1,
        ),
        holders=list_of(
            _message(
                resident=_TEXT,
                workload_class=one_of(class_id.value for class_id in WorkloadClass),
                requests=_COUNT,
                pages=_COUNT,
                reclaimable_pages=_COUNT,
            )
        ),
        reclaimable_pages=_COUNT,
    ),
    "Fairness": _message(
        **_IDENTITY,
        backend=_TEXT,
        policy=_TEXT,
        at=_SECONDS,
        uptime_s=_SECONDS,
        window_s=_SECONDS,
        engine=mapping,
        residents=mapping,
        classes=mapping,
    ),
}

JOB_QUERY: Final[Mapping[str, Validator]] = {
    "state": member(JobState),
    "resident": _TEXT,
    "limit": whole_number(1),
}


async def serve(request: web.Request) -> web.StreamResponse:
    """GET /openapi.json: this document."""
    return respond(request.app[DOCUMENT])


def document(routes: Iterable[Route]) -> Message:
    """Return the OpenAPI document of the routes."""
    paths: dict[str, Message] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    requests = {name: schema_of(check) for name, check in SCHEMAS.items()}
    answers = {name: _lenient(schema_of(check)) for name, check in ANSWERS.items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fairhearth engine",
            "version": __version__,
            "summary": "OpenAI-compatible answers, shared fairly in a household",
        },
        "paths": paths,
        "components": {
            "schemas": requests | answers,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> Message:
    name = f"{route.handler.__module__.rpartition('.')[2]}.{route.handler.__name__}"
    suffix = re.sub(r"\W+", "_", route.path).strip("_") if route.handler.__name__ == "page" else ""
    operation: Message = {
        "operationId": f"{name}.{suffix}" if suffix else name,
        "summary": _summary(route.handler),
        "security": [] if route.is_open else [{"token": []}],
        "responses": {str(status): _response(kind) for status, kind in route.gives.items()}
        | {str(status): _response("Error") for status in route.refusals()},
    }
    if route.streams:
        operation["responses"]["200"]["content"][STREAM] = {}
    if route.scope is not None:
        operation["description"] = f"Needs a token with the scope `{route.scope.value}`."
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.takes is not None:
        content = {"application/json": {"schema": _reference(route.takes)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _summary(handler: Handler) -> str:
    """Return what the handler's first line says after its address."""
    first = (handler.__doc__ or "").partition("\n")[0].rstrip(".")
    return first.partition(": ")[2] or first


def _parameters(route: Route) -> list[Message]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": schema_of(check)}
        for name, check in route.query.items()
    ]
    return in_path + in_query


def _response(kind: str) -> Message:
    if kind in ANSWERS:
        return {"description": kind, "content": {"application/json": {"schema": _reference(kind)}}}
    return {"description": kind, "content": {kind: {}}} if "/" in kind else {"description": kind}


def _reference(name: str) -> Message:
    return {"$ref": f"#/components/schemas/{name}"}


def _lenient(schema: Any) -> Any:
    """Return an answer's schema for its readers, who are to ignore fields they do not know."""
    if isinstance(schema, list):
        return [_lenient(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _lenient(value)
        for key, value in schema.items()
        if not (key == "additionalProperties" and value is False)
    }
