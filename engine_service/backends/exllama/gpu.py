"""The NVIDIA GPUs as torch sees them, and what of them a model may have.

Decides nothing. torch is imported when it is asked.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
from importlib.util import find_spec
from typing import Any, Final

from engine_service.backends.base import ModelError

GIB: Final = 2**30


def cuda(*, without: str) -> Any:
    """Return torch if it can use a GPU; raise ModelError that says what to do `without` a build for CUDA."""
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        raise ModelError(f"torch {torch.__version__} was built without CUDA; {without}")
    if not torch.cuda.is_available():
        raise ModelError(
            "torch finds no usable NVIDIA GPU; check that nvidia-smi lists one, and that a container was "
            'given it (--gpus all); without a GPU use backend = "llama_cpp"'
        )
    return torch


def check_split(torch: Any, gpu_split: tuple[float, ...]) -> None:
    """Raise ModelError for a split over more GPUs than there are."""
    num_gpus = torch.cuda.device_count()
    if len(gpu_split) > num_gpus:
        raise ModelError(f"gpu_split names {len(gpu_split)} GPUs, and torch finds {num_gpus}")


def free_bytes(torch: Any) -> int:
    """Return the memory that is free on all GPUs together."""
    return sum(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))


def give_back(torch: Any) -> None:
    """Let torch return what a model that is no longer held has left."""
    gc.collect()
    torch.cuda.empty_cache()


def needs_compiling(library: str, extension: str) -> bool:
    """Return whether a library's compiled part is to be made at its first import; ModelError if it cannot."""
    if find_spec(extension) is not None:
        return False
    if shutil.which("nvcc") is None or not os.environ.get("CUDA_HOME"):
        raise ModelError(
            f"{library} is installed without its compiled part ({extension}); install a wheel that matches "
            "Python, torch and CUDA, or set CUDA_HOME and have nvcc on PATH to compile it once"
        )
    return True
