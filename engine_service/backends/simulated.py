"""A backend without a model: real sequences, cells and sampling, time by a cost model, text without sense.

Decides what a language model would decide, by arithmetic: the next token is a function of every token id it
reads back from its own store, so a mistake in paging, sharing or resuming changes the text. Used by tests, by
the simulator (in virtual time) and by `fairhearth serve` where no model is wanted.

It can be told to fail: one step, one request, or everything it holds.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.base import (
    BackendError,
    ChunkOrder,
    GenerationOrder,
    InvalidConstraint,
    Language,
    ModelInfo,
    SequenceOutcome,
    StepOutcome,
    Tell,
    Tokenizer,
)
from engine_service.backends.cost_model import CPU_SMOLLM2, CostModel
from engine_service.backends.generation import Matcher, Vocabulary
from engine_service.backends.holding import Part
from engine_service.backends.parking import Memory, fresh_memory
from engine_service.backends.sequences import SequenceHolder
from engine_service.scheduling.model import Capacity, RequestId

Advance = Callable[[float], float]

_PAGE_TOKENS: Final = 32
_LOAD_PARTS: Final = 20
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS: Final = [
    "the",
    "a",
    "an",
    "and",
    "of",
    "to",
    "in",
    "on",
    "at",
    "is",
    "was",
    "it",
    "for",
    "with",
    "from",
    "by",
    "light",
    "lamp",
    "door",
    "window",
    "kitchen",
    "garden",
    "hall",
    "room",
    "morning",
    "evening",
    "night",
    "winter",
    "summer",
    "rain",
    "sun",
    "wind",
    "warm",
    "cold",
    "quiet",
    "bright",
    "open",
    "closed",
    "turns",
    "goes",
    "waits",
    "keeps",
    "writes",
    "reads",
    "brings",
    "takes",
    "rings",
    "sings",
    "bread",
    "tea",
    "coffee",
    "water",
    "clock",
    "bell",
    "book",
    "letter",
    "cat",
    "bird",
    "tree",
    "stairs",
    "fire",
    "table",
    "chair",
    "music",
    "home",
    "soon",
    "later",
    "then",
    "again",
    "never",
    "always",
    "still.",
]
_PIECES: Final[tuple[bytes, ...]] = (
    *(bytes([value]) for value in range(256)),
    *(f" {word}".encode() for word in _WORDS),
    "💡".encode()[:2],  # half a character: streams must hold it back until the other half has come
    "💡".encode()[2:],
)
_START_ID: Final = len(_PIECES)
_END_ID: Final = _START_ID + 1
_VOCAB_SIZE: Final = _END_ID + 1
_SPECIAL: Final = {"<|im_start|>": _START_ID, "<|im_end|>": _END_ID}
_FIRST_WORD_ID: Final = 256
_HALF_ID, _OTHER_HALF_ID = _START_ID - 2, _START_ID - 1

_SPECIAL_PATTERN: Final = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")
_WORD_IDS: Final = {f" {word}": _FIRST_WORD_ID + index for index, word in enumerate(_WORDS)}
_WORD_PATTERN: Final = re.compile(
    "(" + "|".join(sorted(map(re.escape, _WORD_IDS), key=len, reverse=True)) + ")"
)

_END_ONE_IN: Final = 64  #: about every 64th token ends the text
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_MASK: Final = (1 << 64) - 1


class SimulatedTokenizer:
    """Bytes, some whole words and two control tokens; decoding returns exactly what was encoded."""

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return token ids; lone surrogates are encoded as question marks."""
        parts = _SPECIAL_PATTERN.split(text) if parse_special else [text]
        ids: list[int] = []
        for part in parts:
            if parse_special and part in _SPECIAL:
                ids.append(_SPECIAL[part])
            else:
                ids.extend(_encode_plain(part))
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without control tokens; raise ValueError for ids that do not exist."""
        if any(not 0 <= token_id < _VOCAB_SIZE for token_id in token_ids):
            raise ValueError(f"token ids must be in 0 to {_VOCAB_SIZE - 1}")
        return b"".join(map(_token_bytes, token_ids)).decode("utf-8", "replace")


def _encode_plain(text: str) -> Iterator[int]:
    for part in _WORD_PATTERN.split(text):
        if part in _WORD_IDS:
            yield _WORD_IDS[part]
        else:
            yield from part.encode("utf-8", "replace")


def _token_bytes(token_id: int) -> bytes:
    return _PIECES[token_id] if token_id < _START_ID else b""


class SlotStore:
    """Token slots that really hold tokens; a sequence is a table of slot numbers."""

    def __init__(self, num_cells: int) -> None:
        """Own num_cells empty slots."""
        self.num_cells = num_cells
        self._tokens = np.full(num_cells, -1, dtype=np.int32)
        self._owners = np.zeros(num_cells, dtype=np.int32)
        self._free = list(range(num_cells - 1, -1, -1))
        self._tables: dict[int, NDArray[np.int64]] = {}

    @property
    def longest(self) -> int:
        """Slots that one sequence may hold."""
        return self.num_cells

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def length(self, sequence_id: int) -> int:
        """Return how many tokens the sequence stores."""
        return len(self._tables.get(sequence_id, ()))

    def num_held(self, sequence_ids: Sequence[int]) -> int:
        """Return how many different slots these sequences hold together."""
        tables = [self._tables[i] for i in sequence_ids if i in self._tables]
        return len(np.unique(np.concatenate(tables))) if tables else 0

    def write(self, sequence_id: int, tokens: NDArray[np.int32]) -> None:
        """Store more tokens of a sequence in slots of its own."""
        slots = np.array([self._free.pop() for _ in range(len(tokens))], dtype=np.int64)
        self._tokens[slots] = tokens
        self._owners[slots] = 1
        self._tables[sequence_id] = np.concatenate((self._table(sequence_id), slots))

    def read(self, sequence_id: int) -> NDArray[np.int32]:
        """Return the tokens that lie in the sequence's slots."""
        tokens: NDArray[np.int32] = self._tokens[self._table(sequence_id)]
        return tokens

    def share(self, source_id: int, target_id: int, start: int, end: int) -> None:
        """Let the target, which stores exactly start tokens, hold the source's slots [start, end) too."""
        slots = self._table(source_id)[start:end]
        if self.length(target_id) != start or len(slots) != end - start:
            raise AssertionError(f"cannot share [{start}, {end}) of {source_id} with {target_id}")
        self._owners[slots] += 1
        self._tables[target_id] = np.concatenate((self._table(target_id), slots))

    def cut(self, sequence_id: int, length: int) -> None:
        """Forget the sequence's tokens from position length on; 0 forgets all."""
        table = self._table(sequence_id)
        self._owners[table[length:]] -= 1
        for slot in table[length:]:
            if not self._owners[slot]:
                self._tokens[slot] = -1
                self._free.append(int(slot))
        self._tables[sequence_id] = table[:length]
        if not length:
            self._tables.pop(sequence_id)

    def save(self, sequence_id: int, memory: Memory = fresh_memory) -> NDArray[np.uint8]:
        """Return what the sequence stores as bytes."""
        stored = self.read(sequence_id).view(np.uint8)
        data = memory(stored.nbytes)
        data[:] = stored
        return data

    def load(self, sequence_id: int, data: NDArray[np.uint8], num_tokens: int) -> bool:
        """Store saved tokens under an empty id; False: no room."""
        tokens = data.view(np.int32)
        if len(tokens) != num_tokens or num_tokens > self.num_free:
            return False
        self.write(sequence_id, tokens)
        return True

    def _table(self, sequence_id: int) -> NDArray[np.int64]:
        return self._tables.get(sequence_id, np.zeros(0, dtype=np.int64))


