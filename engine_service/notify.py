"""Telling systemd how it goes (sd_notify): ready, reloading, stopping, alive.

Decides nothing; does nothing where no service manager asked. Source: sd_notify(3).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Sends what systemd wants to know to the socket it named."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Read NOTIFY_SOCKET and WATCHDOG_USEC; environment defaults to the process's own."""
        environment = os.environ if environment is None else environment
        self._path = environment.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _seconds(environment.get("WATCHDOG_USEC", ""))
        """How often systemd wants a sign of life at the latest (seconds); None: it does not ask."""

    def ready(self, status: str) -> None:
        """Say that requests are served."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Say that the settings are read anew; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Say that the end has begun."""
        self._send("STOPPING=1", "STATUS=running answers may finish")

    def alive(self) -> None:
        """Give the sign of life."""
        self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._path:
            return
        # A name that begins with @ is in the abstract namespace, written with a zero byte.
        address = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
                sending.connect(address)
                sending.sendall("\n".join(lines).encode())
        except OSError:
            # Nobody listens any more: the engine serves all the same.
            self._path = ""


def _seconds(microseconds: str) -> float | None:
    return int(microseconds) / 1_000_000 if microseconds.isdecimal() and int(microseconds) else None
