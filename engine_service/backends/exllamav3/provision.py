"""From a model folder to a backend that is ready to step, on a GPU.

Decides what is checked before anything is loaded. Knows no settings. torch and exllamav3 are imported here,
when a backend is opened.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_service.backends.base import Language, ModelError, Tell
from engine_service.backends.exllama import folder, gpu
from engine_service.backends.exllama.folder import Library, Options, Progress

if TYPE_CHECKING:
    from engine_service.backends.exllama.backend import Loaded
    from engine_service.backends.exllamav3.backend import ExLlamaV3Backend

LIBRARY: Final = Library(
    backend="exllamav3",
    name="ExLlamaV3",
    packages=("torch", "exllamav3", "tokenizers", "safetensors", "numpy", "rich", "PIL", "yaml", "pydantic",
              "llguidance"),
    kernels=("triton", "marisa_trie"),
    weights="EXL3 or FP16",
)  # fmt: skip
_UNTOLD_TOKENS: Final = 8192  # the library's longest context of a model that does not say
_WARM_UP_ROWS: Final = 8  # of a decode pass while kernels are chosen; the library's own number
_CACHE_BITS: Final = {"q8": 8, "q6": 6, "q4": 4}


class ExLlamaV3Source:
    """A model folder and how to load it, as `base.ModelSource`."""

    def __init__(
        self,
        model_path: Path | None,
        *,
        options: Options,
        context_tokens: int,
        max_sequences: int,
        progress: Progress,
        name: str | None = None,
    ) -> None:
        """Open nothing yet; the arguments are those of `open_backend`, name is what the API lists."""
        self._path = model_path
        self._options = options
        self._context_tokens, self._max_sequences = context_tokens, max_sequences
        self._progress = progress
        self._name = name

    def describe(self) -> Language:
        """Read the folder's tokenizer and configuration; raise ModelError for what is no model."""
        self._options.check(self._context_tokens, library=LIBRARY.name)
        LIBRARY.check_packages()
        return folder.describe(
            LIBRARY.check_folder(self._path),
            name=self._name,
            backend=LIBRARY.backend,
            context_tokens=self._context_tokens,
            max_sequences=self._max_sequences,
            drafts=self._options.draft_tokens > 0,
            untold_tokens=_UNTOLD_TOKENS,
        )

    def open(self, tell: Tell) -> ExLlamaV3Backend:
        """Load the model."""
        return open_backend(
            self._path,
            options=self._options,
            context_tokens=self._context_tokens,
            max_sequences=self._max_sequences,
            progress=self._progress,
            tell=tell,
        )


def open_backend(
    model_path: Path | None,
    *,
    options: Options,
    context_tokens: int,
    max_sequences: int,
    progress: Progress,
    tell: Tell,
) -> ExLlamaV3Backend:
    """Open a folder of EXL3 or FP16 weights and return a backend that has computed once.

    progress gets one plain sentence per step, tell how much is loaded. Raises ModelError that says what is
    wrong and what would be right.
    """
    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # the library reports there; ours says READY only
        loaded = _load(model_path, options, context_tokens, max_sequences, progress, tell)
        from engine_service.backends.exllamav3.backend import ExLlamaV3Backend

        try:
            backend = ExLlamaV3Backend(
                loaded,
                max_sequences=max_sequences,
                chunk_tokens=options.chunk_tokens,
                num_draft_tokens=options.draft_tokens,
            )
            backend.warm_up()
        except ValueError as error:
            raise ModelError(str(error)) from error
    capacity = backend.capacity
    progress(
        f"{backend.info.name} is ready after {time.perf_counter() - started:.1f} s: {capacity.num_pages} "
        f"pages of {capacity.page_tokens} tokens, {capacity.max_sequences} requests at once"
    )
    return backend