class SimulatedBackend(SequenceHolder):
    """Behaves like a model on a device whose speed is a `CostModel`."""

    def __init__(
        self,
        *,
        cost_model: CostModel = CPU_SMOLLM2,
        context_tokens: int = 8192,
        max_sequences: int = 16,
        page_tokens: int = _PAGE_TOKENS,
        micro_batch: int = 128,
        parking_bytes: int = 0,
        name: str = "simulated",
        advance: Advance | None = None,
    ) -> None:
        """Offer context_tokens slots to max_sequences requests.

        advance lets time pass: it gets the seconds an iteration takes and returns those that passed; fewer
        means that the iteration was aborted then. None waits for real and heeds `abort`. An abort loses at
        most micro_batch tokens.
        """
        if context_tokens < page_tokens:
            raise ValueError(f"context_tokens must be >= page_tokens ({page_tokens}), not {context_tokens}")
        if max_sequences < 1 or micro_batch < 1:
            raise ValueError("max_sequences and micro_batch must be >= 1")
        self._cost = cost_model
        self._advance = advance or self._wait
        self._micro_batch = micro_batch
        self._slots = SlotStore(context_tokens)
        self._tokenizer = SimulatedTokenizer()
        self._capacity = _capacity_of(context_tokens, page_tokens, max_sequences)
        self._info = _describe(name, context_tokens)
        self._powers = _powers(context_tokens)
        self._step_fault: Exception | None = None
        self._request_faults: dict[RequestId, Exception] = {}
        self._is_lost = False
        self._abort_lock = threading.Lock()
        self._abort_wanted = threading.Event()
        self._is_stepping = False
        vocabulary = Vocabulary(
            size=_VOCAB_SIZE,
            end_ids=frozenset({_END_ID}),
            token_bytes=_token_bytes,
            max_context_tokens=context_tokens,
        )
        super().__init__(
            self._slots,
            vocabulary=vocabulary,
            num_sequence_ids=4 * max_sequences,
            max_sequences=max_sequences,
            max_pinned=3 * max_sequences,
            max_idle_cells=context_tokens // 8,
            parking_bytes=parking_bytes,
        )

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """What it pretends to be (any thread)."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer (any thread)."""
        return self._tokenizer

    @property
    def capacity(self) -> Capacity:
        """What requests may hold in all."""
        return self._capacity

    def validate(self, order: GenerationOrder) -> None:
        """Raise InvalidConstraint for any grammar: it has none (any thread)."""
        _refuse_grammar(order)

    def _matcher_for(self, order: GenerationOrder) -> Matcher | None:
        _refuse_grammar(order)
        return None

    def abort(self) -> None:
        """Make the step under way return early (any thread); no-op when idle or where `advance` rules."""
        with self._abort_lock:
            if self._is_stepping:
                self._abort_wanted.set()

    def close(self) -> None:
        """There is nothing to free."""

    # -- being told to fail ----------------------------------------------------------------------------

    def fail_next_step(self, error: Exception) -> None:
        """Raise error from the next step, which computes nothing."""
        self._step_fault = error

    def fail_request(self, request_id: RequestId, error: Exception) -> None:
        """Report error for that request in the next step it is part of."""
        self._request_faults[request_id] = error

    def lose_everything(self) -> None:
        """Forget every sequence; from now on every step raises BackendError."""
        self._is_lost = True

    # -- an iteration ----------------------------------------------------------------------------------

    def step(self, decode_ids: Sequence[RequestId], prefills: Sequence[ChunkOrder]) -> StepOutcome:
        """Run one iteration over exactly these; raises as `base.Backend.step` says."""
        if self._is_lost:
            raise BackendError("the simulated device lost everything it held")
        fault, self._step_fault = self._step_fault, None
        if fault is not None:
            raise fault
        parts = self._plan(decode_ids, prefills)
        if not parts:
            return StepOutcome(outcomes=(), seconds=0.0)
        self._make_room(sum(part.num_tokens for part in parts))
        ends = [self._seconds(batch) for batch in self._micro_batches(parts)]
        passed = self._let_pass(ends[-1])
        is_aborted = passed < ends[-1]
        num_done = sum(end <= passed for end in ends) if is_aborted else len(ends)
        outcomes = self._collect(parts, num_rows=num_done * self._micro_batch)
        return StepOutcome(outcomes=tuple(outcomes), seconds=passed, aborted=is_aborted)

    def _micro_batches(self, parts: list[Part]) -> Iterator[list[tuple[Part, int]]]:
        """Yield, for the end of every micro-batch, the parts and how many of their tokens are computed."""
        total = sum(part.num_tokens for part in parts)
        for end in range(self._micro_batch, total + self._micro_batch, self._micro_batch):
            yield list(_shares(parts, end))

    def _seconds(self, done: list[tuple[Part, int]]) -> float:
        chunks = [(part.live.num_stored, kept) for part, kept in done if part.is_chunk and kept]
        decodes = [part.live.num_stored for part, kept in done if not part.is_chunk and kept]
        return self._cost.seconds(
            chunk_tokens=sum(kept for _, kept in chunks),
            chunk_pairs=sum(stored * kept for stored, kept in chunks),
            num_decodes=len(decodes),
            decode_context_tokens=sum(decodes),
        )

    def _let_pass(self, seconds: float) -> float:
        with self._abort_lock:
            self._abort_wanted.clear()
            self._is_stepping = True
        try:
            return self._advance(seconds)
        finally:
            with self._abort_lock:
                self._is_stepping = False

    def _wait(self, seconds: float) -> float:
        """Let real time pass; return the seconds it took, fewer than asked only if aborted."""
        started = time.perf_counter()
        is_aborted = self._abort_wanted.wait(seconds)
        passed = time.perf_counter() - started
        return min(passed, seconds * (1 - 1e-9)) if is_aborted else max(passed, seconds)

    def _collect(self, parts: list[Part], *, num_rows: int) -> list[SequenceOutcome]:
        outcomes = []
        for part, kept in _shares(parts, num_rows):
            live = part.live
            tokens = live.generation.tokens(live.num_stored, live.num_stored + kept)
            self._slots.write(live.sequence_id, tokens)
            live.num_stored += kept
            fault = self._request_faults.pop(live.request_id, None)
            if fault is not None:
                self.release(live.request_id)
                outcomes.append(self._fault(part, kept, fault))
                continue
            wants_logits = part.wants_logits and kept == part.num_tokens
            outcomes.append(
                self._settle(part, kept, self._logits(live.sequence_id) if wants_logits else None)
            )
        return outcomes

    def _logits(self, sequence_id: int) -> NDArray[np.float32]:
        """Return what the "model" thinks of every token, from all tokens read back out of the slots."""
        tokens = self._slots.read(sequence_id)
        scores = np.full(_VOCAB_SIZE, -20.0, dtype=np.float32)
        if tokens[-1] == _HALF_ID:
            scores[_OTHER_HALF_ID] = 20.0
            return scores
        digest = _digest(tokens, self._powers)
        words = scores[_FIRST_WORD_ID:_OTHER_HALF_ID]  # the words, and half a character
        noise = (np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(digest | 1)) >> np.uint64(40)
        words[:] = noise.astype(np.float32) * np.float32(8 / (1 << 24))
        words[digest % len(words)] = 12.0
        scores[_END_ID] = 14.0 if (digest >> 32) % _END_ONE_IN == 0 else 4.0
        return scores


