"""A device that only knows lengths: pages, tokens and seconds, no text and no clock of its own.

Carries out the scheduler's decisions as a backend would, and refuses what a real one could not do: two
iterations at once, tokens beyond a reservation, pages that are not there. What it finds is therefore a bug
of the scheduler (`DeviceRefused`), never a property of the workload.

Semantics as of ExLlamaV2 (pages of 256 tokens, a forward pass per prompt, then one for all decodes) or of
llama.cpp (one pass for everything); which of them is the profile's `mixes_prefill_and_decode`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.scheduling.decisions import Admit, Cancel, Compose, Decision, Grow, Preempt, PrefillChunk
from engine_service.scheduling.events import SequenceResult
from engine_service.scheduling.model import Request, RequestId, pages_for
from engine_service.simulator.profiles import DeviceProfile


class DeviceRefused(Exception):
    """The scheduler ordered what no backend could do."""


@dataclass(slots=True)
class Sequence:
    """What the device knows of a request. The length of its answer is known to nobody else."""

    request: Request
    output_length: int  #: tokens it will really produce, at most `request.max_tokens`
    fails_after: int | None = None  #: output tokens after which the backend gives it up
    shared: int = 0  #: leading tokens held by a pinned prefix
    stored: int = 0
    output: int = 0
    computed: int = 0  #: highest position ever computed: what lies below is computed again
    reserved: int = 0
    is_resident: bool = False
    is_new: bool = False  #: admitted, not reported on yet
    found: int = 0  #: tokens found in the prefix cache at its admission
    fresh: int = 0  #: prompt tokens of its last chunk that had never been computed before
    cached_pages: int = 0  #: full pages that may still be readable after a preemption
    is_done: bool = False

    @property
    def length(self) -> int:
        """Prompt plus output so far."""
        return self.request.prompt_tokens + self.output


@dataclass(slots=True, kw_only=True)
class Flight:
    """The iteration under way."""

    composed: Compose
    started_at: float
    ends_at: float
    chunks: list[tuple[Sequence, int, int]]  #: (whose, tokens to compute, tokens stored before)
    decodes: list[Sequence]
    num_decoding: int  #: sequences in its decode pass
    decoding_context: int  #: tokens they store together
    seconds: float  #: its duration when nobody aborts it
    is_aborted: bool = False


class Device:
    """Holds sequences, runs one iteration at a time."""

    def __init__(self, profile: DeviceProfile) -> None:
        """Start empty."""
        self.profile = profile
        self.flight: Flight | None = None
        self._capacity = profile.capacity
        self._sequences: dict[RequestId, Sequence] = {}
        self._pages: dict[RequestId, int] = {}
        self._pinned: dict[RequestId, int] = {}
        self._num_held = 0
        self._released: dict[RequestId, Sequence] = {}  #: oldest first; their pages may be taken
        self._num_released = 0
        self._plain: dict[RequestId, SequenceResult] = {}

    def introduce(self, sequence: Sequence) -> None:
        """Make a request known (it holds nothing yet)."""
        sequence.shared = sequence.request.shared_prefix_tokens
        self._sequences[sequence.request.request_id] = sequence

    @property
    def num_held(self) -> int:
        """Pages held by sequences and pinned prefixes."""
        return self._num_held + sum(self._pinned.values())

    def pages_of(self, request_id: RequestId) -> int:
        """Return the pages the request holds (0 if none)."""
        return self._pages.get(request_id, 0)

    # ---- orders

    def carry_out(self, decision: Decision, *, now: float) -> None:
        """Do what the scheduler says; raise DeviceRefused where that is impossible."""
        match decision:
            case Admit(request_id=request_id, reserved_tokens=reserved):
                self._admit(request_id, reserved)
            case Grow(request_id=request_id, reserved_tokens=reserved):
                self._grow(request_id, reserved)
            case Preempt(request_id=request_id):
                self._preempt(request_id)
            case Cancel(request_id=request_id):
                self._drop(request_id)
            case Compose():
                self._begin(decision, now=now)
            case _:
                pass

    def _admit(self, request_id: RequestId, reserved: int) -> None:
        sequence = self._sequences[request_id]
        if sequence.is_resident:
            raise DeviceRefused(f"{request_id} was admitted twice")
        if len(self._pages) >= self._capacity.max_sequences:
            raise DeviceRefused(f"{request_id}: all {self._capacity.max_sequences} sequences are taken")
        found = self._find_cached(sequence)
        sequence.is_resident = sequence.is_new = True
        sequence.stored = max(sequence.shared, found)
        sequence.found = sequence.stored
        sequence.reserved = reserved
        self._take_pages(request_id, self._pages_of(sequence))

    def _find_cached(self, sequence: Sequence) -> int:
        """Return the tokens of a preempted request that are still readable; its pages are taken back."""
        if self._released.pop(sequence.request.request_id, None) is None:
            return 0
        self._num_released -= sequence.cached_pages
        # The last token is always computed: its logits are wanted.
        return min(sequence.cached_pages * self._capacity.page_tokens, sequence.length - 1)

    def _pages_of(self, sequence: Sequence) -> int:
        return pages_for(sequence.reserved - sequence.shared, self._capacity.page_tokens)

    def _take_pages(self, request_id: RequestId, num_pages: int) -> None:
        self._num_held += num_pages - self._pages.get(request_id, 0)
        self._pages[request_id] = num_pages
        if self.num_held > self._capacity.num_pages:
            raise DeviceRefused(
                f"{request_id}: {self.num_held} pages are promised, there are {self._capacity.num_pages}"
            )
        self._forget_cached()

    def _forget_cached(self) -> None:
        """Let go of cached pages, oldest first, where the pages are needed."""
        while self._num_released and self.num_held + self._num_released > self._capacity.num_pages:
            oldest = next(iter(self._released.values()))
            oldest.cached_pages -= 1
            self._num_released -= 1
            if not oldest.cached_pages:
                del self._released[oldest.request.request_id]

    def _grow(self, request_id: RequestId, reserved: int) -> None:
        sequence = self._sequences[request_id]
        if not sequence.is_resident or reserved <= sequence.reserved:
            raise DeviceRefused(f"{request_id} cannot grow from {sequence.reserved} to {reserved}")
        sequence.reserved = reserved
        self._take_pages(request_id, self._pages_of(sequence))

    def _preempt(self, request_id: RequestId) -> None:
        sequence = self._sequences[request_id]
        if not sequence.is_resident:
            raise DeviceRefused(f"{request_id} was preempted and holds nothing")
        own = sequence.stored - sequence.shared
        self._release(sequence)
        if self.profile.has_prefix_cache and own >= self._capacity.page_tokens:
            sequence.cached_pages = own // self._capacity.page_tokens
            self._released[request_id] = sequence
            self._num_released += sequence.cached_pages
            self._forget_cached()

    def _release(self, sequence: Sequence) -> None:
        sequence.is_resident = sequence.is_new = False
        sequence.stored = 0
        self._num_held -= self._pages.pop(sequence.request.request_id, 0)

    def _drop(self, request_id: RequestId) -> None:
        self._pinned.pop(request_id, None)
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        self._release(sequence)
        self._plain.pop(request_id, None)
        if self._released.pop(request_id, None) is not None:
            self._num_released -= sequence.cached_pages
        self._sequences.pop(request_id, None)

    def lose_everything(self) -> None:
        """Forget all that is held; requests may be admitted again."""
        self.flight = None
        self._pinned.clear()
        self._released.clear()
        self._num_released = 0
        for request_id in list(self._pages):
            self._release(self._sequences[request_id])
        for sequence in self._sequences.values():
            sequence.cached_pages = sequence.shared = 0

    # ---- an iteration

    def _begin(self, composed: Compose, *, now: float) -> None:
        if self.flight is not None:
            raise DeviceRefused("an iteration is under way and another was ordered")
        decodes = [self._resident(request_id) for request_id in composed.decode_ids]
        chunks = []
        for chunk in composed.prefills:
            sequence = self._resident(chunk.request_id)
            chunks.append((sequence, self._size_of(chunk), sequence.stored))
        finishing = [s for s, size, stored in chunks if stored + size == s.length and s.request.max_tokens]
        # A prompt that ends gets its first token from the decode pass, where there is a separate one.
        joining = [] if self._capacity.mixes_prefill_and_decode else finishing
        num_decoding = len(decodes) + len(joining)
        context = sum(s.stored for s in decodes) + sum(s.length for s in joining)
        seconds = self.profile.seconds(
            chunks=[(size, stored) for _, size, stored in chunks],
            num_decodes=num_decoding,
            decode_context_tokens=context,
        )
        self.flight = Flight(
            composed=composed,
            started_at=now,
            ends_at=now + seconds,
            chunks=chunks,
            decodes=decodes,
            num_decoding=num_decoding,
            decoding_context=context,
            seconds=seconds,
        )

    def _resident(self, request_id: RequestId) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.is_resident:
            raise DeviceRefused(f"{request_id} takes part in an iteration and holds no pages")
        return sequence

    def _size_of(self, chunk: PrefillChunk) -> int:
        sequence = self._sequences[chunk.request_id]
        size = min(chunk.num_tokens, sequence.length - sequence.stored)
        if size < 1:
            raise DeviceRefused(f"{chunk.request_id} has nothing left to prefill")
        return size

    def abort(self, *, now: float) -> None:
        """Cut the iteration short at now, if the backend can."""
        if self.flight is None or not self._capacity.can_abort:
            raise DeviceRefused("there is no iteration that could be aborted")
        self.flight.is_aborted = True
        self.flight.ends_at = min(self.flight.ends_at, now)

    def finish(self) -> tuple[SequenceResult, ...]:
        """End the iteration under way and return what everybody got out of it."""
        flight = self.flight
        if flight is None:
            raise DeviceRefused("no iteration is under way")
        self.flight = None
        if flight.is_aborted:
            return self._kept(flight)
        results = [self._decode(sequence) for sequence in flight.decodes]
        results.extend(self._prefill(sequence, size) for sequence, size, _ in flight.chunks)
        return tuple(results)

    def _kept(self, flight: Flight) -> tuple[SequenceResult, ...]:
        """Return what an aborted iteration computed: whole grains of its rows, decodes first."""
        grain = self.profile.abort_grain_tokens
        total = len(flight.decodes) + sum(size for _, size, _ in flight.chunks)
        elapsed, left = flight.ends_at - flight.started_at, 0
        while grain and left + grain < total and self._seconds_of(flight, left + grain) <= elapsed:
            left += grain
        if not left or left < len(flight.decodes):
            return ()
        results = [self._decode(sequence) for sequence in flight.decodes]
        left -= len(flight.decodes)
        for sequence, size, _ in flight.chunks:
            kept = min(size, left)
            left -= kept
            if kept:
                results.append(self._prefill(sequence, kept))
        return tuple(results)

    def _seconds_of(self, flight: Flight, num_rows: int) -> float:
        """Return how long the first rows of an iteration take."""
        decodes = flight.decodes[:num_rows]
        left, chunks = num_rows - len(decodes), []
        for _, size, stored in flight.chunks:
            chunks.append((min(size, left), stored))
            left -= chunks[-1][0]
        return self.profile.seconds(
            chunks=[chunk for chunk in chunks if chunk[0]],
            num_decodes=len(decodes),
            decode_context_tokens=sum(sequence.stored for sequence in decodes),
        )

    def _decode(self, sequence: Sequence) -> SequenceResult:
        sequence.stored += 1
        if sequence.stored > sequence.reserved:
            raise DeviceRefused(
                f"{sequence.request.request_id} stores {sequence.stored} of {sequence.reserved} tokens"
            )
        if sequence.stored > sequence.computed:
            sequence.computed = sequence.stored
        sequence.output += 1
        if sequence.output < sequence.output_length and sequence.fails_after is None:
            request_id = sequence.request.request_id
            plain = self._plain.get(request_id)
            if plain is None:
                plain = self._plain[request_id] = SequenceResult(request_id=request_id, decode_tokens=1)
            return plain
        return self._token(sequence, prefilled=0, cached=0)

    def _prefill(self, sequence: Sequence, size: int) -> SequenceResult:
        cached = sequence.found if sequence.is_new else 0
        sequence.is_new = False
        start = sequence.stored
        sequence.stored += size
        last = min(sequence.stored, sequence.request.prompt_tokens)
        sequence.fresh = max(0, last - max(start, sequence.computed))
        sequence.computed = max(sequence.computed, sequence.stored)
        if sequence.stored > sequence.reserved:
            raise DeviceRefused(
                f"{sequence.request.request_id} stores {sequence.stored} of {sequence.reserved} tokens"
            )
        if sequence.stored < sequence.length:
            return SequenceResult(
                request_id=sequence.request.request_id, prefill_tokens=size, cached_tokens=cached
            )
        if sequence.request.max_tokens:
            sequence.output += 1
            return self._token(sequence, prefilled=size, cached=cached)
        self._end(sequence)
        return SequenceResult(
            request_id=sequence.request.request_id, prefill_tokens=size, cached_tokens=cached, finished=True
        )

    def _token(self, sequence: Sequence, *, prefilled: int, cached: int) -> SequenceResult:
        finished = sequence.output >= sequence.output_length
        failed = sequence.fails_after is not None and sequence.output >= sequence.fails_after
        if finished or failed:
            self._end(sequence)
        return SequenceResult(
            request_id=sequence.request.request_id,
            prefill_tokens=prefilled,
            cached_tokens=cached,
            decode_tokens=1,
            finished=finished or failed,
            failed=failed and not finished,
        )

    def _end(self, sequence: Sequence) -> None:
        sequence.is_done = True
        request = sequence.request
        if request.keep_prefix:
            own = request.prompt_tokens - sequence.shared
            self._pinned[request.request_id] = pages_for(own, self._capacity.page_tokens)
        self._forget(sequence)

    def drop_prefix(self, request_id: RequestId) -> None:
        """Free the pages of a pinned prefix; who waits for it must compute it. Unknown ids change nothing."""
        if self._pinned.pop(request_id, None) is not None:
            for sequence in self._sequences.values():
                if not sequence.is_resident:
                    sequence.shared = 0
