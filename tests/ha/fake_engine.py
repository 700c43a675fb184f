"""An engine that speaks docs/wire.md over real sockets in the test's own process; only the model is missing.

It reads requests with the engine's own parser, so that whatever the integration sends is checked as the real
engine would, and answers with the golden examples' shapes. A test tells it what to answer, when to wait and
how to fail, and reads afterwards what it was asked, whom it charged, and which requests were left.
"""

from __future__ import annotations

import asyncio
import copy
import json
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
    parse_chat_request,
    parse_json,
    parse_prefix_request,
    parse_resident_id,
    parse_resident_request,
)

GOLDEN = Path(__file__).parents[1] / "contract" / "golden"
TOKEN = "correct-token"
ALL_SCOPES = ("generate", "residents", "metrics")
ENGINE_ID = "5f0c2a9be1d84b0f9a3c7d6e5f4a3b2c"
ACCOUNTS = ("guest", "house")

NO_QUANTILES = {"count": 0, "p50": None, "p95": None, "p99": None, "last": None}


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
    drop: bool = False  #: close the connection after the pieces
    hold: asyncio.Event | None = None  #: wait for it after the first piece


def report() -> dict[str, Any]:
    """Return the part of a snapshot that residents and classes have in common, with nothing in it."""
    return {
        "tokens": {"prefill": 0, "cached": 0, "decode": 0},
        "tokens_served": 0,
        "requests_running": 0,
        "requests_waiting": 0,
        "finished": 0,
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

    def __post_init__(self) -> None:
        """Start with the engine's own accounts only."""
        self._runner: web.AppRunner | None = None
        self._changed = asyncio.Condition()
        self._num_changes = 0
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

    async def start(self) -> None:
        """Listen; on the same port as before if it was started before."""
        app = web.Application(middlewares=[self._middleware])
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
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
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
            if request.path != "/health":
                self._check_token(request)
            return await handler(request)
        except EngineError as err:
            return web.json_response(error_body(err), status=err.http_status)
        except web.HTTPException as err:
            return web.json_response(error_body(NotFound(str(err))), status=err.status)

    def _check_token(self, request: web.Request) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.tokens:
            raise NotAuthenticated("this engine does not know the token")
        scope = "residents" if request.method in ("PUT", "DELETE") else "generate"
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
        body = {**golden("engine"), **self._who(), "name": self.name, "scopes": list(self.tokens[token])}
        return web.json_response(body)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(golden("models"))

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
        defaults = {"daily_tokens": None, "daily_is_hard": False, "page_cap": None}
        resident = {"id": resident_id, **defaults, **body}
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

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        chat = parse_chat_request(parse_json(await request.read()))
        resident_id = chat.options.caller.resident_id
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
        caller = chat.options.caller
        request_id = f"r{len(self.chats)}"
        who = {
            "request_id": request_id,
            "resident": caller.resident_id,
            "workload_class": caller.class_id.value,
        }
        await _write(response, {"role": "assistant", "content": ""}, fairhearth={**who, "num_ahead": 2})
        if answer.reasoning:
            await _write(response, {"reasoning_content": answer.reasoning})
        for index, piece in enumerate(answer.pieces):
            await _write(response, {"content": piece})
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
        caller = chat.options.caller
        prefill = sum(len((message.content or "").split()) for message in chat.messages)
        decode = len(answer.pieces) + len(answer.tool_calls)
        for row in (
            self.snapshot["residents"][caller.resident_id],
            self.snapshot["classes"][caller.class_id.value],
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
) -> None:
    chunk: dict[str, Any] = {
        "id": "chatcmpl-r1",
        "object": "chat.completion.chunk",
        "created": 1764457000,
        "model": "SmolLM2-135M-Instruct",
        "choices": [{"index": 0, "delta": dict(delta), "finish_reason": finish_reason}],
    }
    if fairhearth is not None:
        chunk["fairhearth"] = dict(fairhearth)
    await response.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())


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
