"""What goes into the next iteration: decodes, prefill chunks, and who sits it out.

Reads the state; changes nothing.

Sources: Sarathi-Serve (Agrawal et al., OSDI 2024) for stall-free chunked prefill; QoServe/Niyama
(ASPLOS 2026) for growing the chunk to the decode slack with fixed per-token deadlines. Differs: the token
budget is ordered by class and counter in every iteration, at most one prompt is left half-computed
(several short ones may be finished together), and a spoken answer stops all other prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from engine_service.scheduling.decisions import PrefillChunk
from engine_service.scheduling.estimator import IterationShape
from engine_service.scheduling.records import Record
from engine_service.scheduling.state import State

_HARDLY_LESS: Final = 0.75
"""Of the time that decodes take by themselves; beside speech, what saves less than the rest waits."""


@dataclass(slots=True, kw_only=True)
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


def compose(state: State, *, now: float) -> Composition:
    """Return the next iteration over the requests that hold pages."""
    speaks = state.someone_speaks(now=now)
    decoding = state.decodes()
    prefilling: list[Record] = []
    if state.prefilling:
        prefilling = _eligible_prefills(state, _ranked(state, state.prefilling.values(), now=now), speaks)
    if speaks:
        decoding = _beside_speech(state, _ranked(state, decoding, now=now), prefilling, now=now)
    elif state.policy.pace_ahead_s is not None and (prefilling or state.waiting_flows):
        decoding = _paced(decoding, prefilling, state.policy.pace_ahead_s, now=now)
    context = sum([r.stored for r in decoding])
    prefills: list[PrefillChunk] = []
    if prefilling:
        prefills = _fill(state, prefilling, _chunk_budget(state, decoding, context, prefilling, now=now))
    shape = _shape(state, len(decoding), context, prefills)
    return Composition(
        decodes=decoding, prefills=tuple(prefills), shape=shape, predicted_s=state.estimator.predict(shape)
    )


def _ranked(state: State, records: Iterable[Record], *, now: float) -> list[Record]:
    """Return the records in order, the first to be served first (only where order decides something)."""
    ranked = [r for r in records if not r.is_cancelled]
    ranked.sort(key=lambda r: state.order_key(r, now=now))
    return ranked


def _eligible_prefills(state: State, prefilling: list[Record], speaks: bool) -> list[Record]:
    spoken = [r for r in prefilling if r.flow.urgency == 0]
    if spoken:
        return spoken[: state.policy.max_prefilling_spoken]
    if state.policy.sprint and speaks:
        return []
    return prefilling


def _beside_speech(
    state: State, decoding: list[Record], prefilling: list[Record], *, now: float
) -> tuple[Record, ...]:
    """Leave out lower decodes that would hold a spoken answer up, for a bounded time.

    That is where they would break its inter-token target, and where computing them beside it saves hardly
    anything: then all of them are done as soon, and what is spoken is done sooner. Whoever reads along is
    left out for that only while there is text left to read.
    """
    target = min(
        (
            t
            for r in (*decoding, *prefilling)
            if r.flow.urgency == 0 and (t := r.flow.rules.inter_token_target_s) is not None
        ),
        default=None,
    )
    if target is None:
        return tuple(decoding)
    chunk = sum(r.remaining for r in prefilling)
    saves_little = state.policy.sprint and _batching_saves_little(state, decoding, chunk)
    kept: list[Record] = []
    context = 0
    for r, spare in zip(decoding, _spares_s(decoding, now=now), strict=True):
        is_owed = now - r.last_served_at > state.policy.max_pause_s
        predicted = state.estimator.seconds(chunk, 0, len(kept) + 1, context + r.stored)
        can_wait = saves_little and (spare is None or spare > 0)
        is_short = predicted is None or predicted <= target
        if r.flow.urgency == 0 or is_owed or (is_short and not can_wait):
            kept.append(r)
            context += r.stored
    return tuple(kept)


def _batching_saves_little(state: State, decoding: list[Record], chunk: int) -> bool:
    """Return whether other decodes take about as long beside what is spoken as in iterations of their own.

    So it is on a processor, where every row costs; on a GPU the weights that are read for one row serve all.
    """
    seconds = state.estimator.seconds
    spoken = [r.stored for r in decoding if r.flow.urgency == 0]
    others = [r.stored for r in decoding if r.flow.urgency != 0]
    if not others:
        return False
    together = seconds(chunk, 0, len(decoding), sum(spoken) + sum(others))
    alone = seconds(chunk, 0, len(spoken), sum(spoken))
    apart = seconds(0, 0, len(others), sum(others))
    if together is None or alone is None or apart is None:
        return False
    return together - alone >= _HARDLY_LESS * apart


def _paced(
    decoding: tuple[Record, ...], prefilling: list[Record], ahead_s: float, *, now: float
) -> tuple[Record, ...]:
    """Leave out answers that are so far ahead of their readers that nobody notices, while others wait."""
    spares = zip(decoding, _spares_s(decoding, now=now), strict=True)
    kept = tuple([r for r, spare in spares if spare is None or spare <= ahead_s])
    # Somebody must be computed: an idle device helps nobody.
    return kept if kept or prefilling else decoding


def _spares_s(records: Iterable[Record], *, now: float) -> list[float | None]:
    """Return how long each reader could do without the next token; None where nobody reads along."""
    spares: list[float | None] = []
    for r in records:
        target, first_at = r.flow.rules.inter_token_target_s, r.first_token_at
        if target is None or first_at is None:
            spares.append(None)
        else:
            spares.append(first_at + (r.length - r.request.prompt_tokens) * target - now)
    return spares


def _slack_s(decoding: Iterable[Record], *, now: float) -> float | None:
    """Return the least time any reading or listening person can spare; None if nobody reads along.

    The deadline of output token n is fixed when the first one is out: first + n * target. A stream that
    ran ahead of its reader has slack to give to somebody's prompt.
    """
    return min([spare for spare in _spares_s(decoding, now=now) if spare is not None], default=None)


def _chunk_budget(
    state: State, decoding: tuple[Record, ...], context: int, prefilling: list[Record], *, now: float
) -> int:
    """Return the prompt tokens this iteration may compute (0: decodes only)."""
    policy = state.policy
    first = prefilling[0]
    if first.flow.urgency == 0:
        return policy.max_chunk_tokens
    slack = _slack_s(decoding, now=now)
    if slack is None:
        return policy.max_chunk_tokens
    if not state.estimator.has_learned:
        return policy.min_chunk_tokens
    chunk = _largest_chunk(state, first.stored, len(decoding), context, slack)
    if chunk >= min(policy.efficient_chunk_tokens, first.remaining):
        return chunk
    # Decoding alone runs ahead of the readers and earns slack for a chunk worth its overhead (a pass over
    # the weights and the cache); unless the prompt has waited long enough, or decoding alone cannot keep
    # the target anyway.
    is_owed = now - first.last_served_at > policy.max_pause_s
    gains_slack = _gains_slack(state, decoding, context)
    return max(chunk, policy.min_chunk_tokens) if is_owed or not gains_slack else 0


def _largest_chunk(state: State, stored: int, num_decodes: int, context: int, slack: float) -> int:
    seconds = state.estimator.seconds
    low, high = 0, state.policy.max_chunk_tokens
    while low < high:
        middle = (low + high + 1) // 2
        predicted = seconds(middle, stored, num_decodes, context)
        if predicted is not None and predicted <= slack:
            low = middle
        else:
            high = middle - 1
    return low


def _gains_slack(state: State, decoding: tuple[Record, ...], context: int) -> bool:
    alone = state.estimator.seconds(0, 0, len(decoding), context)
    targets = [t for r in decoding if (t := r.flow.rules.inter_token_target_s) is not None]
    return alone is not None and bool(targets) and alone < 0.8 * min(targets)


def _fill(state: State, prefilling: list[Record], budget: int) -> list[PrefillChunk]:
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
        if chunks and r.flow.urgency != prefilling[0].flow.urgency:
            break
        is_spoken = r.flow.urgency == 0
        most_partial = state.policy.max_prefilling_spoken if is_spoken else state.policy.max_prefilling
        wanted = r.remaining
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
        chunks.append(PrefillChunk(request_id=r.request_id, num_tokens=size))
        num_partial += size < wanted
        budget -= size
        rows += size
    return chunks


def _shape(state: State, num_decodes: int, context: int, prefills: list[PrefillChunk]) -> IterationShape:
    return IterationShape(
        chunk_tokens=sum([chunk.num_tokens for chunk in prefills]),
        chunk_context=max([state.records[chunk.request_id].stored for chunk in prefills], default=0),
        num_decodes=num_decodes,
        decode_context=context,
    )
