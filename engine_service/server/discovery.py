"""Announces the engine in the local network by DNS-SD, so that Home Assistant finds it.

Decides what is told: address, port, id, version, http or https; the token is still asked for. A network that
does not take announcements is logged and costs nothing else. Source: RFC 6763; docs/wire.md.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import ifaddr
from zeroconf import Error as ZeroconfError, InterfaceChoice
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from engine_service import __version__
from engine_service.settings import ServerSettings

_LOGGER = logging.getLogger(__name__)

SERVICE_TYPE: Final = "_fairhearth._tcp.local."
_MAX_LABEL_BYTES: Final = 63  #: RFC 1035
_ID_DIGITS: Final = 6  #: of the engine's id in its instance name, so that two engines of one name differ


def is_reachable(bound: socket.socket) -> bool:
    """Return whether other machines can connect."""
    return not ipaddress.ip_address(bound.getsockname()[0]).is_loopback


@asynccontextmanager
async def announced(bound: socket.socket, settings: ServerSettings, *, engine_id: str) -> AsyncIterator[None]:
    """Announce the engine that listens on the socket while the block runs, if the settings want it."""
    if not (is_reachable(bound) if settings.announce is None else settings.announce):
        yield
        return
    info = service_info(bound, name=settings.name, engine_id=engine_id, scheme=settings.scheme)
    host = bound.getsockname()[0]
    interfaces = InterfaceChoice.All if is_reachable(bound) else [host]
    try:
        zeroconf = AsyncZeroconf(interfaces=interfaces)
    except OSError as error:
        _LOGGER.warning("The engine is not announced: %s", error)
        yield
        return
    try:
        try:
            await (await zeroconf.async_register_service(info, allow_name_change=True))
            _LOGGER.info("Announced as %s", info.name)
        except (OSError, ZeroconfError) as error:
            _LOGGER.warning("The engine is not announced: %s", error)
        yield
    finally:
        await zeroconf.async_unregister_all_services()
        await zeroconf.async_close()


def service_info(
    bound: socket.socket, *, name: str, engine_id: str, scheme: str = "http"
) -> AsyncServiceInfo:
    """Return what is announced."""
    host, port = bound.getsockname()[:2]
    suffix = f" {engine_id[:_ID_DIGITS]}"
    label = name.replace(".", " ").encode()[: _MAX_LABEL_BYTES - len(suffix)].decode(errors="ignore") + suffix
    return AsyncServiceInfo(
        SERVICE_TYPE,
        f"{label}.{SERVICE_TYPE}",
        port=port,
        properties={"engine_id": engine_id, "version": __version__, "scheme": scheme},
        server=f"fairhearth-{engine_id[:12]}.local.",
        parsed_addresses=_addresses(host),
    )


def _addresses(host: str) -> list[str]:
    """Return the addresses that lead to the host; a wildcard means all of this machine's own."""
    if not ipaddress.ip_address(host).is_unspecified:
        return [host]
    entries = [entry.ip for adapter in ifaddr.get_adapters() for entry in adapter.ips]
    found = [ipaddress.ip_address(ip if isinstance(ip, str) else ip[0]) for ip in entries]
    versions = (4, 6) if ":" in host else (4,)
    return [str(ip) for ip in found if ip.version in versions and not ip.is_loopback and not ip.is_link_local]
