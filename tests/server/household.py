"""A whole engine on loopback, inside the test's event loop: real server, real loop, real scheduler."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import platformdirs

from engine_service.backends.base import Backend
from engine_service.backends.llama_cpp import open_backend
from engine_service.engine.ledger import Ledger
from engine_service.engine.loop import Engine
from engine_service.engine.residence import Models
from engine_service.server.residents import merged
from engine_service.server.service import Service
from engine_service.server.serving import SILENCE_S, bind, build_service, serving, url_of
from engine_service.settings import Settings, load
from engine_service.state import StateFolder

ADMIN = "token-of-the-admin-000"
SPEAKER = "token-of-a-speaker-000"
READER = "token-of-prometheus-00"
EDITOR = "token-of-the-editor-00"

SETTINGS = f"""
[server]
port = 0
allow_loopback_without_token = ALLOW_LOOPBACK
drain_s = 2.0
webhook_hosts = ["127.0.0.1"]
WEBHOOK_SECRET
[[server.tokens]]
name = "admin"
token = "{ADMIN}"
scopes = ["admin"]
[[server.tokens]]
name = "speaker"
token = "{SPEAKER}"
scopes = ["generate"]
[[server.tokens]]
name = "prometheus"
token = "{READER}"
scopes = ["metrics"]
[[server.tokens]]
name = "editor"
token = "{EDITOR}"
scopes = ["residents"]
[residents.alice]
name = "Alice"
weight = 2
[paths]
state_dir = "state"
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return the error object."""
        error: dict[str, Any] = self.json()["error"]
        return error


@dataclass(frozen=True, slots=True)
class Household:
    """What a test talks to."""

    url: str
    service: Service
    http: aiohttp.ClientSession
    settings: Settings

    @property
    def engine(self) -> Engine:
        """The engine behind the server."""
        return self.service.engine

    async def ask(
        self,
        method: str,
        path: str,
        message: Any = None,
        *,
        token: str | None = ADMIN,
        data: bytes | io.BytesIO | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Send one request and read the answer."""
        async with self.http.request(
            method, self.url + path, json=message, data=data, headers=bearer(token) | (headers or {})
        ) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def chat(self, content: str = "Hello", *, token: str = ADMIN, **more: Any) -> Answer:
        """Ask for a chat completion."""
        message = {"messages": [{"role": "user", "content": content}], **more}
        return await self.ask("POST", "/v1/chat/completions", message, token=token)

    @asynccontextmanager
    async def stream(self, path: str, message: Any = None) -> AsyncIterator[AsyncGenerator[str, None]]:
        """Open a stream and yield its non-empty lines."""
        method = "GET" if message is None else "POST"
        async with self.http.request(
            method, self.url + path, json=message, headers=bearer(ADMIN)
        ) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            yield _lines(response)

    async def until_idle(self) -> None:
        """Wait until nothing waits or runs; fails by the test's own timeout."""
        while True:
            seen = self.engine.snapshot()
            if seen.engine["requests_running"] + seen.engine["requests_waiting"] == 0:
                return
            await asyncio.sleep(0.01)


async def _lines(response: aiohttp.ClientResponse) -> AsyncGenerator[str, None]:
    async for line in response.content:
        text = line.decode().rstrip("\n")
        if text:
            yield text


def bearer(token: str | None) -> dict[str, str]:
    """Return the header that shows the token."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def payloads(lines: list[str]) -> list[Any]:
    """Return what the data lines of a stream hold."""
    texts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def embedded_model(*, context_tokens: int, max_sequences: int) -> Backend:
    """Open the model that comes with the engine, on one thread."""
    return open_backend(
        None,
        cache_dir=platformdirs.user_cache_path("fairhearth", appauthor=False),
        context_tokens=context_tokens,
        max_sequences=max_sequences,
        threads=1,
        progress=lambda _: None,
    )


@asynccontextmanager
async def household(
    folder: Path,
    backend: Backend,
    *,
    allow_loopback: bool = False,
    rebuild: Callable[[], Backend] | None = None,
    silence_s: float = SILENCE_S,
    webhook_secret: str | None = None,
    models: Models | None = None,
    more_settings: str = "",
) -> AsyncIterator[Household]:
    """Serve a backend as the command line does, with its files in folder."""
    path = folder / "fairhearth.toml"
    text = SETTINGS.replace("ALLOW_LOOPBACK", str(allow_loopback).lower())
    text = text.replace("WEBHOOK_SECRET", f'webhook_secret = "{webhook_secret}"' if webhook_secret else "")
    path.write_text(text + more_settings, encoding="utf-8")
    settings = load(path, environment={})
    state = StateFolder(settings.paths.state_dir)
    kept = state.residents()
    residents = merged(settings.residents, kept)
    engine = Engine(
        backend,
        policy=settings.policy,
        residents=[entry.resident for entry in residents],
        names={entry.resident_id: entry.name for entry in residents},
        rebuild=rebuild,
        ledger=Ledger(state.path),
        models=models,
    )
    service = build_service(engine, settings, state=state, tokens=settings.server.tokens, kept=kept)
    bound = bind("127.0.0.1", 0)
    limits = settings.server
    async with (
        serving(
            service,
            bound,
            max_body_bytes=limits.max_body_bytes,
            drain_s=limits.drain_s,
            silence_s=silence_s,
        ),
        aiohttp.ClientSession() as http,
    ):
        yield Household(url_of(bound), service, http, settings)
    bound.close()
