"""Who was charged for what happened in a block, as the engine's ledger tells it."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from household.stage import Stage


@asynccontextmanager
async def charged(stage: Stage) -> AsyncIterator[Counter[str]]:
    """Fill the counter, at the end of the block, with finished requests by resident and by class."""
    before = _finished(await stage.engine_api.quiet(timeout_s=60))
    seen: Counter[str] = Counter()
    yield seen
    seen.update(_finished(await stage.engine_api.quiet(timeout_s=60)) - before)


def _finished(snapshot: dict[str, Any]) -> Counter[str]:
    accounts = [*snapshot["residents"].items(), *snapshot["classes"].items()]
    return Counter({name: report["finished"] for name, report in accounts})
