"""Where things are, and which port is free."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
ENGINE_COMMAND: Final = ROOT / ".venv/engine/bin/fairhearth"
HASS_COMMAND: Final = ROOT / ".venv/ha/bin/hass"
BROWSER_PYTHON: Final = ROOT / ".venv/browser/bin/python"
INTEGRATION: Final = ROOT / "custom_components/fairhearth"
SATELLITE: Final = Path(__file__).resolve().parent / "satellite"

LOOPBACK: Final = "127.0.0.1"


def free_port(preferred: int | None = None) -> int:
    """Return the preferred port if nobody listens there, else any free one."""
    for port in (preferred, 0):
        if port is None:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no port is free on {LOOPBACK}")


def read_cpu_seconds(pid: int) -> float:
    """Return the processor time a process and its threads have used (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