class SimulatedSource:
    """A simulated model that takes its time to load, as `base.ModelSource`."""

    def __init__(
        self,
        name: str,
        *,
        context_tokens: int = 8192,
        max_sequences: int = 16,
        load_s: float = 0.0,
        cost_model: CostModel = CPU_SMOLLM2,
    ) -> None:
        """Load in load_s seconds."""
        self._name = name
        self._cost = cost_model
        self._context_tokens, self._max_sequences = context_tokens, max_sequences
        self._load_s = load_s

    def describe(self) -> Language:
        """Return what is known of it before it is loaded."""
        return Language(
            info=_describe(self._name, self._context_tokens),
            tokenizer=SimulatedTokenizer(),
            capacity=_capacity_of(self._context_tokens, _PAGE_TOKENS, self._max_sequences),
            validate=_refuse_grammar,
        )

    def open(self, tell: Tell) -> SimulatedBackend:
        """Wait as long as it takes, and return the backend."""
        for part in range(_LOAD_PARTS):
            tell(part / _LOAD_PARTS)
            time.sleep(self._load_s / _LOAD_PARTS)
        tell(1.0)
        return SimulatedBackend(
            cost_model=self._cost,
            context_tokens=self._context_tokens,
            max_sequences=self._max_sequences,
            name=self._name,
        )


