"""Lets the library run without a GPU: a stand-in for its compiled part, with the two functions our gate
reaches.

For tests and for the device `cpu-reference`; never used where a GPU computes. Page table, jobs, iteration
and tokenizer stay the library's own. Sampling needs nothing here: the gate chooses tokens by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
import types

import torch


def install() -> None:
    """Make `import exllamav2` work on a CPU, in paged mode. Must come before the first import of exllamav2.

    Raises RuntimeError if the library was already imported with its compiled part.
    """
    known = sys.modules.get("exllamav2_ext")
    if known is not None and not getattr(known, "is_for_cpu", False):
        raise RuntimeError(
            "exllamav2 is already loaded for a GPU in this process; start another one for the CPU"
        )
    if known is None:
        sys.modules["exllamav2_ext"] = _module()
    for name in ("EXLLAMA_NO_FLASH_ATTN", "EXLLAMA_NO_XFORMERS"):
        os.environ.setdefault(name, "1")
    with contextlib.redirect_stdout(sys.stderr):  # the library says there that it finds no GPU
        attention = importlib.import_module("exllamav2.attn")
    # Paged mode asks for flash-attn, which the caller's model replaces.
    attention.has_flash_attn_with_paged = True  # type: ignore[attr-defined]


def _module() -> types.ModuleType:
    module = types.ModuleType("exllamav2_ext")
    module.is_for_cpu = True  # type: ignore[attr-defined]
    module.count_match = _count_match  # type: ignore[attr-defined]
    module.cache_rotate = _cache_rotate  # type: ignore[attr-defined]
    return module


def _count_match(left: torch.Tensor, right: torch.Tensor, most: int) -> int:
    """Return how many leading tokens two rows of shape (1, n) share, at most `most`."""
    length = min(int(most), left.shape[-1], right.shape[-1])
    differs = (left[0, :length] != right[0, :length]).nonzero()
    return length if not len(differs) else int(differs[0])


def _cache_rotate(cache: torch.Tensor, order: torch.Tensor, buffer: torch.Tensor) -> None:
    """Move rows along a ring: row order[i] takes what row order[i + 1] had, the last one what the first
    had."""
    rows = order.tolist()
    first = cache[rows[0]].clone()
    for target, source in itertools.pairwise(rows):
        cache[target] = cache[source]
    cache[rows[-1]] = first
