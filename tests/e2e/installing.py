"""Scripts and automations of a test, as the editors make them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from household.residence import Household
from household.waiting import until


@asynccontextmanager
async def installed(home: Household, kind: str, name: str, config: dict[str, Any]) -> AsyncIterator[None]:
    """Have a script or an automation for the length of a block."""
    path = f"/api/config/{kind}/config/{name}"
    await home.rest.post(path, config)

    async def is_there() -> bool:
        states = await home.rest.get("/api/states")
        return any(item["entity_id"] == f"{kind}.{name}" for item in states)

    await until(is_there, bool, f"{kind}.{name} is there", timeout_s=30)
    try:
        yield
    finally:
        await home.rest.delete(path)
