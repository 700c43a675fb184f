"""From settings to models: which backend loads what, and how.

Decides which cache is refused before anything is made: one that is larger than all the memory there is.
Backends are imported here when one is wanted, so that one does not need the libraries of another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_service.backends.base import Backend, Language, ModelError, ModelSource, Tell
from engine_service.backends.host_memory import available_bytes, whole_bytes
from engine_service.backends.llama_cpp.provision import default_model_path
from engine_service.commands.showing import size
from engine_service.engine.residence import Models
from engine_service.footprint import Footprint, footprint_of
from engine_service.scheduling.model import ModelId
from engine_service.settings import BackendName, ExLlamaV3Settings, ModelSettings, Settings

Progress = Callable[[str], None]


def opened_models(settings: Settings, progress: Progress) -> Models:
    """Return the settings' several models, none of which is loaded; raise ModelError, BackendError."""
    cache_dir = settings.paths.cache_dir
    return Models(
        {
            model.name: source_of(model.settings, cache_dir, progress, name=model.name)
            for model in settings.models
        },
        pinned=frozenset(model.name for model in settings.models if model.pinned),
        policy=settings.residency,
    )


def opened_backend(settings: Settings, progress: Progress) -> Backend:
    """Load the settings' one model; raise ModelError, BackendError."""
    return source_of(settings.model, settings.paths.cache_dir, progress).open(lambda _: None)


def source_of(
    model: ModelSettings, cache_dir: Path, progress: Progress, *, name: ModelId | None = None
) -> ModelSource:
    """Return where a model comes from; name None: it is called what its backend calls it."""
    match model.backend:
        case BackendName.LLAMA_CPP:
            from engine_service.backends.llama_cpp.provision import GgufSource

            source = GgufSource(
                model.path,
                cache_dir=cache_dir,
                context_tokens=model.context_tokens,
                max_sequences=model.max_sequences,
                threads=model.threads,
                requantise=model.requantise,
                divided_cache=model.divided_cache,
                progress=progress,
                name=name,
            )
            return _Measured(source, model, progress)
        case BackendName.EXLLAMAV2:
            from engine_service.backends.exllamav2.provision import ExLlamaV2Source, Options

            return ExLlamaV2Source(
                model.path,
                options=Options(
                    device=model.exllamav2.device.value,
                    lora_paths=model.exllamav2.lora_paths,
                    **_shared_options(model.exllamav2),
                ),
                cache_dir=cache_dir,
                context_tokens=model.context_tokens,
                max_sequences=model.max_sequences,
                threads=model.threads,
                progress=progress,
                name=name,
            )
        case BackendName.EXLLAMAV3:
            from engine_service.backends.exllama import folder
            from engine_service.backends.exllamav3.provision import ExLlamaV3Source

            return ExLlamaV3Source(
                model.path,
                options=folder.Options(**_shared_options(model.exllamav3)),
                context_tokens=model.context_tokens,
                max_sequences=model.max_sequences,
                progress=progress,
                name=name,
            )
        case BackendName.SIMULATED:
            from engine_service.backends.simulated import SimulatedSource

            return SimulatedSource(
                name or "simulated",
                context_tokens=model.context_tokens,
                max_sequences=model.max_sequences,
            )


def shortage(
    found: Footprint, context_tokens: int, cache_type: str, there: int | None
) -> tuple[str, str] | None:
    """Return what a model takes too much of, and what to do; None if it fits in the memory that is there."""
    needed = found.needed_bytes(context_tokens, cache_type)
    if there is None or needed <= there:
        return None
    most = found.most_tokens(there, cache_type)
    return (
        f"{taken(found, context_tokens, cache_type)}; {size(there)} of memory are free",
        f"set model.context_tokens to {most} or less" if most else "use a smaller model",
    )


def taken(found: Footprint, context_tokens: int, cache_type: str) -> str:
    """Say what a model takes."""
    needed = size(found.needed_bytes(context_tokens, cache_type))
    return f"{found.name} ({found.architecture}), {needed} with a cache of {context_tokens:,} tokens"


class _Measured:
    """A model whose cache must fit in this machine's memory before anything is made of it.

    llama.cpp takes the cache bit by bit until the system ends the process, and with it every other model.
    """

    def __init__(self, source: ModelSource, model: ModelSettings, progress: Progress) -> None:
        self._source = source
        self._model = model
        self._progress = progress

    def describe(self) -> Language:
        """Read everything but the weights; raise ModelError for a cache that can never fit."""
        self._check()
        return self._source.describe()

    def open(self, tell: Tell) -> Backend:
        """Load the model, and tell before that it is tight; raise ModelError for a cache that cannot fit."""
        if told := self._check():
            self._progress(f"memory may run out: {told}")
        return self._source.open(tell)

    def _check(self) -> str | None:
        """Return what is too much for the memory that is free now; that may still turn out well.

        Weights are read from their file again where room is needed, and what others hold may be swapped out.
        The cache alone must be there, and all of it.
        """
        try:
            found = footprint_of(self._model.path or default_model_path())
        except ModelError:
            return None  # llama.cpp says what is wrong with the file
        tokens, cache_type = self._model.context_tokens, self._model.cache_type.value
        short = shortage(found, tokens, cache_type, available_bytes())
        if short is None:
            return None
        told, whole = "; ".join(short), whole_bytes()
        cache = found.cache_bytes(found.cache_tokens(tokens), cache_type)
        if found.is_even and whole is not None and cache > whole:
            raise ModelError(told)
        return told


def _shared_options(own: ExLlamaV3Settings) -> dict[str, Any]:
    """Return what both libraries are told."""
    return {
        "cache_type": own.cache_type.value,
        "chunk_tokens": own.chunk_tokens,
        "gpu_split": own.gpu_split,
        "tensor_parallel": own.tensor_parallel,
        "draft_tokens": own.draft_tokens,
        "draft_path": own.draft_path,
    }
