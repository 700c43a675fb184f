"""From a model folder to a backend that is ready to step: on a GPU, or on the CPU as a reference.

Decides what is checked before anything is loaded, and how much memory that takes. Knows no settings. torch
and exllamav2 are imported here, when a backend is opened.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_service.backends.base import Language, ModelError, Tell
from engine_service.backends.exllama import folder, gpu
from engine_service.backends.exllama.folder import Library, Progress

if TYPE_CHECKING:
    from engine_service.backends.exllama.tokenizer import DirectoryTokenizer
    from engine_service.backends.exllamav2.backend import ExLlamaV2Backend, Loaded
    from engine_service.backends.exllamav2.eye import DirectoryEye

LIBRARY: Final = Library(
    backend="exllamav2",
    name="ExLlamaV2",
    packages=("torch", "exllamav2", "tokenizers", "safetensors", "numpy", "rich", "PIL"),
    kernels=(),
    weights="EXL2, GPTQ or FP16",
)
_CACHE_BITS: Final = {"fp16": 16.0, "q8": 8.5, "q6": 6.5, "q4": 4.5}
_CACHE_CLASSES: Final = {
    "fp16": "ExLlamaV2Cache",
    "q8": "ExLlamaV2Cache_Q8",
    "q6": "ExLlamaV2Cache_Q6",
    "q4": "ExLlamaV2Cache_Q4",
}
_OVERHEAD_BYTES: Final = 768 * 2**20  # context, kernels, buffers: an estimate; loading itself decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(folder.Options):
    """How a model is loaded."""

    device: str = "cuda"  #: "cuda", or "cpu-reference": slow, for tests
    lora_paths: tuple[Path, ...] = ()


def open_backend(
    model_path: Path | None,
    *,
    options: Options,
    cache_dir: Path,
    context_tokens: int,
    max_sequences: int,
    threads: int | None = None,
    progress: Progress,
) -> ExLlamaV2Backend:
    """Open a model and return a backend that has computed once.

    On a GPU model_path is a folder of EXL2, GPTQ or FP16 weights. The device cpu-reference takes a GGUF file
    of a Llama model, by default the embedded one. progress gets one plain sentence per step. Raises
    ModelError that says what is wrong and what would be right.
    """
    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # the library reports there; ours says READY only
        loaded, paged = load(
            model_path,
            options=options,
            cache_dir=cache_dir,
            context_tokens=context_tokens,
            max_sequences=max_sequences,
            threads=threads,
            progress=progress,
        )
        from engine_service.backends.exllamav2.backend import ExLlamaV2Backend

        try:
            backend = ExLlamaV2Backend(
                loaded,
                max_sequences=max_sequences,
                chunk_tokens=options.chunk_tokens,
                paged=paged,
                num_draft_tokens=options.draft_tokens,
            )
            backend.warm_up()
        except ValueError as error:
            raise ModelError(str(error)) from error
    capacity = backend.capacity
    progress(
        f"{backend.info.name} is ready on {options.device} after {time.perf_counter() - started:.1f} s: "
        f"{capacity.num_pages} pages of {capacity.page_tokens} tokens, "
        f"{capacity.max_sequences} requests at once"
    )
    return backend


class ExLlamaV2Source:
    """A model folder and how to load it, as `base.ModelSource`."""

    def __init__(
        self,
        model_path: Path | None,
        *,
        options: Options,
        cache_dir: Path,
        context_tokens: int,
        max_sequences: int,
        threads: int | None,
        progress: Progress,
        name: str | None = None,
    ) -> None:
        """Open nothing yet; the arguments are those of `open_backend`, name is what the API lists."""
        self._path = model_path
        self._options = options
        self._cache_dir = cache_dir
        self._context_tokens, self._max_sequences = context_tokens, max_sequences
        self._threads = threads
        self._progress = progress
        self._name = name

    def describe(self) -> Language:
        """Read the folder's tokenizer and configuration; raise ModelError for what is no model."""
        self._options.check(self._context_tokens, library=LIBRARY.name)
        LIBRARY.check_packages()
        directory = self._directory()
        return folder.describe(
            directory,
            name=self._name,
            backend=LIBRARY.backend,
            context_tokens=self._context_tokens,
            max_sequences=self._max_sequences,
            drafts=self._options.draft_tokens > 0,
            eye_of=lambda texts: _eye(directory, texts, self._options),
        )

    def _directory(self) -> Path:
        if self._options.device != "cpu-reference":
            return LIBRARY.check_folder(self._path)
        from engine_service.backends.exllamav2.cpu_reference import model_directory
        from engine_service.backends.exllamav2.gguf import GgufFile
        from engine_service.backends.llama_cpp.provision import default_model_path

        return model_directory(GgufFile(self._path or default_model_path()), self._cache_dir)

    def open(self, tell: Tell) -> ExLlamaV2Backend:
        """Load the model; the library does not say how far it is."""
        tell(0.0)
        return open_backend(
            self._path,
            options=self._options,
            cache_dir=self._cache_dir,
            context_tokens=self._context_tokens,
            max_sequences=self._max_sequences,
            threads=self._threads,
            progress=self._progress,
        )


