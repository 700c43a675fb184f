"""Runs the loads on both servers in turn, and again where the machine was disturbed.

Decides which of the peer's settings is its best for which figure, and which attempt counts. The bars are the
caller's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final, TypeVar

from bench.client import ServerFailed
from bench.loads import Mixed, Prompts, mixed, several_streams, warm_prefix
from bench.machine import Disturbance, Watch, idle_window
from bench.servers import Common, PeerSetting, Server, ours, peer
from bench.verdict import Pair, quantile

T = TypeVar("T")
_IDLE_WITHIN_S: Final = 30.0
_ATTEMPTS: Final = 3
_USABLE: Final = 1.1

# The same number of slots for both: none is held free for speech, so that speech has to take one. And the
# same cache: one for all requests, or a part for each.
_OUR_CONFIG: Final = "[policy]\nvoice_headroom_sequences = 0\n[model]\ndivided_cache = {divided}\n"


def tried_settings(slots: int) -> tuple[PeerSetting, ...]:
    """Return the ways in which the peer is tried; with the first it was fastest so far."""
    return (
        PeerSetting(slots=slots, unified=False),
        PeerSetting(slots=slots, unified=False, is_mapped=False),
        PeerSetting(slots=slots, unified=True),
        PeerSetting(slots=slots, unified=True, micro_batch=128),
        PeerSetting(slots=slots, unified=True, batch=512),
        PeerSetting(slots=slots, unified=True, batch=64, micro_batch=64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One run of the mix on the peer in one setting."""

    setting: PeerSetting
    mixed: Mixed

    @property
    def ttft_p95_s(self) -> float:
        """The 95th percentile of the spoken requests' time to first token."""
        return quantile(self.mixed.spoken_ttft_s, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPair:
    """The mix on both, one after the other, and on ours with everything ordered as chat."""

    peer: Mixed
    ours: Mixed
    ours_all_chat: Mixed | None


@dataclass(slots=True)
class Bench:
    """A series of measurements with one model and one number of threads."""

    common: Common
    prompts: Prompts
    python: str
    say: Callable[[str], None]
    disturbances: list[Disturbance] = field(default_factory=list)  #: of the attempts that counted
    _runs: count[int] = field(default_factory=lambda: count(1))

    async def tried(self, settings: Sequence[PeerSetting]) -> list[Tried]:
        """Run the mix once in each setting of the peer."""
        found = []
        for setting in settings:
            async with peer(self.common, setting) as server:
                await warm_prefix(server, self.prompts, next(self._runs), pins=False)
                result = await self._calm([server], lambda: mixed(server, self.prompts, next(self._runs)))
            found.append(Tried(setting=setting, mixed=result))
            self.say(
                f"  peer {setting.title}: makespan {result.makespan_s:.1f} s, "
                f"{result.tokens_per_s:.1f} tokens/s, voice TTFT p95 {found[-1].ttft_p95_s:.2f} s"
            )
        return found

    async def streams(self, setting: PeerSetting, num_clients: int, repeats: int) -> list[Pair]:
        """Return tokens per second of both for that many clients at once."""
        async with peer(self.common, setting) as theirs, self._ours(setting) as own:
            for server in (theirs, own):  # memory is touched and the code is warm
                await several_streams(server, self.prompts, next(self._runs), num_clients)

            async def both(order: Sequence[Server]) -> Pair:
                speeds = {
                    server.name: await several_streams(server, self.prompts, next(self._runs), num_clients)
                    for server in order
                }
                return Pair(peer=speeds[theirs.name], ours=speeds[own.name])

            # Each goes first in turn, so that what drifts favours neither.
            orders = [[theirs, own], [own, theirs]]
            return [await self._calm([theirs, own], partial(both, orders[i % 2])) for i in range(repeats)]

    async def mixes(self, setting: PeerSetting, repeats: int, *, num_all_chat: int = 0) -> list[MixedPair]:
        """Return the mix on both, with a warm prefix; ours num_all_chat times also with all of it as chat."""
        pairs = []
        all_chat = self.prompts.all_chat()
        async with peer(self.common, setting) as theirs, self._ours(setting) as own:
            orders = [[theirs, own], [own, theirs]]
            for i in range(repeats):
                runs = {}
                for server in orders[i % 2]:
                    await warm_prefix(server, self.prompts, next(self._runs), pins=server is own)
                    run = partial(self._mixed, server, self.prompts)
                    runs[server.name] = await self._calm([server], run)
                their, mine = runs[theirs.name], runs[own.name]
                plain = None
                if i < num_all_chat:
                    plain = await self._calm([own], partial(self._mixed, own, all_chat))
                pairs.append(MixedPair(peer=their, ours=mine, ours_all_chat=plain))
                self.say(f"  makespan {their.makespan_s:.1f} s and {mine.makespan_s:.1f} s")
        return pairs

    async def _mixed(self, server: Server, prompts: Prompts) -> Mixed:
        return await mixed(server, prompts, next(self._runs))

    def _ours(self, setting: PeerSetting) -> Server:
        config = _OUR_CONFIG.format(divided=str(not setting.unified).lower())
        title = f"ours-{setting.slots}"
        return ours(self.common, self.python, slots=setting.slots, title=title, config=config)

    async def _calm(self, servers: Sequence[Server], run: Callable[[], Awaitable[T]]) -> T:
        """Run until an attempt was left in peace, a few times at most; return the least disturbed.

        Raises ServerFailed if the machine stood still in every attempt: such figures say nothing.
        """
        attempts: list[tuple[Disturbance, T]] = []
        for _ in range(_ATTEMPTS):
            await idle_window(max_wait_s=_IDLE_WITHIN_S)
            async with Watch([server.pid for server in servers]) as watch:
                result = await run()
            attempts.append((watch.disturbance, result))
            if watch.disturbance.is_slight:
                break
        best = min(attempts, key=lambda attempt: (attempt[0].is_void, attempt[0].foreign_share))
        if best[0].is_void:
            raise ServerFailed(
                f"the machine stood still for {best[0].standstill_s:.0f} s in every attempt; try again later"
            )
        self.disturbances.append(best[0])
        return best[1]


def fastest(found: Sequence[Tried]) -> PeerSetting:
    """Return the setting with the least makespan."""
    return min(found, key=lambda one: one.mixed.makespan_s).setting


def promptest(found: Sequence[Tried]) -> PeerSetting:
    """Return the setting that answers speech first, of those that are no slower than ours may be.

    A setting that buys its answer by a makespan which we would be failed for is no better choice.
    """
    limit_s = _USABLE * min(one.mixed.makespan_s for one in found)
    usable = [one for one in found if one.mixed.makespan_s <= limit_s]
    return min(usable, key=lambda one: one.ttft_p95_s).setting
