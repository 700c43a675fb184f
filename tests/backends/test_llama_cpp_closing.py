"""Closing a model while other threads read it: they are told, and the process lives on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from engine_service.backends.base import BackendError, Constraint, ConstraintKind, GenerationOrder
from engine_service.backends.llama_cpp.backend import LlamaCppBackend
from engine_service.backends.llama_cpp.model import Model
from engine_service.scheduling.model import RequestId

TEXT = "The keeper climbed the stairs of the lighthouse and trimmed the wick. " * 200


def opened(model: Model) -> LlamaCppBackend:
    own_model = Model(model.library, model.path)
    return LlamaCppBackend(own_model, context_tokens=256, max_sequences=2, threads=1)


def constrained(text: str) -> GenerationOrder:
    constraint = Constraint(kind=ConstraintKind.REGEX, text=text)
    return GenerationOrder(request_id=RequestId("r"), prompt_ids=(1,), max_tokens=1, constraint=constraint)


class Reader(threading.Thread):
    """Reads again and again until it is told that the model is closed."""

    def __init__(self, read: Callable[[int], object]) -> None:
        super().__init__()
        self._read = read
        self.has_read = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for turn in range(3_000):
                self._read(turn)
                self.has_read.set()
        except BaseException as error:
            self.error = error


def test_a_closed_model_refuses_every_use(model: Model) -> None:
    backend = opened(model)
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="is closed"):
        backend.tokenizer.encode("hello")
    with pytest.raises(BackendError, match="is closed"):
        backend.tokenizer.decode([100])
    with pytest.raises(BackendError, match="is closed"):
        backend.validate(constrained("[a-z]+"))


@pytest.mark.parametrize("turn", range(2))
def test_closing_while_threads_read_ends_their_reading_and_nothing_else(model: Model, turn: int) -> None:
    backend = opened(model)
    readers = [Reader(lambda _: backend.tokenizer.encode(TEXT)) for _ in range(3)]
    readers.append(Reader(lambda n: backend.tokenizer.decode(range(n % 500, n % 500 + 40))))
    # Another grammar every time, so that it is compiled and not merely copied.
    readers.append(Reader(lambda n: backend.validate(constrained(f"[a-z]{{{turn},{n + 10}}}"))))
    for reader in readers:
        reader.start()
    for reader in readers:
        assert reader.has_read.wait(60), reader.error
    backend.close()
    for reader in readers:
        reader.join(60)
        assert not reader.is_alive()
        # One that needs nothing new from the model any more (pieces are kept) may get through its turns.
        assert reader.error is None or isinstance(reader.error, BackendError)
    with pytest.raises(BackendError):
        backend.tokenizer.encode(TEXT)
