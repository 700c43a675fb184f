"""What goes into the next iteration: decodes, prefill chunks, and who sits it out.

Reads the state; changes nothing.

Sources: Sarathi-Serve (Agrawal et al., OSDI 2024) for stall-free chunked prefill; QoServe/Niyama
(ASPLOS 2026) for growing the chunk to the decode slack with fixed per-token deadlines. Differs: the token
budget is ordered by class and counter in every iteration, at most one prompt is left half-computed
(several short ones may be finished together), and a spoken answer stops all other prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.scheduling.decisions import PrefillChunk
from engine_service.scheduling.estimator import IterationShape
from engine_service.scheduling.records import Record
from engine_service.scheduling.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """One iteration, before it becomes a decision."""

    decodes: tuple[Record, ...]
    prefills: tuple[PrefillChunk, ...]
    shape: IterationShape
    predicted_s: float | None

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to run."""
        return not self.decodes and not self.prefills


@dataclass(frozen=True, slots=True)
class _Ranked:
    record: Record
    urgency: int


def compose(state: State, *, now: float) -> Composition:
    """Return the next iteration over the requests that hold pages."""
    speaks = state.someone_speaks(now=now)
    prefilling = _eligible_prefills(state, _ranked(state, list(state.prefilling.values()), now=now), speaks)
    decoding = [_Ranked(r, 0) for r in state.holding.values() if r.is_decoding and not r.is_cancelled]
    if speaks:
        decoding = _ranked(state, [r.record for r in decoding], now=now)
        decoding = _beside_speech(state, decoding, prefilling, now=now)
    budget = _chunk_budget(state, decoding, prefilling, now=now)
    prefills = _fill(state, prefilling, budget)
    decodes = tuple(r.record for r in decoding)
    shape = _shape(state, decodes, prefills)
    return Composition(
        decodes=decodes, prefills=tuple(prefills), shape=shape, predicted_s=state.estimator.predict(shape)
    )


def _ranked(state: State, records: list[Record], *, now: float) -> list[_Ranked]:
    """Return the records in order, the first to be served first (only where order decides something)."""
    records = [r for r in records if not r.is_cancelled]
    records.sort(key=lambda r: state.order_key(r, now=now))
    return [_Ranked(record, state.urgency(record, now=now)) for record in records]


def _eligible_prefills(state: State, prefilling: list[_Ranked], speaks: bool) -> list[_Ranked]:
    spoken = [r for r in prefilling if r.urgency == 0]
    if spoken:
        return spoken[: state.policy.max_prefilling_spoken]
    if state.policy.sprint and speaks:
        return []
    return prefilling


def _beside_speech(
    state: State, decoding: list[_Ranked], prefilling: list[_Ranked], *, now: float
) -> list[_Ranked]:
    """Leave out lower decodes while they would break the spoken inter-token target, for a bounded time."""
    target = min(
        (
            t
            for r in (*decoding, *prefilling)
            if r.urgency == 0
            and (t := state.policy.classes[r.record.class_id].inter_token_target_s) is not None
        ),
        default=None,
    )
    if target is None:
        return decoding
    chunk = sum(r.record.remaining for r in prefilling)
    kept: list[_Ranked] = []
    for r in decoding:
        is_owed = now - r.record.last_served_at > state.policy.max_pause_s
        predicted = state.estimator.predict(_decode_shape([*kept, r], chunk))
        if r.urgency == 0 or is_owed or predicted is None or predicted <= target:
            kept.append(r)
    return kept


def _decode_shape(decoding: list[_Ranked], chunk: int, context: int = 0) -> IterationShape:
    return IterationShape(
        chunk_tokens=chunk,
        chunk_context=context,
        num_decodes=len(decoding),
        decode_context=sum(r.record.stored for r in decoding),
    )


