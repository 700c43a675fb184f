"""Who asks for what, and when: streams of requests, drawn from a seed.

The only module of the simulator that uses chance. Every stream has a generator of its own, seeded by the
run's seed and the stream's name, so that a stream sends the same requests whether or not others take part
and whatever policy serves them. A closed loop's arrivals depend on its answers; its lengths do not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from engine_service.scheduling.model import Request, ResidentId, WorkloadClass


class Shape(StrEnum):
    """How lengths are distributed."""

    FIXED = "fixed"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """A distribution of whole token counts."""

    shape: Shape
    low: int  #: least; the value itself if fixed
    high: int  #: most
    mu: float = 0.0  #: of the logarithm
    sigma: float = 0.0

    def draw(self, rng: random.Random) -> int:
        """Return a length in [low, high]."""
        match self.shape:
            case Shape.FIXED:
                return self.low
            case Shape.UNIFORM:
                return rng.randint(self.low, self.high)
            case Shape.LOGNORMAL:
                return max(self.low, min(self.high, round(rng.lognormvariate(self.mu, self.sigma))))
            case _:
                assert_never(self.shape)


class Pattern(StrEnum):
    """When the requests of a stream arrive."""

    POISSON = "poisson"  #: at random, rate per second
    UNIFORM = "uniform"  #: evenly spaced, rate per second
    RAMP = "ramp"  #: evenly spaced by a rate that goes linearly from rate to rate_end
    DIURNAL = "diurnal"  #: Poisson with a rate that swings once per period_s by swing
    BURSTS = "bursts"  #: calls every_s apart, then gap_s of silence
    TOGETHER = "together"  #: count requests at once
    CLOSED = "closed"  #: the next request think_s after an answer, concurrency at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The arrival process of a stream."""

    pattern: Pattern
    rate: float = 0.0  #: requests per second
    rate_end: float = 0.0
    swing: float = 0.0  #: [0, 1]: the rate goes between rate * (1 - swing) and rate * (1 + swing)
    period_s: float = 0.0
    calls: tuple[int, int] = (1, 1)  #: requests of a burst, from and to
    every_s: float = 0.0
    gap_s: float = 0.0
    count: int = 1
    concurrency: int = 1
    think_s: float = 0.0  #: mean of an exponential pause
    on_s: float = 0.0  #: sends for on_s, is silent for off_s, and again; 0 always sends
    off_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One habit of one resident."""

    name: str
    resident_id: ResidentId
    class_id: WorkloadClass
    arrivals: Arrivals
    prompt: Length
    output: Length
    max_tokens: int | None = None  #: what the caller asks for at most; None: exactly what comes out
    from_s: float = 0.0
    until_s: float | None = None  #: None: to the end of the run
    most_requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A request as its caller sees it: what is asked and, unknown to all but the device, what comes."""

    stream: Stream
    index: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOrder:
    """A request that was really made once."""

    at_s: float
    request: Request
    output_tokens: int
    cancelled_at_s: float | None = None  #: when its caller went away


