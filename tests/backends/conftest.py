"""Both backends, emptied before and audited after every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_service.backends.llama_cpp.backend import LlamaCppBackend
from engine_service.backends.llama_cpp.binding import open_library
from engine_service.backends.llama_cpp.model import Model
from engine_service.backends.llama_cpp.provision import open_default_model
from engine_service.backends.simulated import SimulatedBackend
from tests.backends.driver import Driver

AnyBackend = LlamaCppBackend | SimulatedBackend

CONTEXT_TOKENS = 2048
MAX_SEQUENCES = 8


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the requantised default model is made once per run."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def model(model_cache: Path) -> Model:
    """The default model, requantised as `fairhearth serve` uses it."""
    return open_default_model(open_library(), model_cache, requantise=True, progress=lambda _: None)


@pytest.fixture(scope="session")
def llama_cpp_session(model: Model) -> LlamaCppBackend:
    """The real backend: one thread and micro-batches below 64 rows, where batching cannot change rounding."""
    return LlamaCppBackend(
        model, context_tokens=CONTEXT_TOKENS, max_sequences=MAX_SEQUENCES, threads=1, micro_batch=32
    )


@pytest.fixture
def llama_cpp(llama_cpp_session: LlamaCppBackend) -> Iterator[LlamaCppBackend]:
    """The real backend, empty before and after the test."""
    llama_cpp_session.drop_cache()
    assert_empty(llama_cpp_session)
    yield llama_cpp_session
    llama_cpp_session.check()
    forget_everything(llama_cpp_session)


@pytest.fixture(params=["simulated", "llama_cpp"])
def backend(request: pytest.FixtureRequest) -> Iterator[AnyBackend]:
    """Every backend in turn."""
    if request.param == "llama_cpp":
        yield request.getfixturevalue("llama_cpp")
        return
    simulated = SimulatedBackend(
        context_tokens=CONTEXT_TOKENS, max_sequences=MAX_SEQUENCES, micro_batch=32, advance=lambda s: s
    )
    yield simulated
    simulated.check()
    forget_everything(simulated)


@pytest.fixture
def driver(backend: AnyBackend) -> Driver:
    """A driver of every backend in turn."""
    return Driver(backend)


def forget_everything(backend: AnyBackend) -> None:
    """Release what a test left and see that nothing at all is stored any more."""
    for request_id in backend.request_ids:
        backend.release(request_id)
    for request_id in backend.pinned_ids:
        backend.drop_prefix(request_id)
    backend.check()
    backend.drop_cache()
    backend.check()
    assert_empty(backend)


def assert_empty(backend: AnyBackend) -> None:
    assert not backend.request_ids
    assert backend.num_cells_held == backend.num_cells_cached == 0
