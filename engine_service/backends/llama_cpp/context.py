"""One llama_context: composing the rows of an iteration, running it, stopping it, cutting and sharing cells.

Decides nothing about who runs. Must be used from one thread, except `abort`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.base import ModelError
from engine_service.backends.llama_cpp.binding import ABORTED, Batch
from engine_service.backends.llama_cpp.cells import CellAccounts
from engine_service.backends.llama_cpp.model import Model
from engine_service.backends.parking import Memory, fresh_memory

_INT32_BYTES: Final = 4
PATIENCE_S: Final = 0.1
"""A run that should be over by then is left alone until then: more would be lost than speech would win.

Nobody notices a tenth of a second (Nielsen 1993, "Usability Engineering", chapter 5); a run that is stopped
has to be computed again from its start.
"""


class Context:
    """The cache of one model and the batch that is composed for it."""

    def __init__(
        self,
        model: Model,
        *,
        num_cells: int,
        num_sequences: int,
        micro_batch: int,
        threads: int,
        is_divided: bool = False,
    ) -> None:
        """Allocate the cache; raise ModelError if llama.cpp refuses (for lack of memory, as a rule).

        is_divided gives each sequence an equal part of the cells, which `share` cannot share.
        """
        library = model.library
        with library.fresh_log():
            handle = library.open_context(
                model.handle,
                num_cells=num_cells,
                num_sequences=num_sequences,
                micro_batch=micro_batch,
                threads=threads,
                is_divided=is_divided,
            )
            if not handle:
                raise ModelError(f"{model.path}: no cache of {num_cells} tokens: {library.recent_log()}")
        self._library, self._handle, self._vocab_size = library, handle, model.vocab_size
        self._hidden_size = library.hidden_size(model.handle)
        self._memory = library.memory(handle)
        self.num_cells = library.num_cells(handle)
        self.longest = self.num_cells // num_sequences if is_divided else self.num_cells
        self.cells = CellAccounts()
        self._allocate_batch()
        self._abort_flag = ctypes.create_string_buffer(2)
        self._abort_lock = threading.Lock()
        self._is_stepping = self._was_aborted = False
        self._started_at, self._expected_s = 0.0, None  # type: float, float | None
        self._asked_at: float | None = None
        library.set_abort_flag(handle, ctypes.addressof(self._abort_flag))

    def _allocate_batch(self) -> None:
        """Own the batch's memory as numpy arrays; llama.cpp reads it in place."""
        size = self.num_cells
        self._tokens = np.zeros(size, dtype=np.int32)
        self._positions = np.zeros(size, dtype=np.int32)
        self._counts = np.ones(size, dtype=np.int32)
        self._ids = np.zeros(size, dtype=np.int32)
        self._outputs = np.zeros(size, dtype=np.int8)
        offsets = np.arange(size, dtype=np.uint64) * np.uint64(_INT32_BYTES)
        self._id_pointers = offsets + np.uint64(self._ids.ctypes.data)
        self._ramp = np.arange(size, dtype=np.int32)
        self._batch = Batch(
            n_tokens=0,
            token=self._tokens.ctypes.data,
            embd=None,
            pos=self._positions.ctypes.data,
            n_seq_id=self._counts.ctypes.data,
            seq_id=self._id_pointers.ctypes.data,
            logits=self._outputs.ctypes.data,
        )
        self._num_rows = self._num_outputs = 0
        self._logits, self._logits_place = np.empty((0, self._vocab_size), dtype=np.float32), (0, 0)

    # -- an iteration ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start composing an empty batch."""
        self._num_rows = self._num_outputs = 0

    def add_token(self, sequence_id: int, token_id: int, position: int) -> int:
        """Add one token whose logits are wanted; return its row of logits."""
        row = self._num_rows
        self._tokens[row] = token_id
        self._positions[row] = position
        self._ids[row] = sequence_id
        self._outputs[row] = 1
        self._num_rows = row + 1
        self._num_outputs += 1
        return self._num_outputs - 1

    def add_chunk(
        self,
        sequence_id: int,
        tokens: NDArray[np.int32],
        position: int,
        *,
        wants_logits: bool,
        wants_hidden: bool = False,
    ) -> int:
        """Add consecutive tokens from position on; return the last one's row of logits, -1 if not wanted.

        wants_hidden wants every row, for `hidden`.
        """
        start, end = self._num_rows, self._num_rows + len(tokens)
        self._tokens[start:end] = tokens
        self._positions[start:end] = self._ramp[: len(tokens)]
        self._positions[start:end] += position
        self._ids[start:end] = sequence_id
        self._outputs[start:end] = wants_hidden
        self._num_rows = end
        if wants_hidden:
            self._num_outputs += len(tokens)
        if not wants_logits:
            return -1
        self._outputs[end - 1] = 1
        self._num_outputs += 1
        return self._num_outputs - 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Make `abort` count from here to the end of the block, whichever `run` it meets."""
        with self._abort_lock:
            self._is_stepping, self._was_aborted = True, False
        try:
            yield
        finally:
            with self._abort_lock:
                self._is_stepping = False

    def run(self, *, expected_s: float | None = None) -> int:
        """Compute the batch; return 0, `NO_ROOM`, `ABORTED` (nothing stored) or an error of llama.cpp.

        With expected_s, how long this should take, it may be stopped by `abort`; without, an abort meanwhile
        lets it end and stops the step's next one that may be stopped.
        """
        self._batch.n_tokens = self._num_rows
        with self._abort_lock:
            if expected_s is not None and self._was_aborted:
                return ABORTED
            self._abort_flag[0] = b"\0"
            self._started_at, self._expected_s, self._asked_at = time.monotonic(), expected_s, None
        try:
            code = self._library.decode(self._handle, self._batch)
            self._library.synchronize(self._handle)
        finally:
            with self._abort_lock:
                self._expected_s = None
        return code

    def abort(self) -> None:
        """Stop the `step` under way (any thread): at once, or where the `run` under way is nearly over, then.

        Nothing happens if none is. Who asks again stops what should have been over meanwhile and is not.
        """
        with self._abort_lock:
            self._was_aborted = self._is_stepping
            if self._expected_s is None:
                return
            now = time.monotonic()
            if self._asked_at is None:
                self._asked_at = now
            ends_at, waits_until = self._started_at + self._expected_s, self._asked_at + PATIENCE_S
            if not (now < waits_until and now - PATIENCE_S <= ends_at < waits_until):
                self._abort_flag[0] = b"\1"

    def logits(self) -> NDArray[np.float32] | None:
        """Return the wanted rows, float32 [rows, vocabulary], valid until the next `run`; None if lost."""
        if not self._num_outputs:
            return None
        address = self._library.logits_address(self._handle)
        if not address:
            return None
        place = (address, self._num_outputs)
        if place != self._logits_place:  # making the array takes longer than choosing a token from it
            kind = ctypes.c_float * (self._num_outputs * self._vocab_size)
            flat: NDArray[np.float32] = np.ctypeslib.as_array(kind.from_address(address))
            self._logits = flat.reshape(self._num_outputs, self._vocab_size)
            self._logits_place = place
        return self._logits

    @contextmanager
    def keeping_hidden(self) -> Iterator[None]:
        """Let `run` keep what the model makes of every wanted row, inside the block."""
        self._library.set_embeddings(self._handle, True)
        try:
            yield
        finally:
            self._library.set_embeddings(self._handle, False)

    def hidden(self) -> NDArray[np.float32] | None:
        """Return it, float32 [wanted rows, hidden size], valid until the next `run`; None if lost."""
        address = self._library.embeddings_address(self._handle)
        if not address:
            return None
        kind = ctypes.c_float * (self._num_outputs * self._hidden_size)
        flat: NDArray[np.float32] = np.ctypeslib.as_array(kind.from_address(address))
        return flat.reshape(self._num_outputs, self._hidden_size)

    def length(self, sequence_id: int) -> int:
        """Return how many tokens llama.cpp itself says the sequence stores."""
        return self._library.last_position(self._memory, sequence_id) + 1

    # -- cells -----------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Cells that hold nothing."""
        return self.num_cells - self.cells.num_used

    def num_held(self, sequence_ids: Sequence[int]) -> int:
        """Return how many different cells these sequences hold together."""
        return self.cells.num_held(sequence_ids)

    def append(self, sequence_id: int, num_tokens: int) -> None:
        """Count what `run` stored (>= 0 tokens)."""
        if num_tokens:
            self.cells.append(sequence_id, num_tokens)

    def cut(self, sequence_id: int, length: int) -> None:
        """Forget the sequence's tokens from position length on; 0 forgets all."""
        if not self._library.remove(self._memory, sequence_id, length):
            raise AssertionError(f"the cache of sequence {sequence_id} cannot be cut at {length}")
        self.cells.cut(sequence_id, length)

    def share(self, source_id: int, target_id: int, start: int, end: int) -> None:
        """Let the target hold the source's cells [start, end) too, without computing or copying."""
        self._library.copy(self._memory, source_id, target_id, start, end)
        self.cells.share(source_id, target_id, start, end)

    def save(self, sequence_id: int, memory: Memory = fresh_memory) -> NDArray[np.uint8]:
        """Return all that the sequence stores, copied in 2 us per token; empty if llama.cpp refuses.

        Where memory is fresh, mapping it takes up to 50 us per token more.
        """
        return self._library.save_sequence(self._handle, sequence_id, memory)

    def load(self, sequence_id: int, data: NDArray[np.uint8], num_tokens: int) -> bool:
        """Store a saved sequence of num_tokens tokens under an empty id; False: no room."""
        if not self._library.load_sequence(self._handle, sequence_id, data):
            return False
        self.cells.append(sequence_id, num_tokens)
        return True

    def set_threads(self, threads: int) -> None:
        """Compute with that many threads from now on."""
        self._library.set_threads(self._handle, threads)

    def close(self) -> None:
        """Free the cache."""
        if self._handle:
            self._library.free_context(self._handle)
            self._handle = 0
