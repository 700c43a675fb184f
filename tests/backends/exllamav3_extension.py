"""Lets exllamav3 run without a GPU, for tests: stand-ins for its compiled part and for Triton.

Generator, jobs, page table and filters stay the library's own. Its compiled part has the four functions that
these call; every kernel is a name that can be imported, and computes nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_TRITON = ("triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice",
           "triton.language.extra.cuda", "triton.runtime", "triton.runtime.driver", "triton.compiler",
           "triton.testing", "triton.backends", "triton.backends.compiler", "triton.tools",
           "triton.tools.tensor_descriptor")  # fmt: skip


class _Absent:
    """Stands for anything of a library that is not here while modules are imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __getitem__(self, index: Any) -> _Absent:
        return self

    def __or__(self, other: Any) -> _Absent:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Decorate a function with nothing, or be something absent again."""
        is_decorator = len(arguments) == 1 and callable(arguments[0]) and not options
        return arguments[0] if is_decorator else _Absent(f"{self._name}()")


class _AbsentModule(types.ModuleType):
    __version__ = "3.5.0"
    __path__ = ()

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _WithoutGpu:
    """torch as the generator sees it: nothing is pinned, and there is nothing to wait for."""

    cuda = types.SimpleNamespace(synchronize=lambda *_: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty(*shape, **options)

    @staticmethod
    def zeros(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.zeros(*shape, **options)


def install() -> None:
    """Make `import exllamav3` work on a CPU. Must come before the first import of exllamav3."""
    if "exllamav3" in sys.modules:
        return
    sys.modules["exllamav3_ext"] = _extension()
    with _triton(), contextlib.redirect_stdout(sys.stderr):
        importlib.import_module("exllamav3")
        importlib.import_module("exllamav3.architecture.architectures")
    generator: Any = importlib.import_module("exllamav3.generator.generator")
    generator.torch = _WithoutGpu()


@contextlib.contextmanager
def _triton() -> Iterator[None]:
    """Let Triton be imported, for the library only: torch asks for it too."""
    for name in _TRITON:
        module = _AbsentModule(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in _TRITON:
            del sys.modules[name]


def _extension() -> types.ModuleType:
    module: Any = _AbsentModule("exllamav3_ext")
    # The library compiles its part unless it finds a file of this kind.
    origin = "exllamav3_ext" + importlib.machinery.EXTENSION_SUFFIXES[0]
    module.__spec__ = importlib.machinery.ModuleSpec("exllamav3_ext", loader=object(), origin=origin)  # type: ignore[arg-type]
    module.generator_stage_decode = _stage_decode
    module.count_match_tensor = _count_match
    module.cache_rotate = _cache_rotate
    module.BC_SAM = _SuffixMatcher
    return module


def _stage_decode(
    arena: torch.Tensor,
    width: int,
    block_indices: Sequence[torch.Tensor],
    stored: Sequence[int],
    rope_offsets: Sequence[int],
    batch_ids: torch.Tensor | None,
    sequences: Sequence[torch.Tensor],
    pages: Sequence[torch.Tensor],
    page_offsets: Sequence[int],
) -> None:
    """Fill the arena (block table, lengths, perhaps positions) and give every row the token it decodes.

    As in the library, an index that lies outside raises.
    """
    rows = len(block_indices)
    table, rest = arena[: rows * width].view(rows, width), arena[rows * width :]
    table.zero_()
    for row, index in enumerate(block_indices):
        num_pages = min(index.numel(), width)
        table[row, :num_pages] = index.view(-1)[:num_pages]
        rest[row] = stored[row]
        if rope_offsets:
            rest[rows + row] = stored[row] + rope_offsets[row]
    if batch_ids is None:
        return
    for row, (ids, page, offset) in enumerate(zip(sequences, pages, page_offsets, strict=True)):
        if stored[row] >= ids.shape[-1] or offset >= page.shape[-1]:
            raise RuntimeError("token index out of range")
        batch_ids[row, 0] = page[0, offset] = ids[0, stored[row]]


def _count_match(left: torch.Tensor, right: torch.Tensor, most: int) -> int:
    """Return how many leading tokens two rows of shape (1, n) share, at most `most`."""
    length = min(int(most), left.shape[-1], right.shape[-1])
    differs = (left[0, :length] != right[0, :length]).nonzero()
    return length if not len(differs) else int(differs[0])


def _cache_rotate(cache: torch.Tensor, order: torch.Tensor, buffer: torch.Tensor) -> None:
    """Move pages: pairs of where to and where from, of which -1 is the buffer."""
    places = order.tolist()
    for target, source in zip(places[::2], places[1::2], strict=True):
        (buffer if target == -1 else cache[target]).copy_(buffer if source == -1 else cache[source])


class _SuffixMatcher:
    """Finds what came after the latest tokens the last time they came; of at most eight tokens."""

    def accept_tensor(self, ids: torch.Tensor) -> tuple[int, int]:
        """Return where the longest end of ids, of shape (1, n), came before: [begin, end)."""
        known = ids[0].numpy().astype("<i4").tobytes()
        for length in range(min(8, ids.shape[-1] - 1), 0, -1):
            place = known.rfind(known[-4 * length :], 0, len(known) - 4)
            if place >= 0 and place % 4 == 0:
                return place // 4, place // 4 + length
        return 0, 0