def _capacity_of(context_tokens: int, page_tokens: int, max_sequences: int) -> Capacity:
    return Capacity(
        num_pages=context_tokens // page_tokens,
        page_tokens=page_tokens,
        max_sequences=max_sequences,
        max_context_tokens=context_tokens,
        can_abort=True,
    )


def _refuse_grammar(order: GenerationOrder) -> None:
    if order.constraint is not None:
        raise InvalidConstraint(
            f"the simulated backend cannot force an output to match a {order.constraint.kind.value}; "
            "use the llama_cpp backend, or leave the constraint out"
        )


def _shares(parts: list[Part], num_rows: int) -> Iterator[tuple[Part, int]]:
    """Yield how many tokens each part has among the first num_rows rows."""
    for part in parts:
        kept = max(0, min(part.num_tokens, num_rows))
        num_rows -= kept
        yield part, kept


def _powers(length: int) -> NDArray[np.uint64]:
    return np.cumprod(np.full(length, _MULTIPLIER, dtype=np.uint64), dtype=np.uint64)


def _digest(tokens: NDArray[np.int32], powers: NDArray[np.uint64]) -> int:
    """Return 64 bits that depend on every token and its position."""
    values = tokens.astype(np.uint64) + np.uint64(1)
    mixed = int((values * powers[: len(tokens)]).sum(dtype=np.uint64))
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def _describe(name: str, context_tokens: int) -> ModelInfo:
    return ModelInfo(
        name=name,
        architecture="simulated",
        max_context_tokens=context_tokens,
        vocab_size=_VOCAB_SIZE,
        chat_template=_CHAT_TEMPLATE,
        bos_text="<|im_start|>",
        eos_text="<|im_end|>",
        backend="simulated",
    )