def _load(
    model_path: Path | None,
    options: Options,
    context_tokens: int,
    max_sequences: int,
    progress: Progress,
    tell: Tell,
) -> Loaded:
    options.check(context_tokens, library=LIBRARY.name)
    LIBRARY.check_packages()
    path = LIBRARY.check_folder(model_path)
    if options.draft_path is not None:
        LIBRARY.check_draft(path, options.draft_path)
    torch = gpu.cuda(
        without="install a CUDA build that ExLlamaV3 has wheels for (2.7 to 2.11), or use "
        'backend = "llama_cpp"'
    )
    LIBRARY.check_packages(computes=True)
    gpu.check_split(torch, options.gpu_split)
    if gpu.needs_compiling("exllamav3", "exllamav3_ext"):
        progress("compiling ExLlamaV3's kernels, once; this takes many minutes")
    from engine_service.backends.exllama.backend import Loaded
    from engine_service.backends.exllama.tokenizer import DirectoryTokenizer

    cache_tokens = context_tokens - context_tokens % folder.PAGE_TOKENS
    draft_model = draft_cache = None
    if options.draft_path is not None:
        draft_model, draft_cache = unloaded(options.draft_path, options, cache_tokens, is_draft=True)
        into_memory(torch, draft_model, draft_cache, options, max_sequences, lambda _: None)
    model, cache = unloaded(path, options, cache_tokens)
    try:
        into_memory(torch, model, cache, options, max_sequences, tell)
    except ModelError:
        if draft_model is not None:
            draft_model.unload()
        raise
    progress("compiling and choosing kernels, so that the first requests do not wait for it")
    # Writes into the cache, which is still nobody's. The library reports and skips what fails.
    model.warmup(
        cache=cache, max_chunk_size=options.chunk_tokens, max_batch_size=min(max_sequences, _WARM_UP_ROWS)
    )
    return Loaded(
        name=path.name,
        model=model,
        cache=cache,
        texts=DirectoryTokenizer(path),
        draft_model=draft_model,
        draft_cache=draft_cache,
    )


def unloaded(path: Path, options: Options, cache_tokens: int, *, is_draft: bool = False) -> tuple[Any, Any]:
    """Return the library's model and cache, neither in memory yet; raise ModelError for what cannot run here.

    A model of sliding windows gets pages for all it has seen: then it is preempted like any other.
    """
    library = importlib.import_module("exllamav3")
    try:
        model = library.Model.from_config(library.Config.from_directory(str(path)), swa_full=True)
    except Exception as error:  # assertions, KeyErrors and the like
        raise ModelError(
            f"{path}: ExLlamaV3 cannot read this model ({type(error).__name__}: {error})"
        ) from error
    if model.caps.get("recurrent_states"):
        raise ModelError(
            f"{path}: {model.config.architecture} keeps a state beside the pages of its cache, with which a "
            "request cannot be preempted and resumed exactly; use a model with attention in every layer, or "
            'backend = "llama_cpp"'
        )
    if is_draft and (model.caps.get("dflash_draft") or model.caps.get("mtp_draft")):
        raise ModelError(f"{path}: a model that drafts must be one that could answer by itself")
    bits = _CACHE_BITS.get(options.cache_type)
    layers = {"layer_type": library.CacheLayer_quant, "k_bits": bits, "v_bits": bits} if bits else {}
    return model, library.Cache(model, max_num_tokens=cache_tokens, **layers)


def into_memory(torch: Any, model: Any, cache: Any, options: Options, max_sequences: int, tell: Tell) -> None:
    """Load a model that is `unloaded`, with its cache; raise ModelError where it does not fit."""
    free = gpu.free_bytes(torch)
    try:
        model.load(
            use_per_device=list(options.gpu_split) or None,
            tensor_p=options.tensor_parallel,
            max_chunk_size=options.chunk_tokens,
            max_output_size=max_sequences * (1 + options.draft_tokens),
            max_batch_size=max_sequences,
            callback=lambda done, total: tell(done / max(1, total)),
        )
    except Exception as error:  # out of memory, assertions and the like
        model.unload()
        gpu.give_back(torch)
        raise ModelError(
            f"{model.config.directory}: the model could not be loaded ({type(error).__name__}: {error}); its "
            f"files have {_gib(_weights(model))}, its cache {_gib(_cache(cache))}, and {_gib(free)} of GPU "
            "memory were free"
        ) from error


def _weights(model: Any) -> int:
    return sum(file.stat().st_size for file in folder.weight_files(Path(model.config.directory)))


def _cache(cache: Any) -> int:
    return int(sum(layer.storage_size() for layer in cache.layers.values()))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / gpu.GIB:.1f} GiB"
