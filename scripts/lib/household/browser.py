"""Pages of Home Assistant as a signed-in person sees them; the browser runs in an environment of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from household.places import BROWSER_PYTHON

TIMEOUT_S: Final = 600.0

Step = tuple[str, ...]


class BrowserFailed(RuntimeError):
    """A page could not be opened or a step on it not be taken; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One page, what is done on it, and the picture that is taken of it; `camera` describes the steps."""

    path: str
    steps: tuple[Step, ...]
    file: Path | None = None
    width: int = 1280
    height: int = 980
    scheme: str = "light"
    language: str = "en"
    clip: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of a visit."""

    file: Path | None
    errors: tuple[str, ...]  #: what the page logged as an error or threw


async def visit(url: str, tokens: dict[str, Any], visits: Sequence[Visit]) -> list[Report]:
    """Make the visits one after the other as the user whose tokens they are.

    Raises BrowserFailed or TimeoutError.
    """
    order = {"url": url, "tokens": tokens, "pages": [_wanted(one) for one in visits]}
    camera = await asyncio.create_subprocess_exec(
        str(BROWSER_PYTHON),
        str(Path(__file__).parent / "camera.py"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, complaints = await camera.communicate(json.dumps(order).encode())
    finally:
        if camera.returncode is None:
            camera.kill()
            await camera.wait()
    if camera.returncode:
        raise BrowserFailed(complaints.decode().strip() or f"the browser ended with {camera.returncode}")
    return [_report(json.loads(line)) for line in output.decode().splitlines()]


def _wanted(one: Visit) -> dict[str, Any]:
    return {**asdict(one), "file": None if one.file is None else str(one.file)}


def _report(body: dict[str, Any]) -> Report:
    return Report(file=Path(body["file"]) if body["file"] else None, errors=tuple(body["errors"]))
