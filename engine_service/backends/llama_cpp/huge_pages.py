"""Weights in huge pages, where Linux can and memory is plenty.

Decides whether weights are copied into memory of their own, which only then may be of huge pages: a file of
ext4 that is mapped stays in pages of 4 KiB. Every token passes over all weights, and looking up where 35,000
small pages lie took 12 % of the time of a single row (136 MB of weights, two threads: 7.8 ms, and 6.9 in 70
huge pages).

Source: madvise(2), MADV_HUGEPAGE and MADV_COLLAPSE (Linux 6.1). Where the kernel refuses, the copied weights
stay in small pages, which is as fast as in the file.
"""

from __future__ import annotations

import ctypes
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from engine_service.backends.host_memory import available_bytes

_LOGGER = logging.getLogger(__name__)

_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
_HUGE: Final = 2 * 2**20  #: bytes; x86-64, and aarch64 with pages of 4 KiB
_PLENTY: Final = 3  #: times the weights: what must be available, as a cache comes beside them

_SHARD: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_MAPS: Final = Path("/proc/self/maps")

Range = tuple[int, int]
"""First address and the one behind the last."""


def are_worth_a_copy(path: Path) -> bool:
    """Return whether the weights in a file should be copied out of it: Linux, and memory is plenty.

    One that says that there are more of its kind is left alone.
    """
    if sys.platform != "linux" or _SHARD.search(path.name):
        return False
    return path.stat().st_size * _PLENTY <= (available_bytes() or 0)


@contextmanager
def backing_what_is_new() -> Iterator[None]:
    """Let memory that is taken inside the block have huge pages afterwards, as far as that is possible.

    What the C library takes out of memory that this process had before and gave back to it is not found. That
    happens where as much as a model lies free in one piece, and costs no more than the gain.
    """
    before = _mapped()
    yield
    for start, end in _without(_mapped(), before):
        _collapse(-(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE)


def _mapped() -> list[Range]:
    """Return the ranges of memory that belong to no file, in order."""
    with suppress(OSError):
        return list(_anonymous(_MAPS.read_text(encoding="utf-8", errors="replace")))
    return []


def _anonymous(maps: str) -> Iterator[Range]:
    for line in maps.splitlines():
        addresses, permissions, *rest = line.split(maxsplit=5)
        if permissions.startswith("rw-p") and len(rest) < 4:  # the fourth would be a path or [heap]
            start, _, end = addresses.partition("-")
            yield int(start, 16), int(end, 16)


def _without(ranges: Sequence[Range], others: Sequence[Range]) -> Iterator[Range]:
    """Yield the parts of ranges that lie in no other; Linux lists neighbours as one."""
    for start, end in ranges:
        for other_start, other_end in sorted(others):
            if other_end <= start or end <= other_start:
                continue
            if start < other_start:
                yield start, other_start
            start = max(start, other_end)
        if start < end:
            yield start, end


def _collapse(start: int, end: int) -> None:
    if end <= start:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # The first lets the kernel do it by and by where it does not know the second, which does it now. Page by
    # page, because it ends at the first that cannot be (memory that nobody has touched yet).
    madvise(start, end - start, _MADV_HUGEPAGE)
    pages = range(start, end, _HUGE)
    num_refused = sum([madvise(page, _HUGE, _MADV_COLLAPSE) != 0 for page in pages])
    _LOGGER.debug("%d of %d huge pages could not be had", num_refused, len(pages))
