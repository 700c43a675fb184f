"""An engine that speaks docs/wire.md over real sockets in the test's own process; only the model is missing.

It reads requests with the engine's own parser, so that whatever the integration sends is checked as the real
engine would, and answers with the golden examples' shapes. A test tells it what to answer, when to wait and
how to fail, and reads afterwards what it was asked, whom it charged, and which requests were left.
"""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from engine_service.errors import (
    EngineError,
    InvalidRequest,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    UnknownResident,
)
from engine_service.protocol import (
    ChatRequest,
    ResidentRequest,
    parse_chat_request,
    parse_job_request,
    parse_json,
    parse_pair_request,
    parse_policy_request,
    parse_prefix_request,
    parse_rehearsal_request,
    parse_resident_id,
    parse_resident_request,
    parse_rollback_request,
)

GOLDEN = Path(__file__).parents[1] / "contract" / "golden"
TOKEN = "correct-token"
ALL_SCOPES = ("generate", "residents", "metrics", "policy")
ENGINE_ID = "5f0c2a9be1d84b0f9a3c7d6e5f4a3b2c"
ACCOUNTS = ("guest", "house")

NO_QUANTILES = {"count": 0, "p50": None, "p95": None, "p99": None, "last": None}


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Whom a request names, with what the engine takes where it names nobody."""

    resident_id: str
    class_id: str
    program_id: str | None


def caller_of(chat: ChatRequest) -> Caller:
    """Return whom a request names, as it was sent."""
    sent = chat.options.as_wire().get("fairhearth") or {}
    return Caller(
        resident_id=sent.get("resident", "guest"),
        class_id=sent.get("workload_class", "chat"),
        program_id=sent.get("program"),
    )


DEFAULT_POLICY: dict[str, Any] = {
    "fairness": "service",
    "max_skips": 4,
    "paused_classes": [],
    "classes": {"voice": {"max_wait_s": 2.0}, "background": {"max_wait_s": 900.0}},
}
"""Some of the engine's keys."""


