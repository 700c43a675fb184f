"""From settings to models: which backend loads what, and how.

Decides nothing. Backends are imported here when one is wanted, so that one does not need the libraries of
another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_service.backends.base import Backend, ModelSource
from engine_service.engine.residence import Models
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

            return GgufSource(
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
