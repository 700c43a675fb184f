"""Who was charged for what happened in a block, as the engine's ledger tells it."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from household.stage import Stage
from household.waiting import until


@asynccontextmanager
async def charged(stage: Stage, *, num_requests: int = 0) -> AsyncIterator[Counter[str]]:
    """Fill the counter, at the end of the block, with finished requests by resident and by class.

    num_requests: wait for so many, where the block only sets them off.
    """
    before = _finished(await stage.engine_api.quiet(timeout_s=60))
    seen: Counter[str] = Counter()
    yield seen
    await until(
        stage.engine_api.fairness,
        # Each request counts for a resident and for a class.
        lambda snapshot: (_finished(snapshot) - before).total() >= 2 * num_requests,
        f"{num_requests} requests are finished",
        timeout_s=120,
    )
    seen.update(_finished(await stage.engine_api.quiet(timeout_s=60)) - before)


def _finished(snapshot: dict[str, Any]) -> Counter[str]:
    accounts = [*snapshot["residents"].items(), *snapshot["classes"].items()]
    return Counter({name: report["finished"] for name, report in accounts})