def load(
    model_path: Path | None,
    *,
    options: Options,
    cache_dir: Path,
    context_tokens: int,
    max_sequences: int,
    threads: int | None,
    progress: Progress,
) -> tuple[Loaded, bool]:
    """Return a model with an empty cache, and whether that is paged; raise ModelError as `open_backend`."""
    options.check(context_tokens, library=LIBRARY.name)
    LIBRARY.check_packages()
    cache_tokens = context_tokens - context_tokens % folder.PAGE_TOKENS
    if options.device == "cpu-reference":
        return _load_reference(model_path, options, cache_tokens, cache_dir, threads), True
    return _load(model_path, options, cache_tokens, max_sequences, progress)


# -- on the CPU ------------------------------------------------------------------------------------------


def _load_reference(
    path: Path | None, options: Options, cache_tokens: int, cache_dir: Path, threads: int | None
) -> Loaded:
    from engine_service.backends.exllamav2 import cpu_extension

    cpu_extension.install()
    import torch
    from exllamav2 import ExLlamaV2Cache, ExLlamaV2Tokenizer

    from engine_service.backends.exllama.tokenizer import DirectoryTokenizer
    from engine_service.backends.exllamav2.backend import Loaded
    from engine_service.backends.exllamav2.cpu_reference import ReferenceModel, model_directory
    from engine_service.backends.exllamav2.gguf import GgufFile
    from engine_service.backends.llama_cpp.provision import default_model_path

    if options.draft_path or options.lora_paths or options.cache_type != "fp16":
        raise ModelError("cpu-reference knows neither draft models nor LoRAs, and its cache_type is fp16")
    file = GgufFile(path or default_model_path())
    directory = model_directory(file, cache_dir)
    model = ReferenceModel(file, directory, max_seq_len=cache_tokens, max_input_len=options.chunk_tokens)
    # Importing exllamav2 sets one thread.
    torch.set_num_threads(threads or max(1, (os.cpu_count() or 2) - 1))
    return Loaded(
        name=f"{file.path.stem}-cpu-reference",
        model=model,
        cache=ExLlamaV2Cache(model, max_seq_len=cache_tokens),
        tokenizer=ExLlamaV2Tokenizer(model.config),
        texts=DirectoryTokenizer(directory),
    )


# -- on a GPU --------------------------------------------------------------------------------------------


def _load(
    model_path: Path | None, options: Options, cache_tokens: int, max_sequences: int, progress: Progress
) -> tuple[Loaded, bool]:
    """Return the model and whether its cache is paged."""
    path = LIBRARY.check_folder(model_path)
    if options.draft_path is not None:
        LIBRARY.check_draft(path, options.draft_path)
    for lora in options.lora_paths:
        _check_lora(lora)
    torch = gpu.cuda(
        without="install a CUDA build that ExLlamaV2 has wheels for (2.9 at most), or use "
        'device = "cpu-reference" or backend = "llama_cpp"'
    )
    gpu.check_split(torch, options.gpu_split)
    if gpu.needs_compiling("exllamav2", "exllamav2_ext"):
        progress("compiling ExLlamaV2's kernels, once; this takes several minutes")
    library = importlib.import_module("exllamav2")
    attention = importlib.import_module("exllamav2.attn")
    from engine_service.backends.exllama.tokenizer import DirectoryTokenizer
    from engine_service.backends.exllamav2.backend import Loaded

    config = _config(library, path, options, cache_tokens, max_sequences)
    paged = bool(attention.has_flash_attn_with_paged) and not config.no_flash_attn
    if not paged:
        progress(
            "flash-attn 2.5.7 or later is not usable here: the cache is not paged, and one request runs at a "
            "time; others wait, and a more urgent one takes its place"
        )
    texts = DirectoryTokenizer(path)
    eye = _eye(path, texts, options)
    needed = _needed_bytes(path, config, options.cache_type, cache_tokens)
    draft_path, draft_config = options.draft_path, None
    if draft_path is not None:
        draft_config = _config(library, draft_path, options, cache_tokens, max_sequences)
        needed += _needed_bytes(draft_path, draft_config, options.cache_type, cache_tokens)
    _check_memory(torch, needed)
    # First, so that what the model and its cache take is fitted into what the tower leaves.
    tower = None if eye is None else _tower(library, config)
    if config.vision_model_type is not None and (blinds := _blinds(options)):
        progress(f"{path.name} could look at pictures, but not {blinds}: they are refused")
    model, cache = _into_memory(library, torch, config, options, cache_tokens)
    draft_model = draft_cache = None
    if draft_config is not None:
        draft_model, draft_cache = _into_memory(library, torch, draft_config, options, cache_tokens)
    loras = tuple(_lora(library, model, lora) for lora in options.lora_paths)
    loaded = Loaded(
        name=path.name,
        model=model,
        cache=cache,
        tokenizer=library.ExLlamaV2Tokenizer(config),
        texts=texts,
        draft_model=draft_model,
        draft_cache=draft_cache,
        loras=loras,
        tower=tower,
        eye=eye,
    )
    return loaded, paged


