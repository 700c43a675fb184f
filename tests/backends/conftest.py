"""Every backend, emptied before and audited after every test.

ExLlamaV2 and ExLlamaV3 are among them where torch and they are installed: in .venv/exllamav2 (scripts/setup
exllamav2).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine_service.backends.llama_cpp.backend import DividedLlamaCppBackend, LlamaCppBackend
from engine_service.backends.llama_cpp.binding import open_library
from engine_service.backends.llama_cpp.model import Model
from engine_service.backends.llama_cpp.provision import open_default_model
from engine_service.backends.simulated import SimulatedBackend
from tests.backends.driver import Driver

if TYPE_CHECKING:
    from tests.backends.bench import MakeBench

HAS_TORCH = find_spec("torch") is not None
HAS_EXLLAMAV2 = HAS_TORCH and find_spec("exllamav2") is not None
HAS_EXLLAMAV3 = HAS_TORCH and find_spec("exllamav3") is not None
EXLLAMA = [name for name, has in (("exllamav2", HAS_EXLLAMAV2), ("exllamav3", HAS_EXLLAMAV3)) if has]
AnyBackend = Any  # LlamaCppBackend | SimulatedBackend | ExLlamaBackend, which cannot be imported everywhere
Library = Any  # the module exllamav2_cpu or exllamav3_cpu

collect_ignore_glob = [f"*{name}*" for name in ("exllamav2", "exllamav3") if name not in EXLLAMA]
if not EXLLAMA:
    collect_ignore_glob.append("*exllama_*")
# Before anything imports a library, which would compile its part for GPUs.
if HAS_EXLLAMAV2:
    from engine_service.backends.exllamav2 import cpu_extension

    cpu_extension.install()
if HAS_EXLLAMAV3:
    from tests.backends import exllamav3_extension

    exllamav3_extension.install()

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
    yield from used_up(llama_cpp_session)


@pytest.fixture(scope="session")
def llama_cpp_divided_session(model: Model) -> DividedLlamaCppBackend:
    """The same with a cache of its own for every request, which is as long as the shared one."""
    return DividedLlamaCppBackend(
        model,
        context_tokens=MAX_SEQUENCES * CONTEXT_TOKENS,
        max_sequences=MAX_SEQUENCES,
        threads=1,
        micro_batch=32,
    )


@pytest.fixture
def llama_cpp_divided(llama_cpp_divided_session: DividedLlamaCppBackend) -> Iterator[DividedLlamaCppBackend]:
    """The real backend with a divided cache, empty before and after the test."""
    yield from used_up(llama_cpp_divided_session)


@pytest.fixture(scope="session")
def echo_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a model for the real generators of ExLlamaV2 and ExLlamaV3 on a CPU."""
    from tests.backends.echo import make_model_directory

    return make_model_directory(tmp_path_factory.mktemp("echo"))


@pytest.fixture(params=EXLLAMA)
def library(request: pytest.FixtureRequest) -> Library:
    """What makes a backend of ExLlamaV2 and of ExLlamaV3, in turn, over a model that reads its cache back."""
    return importlib.import_module(f"tests.backends.{request.param}_cpu")


@pytest.fixture
def make_bench(library: Library, echo_directory: Path) -> MakeBench:
    """Make a backend of ExLlamaV2 and of ExLlamaV3, in turn, with what tells whether its texts are right."""
    from tests.backends.bench import Bench

    return functools.partial(Bench, library, echo_directory)


@pytest.fixture
def exllamav2(echo_directory: Path) -> Iterator[AnyBackend]:
    """The real ExLlamaV2 generator over a model that reads its own cache back."""
    yield from roomy(importlib.import_module("tests.backends.exllamav2_cpu"), echo_directory)


@pytest.fixture
def exllamav3(echo_directory: Path) -> Iterator[AnyBackend]:
    """The real ExLlamaV3 generator over a model that reads its own cache back."""
    yield from roomy(importlib.import_module("tests.backends.exllamav3_cpu"), echo_directory)


def roomy(library: Library, directory: Path) -> Iterator[AnyBackend]:
    """Yield a backend with more pages than a context has, as on a GPU.

    A page is 256 tokens, and every request and prefix takes at least one.
    """
    backend = library.make_backend(
        directory,
        cache_tokens=4 * CONTEXT_TOKENS,
        context_tokens=CONTEXT_TOKENS,
        max_sequences=MAX_SEQUENCES,
        max_pinned=16,
    )
    yield backend
    backend.check()
    forget_everything(backend)
    backend.close()


@pytest.fixture(params=["simulated", "llama_cpp", "llama_cpp_divided", *EXLLAMA])
def backend(request: pytest.FixtureRequest) -> Iterator[AnyBackend]:
    """Every backend in turn."""
    if request.param != "simulated":
        yield request.getfixturevalue(request.param)
        return
    simulated = SimulatedBackend(
        context_tokens=CONTEXT_TOKENS,
        max_sequences=MAX_SEQUENCES,
        micro_batch=32,
        parking_bytes=2**20,
        advance=lambda s: s,
    )
    yield simulated
    simulated.check()
    forget_everything(simulated)


@pytest.fixture
def driver(backend: AnyBackend) -> Driver:
    """A driver of every backend in turn."""
    return Driver(backend)


def used_up(backend: AnyBackend) -> Iterator[AnyBackend]:
    """Yield an empty backend and see that it can be emptied again."""
    backend.drop_cache()
    assert_empty(backend)
    yield backend
    backend.check()
    forget_everything(backend)


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
    assert backend.num_cells_held == backend.num_cells_cached == backend.num_parked == 0
