"""Carries messages between the caller and one engine over HTTP. Decides nothing, retries nothing.

Every failure leaves as an `EngineError`: a lost or refused connection is `CannotConnect`, an answer against
the contract is `ProtocolError`, and what the engine complains about is rebuilt from its code. Leaving a
stream early (cancellation, `aclose`) closes the connection, which the engine takes as cancelling the request.
Source: docs/wire.md.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final

import aiohttp
from yarl import URL

from .errors import CannotConnect, ProtocolError, UnknownJob, error_from_wire
from .fairness import FairnessSnapshot
from .jobs import Job, JobOrder, jobs_from_wire
from .policy import Policy, table_from_wire
from .protocol import (
    ChatEvent,
    ChatRequest,
    EngineInfo,
    Health,
    Message,
    Paired,
    PrefixPin,
    ResidentSettings,
    ToolSpec,
    chat_events,
    models_from_wire,
    resident_from_wire,
    residents_from_wire,
    template_switches,
)
from .reading import JsonObject, Reader, loads

REQUEST_TIMEOUT_S: Final = 10.0
"""Most seconds for a question that the engine answers from memory."""

PREFIX_TIMEOUT_S: Final = 120.0
"""Most seconds to compute a prompt's beginning while others are served."""

REHEARSAL_TIMEOUT_S: Final = 150.0
"""The engine ends a rehearsal after two minutes."""

SILENCE_TIMEOUT_S: Final = 40.0
"""Every stream says something at least every 15 s, if only that it is alive; twice missed is lost."""

MAX_ID_SHOWN: Final = 64
"""Most characters of an id, which somebody may have mistaken for a text, in a message."""

MAX_LINE_BYTES: Final = 4 * 1024 * 1024
"""A longer line is no message of the contract."""


