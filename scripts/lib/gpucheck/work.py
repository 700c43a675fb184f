"""What both sides are given to do, and what is written down of how it went. Knows no library."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A household that asks for more than the card can do, and a voice now and then."""

    seconds: float  #: how long each side is watched
    document_tokens: int
    document_output: int
    documents_in_flight: int  #: as soon as one is answered, the next is asked for
    voice_tokens: int
    voice_output: int
    voice_every_s: float
    idle_voices: int  #: asked one by one, with nothing else to do
    cache_tokens: int
    max_sequences: int
    chunk_tokens: int


FULL = Work(
    seconds=40.0,
    document_tokens=6000,
    document_output=128,
    documents_in_flight=12,
    voice_tokens=800,
    voice_output=32,
    voice_every_s=0.8,
    idle_voices=10,
    cache_tokens=65_536,
    max_sequences=16,
    chunk_tokens=512,
)
TINY = Work(
    seconds=10.0,
    document_tokens=120,
    document_output=8,
    documents_in_flight=3,
    voice_tokens=24,
    voice_output=2,
    voice_every_s=2.5,
    idle_voices=2,
    cache_tokens=3072,
    max_sequences=4,
    chunk_tokens=256,
)


class Prompts:
    """Random token ids: the same sequence for both sides, and no prompt ever found in a cache."""

    def __init__(self, vocab_size: int) -> None:
        """Choose among the ordinary tokens of a vocabulary; its lowest ids are often control tokens."""
        self._random = random.Random(1)
        self._ids = range(min(100, vocab_size // 4), vocab_size)

    def next(self, length: int) -> tuple[int, ...]:
        """Return the next prompt."""
        return tuple(self._random.choices(self._ids, k=length))


@dataclass(slots=True)
class Watched:
    """One side's run. Seconds."""

    waits: list[float] = field(default_factory=list)  #: of every voice: from asking to its first token
    iterations: list[float] = field(default_factory=list)
    tokens: int = 0  #: prompt tokens computed and tokens generated
    documents: int = 0  #: answered to the end
    seconds: float = 0.0
    unanswered: int = 0  #: voices that had no token when the watching ended

    @property
    def tokens_per_s(self) -> float:
        """How much was computed."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, float | int | None]:
        """Return what is shown. A voice without any token counts as the whole time in the 95th percentile."""
        waits = sorted(self.waits + [self.seconds] * self.unanswered)
        return {
            "voices": len(self.waits),
            "voices_unanswered": self.unanswered,
            "voice_ttft_p50_ms": _ms(statistics.median(waits) if waits else None),
            "voice_ttft_p95_ms": _ms(percentile(waits, 0.95)),
            "longest_iteration_ms": _ms(max(self.iterations, default=None)),
            "iterations": len(self.iterations),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "documents_answered": self.documents,
        }


def percentile(ordered: list[float], part: float) -> float | None:
    """Return the nearest-rank percentile of ascending values."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def voice_times(work: Work) -> Iterator[float]:
    """Yield when voices ask, in seconds from the beginning, the first one after a little while."""
    at_s = work.voice_every_s / 2
    while at_s < work.seconds * 0.9:
        yield at_s
        at_s += work.voice_every_s
