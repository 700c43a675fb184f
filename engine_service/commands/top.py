"""`fairhearth top`: who is being served, live, in a terminal.

Decides nothing: shows the engine's own snapshot stream, and its memory now and then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import aiohttp
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from yarl import URL

from engine_service.checks import shown
from engine_service.commands.showing import EXIT_BAD, EXIT_OK, console, fail, table
from engine_service.server.tls import own_client_context
from engine_service.settings import Settings

_BAR_CELLS: Final = 20
_MEMORY_EVERY_S: Final = 2.0
_ANSWER_S: Final = 10.0
_SILENT_S: Final = 60.0  #: the engine sends a comment every 15 s
_LINE_BYTES: Final = 2**20


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `top`; add makes a parser that knows the options of all commands."""
    top = add("top", help="show live who is being served", run_with_settings=run_top)
    top.add_argument("--url", metavar="URL", help="the engine's address (default: the settings')")
    top.add_argument(
        "--token", metavar="T", help="bearer token (default: the settings', or the first start's)"
    )
    top.add_argument("--once", action="store_true", help="show one moment and end")


def run_top(parsed: argparse.Namespace, settings: Settings) -> int:
    """Run `fairhearth top`."""
    url = (parsed.url or _url(settings)).rstrip("/")
    if not _is_address(url):
        return fail(f"--url must be an address like http://192.168.1.5:8321, not {shown(parsed.url)}")
    token = _token(settings)
    trusted = None if parsed.url else own_client_context(settings.server)
    try:
        asyncio.run(_show(url, token, trusted, is_once=parsed.once))
    except KeyboardInterrupt:
        return EXIT_OK
    except _Refused as error:
        return fail(f"{url}: {error}", EXIT_BAD)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return fail(
            f"{url} does not answer ({error}); is the engine running? --url says where",
            EXIT_BAD,
        )
    return EXIT_OK


def _is_address(url: str) -> bool:
    try:
        parsed = URL(url)
    except ValueError:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host) and parsed.path in ("", "/")


def _url(settings: Settings) -> str:
    server = settings.server
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    return f"{server.scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def _token(settings: Settings) -> str | None:
    if settings.server.tokens:
        return settings.server.tokens[0].token
    try:
        return (settings.paths.state_dir / "token").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


class _Refused(Exception):
    """The engine answered with an error; the message is its own."""


async def _show(url: str, token: str | None, trusted: ssl.SSLContext | None, *, is_once: bool) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=None, connect=_ANSWER_S, sock_read=_SILENT_S)
    async with aiohttp.ClientSession(
        url,
        connector=aiohttp.TCPConnector(ssl=trusted or True),
        headers=headers,
        timeout=timeout,
        read_bufsize=_LINE_BYTES,
    ) as http:
        if is_once:
            console().print(render(await _get(http, "/v1/fairness"), await _get(http, "/v1/capacity")))
            return
        await _follow(http)


async def _follow(http: aiohttp.ClientSession) -> None:
    memory, looked_at = await _get(http, "/v1/capacity"), time.monotonic()
    with Live(console=console(), screen=False, auto_refresh=False) as live:
        async for snapshot in _snapshots(http):
            if time.monotonic() - looked_at >= _MEMORY_EVERY_S:
                memory, looked_at = await _get(http, "/v1/capacity"), time.monotonic()
            live.update(render(snapshot, memory), refresh=True)


async def _snapshots(http: aiohttp.ClientSession) -> AsyncIterator[dict[str, Any]]:
    async with http.get("/v1/fairness/stream") as response:
        await _check(response)
        async for line in response.content:
            if line.startswith(b"data: "):
                message = json.loads(line[6:])
                if "error" in message:
                    raise _Refused(message["error"]["message"])
                yield message


