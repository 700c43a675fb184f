"""The engine in the local network: announced where others can reach it, found by who listens."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from engine_service import __version__
from engine_service.server.discovery import SERVICE_TYPE, announced, is_reachable, service_info
from engine_service.server.serving import bind
from engine_service.settings import ServerSettings

ENGINE_ID = uuid.uuid4().hex  # other runs on this machine hear what this one announces
LABEL = ENGINE_ID[:6]


@pytest.fixture
def loopback() -> Iterator[socket.socket]:
    bound = bind("127.0.0.1", 0)
    yield bound
    bound.close()


async def found(name: str, *, timeout_s: float) -> AsyncServiceInfo | None:
    """Ask the loopback network for an engine of that name."""
    zeroconf = AsyncZeroconf(interfaces=["127.0.0.1"])
    try:
        info = AsyncServiceInfo(SERVICE_TYPE, name)
        return info if await info.async_request(zeroconf.zeroconf, timeout_s * 1000) else None
    finally:
        await zeroconf.async_close()


async def test_an_announced_engine_is_found_with_its_id_and_leaves_when_it_ends(
    loopback: socket.socket,
) -> None:
    settings = ServerSettings(name="Hearth", announce=True)
    name = f"Hearth {LABEL}.{SERVICE_TYPE}"
    async with announced(loopback, settings, engine_id=ENGINE_ID):
        info = await found(name, timeout_s=20)
        assert info is not None
        assert info.port == loopback.getsockname()[1]
        assert info.parsed_addresses() == ["127.0.0.1"]
        assert info.decoded_properties == {
            "engine_id": ENGINE_ID,
            "version": __version__,
            "scheme": "http",
        }
    assert await found(name, timeout_s=1) is None


@pytest.mark.parametrize("announce", [None, False])
async def test_an_engine_only_this_machine_reaches_is_not_announced_unless_wanted(
    loopback: socket.socket, announce: bool | None
) -> None:
    settings = replace(ServerSettings(name="Quiet"), announce=announce)
    async with announced(loopback, settings, engine_id=ENGINE_ID):
        assert await found(f"Quiet {LABEL}.{SERVICE_TYPE}", timeout_s=1) is None


async def test_an_engine_for_everybody_names_every_address_of_its_machine() -> None:
    bound = bind("0.0.0.0", 0)
    try:
        assert is_reachable(bound)
        addresses = service_info(bound, name="x", engine_id=ENGINE_ID).parsed_addresses()
    finally:
        bound.close()
    assert not {"0.0.0.0", "127.0.0.1"} & set(addresses)


@pytest.mark.parametrize("name", ["a.b.c", "ö" * 64, "x" * 128])
def test_any_name_makes_a_legal_label(loopback: socket.socket, name: str) -> None:
    label = service_info(loopback, name=name, engine_id=ENGINE_ID).name.removesuffix("." + SERVICE_TYPE)
    assert "." not in label
    assert len(label.encode()) <= 63
