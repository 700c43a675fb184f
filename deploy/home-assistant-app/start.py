"""Starts the engine as a Home Assistant app, or hands everything on to an engine on another machine.

Decides which of the two by the app's options (/data/options.json). Runs on the standard library alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

DATA = Path("/data")
SHARE = Path("/share")
PORT = 8321
_PIECE = 65_536
_CONNECT_S = 10.0


def arguments(options: dict[str, Any]) -> list[str]:
    """Return the engine's command line for the app's options."""
    given = [
        "fairhearth", "serve", "--host", "0.0.0.0", "--port", str(PORT),
        "--state-dir", str(DATA / "state"), "--cache-dir", str(DATA / "cache"),
        "--context-tokens", str(options["context_tokens"]), "--log-level", options["log_level"],
    ]  # fmt: skip
    if options.get("model"):
        given += ["--model", str(SHARE / options["model"])]
    if options.get("threads"):
        given += ["--threads", str(options["threads"])]
    return given


async def relay(host: str, port: int, *, listen: str = "0.0.0.0", on: int = PORT) -> asyncio.Server:
    """Hand every connection on to host and port, both ways, until either side ends it."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                far_reader, far_writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            print(f"{host}:{port} does not answer: {error}", file=sys.stderr)
            writer.close()
            return
        ways = [
            asyncio.create_task(_copy(reader, far_writer)),
            asyncio.create_task(_copy(far_reader, writer)),
        ]
        # One direction may end first (a client that has sent all); the other ends the connection.
        await ways[1]
        ways[0].cancel()
        for end in (writer, far_writer):
            end.close()

    return await asyncio.start_server(connected, listen, on)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        return
    finally:
        # A client that went away must be seen by the engine, or it would go on computing for nobody.
        writer.close()


async def _hand_on(address: str) -> None:
    host, _, port = address.rpartition(":")
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with await relay(host, int(port)):
        print(f"handing on to {address}", file=sys.stderr)
        await stopped.wait()


def main() -> None:
    """Do what the options say."""
    options = json.loads((DATA / "options.json").read_text(encoding="utf-8"))
    if options.get("engine_elsewhere"):
        asyncio.run(_hand_on(options["engine_elsewhere"]))
        return
    command = arguments(options)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