def _eye(directory: Path, texts: DirectoryTokenizer, options: Options) -> DirectoryEye | None:
    """Return what reads pictures for a model, None where it sees nothing or is loaded so that it cannot."""
    from engine_service.backends.exllamav2.eye import eye_of

    return None if _blinds(options) else eye_of(directory, texts)


def _blinds(options: Options) -> str:
    """Return what of the options a model that sees cannot have, empty if nothing."""
    if options.draft_path is not None:
        return "with a draft model"
    if options.tensor_parallel:
        return "with tensor parallelism"
    return "on this device" if options.device == "cpu-reference" else ""


def _tower(library: Any, config: Any) -> Any:
    try:
        tower = library.ExLlamaV2VisionTower(config)
        tower.load()
    except Exception as error:  # the library asserts, or misses a key; out of memory is a RuntimeError
        raise ModelError(
            f"{config.model_dir}: the part of the model that looks at pictures could not be loaded "
            f"({type(error).__name__}: {error})"
        ) from error
    return tower


def _check_lora(path: Path) -> None:
    described = path / "adapter_config.json"
    if not described.is_file():
        raise ModelError(f"{path}: there is no adapter_config.json; give the folder of a LoRA adapter")
    try:
        config = json.loads(described.read_text("utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{described}: must be a JSON object with the numbers r and lora_alpha ({error})"
        ) from error
    if rank < 1 or alpha <= 0 or config.get("fan_in_fan_out"):
        raise ModelError(f"{described}: r and lora_alpha must be above 0 and fan_in_fan_out must not be set")
    if not (path / "adapter_model.bin").is_file():
        folder.check_weights(path, "a LoRA adapter has them, or adapter_model.bin")


def _lora(library: Any, model: Any, path: Path) -> Any:
    try:
        return library.ExLlamaV2Lora.from_directory(model, str(path))
    except Exception as error:  # the library asserts, or misses a key, where an adapter is for another model
        raise ModelError(
            f"{path}: this LoRA does not fit the model ({type(error).__name__}: {error})"
        ) from error


def _config(library: Any, path: Path, options: Options, cache_tokens: int, max_sequences: int) -> Any:
    described = json.loads((path / "config.json").read_text("utf-8"))
    architecture = next(iter(described.get("architectures") or []), None)
    source = (Path(library.__file__).parent / "architecture.py").read_text("utf-8")
    # The library loads what it does not know as if it were Llama; its list of names is in its source only.
    if architecture is None or f'"{architecture}"' not in source:
        raise ModelError(f"{path}: ExLlamaV2 does not know the architecture {architecture!r}")
    try:
        config = library.ExLlamaV2Config(str(path))
    except Exception as error:  # assertions, KeyErrors and the like
        raise ModelError(
            f"{path}: ExLlamaV2 cannot read this model ({type(error).__name__}: {error})"
        ) from error
    config.arch_compat_overrides(quiet=True)
    config.max_seq_len = min(config.max_seq_len, cache_tokens)
    config.max_input_len = min(options.chunk_tokens, config.max_seq_len)
    config.max_attention_size = config.max_input_len**2
    config.max_batch_size = max(1, max_sequences)
    return config


def _needed_bytes(path: Path, config: Any, cache_type: str, cache_tokens: int) -> int:
    weights = sum(file.stat().st_size for file in folder.weight_files(path))
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return weights + int(per_token * cache_tokens * _CACHE_BITS[cache_type] / 8) + _OVERHEAD_BYTES


def _check_memory(torch: Any, needed: int) -> None:
    free = gpu.free_bytes(torch)
    if needed > free:
        raise ModelError(
            f"the model and its cache need about {needed / gpu.GIB:.1f} GiB, and {free / gpu.GIB:.1f} GiB of "
            "GPU memory are free; use a smaller model, fewer context_tokens, or a smaller cache_type (q8, "
            "q6, q4)"
        )


def _into_memory(
    library: Any, torch: Any, config: Any, options: Options, cache_tokens: int
) -> tuple[Any, Any]:
    model = library.ExLlamaV2(config)
    cache_class = getattr(library, _CACHE_CLASSES[options.cache_type])
    split = list(options.gpu_split) or None
    try:
        if options.tensor_parallel:
            model.load_tp(split, expect_cache_tokens=cache_tokens, expect_cache_base=cache_class)
            return model, library.ExLlamaV2Cache_TP(model, base=cache_class, max_seq_len=cache_tokens)
        if split:
            model.load(split)
            return model, cache_class(model, max_seq_len=cache_tokens)
        cache = cache_class(model, max_seq_len=cache_tokens, lazy=True)
        model.load_autosplit(cache)
        return model, cache
    except (RuntimeError, ValueError) as error:
        # Out of memory, among others: torch.cuda.OutOfMemoryError is a RuntimeError.
        model.unload()
        gpu.give_back(torch)
        raise ModelError(f"{config.model_dir}: the model could not be loaded ({error})") from error