def _slack_s(state: State, decoding: list[_Ranked], *, now: float) -> float | None:
    """Return the least time any reading or listening person can spare; None if nobody reads along.

    The deadline of output token n is fixed when the first one is out: first + n * target. A stream that
    ran ahead of its reader has slack to give to somebody's prompt.
    """
    slack: float | None = None
    for r in decoding:
        target = state.policy.classes[r.record.class_id].inter_token_target_s
        if target is None or r.record.first_token_at is None:
            continue
        spare = r.record.first_token_at + r.record.output * target - now
        slack = spare if slack is None else min(slack, spare)
    return slack


def _chunk_budget(state: State, decoding: list[_Ranked], prefilling: list[_Ranked], *, now: float) -> int:
    """Return the prompt tokens this iteration may compute (0: decodes only)."""
    policy = state.policy
    if not prefilling:
        return 0
    slack = _slack_s(state, decoding, now=now)
    if slack is None or prefilling[0].urgency == 0:
        return policy.max_chunk_tokens
    if not state.estimator.has_learned:
        return policy.min_chunk_tokens
    first = prefilling[0].record
    chunk = _largest_chunk(state, decoding, first.stored, slack)
    if chunk >= min(policy.efficient_chunk_tokens, first.remaining):
        return chunk
    # Decoding alone runs ahead of the readers and earns slack for a chunk worth its overhead (a pass over
    # the weights and the cache); unless the prompt has waited long enough, or decoding alone cannot keep
    # the target anyway.
    is_owed = now - first.last_served_at > policy.max_pause_s
    return max(chunk, policy.min_chunk_tokens) if is_owed or not _gains_slack(state, decoding) else 0


def _largest_chunk(state: State, decoding: list[_Ranked], context: int, slack: float) -> int:
    low, high = 0, state.policy.max_chunk_tokens
    while low < high:
        middle = (low + high + 1) // 2
        predicted = state.estimator.predict(_decode_shape(decoding, middle, context))
        if predicted is not None and predicted <= slack:
            low = middle
        else:
            high = middle - 1
    return low


def _gains_slack(state: State, decoding: list[_Ranked]) -> bool:
    alone = state.estimator.predict(_decode_shape(decoding, 0))
    targets = [
        t for r in decoding if (t := state.policy.classes[r.record.class_id].inter_token_target_s) is not None
    ]
    return alone is not None and bool(targets) and alone < 0.8 * min(targets)


def _fill(state: State, prefilling: list[_Ranked], budget: int) -> list[PrefillChunk]:
    """Cut chunks off the prompts in order; all but max_prefilling must be finished by theirs.

    A cut chunk is cut where the iteration fills whole passes of the backend: a few rows more would cost
    another pass over the weights and the cache.
    """
    granularity = state.known_capacity.chunk_granularity
    chunks: list[PrefillChunk] = []
    num_partial = 0
    rows = 0
    for r in prefilling:
        # A short urgent prompt is not made longer by filling its iteration with a less urgent one.
        if chunks and r.urgency != prefilling[0].urgency:
            break
        is_spoken = r.urgency == 0
        most_partial = state.policy.max_prefilling_spoken if is_spoken else state.policy.max_prefilling
        wanted = r.record.remaining
        size = min(wanted, budget)
        if size < wanted:
            size -= size % granularity
            overhang = (rows + size) % state.known_capacity.row_multiple
            if overhang < size:
                size -= overhang
            if num_partial >= most_partial:
                continue
        if size <= 0 or (chunks and not is_spoken and not state.known_capacity.mixes_prefill_and_decode):
            break
        chunks.append(PrefillChunk(request_id=r.record.request_id, num_tokens=size))
        num_partial += size < wanted
        budget -= size
        rows += size
    return chunks


def _shape(state: State, decodes: tuple[Record, ...], prefills: list[PrefillChunk]) -> IterationShape:
    return IterationShape(
        chunk_tokens=sum(chunk.num_tokens for chunk in prefills),
        chunk_context=max((state.records[chunk.request_id].stored for chunk in prefills), default=0),
        num_decodes=len(decodes),
        decode_context=sum(record.stored for record in decodes),
    )