@dataclass(slots=True)
class StreamState:
    """Draws the requests of one stream, in order."""

    stream: Stream
    seed: int
    duration_s: float
    _rng: random.Random = field(init=False)
    _num_drawn: int = 0

    def __post_init__(self) -> None:
        """Seed a generator of its own."""
        self._rng = random.Random(f"{self.seed}/{self.stream.name}")

    @property
    def until_s(self) -> float:
        """When the stream ends."""
        return min(self.duration_s, self.stream.until_s or self.duration_s)

    @property
    def is_closed_loop(self) -> bool:
        """Return whether arrivals depend on answers."""
        return self.stream.arrivals.pattern is Pattern.CLOSED

    def order(self, at_s: float) -> Order | None:
        """Return the next request, arriving at at_s; None when the stream has ended."""
        most = self.stream.most_requests
        if at_s >= self.until_s or (most is not None and self._num_drawn >= most):
            return None
        prompt, output = self.stream.prompt.draw(self._rng), self.stream.output.draw(self._rng)
        self._num_drawn += 1
        asked = self.stream.max_tokens
        return Order(
            stream=self.stream,
            index=self._num_drawn,
            at_s=at_s,
            prompt_tokens=prompt,
            output_tokens=output if asked is None else min(output, asked),
            max_tokens=output if asked is None else asked,
        )

    def think_s(self) -> float:
        """Return the pause before the next request of a closed loop."""
        mean = self.stream.arrivals.think_s
        return self._rng.expovariate(1 / mean) if mean else 0.0

    def first(self) -> list[Order]:
        """Return what a closed loop starts with."""
        starts = [self.stream.from_s + self.think_s() for _ in range(self.stream.arrivals.concurrency)]
        return [order for at_s in sorted(starts) if (order := self.order(at_s)) is not None]

    def open_loop(self) -> list[Order]:
        """Return all requests of an open stream."""
        return [order for at_s in self._times() if (order := self.order(at_s)) is not None]

    def _times(self) -> Iterator[float]:
        a = self.stream.arrivals
        match a.pattern:
            case Pattern.TOGETHER:
                yield from [self.stream.from_s] * a.count
            case Pattern.BURSTS:
                yield from self._bursts()
            case Pattern.POISSON | Pattern.DIURNAL:
                yield from self._random_times()
            case Pattern.UNIFORM | Pattern.RAMP:
                yield from self._even_times()
            case Pattern.CLOSED:
                return
            case _:
                assert_never(a.pattern)

    def _bursts(self) -> Iterator[float]:
        a = self.stream.arrivals
        at_s = self.stream.from_s + self._rng.uniform(0, a.gap_s)
        while at_s < self.until_s:
            for _ in range(self._rng.randint(*a.calls)):
                yield at_s
                at_s += a.every_s
            at_s += a.gap_s

    def _random_times(self) -> Iterator[float]:
        """Thin a Poisson process of the greatest rate (Lewis and Shedler, 1979)."""
        a = self.stream.arrivals
        most = a.rate * (1 + a.swing)
        on_s = 0.0
        while True:
            on_s += self._rng.expovariate(most)
            at_s = self.stream.from_s + self._stretched(on_s)
            if at_s >= self.until_s:
                return
            if not a.swing or self._rng.random() * most <= self._rate_at(at_s):
                yield at_s

    def _rate_at(self, at_s: float) -> float:
        a = self.stream.arrivals
        return a.rate * (1 - a.swing * math.cos(2 * math.pi * at_s / a.period_s))

    def _even_times(self) -> Iterator[float]:
        a = self.stream.arrivals
        span = self.until_s - self.stream.from_s
        slope = (a.rate_end - a.rate) / span if a.pattern is Pattern.RAMP and span > 0 else 0.0
        # The n-th request comes when the integral of the rate reaches n.
        for n in range(int((a.rate + abs(slope) * span) * span) + 1):
            if slope:
                square = a.rate * a.rate + 2 * slope * n
                if square < 0:
                    return
                on_s = (math.sqrt(square) - a.rate) / slope
            else:
                on_s = n / a.rate
            at_s = self.stream.from_s + self._stretched(on_s)
            if at_s >= self.until_s:
                return
            yield at_s

    def _stretched(self, on_s: float) -> float:
        """Return when the stream has been sending for on_s, its silences counted in."""
        a = self.stream.arrivals
        return on_s + on_s // a.on_s * a.off_s if a.on_s else on_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WallDay:
    """The shell says that a local day began; days may come back after the clock was set."""

    at_s: float
    day: str
    ends_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong, and how often."""

    disconnects: float = 0.0  #: fraction of requests whose caller goes away, at any moment
    failures: float = 0.0  #: fraction of requests that the backend gives up
    losses_per_hour: float = 0.0  #: the backend forgets everything
    down_s: float = 2.0  #: and is back after that long
    clock_jumps: tuple[tuple[float, float], ...] = ()  #: (at, seconds ahead) of the engine's monotonic clock
    days: tuple[WallDay, ...] = ()


class FaultDraws:
    """Draws what goes wrong, from a generator of its own."""

    def __init__(self, faults: Faults, seed: int) -> None:
        """Draw for one run."""
        self._faults = faults
        self._rng = random.Random(f"{seed}/faults")

    def disconnects_after_s(self) -> float | None:
        """Return how long after its arrival a caller goes away, None if it stays.

        From a millisecond to a minute, each order of magnitude alike: every state is met.
        """
        if not self._faults.disconnects or self._rng.random() >= self._faults.disconnects:
            return None
        return float(10 ** self._rng.uniform(-3, 1.8))

    def fails_after(self, output_tokens: int) -> int | None:
        """Return after how many output tokens the backend gives a request up, None if it does not."""
        if not self._faults.failures or not output_tokens or self._rng.random() >= self._faults.failures:
            return None
        return self._rng.randint(1, output_tokens)

    def losses_at_s(self, duration_s: float) -> Iterator[float]:
        """Yield when the backend forgets everything."""
        at_s = 0.0
        while self._faults.losses_per_hour:
            at_s += self._rng.expovariate(self._faults.losses_per_hour / 3600)
            if at_s >= duration_s:
                return
            yield at_s