class EngineClient:
    """One engine at one address with one token. The session is the caller's and stays open."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        token: str | None = None,
        *,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
    ) -> None:
        """Talk to the engine at url (`http://host:port`) with a bearer token, None for `/health` only."""
        self._session = session
        self._url = URL(url)
        self._silence_timeout_s = silence_timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    @property
    def url(self) -> str:
        """Return the engine's address."""
        return str(self._url)

    async def health(self) -> Health:
        """Ask whether an engine answers and which; needs no token."""
        return Health.from_wire(await self._ask("GET", "health"))

    async def engine(self) -> EngineInfo:
        """Ask what the engine is and what the token may do."""
        return EngineInfo.from_wire(await self._ask("GET", "v1", "engine"))

    async def pair(self, code: str, name: str) -> Paired:
        """Trade the code that the engine shows for a token; needs no token.

        Raises PairingClosed where no code is open, WrongCode, or TooManyFailures.
        """
        return Paired.from_wire(await self._ask("POST", "v1", "pair", body={"code": code, "name": name}))

    async def models(self) -> dict[str, bool]:
        """Return the names of the models served, and whether each can be shown pictures."""
        return models_from_wire(await self._ask("GET", "v1", "models"))

    async def residents(self) -> dict[str, ResidentSettings]:
        """Return the settings of the residents that the engine knows, by id."""
        return residents_from_wire(await self._ask("GET", "v1", "residents"))

    async def put_resident(self, resident_id: str, settings: ResidentSettings) -> ResidentSettings:
        """Create or replace a resident and return what the engine made of it."""
        body = await self._ask("PUT", "v1", "residents", resident_id, body=settings.as_wire())
        return resident_from_wire(body)[1]

    async def delete_resident(self, resident_id: str) -> None:
        """Let a resident's work drain and remove it; raise UnknownResident where there is none."""
        await self._ask("DELETE", "v1", "residents", resident_id)

    async def fairness(self) -> FairnessSnapshot:
        """Return who was served how, now."""
        return FairnessSnapshot.from_wire(await self._ask("GET", "v1", "fairness"))

    async def pin_prefix(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        thinking: bool | None = None,
        model: str | None = None,
    ) -> PrefixPin:
        """Have the shared beginning of a prompt computed and kept, for requests that think likewise.

        model None is the engine's first. One that is not in memory keeps nothing: then no token is pinned.
        """
        body: JsonObject = {"messages": [message.as_wire() for message in messages]}
        if (switches := template_switches(thinking)) is not None:
            body["chat_template_kwargs"] = switches
        if model is not None:
            body["model"] = model
        if tools:
            body["tools"] = [tool.as_wire() for tool in tools]
        return PrefixPin.from_wire(
            await self._ask("POST", "v1", "prefix", body=body, timeout_s=PREFIX_TIMEOUT_S)
        )

    async def policy(self) -> Policy:
        """Return what decides who is served when."""
        return Policy.from_wire(await self._ask("GET", "v1", "policy"))

    async def change_policy(
        self, changes: JsonObject, *, note: str | None = None, from_defaults: bool = False
    ) -> Policy:
        """Change the named keys while the engine runs, or begin with the defaults; return what holds then."""
        method = "PUT" if from_defaults else "PATCH"
        return Policy.from_wire(await self._ask(method, "v1", "policy", body=_policy_change(changes, note)))

    async def validate_policy(self, changes: JsonObject) -> JsonObject:
        """Return the table that a change would make, and change nothing."""
        return table_from_wire(
            await self._ask("POST", "v1", "policy", "validate", body=_policy_change(changes, None))
        )

    async def roll_back_policy(self, revision: int) -> Policy:
        """Have an earlier policy hold again; return what holds then."""
        body: JsonObject = {"revision": revision}
        return Policy.from_wire(await self._ask("POST", "v1", "policy", "rollback", body=body))

    async def rehearse(self, scenario: str, changes: JsonObject, *, seeds: int) -> JsonObject:
        """Return what a scenario of the simulator says of the policy in force with these changes."""
        body: JsonObject = {"scenario": scenario, "policy": changes, "seeds": seeds}
        verdict = await self._ask("POST", "v1", "rehearse", body=body, timeout_s=REHEARSAL_TIMEOUT_S)
        Reader(verdict, "rehearsal").flag("passes")
        return verdict

    async def submit_job(self, order: JobOrder) -> Job:
        """Order an answer that outlives the engine's restarts; return it as the engine wrote it down."""
        return Job.from_wire(await self._ask("POST", "v1", "jobs", body=order.as_wire()))

    async def job(self, job_id: str) -> Job:
        """Return a job with its text; raise UnknownJob where there is none."""
        return Job.from_wire(await self._ask("GET", "v1", "jobs", _in_address(job_id)))

    async def jobs(
        self, *, state: str | None = None, resident: str | None = None, limit: int | None = None
    ) -> list[Job]:
        """Return the jobs without their texts, newest first."""
        wanted = {"state": state, "resident": resident, "limit": None if limit is None else str(limit)}
        query = {key: value for key, value in wanted.items() if value is not None}
        return jobs_from_wire(await self._ask("GET", "v1", "jobs", query=query))

    async def cancel_job(self, job_id: str) -> Job:
        """Cancel a job and return how it stands now; one that has ended stays as it is."""
        return Job.from_wire(await self._ask("DELETE", "v1", "jobs", _in_address(job_id)))

    async def job_stream(self) -> AsyncGenerator[Job]:
        """Yield every job that has not ended once, then each change, until the engine ends the stream."""
        async with aclosing(self._events("v1", "jobs", "stream")) as bodies:
            async for body in bodies:
                yield Job.from_wire(body)

    async def fairness_stream(self) -> AsyncGenerator[FairnessSnapshot]:
        """Yield a snapshot at once and one after each change, until the engine ends the stream.

        Raises CannotConnect when it is silent for longer than its keepalives allow.
        """
        async with aclosing(self._events("v1", "fairness", "stream")) as bodies:
            async for body in bodies:
                yield FairnessSnapshot.from_wire(body)

    async def _events(self, *path: str) -> AsyncGenerator[object]:
        """Yield the body of each event of a stream; raise the error that one stands for."""
        async with self._open("GET", *path) as response, aclosing(_data_lines(response)) as lines:
            async for line in lines:
                body = loads(line, where="event")
                if isinstance(body, dict) and set(body) == {"error"}:
                    raise error_from_wire(body)
                yield body

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatEvent]:
        """Order an answer and yield what happens, `Accepted` first and `Finished` last but for `Usage`.

        Raises CannotConnect when the stream breaks off before it said that it is done.
        """
        async with (
            self._open("POST", "v1", "chat", "completions", body=request.as_wire()) as response,
            aclosing(_data_lines(response)) as lines,
        ):
            async for line in lines:
                if line == b"[DONE]":
                    return
                for event in chat_events(loads(line, where="answer chunk")):
                    yield event
        raise CannotConnect("the engine ended the answer before it was complete")

    async def _ask(
        self,
        method: str,
        *path: str,
        body: JsonObject | None = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> JsonObject:
        """Send one question and return the answer's object; raise what went wrong."""
        try:
            async with self._session.request(
                method,
                self._url.joinpath(*path),
                json=body,
                params=query,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                return await _object(response)
        except TimeoutError as err:
            raise CannotConnect(f"the engine at {self._url} did not answer within {timeout_s:g} s") from err
        except aiohttp.ClientError as err:
            raise CannotConnect(_reason(self._url, err)) from err

    @asynccontextmanager
    async def _open(
        self, method: str, *path: str, body: JsonObject | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a stream that may last for ever but not be silent for long."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=REQUEST_TIMEOUT_S, sock_read=self._silence_timeout_s
        )
        headers = {**self._headers, "Accept": "text/event-stream"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with self._session.request(
                method,
                self._url.joinpath(*path),
                data=None if body is None else io.BytesIO(json.dumps(body).encode()),  # read piece by piece
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.content_type != "text/event-stream":
                    await _object(response)
                    raise ProtocolError(
                        f"expected a stream of events at {response.url.path}, got {response.content_type}"
                    )
                yield response
        except TimeoutError as err:
            raise CannotConnect(f"the engine at {self._url} has gone silent") from err
        except aiohttp.ClientError as err:
            raise CannotConnect(_reason(self._url, err)) from err


def _in_address(job_id: str) -> str:
    """Return the id of a job; raise UnknownJob for what would lead to another address than a job's."""
    if job_id == "stream" or re.fullmatch(r"[\w-]+", job_id) is None:
        raise UnknownJob(f"there is no job {job_id[:MAX_ID_SHOWN]!r}")
    return job_id


def _policy_change(changes: JsonObject, note: str | None) -> JsonObject:
    return {"policy": changes} if note is None else {"policy": changes, "note": note}


async def _object(response: aiohttp.ClientResponse) -> JsonObject:
    """Return the JSON object of an answer, empty without a body; raise the error that it stands for."""
    if response.status == 204:
        return {}
    text = await response.read()
    try:
        body = loads(text, where=f"answer of {response.url.path}")
    except ProtocolError as err:
        if response.ok:
            raise
        raise error_from_wire(None, status=response.status) from err
    if not response.ok:
        raise error_from_wire(body, status=response.status)
    if not isinstance(body, dict):
        raise ProtocolError(f"answer of {response.url.path} should be an object")
    return body


async def _data_lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """Yield the payload of each `data:` line of a server-sent event stream; comments and names are skipped.

    The contract sends every message as one line, so events need not be joined from several.
    """
    buffer = b""
    async for piece in response.content.iter_any():
        *lines, buffer = (buffer + piece).split(b"\n")
        if len(buffer) > MAX_LINE_BYTES:
            raise ProtocolError(f"a line of more than {MAX_LINE_BYTES} bytes is no message of the contract")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


def _reason(url: URL, err: aiohttp.ClientError) -> str:
    if isinstance(err, aiohttp.ClientConnectorError):
        return f"no engine answers at {url}"
    return f"the connection to the engine at {url} was lost: {str(err) or type(err).__name__}"
