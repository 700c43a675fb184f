"""Home Assistant from outside: REST and one WebSocket connection, as the frontend uses them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp

CALL_TIMEOUT_S: Final = 60.0


class CommandFailed(RuntimeError):
    """Home Assistant refused; `code` is its reason."""

    def __init__(self, what: str, code: str, message: str) -> None:
        """Name the command and the reason."""
        super().__init__(f"{what}: {code}: {message}")
        self.code = code


class Rest:
    """Home Assistant's REST interface as one user."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        """Use a bearer token."""
        self.session = session
        self.url = url
        self.token = token

    async def get(self, path: str) -> Any:
        """Return the body of a GET."""
        return await self._send("GET", path)

    async def post(self, path: str, body: Any = None) -> Any:
        """Return the body of a POST."""
        return await self._send("POST", path, body)

    async def delete(self, path: str) -> Any:
        """Return the body of a DELETE."""
        return await self._send("DELETE", path)

    async def _send(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"}
        async with self.session.request(method, self.url + path, json=body, headers=headers) as response:
            if response.status >= 400:
                raise CommandFailed(f"{method} {path}", str(response.status), await response.text())
            return await response.json()


class Subscription:
    """Events of one command, in order."""

    def __init__(self, connection: WebSocket, message_id: int) -> None:
        """Receive what carries the id."""
        self._connection = connection
        self.message_id = message_id
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    async def next(self, timeout_s: float) -> Any:
        """Return the next event; raise TimeoutError where none comes."""
        async with asyncio.timeout(timeout_s):
            item = await self.queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def close(self) -> None:
        """Unsubscribe; a pipeline that runs is cancelled by this."""
        self._connection.forget(self.message_id)
        with contextlib.suppress(CommandFailed):  # it may have ended by itself
            await self._connection.call("unsubscribe_events", subscription=self.message_id)


class WebSocket:
    """One authenticated connection; commands may overlap."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Read from a socket that is authenticated."""
        self._socket = socket
        self._ids = itertools.count(1)
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._subscriptions: dict[int, Subscription] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, rest: Rest) -> WebSocket:
        """Open a connection with the token of a REST client."""
        socket = await rest.session.ws_connect(
            rest.url.replace("http", "ws", 1) + "/api/websocket", max_msg_size=0, heartbeat=30
        )
        await socket.receive_json()
        await socket.send_json({"type": "auth", "access_token": rest.token})
        answer = await socket.receive_json()
        if answer["type"] != "auth_ok":
            await socket.close()
            raise CommandFailed("auth", answer["type"], answer.get("message", ""))
        return cls(socket)

    async def call(self, kind: str, *, timeout_s: float = CALL_TIMEOUT_S, **fields: Any) -> Any:
        """Return the result of a command; raise CommandFailed."""
        return await self._command(next(self._ids), kind, timeout_s, fields)

    async def subscribe(self, kind: str, **fields: Any) -> Subscription:
        """Start a command that sends events."""
        message_id = next(self._ids)
        subscription = self._subscriptions[message_id] = Subscription(self, message_id)
        try:
            await self._command(message_id, kind, CALL_TIMEOUT_S, fields)
        except BaseException:
            self.forget(message_id)
            raise
        return subscription

    @contextlib.asynccontextmanager
    async def events(self, kind: str, **fields: Any) -> AsyncIterator[Subscription]:
        """Subscribe for the length of a block."""
        subscription = await self.subscribe(kind, **fields)
        try:
            yield subscription
        finally:
            await subscription.close()

    async def act(
        self, action: str, data: dict[str, Any], *, timeout_s: float = CALL_TIMEOUT_S, returns: bool = False
    ) -> Any:
        """Perform an action like `light.turn_on`; return its response where it returns one."""
        domain, _, service = action.partition(".")
        result = await self.call(
            "call_service",
            timeout_s=timeout_s,
            domain=domain,
            service=service,
            service_data=data,
            return_response=returns,
        )
        return result["response"] if returns else None

    def forget(self, message_id: int) -> None:
        """Drop further events of a subscription."""
        self._subscriptions.pop(message_id, None)

    async def close(self) -> None:
        """Close the connection."""
        await self._socket.close()
        await self._reader

    async def _command(self, message_id: int, kind: str, timeout_s: float, fields: dict[str, Any]) -> Any:
        future = self._results[message_id] = asyncio.get_running_loop().create_future()
        try:
            await self._socket.send_json({"id": message_id, "type": kind, **fields})
            async with asyncio.timeout(timeout_s):
                message = await future
        finally:
            self._results.pop(message_id, None)
        if not message["success"]:
            raise CommandFailed(kind, message["error"]["code"], message["error"]["message"])
        return message["result"]

    async def _read(self) -> None:
        """Hand every message to whoever waits for it, until the connection closes."""
        async for received in self._socket:
            if received.type is not aiohttp.WSMsgType.TEXT:
                continue
            parsed = received.json()
            for message in parsed if isinstance(parsed, list) else [parsed]:
                self._dispatch(message)
        closed = ConnectionResetError("Home Assistant closed the connection")
        for future in self._results.values():
            if not future.done():
                future.set_exception(closed)
        for subscription in self._subscriptions.values():
            subscription.queue.put_nowait(closed)

    def _dispatch(self, message: dict[str, Any]) -> None:
        future = self._results.get(message["id"])
        subscription = self._subscriptions.get(message["id"])
        if message["type"] == "result" and future is not None and not future.done():
            future.set_result(message)
        elif message["type"] == "event" and subscription is not None:
            subscription.queue.put_nowait(message["event"])
