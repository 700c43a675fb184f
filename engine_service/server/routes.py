"""Every address of the engine: who serves it, which scope it needs, what it takes and gives.

Source: docs/wire.md.
"""

from __future__ import annotations

from typing import Final

from engine_service.server import openapi
from engine_service.server.handlers import (
    about,
    capacity,
    fairness,
    generate,
    jobs,
    pair,
    policy,
    rehearse,
    residents,
    status,
)
from engine_service.server.openapi import Route
from engine_service.settings import Scope

_STREAM: Final = "text/event-stream"

ROUTES: Final = (
    Route(method="GET", path="/", handler=status.page, is_open=True, gives={200: "text/html"}),
    Route(method="GET", path="/status.js", handler=status.page, is_open=True, gives={200: "text/javascript"}),
    Route(method="GET", path="/status.css", handler=status.page, is_open=True, gives={200: "text/css"}),
    Route(
        method="GET",
        path="/openapi.json",
        handler=openapi.serve,
        is_open=True,
        gives={200: "application/json"},
    ),
    Route(method="GET", path="/health", handler=about.health, is_open=True, gives={200: "Health"}),
    Route(
        method="GET",
        path="/ready",
        handler=about.ready,
        is_open=True,
        gives={200: "Ready", 503: "NotReady"},
    ),
    Route(
        method="POST",
        path="/v1/pair",
        handler=pair.pair,
        is_open=True,
        takes="PairRequest",
        gives={201: "Pairing"},
    ),
    Route(method="GET", path="/v1/engine", handler=about.engine, gives={200: "Engine"}),
    Route(method="GET", path="/v1/models", handler=about.models, gives={200: "Models"}),
    Route(method="GET", path="/v1/models/{model_id}", handler=about.model, gives={200: "Model"}),
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=generate.chat,
        scope=Scope.GENERATE,
        takes="ChatRequest",
        gives={200: "ChatCompletion"},
    ),
    Route(
        method="POST",
        path="/v1/completions",
        handler=generate.complete,
        scope=Scope.GENERATE,
        takes="CompletionRequest",
        gives={200: "Completion"},
    ),
    Route(
        method="POST",
        path="/v1/prefix",
        handler=generate.prefix,
        scope=Scope.GENERATE,
        takes="PrefixRequest",
        gives={200: "Prefix"},
    ),
    Route(
        method="POST",
        path="/v1/embeddings",
        handler=generate.embed,
        scope=Scope.GENERATE,
        takes="EmbeddingsRequest",
        gives={200: "Embeddings", 501: "Error"},
    ),
    Route(method="GET", path="/v1/policy", handler=policy.read, gives={200: "Policy"}),
    Route(
        method="PUT",
        path="/v1/policy",
        handler=policy.replace,
        scope=Scope.POLICY,
        takes="PolicyRequest",
        gives={200: "Policy"},
    ),
    Route(
        method="PATCH",
        path="/v1/policy",
        handler=policy.change,
        scope=Scope.POLICY,
        takes="PolicyRequest",
        gives={200: "Policy"},
    ),
    Route(
        method="POST",
        path="/v1/policy/validate",
        handler=policy.validate,
        scope=Scope.POLICY,
        takes="PolicyRequest",
        gives={200: "PolicyTrial"},
    ),
    Route(
        method="POST",
        path="/v1/policy/rollback",
        handler=policy.roll_back,
        scope=Scope.POLICY,
        takes="RollbackRequest",
        gives={200: "Policy"},
    ),
    Route(
        method="POST",
        path="/v1/rehearse",
        handler=rehearse.rehearse,
        scope=Scope.POLICY,
        takes="RehearsalRequest",
        gives={200: "Rehearsal"},
    ),
    Route(
        method="POST",
        path="/v1/jobs",
        handler=jobs.submit,
        scope=Scope.GENERATE,
        takes="JobRequest",
        gives={202: "Job", 200: "Job"},
    ),
    Route(
        method="GET",
        path="/v1/jobs",
        handler=jobs.list_newest,
        scope=Scope.GENERATE,
        gives={200: "Jobs"},
        query=openapi.JOB_QUERY,
    ),
    Route(
        method="GET",
        path="/v1/jobs/stream",
        handler=jobs.stream,
        scope=Scope.GENERATE,
        gives={200: _STREAM},
    ),
    Route(
        method="GET",
        path="/v1/jobs/{job_id}",
        handler=jobs.get,
        scope=Scope.GENERATE,
        gives={200: "Job"},
    ),
    Route(
        method="DELETE",
        path="/v1/jobs/{job_id}",
        handler=jobs.cancel,
        scope=Scope.GENERATE,
        gives={200: "Job"},
    ),
    Route(method="GET", path="/v1/residents", handler=residents.list_all, gives={200: "Residents"}),
    Route(
        method="PUT",
        path="/v1/residents/{resident_id}",
        handler=residents.put,
        scope=Scope.RESIDENTS,
        takes="ResidentRequest",
        gives={200: "Resident"},
    ),
    Route(
        method="DELETE",
        path="/v1/residents/{resident_id}",
        handler=residents.delete,
        scope=Scope.RESIDENTS,
        gives={204: "removed"},
    ),
    Route(method="GET", path="/v1/capacity", handler=capacity.capacity, gives={200: "Capacity"}),
    Route(method="GET", path="/v1/fairness", handler=fairness.once, gives={200: "Fairness"}),
    Route(method="GET", path="/v1/fairness/stream", handler=fairness.stream, gives={200: _STREAM}),
    Route(
        method="GET", path="/metrics", handler=about.metrics, scope=Scope.METRICS, gives={200: "text/plain"}
    ),
)
