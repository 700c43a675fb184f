"""A phone with the companion app as Home Assistant knows it: registered, pushed to, heard by webhook."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from aiohttp import web
from household.client import Rest
from household.residence import Household
from household.waiting import until


@dataclass(slots=True)
class Phone:
    """What was pushed to it, oldest first, and its notify entity."""

    entity_id: str
    pushed: list[dict[str, Any]] = field(default_factory=list)


@asynccontextmanager
async def phone_of_alice(home: Household) -> AsyncIterator[Phone]:
    """Register a phone for the length of a block; remove it afterwards."""
    phone = Phone(entity_id="")

    async def receive(request: web.Request) -> web.Response:
        phone.pushed.append(await request.json())
        return web.json_response({}, status=201)

    app = web.Application()
    app.router.add_post("/push", receive)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address, port = runner.addresses[0][:2]
        app_data = {"push_token": "alice", "push_url": f"http://{address}:{port}/push"}
        await home.rest.post("/api/mobile_app/registrations", {**_DEVICE, "app_data": app_data})
        phone.entity_id = await until(
            lambda: _notify_entity(home), bool, "the phone has a notify entity", timeout_s=30
        )
        yield phone
    finally:
        await _forget_phones(home)
        await runner.cleanup()


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where the app of a phone reports and asks. Who knows the address needs no token."""

    session: aiohttp.ClientSession
    url: str
    device_id: str  #: of the phone, in the device registry

    async def send(self, kind: str, data: dict[str, Any]) -> Any:
        """Return the answer to one message; raise ClientResponseError where it is refused."""
        async with self.session.post(self.url, json={"type": kind, "data": data}) as response:
            response.raise_for_status()
            return await response.json()


@asynccontextmanager
async def webhook_of(home: Household, owner: Rest) -> AsyncIterator[Webhook]:
    """Register a phone, as someone who is signed in, for the length of a block; remove it afterwards."""
    device = {**_DEVICE, "device_id": "pocket-phone", "device_name": "Pocket phone"}
    registered = await owner.post("/api/mobile_app/registrations", device)
    try:
        yield Webhook(
            session=home.rest.session,
            url=f"{home.rest.url}/api/webhook/{registered['webhook_id']}",
            device_id=await until(
                lambda: _device_id(home, device["device_name"]), bool, "the phone is a device", timeout_s=30
            ),
        )
    finally:
        await _forget_phones(home)


async def _forget_phones(home: Household) -> None:
    for entry in await home.rest.get("/api/config/config_entries/entry?domain=mobile_app"):
        await home.rest.delete(f"/api/config/config_entries/entry/{entry['entry_id']}")


_DEVICE: Final[dict[str, Any]] = {
    "device_id": "alices-phone",
    "app_id": "fairhearth.test",
    "app_name": "Test",
    "app_version": "1",
    "device_name": "Alice's phone",
    "manufacturer": "Nobody",
    "model": "None",
    "os_name": "None",
    "os_version": "1",
    "supports_encryption": False,
}


async def _notify_entity(home: Household) -> str:
    registered = await home.socket.call("config/entity_registry/list")
    found = [
        item["entity_id"]
        for item in registered
        if item["platform"] == "mobile_app" and item["entity_id"].startswith("notify.")
    ]
    return str(found[0]) if found else ""


async def _device_id(home: Household, name: str) -> str:
    devices = await home.socket.call("config/device_registry/list")
    return next((str(device["id"]) for device in devices if device["name"] == name), "")
