"""How commands show what they found: units, tables, a failure in one line. Decides nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

EXIT_OK: Final = 0
EXIT_BAD: Final = 1
EXIT_USAGE: Final = 2

_GIB: Final = 2**30
_MIB: Final = 2**20


def console() -> Console:
    """Return what writes to standard output; wide enough for a table where nobody looks at a terminal."""
    shown = Console()
    return shown if shown.is_terminal else Console(width=120)


def size(num_bytes: float) -> str:
    """Return a number of bytes as people read it."""
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> Table:
    """Return a table without lines; the first columns are text, the others numbers."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for index, header in enumerate(headers):
        made.add_column(header, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def print_json(message: Any) -> None:
    """Print a message for programs."""
    print(json.dumps(message, ensure_ascii=False, indent=2))


def fail(message: str, code: int = EXIT_USAGE) -> int:
    """Say in one line what was wrong; return the exit code."""
    print(f"fairhearth: {' '.join(message.split())}", file=sys.stderr)
    return code