def changed_policy(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy with changes; raise InvalidRequest with a key that there is not."""
    changed = dict(table)
    for key, value in changes.items():
        if key not in table:
            raise InvalidRequest(f"{key} is not a known key; known are {', '.join(table)}", param=key)
        changed[key] = changed_policy(table[key], value) if isinstance(table[key], dict) else value
    return changed


def golden(name: str) -> Any:
    """Return one of the examples that bind both sides of the wire."""
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


@dataclass(kw_only=True)
class Answer:
    """What the next chat completion gets."""

    pieces: Sequence[str] = ("Hello", " from", " the", " fake", " engine.")
    reasoning: str | None = None
    tool_calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    finish_reason: str | None = None  #: None: stop, or tool_calls where there are any
    refusal: EngineError | None = None  #: sent instead of a stream
    error: EngineError | None = None  #: sent in the stream, after the pieces
    odds: Mapping[str, float] | None = None  #: log probabilities, told with the first piece
    drop: bool = False  #: close the connection after the pieces
    hold: asyncio.Event | None = None  #: wait for it after the first piece
    hold_first: bool = False  #: wait before the first piece instead


def report() -> dict[str, Any]:
    """Return the part of a snapshot that residents and classes have in common, with nothing in it."""
    return {
        "tokens": {"prefill": 0, "cached": 0, "decode": 0},
        "tokens_served": 0,
        "requests_running": 0,
        "requests_waiting": 0,
        "finished": 0,
        "cancelled": 0,
        "preemptions": 0,
        "rejected": 0,
        "queue_time_s": dict(NO_QUANTILES),
        "time_to_first_token_s": dict(NO_QUANTILES),
        "inter_token_latency_s": dict(NO_QUANTILES),
        "completion_time_s": dict(NO_QUANTILES),
    }


def resident_report(name: str, weight: int = 1) -> dict[str, Any]:
    """Return a resident's part of a snapshot, with nothing in it."""
    return {
        **report(),
        "name": name,
        "weight": weight,
        "service_share": 0.0,
        "entitled_share": 0.0,
        "kv_pages_used": 0,
        "tokens_left_today": None,
    }


@dataclass(kw_only=True)
class FakeEngine:
    """One engine. Everything a test may change is a field."""

    engine_id: str = ENGINE_ID
    name: str = "Kitchen engine"
    version: str = "0.1.0"
    schema_version: int = 1
    model: str = "SmolLM2-135M-Instruct"
    context_tokens: int = 8192
    can_see: bool = False  #: its first model can be shown pictures
    can_see_beside: bool = False  #: its second one can
    tokens: dict[str, tuple[str, ...]] = field(default_factory=lambda: {TOKEN: ALL_SCOPES})
    keepalive_s: float = 15.0
    answers: deque[Answer] = field(default_factory=deque)

    chats: list[ChatRequest] = field(default_factory=list)
    prefixes: list[Any] = field(default_factory=list)
    abandoned: list[ChatRequest] = field(default_factory=list)
    num_streams: int = 0  #: fairness streams opened so far
    puts: list[str] = field(default_factory=list)
    residents: dict[str, dict[str, Any]] = field(default_factory=dict)
    snapshot: dict[str, Any] = field(default_factory=dict)
    port: int = 0
    code: str | None = "123456"  #: what a client may pair with, None while no code is open
    hold_models: asyncio.Event | None = None  #: wait for it before the models are told
    pair_refusal: EngineError | None = None
    token_refusal: EngineError | None = None
    has_policy: bool = True
    rehearsals: list[dict[str, Any]] = field(default_factory=list)
    policies: list[dict[str, Any]] = field(default_factory=lambda: [DEFAULT_POLICY])  #: by revision
    has_jobs: bool = True
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    orders: list[dict[str, Any]] = field(default_factory=list)  #: of jobs, as they came
    num_job_streams: int = 0
    jobs_gone_when_cancelled: bool = False

    def __post_init__(self) -> None:
        """Start with the engine's own accounts only."""
        self._runner: web.AppRunner | None = None
        self._changed = asyncio.Condition()
        self._num_changes = 0
        self._job_listeners: set[asyncio.Queue[dict[str, Any]]] = set()
        self.snapshot = golden("fairness")
        self.snapshot["residents"] = {}
        self.snapshot["classes"] = {name: report() for name in self.snapshot["classes"]}
        self.forget()

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def forget(self) -> None:
        """Lose every resident but the engine's own, as an engine without its state file."""
        self.residents.clear()
        self.snapshot["residents"].clear()
        for account in ACCOUNTS:
            self.put(account, {"name": account.capitalize(), "weight": 1})

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen; on the same port as before if it was started before."""
        app = web.Application(middlewares=[self._middleware], client_max_size=16 * 2**20)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/engine", self._engine),
                web.get("/v1/models", self._models),
                web.get("/v1/residents", self._list_residents),
                web.put("/v1/residents/{id}", self._put_resident),
                web.delete("/v1/residents/{id}", self._delete_resident),
                web.get("/v1/fairness", self._fairness),
                web.get("/v1/fairness/stream", self._fairness_stream),
                web.post("/v1/prefix", self._prefix),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/pair", self._pair),
                web.get("/v1/policy", self._get_policy),
                web.patch("/v1/policy", self._change_policy),
                web.put("/v1/policy", self._change_policy),
                web.post("/v1/policy/validate", self._validate_policy),
                web.post("/v1/policy/rollback", self._roll_back_policy),
                web.post("/v1/rehearse", self._rehearse),
                web.post("/v1/jobs", self._submit_job),
                web.get("/v1/jobs", self._list_jobs),
                web.get("/v1/jobs/stream", self._job_stream),
                web.get("/v1/jobs/{id}", self._get_job),
                web.delete("/v1/jobs/{id}", self._cancel_job),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening and cut every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def publish(self, change: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Change the snapshot and send it to everyone who follows."""
        if change is not None:
            change(self.snapshot)
        async with self._changed:
            self._num_changes += 1
            self._changed.notify_all()

    # --- what is answered ---

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            if request.path.startswith("/v1/jobs") and not self.has_jobs:
                raise NotFound(f"there is nothing at {request.path}")
            if request.path not in ("/health", "/v1/pair"):
                self._check_token(request)
            return await handler(request)
        except EngineError as err:
            return web.json_response(error_body(err), status=err.http_status)
        except web.HTTPException as err:
            return web.json_response(error_body(NotFound(str(err))), status=err.status)

    def _check_token(self, request: web.Request) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.token_refusal is not None:
            raise self.token_refusal
        if token not in self.tokens:
            raise NotAuthenticated("this engine does not know the token")
        is_resident = request.path.startswith("/v1/residents")
        is_policy = request.path.startswith("/v1/policy")
        scope = "residents" if is_resident else "policy" if is_policy else "generate"
        if request.method != "GET" and scope not in self.tokens[token]:
            raise NotAllowed(f"the token lacks the scope {scope}")

    def _who(self) -> dict[str, Any]:
        return {
            "engine_id": self.engine_id,
            "version": self.version,
            "schema_version": self.schema_version,
            "model": self.model,
        }

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", **self._who()})

    async def _engine(self, request: web.Request) -> web.Response:
        token = request.headers["Authorization"].removeprefix("Bearer ")
        about = {
            "max_context_tokens": self.context_tokens,
            "scopes": list(self.tokens[token]),
            "can_see": self.can_see,
        }
        body = {**golden("engine"), **self._who(), "name": self.name, **about}
        return web.json_response(body)

    async def _models(self, request: web.Request) -> web.Response:
        if self.hold_models is not None:
            await self.hold_models.wait()
        models = golden("models")
        for row, can_see in zip(models["data"], (self.can_see, self.can_see_beside), strict=True):
            row["fairhearth"]["can_see"] = can_see
        return web.json_response(models)

    async def _list_residents(self, request: web.Request) -> web.Response:
        return web.json_response({"residents": list(self.residents.values())})

    async def _put_resident(self, request: web.Request) -> web.Response:
        resident_id = parse_resident_id(request.match_info["id"])
        body = parse_resident_request(parse_json(await request.read())).as_wire()
        self.puts.append(resident_id)
        self.put(resident_id, body)
        await self.publish()
        return web.json_response(self.residents[resident_id])

    def put(self, resident_id: str, body: Mapping[str, Any]) -> None:
        """Create or replace a resident."""
        resident = {"id": resident_id, **ResidentRequest().as_wire(), **body}
        self.residents[resident_id] = resident
        row = self.snapshot["residents"].setdefault(resident_id, resident_report(resident["name"]))
        row.update(name=resident["name"], weight=resident["weight"])
        row["tokens_left_today"] = resident["daily_tokens"]

    async def _delete_resident(self, request: web.Request) -> web.Response:
        resident_id = request.match_info["id"]
        if resident_id not in self.residents:
            raise UnknownResident(f"there is no resident {resident_id!r}")
        if resident_id in ACCOUNTS:
            raise InvalidRequest(f"{resident_id} cannot be removed")
        del self.residents[resident_id]
        del self.snapshot["residents"][resident_id]
        await self.publish()
        return web.json_response({"id": resident_id})

    async def _fairness(self, request: web.Request) -> web.Response:
        return web.json_response(self._snapshot())

    def _snapshot(self) -> dict[str, Any]:
        return {**copy.deepcopy(self.snapshot), **self._who()}

    async def _fairness_stream(self, request: web.Request) -> web.StreamResponse:
        self.num_streams += 1
        async with self._event_stream(request) as response:
            seen = self._num_changes
            while True:
                line = json.dumps(self._snapshot(), ensure_ascii=False)
                await response.write(f"event: fairness\ndata: {line}\n\n".encode())
                while not await self._changed_since(seen):
                    await response.write(b": keepalive\n\n")
                seen = self._num_changes

    async def _changed_since(self, seen: int) -> bool:
        """Return whether something changed before it is time to say that the stream is alive."""
        try:
            async with asyncio.timeout(self.keepalive_s), self._changed:
                await self._changed.wait_for(lambda: self._num_changes > seen)
        except TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def _event_stream(self, request: web.Request) -> AsyncIterator[web.StreamResponse]:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        yield response
        await response.write_eof()

    async def _prefix(self, request: web.Request) -> web.Response:
        prefix = parse_prefix_request(parse_json(await request.read()))
        self.prefixes.append(prefix)
        return web.json_response(golden("prefix_response"))

    async def _pair(self, request: web.Request) -> web.Response:
        asked = parse_pair_request(parse_json(await request.read()))
        if self.pair_refusal is not None:
            raise self.pair_refusal
        if self.code is None:
            raise refusal("pairing_closed", "no code is open; run `fairhearth pair` beside the engine", 403)
        if asked.code != self.code:
            raise refusal("wrong_code", "this is not the code that the engine shows", 403)
        self.code = None
        token = f"paired-{asked.name}"
        self.tokens[token] = ALL_SCOPES
        answer = {"token": token, "name": asked.name, "scopes": ALL_SCOPES, "engine_id": self.engine_id}
        return web.json_response(answer, status=201)

    # --- the policy ---

    async def _get_policy(self, request: web.Request) -> web.Response:
        if not self.has_policy:
            raise NotFound("there is nothing at /v1/policy")
        return web.json_response(self._policy_body())

    def _policy_body(self, note: str = "") -> dict[str, Any]:
        table = self.policies[-1]
        who = {"revision": len(self.policies) - 1, "at": 1764457000.1, "by": "Home Assistant", "note": note}
        return {"scheduler": "fairhearth", **who, "policy": table, "history": [who]}

    async def _change_policy(self, request: web.Request) -> web.Response:
        change = parse_policy_request(parse_json(await request.read()))
        base = DEFAULT_POLICY if request.method == "PUT" else self.policies[-1]
        self.policies.append(changed_policy(base, change.policy))
        paused = self.policies[-1]["paused_classes"]
        await self.publish(lambda snapshot: snapshot["engine"].update(paused_classes=paused))
        return web.json_response(self._policy_body(change.note or ""))

    async def _validate_policy(self, request: web.Request) -> web.Response:
        change = parse_policy_request(parse_json(await request.read()))
        return web.json_response({"policy": changed_policy(self.policies[-1], change.policy)})

    async def _roll_back_policy(self, request: web.Request) -> web.Response:
        revision = parse_rollback_request(parse_json(await request.read()))
        if revision >= len(self.policies):
            raise InvalidRequest(f"there is no revision {revision}")
        self.policies.append(self.policies[revision])
        return web.json_response(self._policy_body(f"back to revision {revision}"))

    async def _rehearse(self, request: web.Request) -> web.Response:
        asked = parse_rehearsal_request(parse_json(await request.read()))
        if asked.scenario != "kitchen_light":
            raise InvalidRequest(f"there is no scenario {asked.scenario!r}", param="scenario")
        self.rehearsals.append(asked.as_wire())
        return web.json_response(golden("rehearsal"))

    # --- durable jobs ---

    async def _submit_job(self, request: web.Request) -> web.Response:
        order = parse_json(await request.read())
        assert isinstance(order, dict)
        chat = parse_job_request(order).chat
        caller = caller_of(chat)
        if caller.resident_id not in self.residents:
            raise UnknownResident(f"there is no resident {caller.resident_id!r}")
        self.orders.append(order)
        key = order.get("idempotency_key")
        for job in self.jobs.values():
            if key is not None and job["idempotency_key"] == key:
                return web.json_response(job)
        job = {
            "id": f"job-{len(self.jobs) + 1}",
            "state": "submitted",
            "title": order.get("title"),
            "resident": caller.resident_id,
            "workload_class": order["request"]["fairhearth"].get("workload_class", "background"),
            "idempotency_key": key,
            "created_at": 1764457000.1,
            "started_at": None,
            "ended_at": None,
            "deadline_at": None,
            "kept_until": None,
            "attempts": 0,
            "progress": {"output_tokens": 0, "max_tokens": chat.options.max_tokens},
            "eta_s": None,
            "partial": "",
            "result": None,
            "result_sha256": None,
            "error": None,
        }
        self.jobs[job["id"]] = job
        self._tell_job(job)
        return web.json_response(job, status=202)

    def move_job(self, job_id: str, state: str, *, text: str = "", error: str | None = None) -> None:
        """Bring a job into another state and tell everyone who follows."""
        job = self.jobs[job_id]
        job.update(state=state, started_at=1764457003.2, attempts=1)
        job["progress"]["output_tokens"] = len(text.split())
        if state == "running":
            job.update(partial=text, eta_s=12.5)
        else:
            job.update(partial="", eta_s=None, ended_at=1764457060.9)
        if state == "finished":
            message = {"role": "assistant", "content": text}
            job["result"] = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        if error is not None:
            job["error"] = error_body(refusal("generation_failed", error))["error"]
        self._tell_job(job)

    def _tell_job(self, job: dict[str, Any]) -> None:
        for queue in self._job_listeners:
            queue.put_nowait(_briefly(job))

    def _job(self, request: web.Request) -> dict[str, Any]:
        job_id = request.match_info["id"]
        if job_id not in self.jobs:
            raise refusal("unknown_job", f"there is no job {job_id!r}")
        return self.jobs[job_id]

    async def _get_job(self, request: web.Request) -> web.Response:
        return web.json_response(self._job(request))

    async def _cancel_job(self, request: web.Request) -> web.Response:
        if self.jobs_gone_when_cancelled:
            self.jobs.pop(request.match_info["id"])
        job = self._job(request)
        if job["state"] in ("submitted", "running"):
            self.move_job(job["id"], "cancelled")
        return web.json_response(job)

    async def _list_jobs(self, request: web.Request) -> web.Response:
        wanted = {key: request.query[key] for key in ("state", "resident") if key in request.query}
        rows = [
            _briefly(job)
            for job in reversed(self.jobs.values())
            if all(job[key] == value for key, value in wanted.items())
        ]
        return web.json_response({"jobs": rows[: int(request.query.get("limit", "100"))]})

    async def _job_stream(self, request: web.Request) -> web.StreamResponse:
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for job in self.jobs.values():
            if job["state"] in ("submitted", "running"):
                queue.put_nowait(_briefly(job))
        self._job_listeners.add(queue)
        self.num_job_streams += 1
        try:
            async with self._event_stream(request) as response:
                await response.write(b": hello\n\n")
                while True:
                    line = json.dumps(await queue.get(), ensure_ascii=False)
                    await response.write(f"event: job\ndata: {line}\n\n".encode())
        finally:
            self._job_listeners.discard(queue)

    # --- answers ---

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        chat = parse_chat_request(parse_json(await request.read()))
        resident_id = caller_of(chat).resident_id
        if resident_id not in self.residents:
            raise UnknownResident(f"there is no resident {resident_id!r}", param="fairhearth.resident")
        self.chats.append(chat)
        answer = self.answers.popleft() if self.answers else Answer()
        if answer.refusal is not None:
            raise answer.refusal
        try:
            async with self._event_stream(request) as response:
                await self._write_answer(response, chat, answer)
            return response
        except (asyncio.CancelledError, ConnectionResetError):
            self.abandoned.append(chat)
            raise

    async def _write_answer(self, response: web.StreamResponse, chat: ChatRequest, answer: Answer) -> None:
        caller = caller_of(chat)
        request_id = f"r{len(self.chats)}"
        who = {
            "request_id": request_id,
            "resident": caller.resident_id,
            "workload_class": caller.class_id,
        }
        await _write(response, {"role": "assistant", "content": ""}, fairhearth={**who, "num_ahead": 2})
        if answer.hold is not None and answer.hold_first:
            await answer.hold.wait()
        if answer.reasoning:
            await _write(response, {"reasoning_content": answer.reasoning})
        for index, piece in enumerate(answer.pieces):
            await _write(response, {"content": piece}, odds=None if index else answer.odds)
            if index == 0 and answer.hold is not None:
                await answer.hold.wait()
        if answer.drop:
            assert response._req is not None
            assert response._req.transport is not None
            response._req.transport.abort()
            raise ConnectionResetError
        if answer.error is not None:
            await response.write(f"data: {json.dumps(error_body(answer.error))}\n\n".encode())
            return
        for index, (name, arguments) in enumerate(answer.tool_calls):
            call = {
                "index": index,
                "id": f"call_{request_id}_{index}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            await _write(response, {"tool_calls": [call]})
        tokens = self._charge(chat, answer)
        measured = {**golden("chat_response")["fairhearth"], **who, "tokens": tokens}
        reason = answer.finish_reason or ("tool_calls" if answer.tool_calls else "stop")
        await _write(response, {}, finish_reason=reason, fairhearth=measured)
        if chat.options.include_usage:
            usage = {"choices": [], "usage": golden("chat_response")["usage"]}
            await response.write(f"data: {json.dumps(usage)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await self.publish()

    def _charge(self, chat: ChatRequest, answer: Answer) -> dict[str, int]:
        """Count the words of prompt and answer as tokens and return them."""
        caller = caller_of(chat)
        prefill = sum(len((message.content or "").split()) for message in chat.messages)
        decode = len(answer.pieces) + len(answer.tool_calls)
        drained = resident_report("of a resident who was removed meanwhile")
        for row in (
            self.snapshot["residents"].get(caller.resident_id, drained),
            self.snapshot["classes"][caller.class_id],
        ):
            row["tokens"]["prefill"] += prefill
            row["tokens"]["decode"] += decode
            row["tokens_served"] += prefill + decode
            row["finished"] += 1
        self.snapshot["engine"]["tokens_served"] += prefill + decode
        return {"prefill": prefill, "cached": 0, "decode": decode, "recomputed": 0}


async def _write(
    response: web.StreamResponse,
    delta: Mapping[str, Any],
    *,
    finish_reason: str | None = None,
    fairhearth: Mapping[str, Any] | None = None,
    odds: Mapping[str, float] | None = None,
) -> None:
    chunk: dict[str, Any] = {
        "id": "chatcmpl-r1",
        "object": "chat.completion.chunk",
        "created": 1764457000,
        "model": "SmolLM2-135M-Instruct",
        "choices": [{"index": 0, "delta": dict(delta), "finish_reason": finish_reason}],
    }
    if odds is not None:
        top = [
            {"token": token, "logprob": value, "bytes": list(token.encode())} for token, value in odds.items()
        ]
        chunk["choices"][0]["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    if fairhearth is not None:
        chunk["fairhearth"] = dict(fairhearth)
    await response.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())


def _briefly(job: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in job.items() if key not in ("partial", "result")}


def refusal(code: str, message: str, status: int = 404) -> EngineError:
    """Return an error with a code of the wire."""
    cls: type[EngineError] = type("Refusal", (EngineError,), {"code": code, "http_status": status})
    return cls(message)


def error_body(err: EngineError) -> dict[str, Any]:
    """Return the shape that every error has on the wire."""
    return {
        "error": {
            "code": err.code,
            "message": err.message,
            "type": "server_error" if err.http_status >= 500 else "invalid_request_error",
            "param": err.param,
            "retry_after_s": err.retry_after_s,
        }
    }