async def _get(http: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    async with http.get(path) as response:
        await _check(response)
        message: dict[str, Any] = await response.json()
        return message


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    try:
        message = (await response.json())["error"]["message"]
    except (ValueError, KeyError, TypeError, aiohttp.ClientError):
        message = f"status {response.status}; this is no Fairhearth engine; --url says where it is"
        raise _Refused(message) from None
    if response.status == 401:
        message += "; --token says another, --url where another engine is"
    raise _Refused(message)


# --- the picture ---


def render(snapshot: Mapping[str, Any], memory: Mapping[str, Any]) -> RenderableType:
    """Return the picture of one moment: the messages of /v1/fairness and /v1/capacity."""
    parts: list[RenderableType] = [
        _residents(snapshot),
        Text(),
        _classes(snapshot),
        Text(),
        _memory(memory),
        Text(),
        _load(snapshot),
    ]
    served = f"{snapshot['model']} on {snapshot['backend']}, {snapshot['policy']}"
    title = f"Fairhearth {snapshot['version']}: {served}"
    return Panel(Group(*parts), title=title, border_style="cyan")


def _residents(snapshot: Mapping[str, Any]) -> Table:
    rows = [
        [
            Text(report["name"]),
            _count(report["requests_running"], "green"),
            _count(report["requests_waiting"], "yellow"),
            Text(f"{report['tokens_served']:,}"),
            Text("-" if report["tokens_left_today"] is None else f"{report['tokens_left_today']:,}"),
            _bar(report["service_share"], report["entitled_share"]),
        ]
        for report in snapshot["residents"].values()
    ]
    made = table(("resident", "runs now", "waits", "tokens", "left today", "share (| is the fair one)"), ())
    for row in rows:
        made.add_row(*row)
    return made


def _classes(snapshot: Mapping[str, Any]) -> Table:
    made = table(
        (
            "class",
            "runs now",
            "waits",
            "first word",
            "19 of 20 within",
            "between words",
            "done within",
            "in time",
        ),
        (),
    )
    paused = snapshot["engine"]["paused_classes"]
    for name, report in snapshot["classes"].items():
        first = report["time_to_first_token_s"]
        made.add_row(
            Text(name).append(" paused" if name in paused else "", style="yellow"),
            _count(report["requests_running"], "green"),
            _count(report["requests_waiting"], "yellow"),
            _seconds(first["p50"]),
            _seconds(first["p95"]),
            _seconds(report["inter_token_latency_s"]["p95"]),
            _seconds(report["completion_time_s"]["p95"]),
            _share(report["slo_attainment"]),
        )
    return made


def _memory(memory: Mapping[str, Any]) -> Table:
    made = table(("memory is held by", "", "requests", "pages", "speech could take back"), (), left=2)
    for holder in memory["holders"]:
        made.add_row(
            holder["resident"],
            holder["workload_class"],
            str(holder["requests"]),
            str(holder["pages"]),
            str(holder["reclaimable_pages"]),
        )
    made.add_row("pinned beginnings", "", "", str(memory["kv_pages_pinned"]), "")
    made.add_row("nobody", "", "", str(memory["kv_pages_free"]), "")
    return made


def _load(snapshot: Mapping[str, Any]) -> Text:
    load = snapshot["engine"]
    used = 100 * load["kv_pages_used"] / max(1, load["kv_pages_total"])
    speed, fairness = load["tokens_per_second"], load["fairness_index"]
    bound = "" if load["bound_used"] is None else f", {100 * load['bound_used']:.0f} % of its bound"
    text = Text(f"{speed:.0f} tokens/s, memory {used:.0f} %, fairness {fairness:.2f}{bound}, ")
    met = load["policy_met"]
    return text.append(
        "policy met" if met else f"policy not met: {'; '.join(load['policy_notes'])}",
        style="green" if met else "red",
    )


def _count(number: int, style: str) -> Text:
    return Text(str(number), style=style if number else "dim")


def _seconds(value: float | None) -> Text:
    return Text("-", style="dim") if value is None else Text(f"{value:.2f} s")


def _share(value: float | None) -> Text:
    return Text("-", style="dim") if value is None else Text(f"{100 * value:.0f} %")


def _bar(share: float, entitled: float) -> Text:
    filled, mark = round(_BAR_CELLS * share), min(_BAR_CELLS - 1, round(_BAR_CELLS * entitled))
    cells = (
        "|" if entitled and cell == mark else "█" if cell < filled else "·" for cell in range(_BAR_CELLS)
    )
    return Text("".join(cells), style="cyan").append(f" {100 * share:3.0f} %")
