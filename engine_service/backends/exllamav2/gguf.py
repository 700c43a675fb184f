"""Reads a GGUF file: its metadata, whether it is whole, and its tensors as 32-bit floats.

Decides nothing. Knows the sizes of the types that model files have, and how to read those of which the
embedded model consists (F32, F16, Q4_1, Q8_0); it refuses to read others by name.

Source: the GGUF specification, version 3, of ggml-org/ggml; block layouts of its ggml-common.h.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.base import ModelError

Floats32 = NDArray[np.float32]

_MAGIC: Final = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT: Final = 32  #: of the tensors, where the file names no other


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    shape: tuple[int, ...]  #: outermost dimension first
    kind: int
    offset: int


class GgufFile:
    """One GGUF file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Read metadata and the list of tensors; raise ModelError for what is no whole GGUF file."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: the file cannot be read ({error})") from error
        if self._data[:4] != _MAGIC:
            raise ModelError(f"{path}: this is not a GGUF file: it begins with {self._data[:4]!r}")
        self._place = 4
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: the header is damaged or cut short ({error})") from error

    def _read_header(self) -> None:
        self._scalar("I")  # the version; 2 and 3 differ in nothing that is read here
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self._tensors: dict[str, _Tensor] = {}
        for _ in range(num_tensors):
            name = self._string()
            dimensions = [self._scalar("Q") for _ in range(self._scalar("I"))]
            kind, offset = self._scalar("I"), self._scalar("Q")
            self._tensors[name] = _Tensor(shape=tuple(reversed(dimensions)), kind=kind, offset=offset)
        alignment = self.metadata.get("general.alignment")
        if not isinstance(alignment, int) or alignment < 1:
            alignment = _ALIGNMENT
        self._start = -(-self._place // alignment) * alignment

    def check_is_whole(self) -> None:
        """Raise ModelError if the file ends before its tensors do.

        Of a type that is not known here the beginning alone must be there: llama.cpp knows what it takes.
        """
        end = max((self._end_of(tensor) for tensor in self._tensors.values()), default=0)
        size = len(self._data)
        if end > size:
            raise ModelError(
                f"{self.path}: the file is cut short: {size} bytes instead of {end}; fetch it again"
            )

    def _end_of(self, tensor: _Tensor) -> int:
        block_values, block_bytes = _BLOCKS.get(tensor.kind, (1, 0))
        return self._start + tensor.offset + math.prod(tensor.shape) // block_values * block_bytes

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of that name."""
        return name in self._tensors

    def tensor(self, name: str) -> Floats32:
        """Return a tensor, dequantised; raise ModelError if it is missing, cut short or of an unknown
        type."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path}: there is no tensor {name!r}; only Llama models are known here")
        if tensor.kind not in _KINDS:
            raise ModelError(
                f"{self.path}: {name} has the quantisation type {tensor.kind}; "
                "F32, F16, Q4_1 and Q8_0 are known"
            )
        block_values, block_bytes, read = _KINDS[tensor.kind]
        num_values = int(np.prod(tensor.shape))
        start = self._start + tensor.offset
        end = start + num_values // block_values * block_bytes
        if end > len(self._data):
            raise ModelError(f"{self.path}: {name} is cut short; the file has {len(self._data)} bytes")
        raw = np.frombuffer(self._data, dtype=np.uint8, count=end - start, offset=start)
        return read(raw.reshape(-1, block_bytes)).reshape(tensor.shape)

    # -- the header's pieces ---------------------------------------------------------------------------

    def _scalar(self, code: str) -> Any:
        end = self._place + struct.calcsize(f"<{code}")
        if end > len(self._data):
            raise struct.error("a number goes beyond the end of the file")
        value = struct.unpack_from(f"<{code}", self._data, self._place)[0]
        self._place = end
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        if self._place + length > len(self._data):
            raise struct.error("a text goes beyond the end of the file")
        text = self._data[self._place : self._place + length].decode()
        self._place += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, length = self._scalar("I"), self._scalar("Q")
            return [self._value(item) for _ in range(length)]
        if kind not in _SCALARS:
            raise struct.error(f"there is no kind of value {kind}")
        return self._scalar(_SCALARS[kind])


def _f32(blocks: NDArray[np.uint8]) -> Floats32:
    return blocks.view(np.float32).copy()


def _f16(blocks: NDArray[np.uint8]) -> Floats32:
    return blocks.view(np.float16).astype(np.float32)


def _q4_1(blocks: NDArray[np.uint8]) -> Floats32:
    """A block is a scale, a minimum, and 32 values of 4 bits: the low halves of 16 bytes, then the high
    ones."""
    scale = blocks[:, 0:2].view(np.float16).astype(np.float32)
    least = blocks[:, 2:4].view(np.float16).astype(np.float32)
    packed = blocks[:, 4:]
    return np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32) * scale + least


def _q8_0(blocks: NDArray[np.uint8]) -> Floats32:
    """A block is a scale and 32 values of 8 bits."""
    scale = blocks[:, 0:2].view(np.float16).astype(np.float32)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * scale


#: type: (values per block, bytes per block, dequantisation)
_KINDS: Final[dict[int, tuple[int, int, Callable[[NDArray[np.uint8]], Floats32]]]] = {
    0: (1, 4, _f32),
    1: (1, 2, _f16),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}

_BLOCKS: Final[dict[int, tuple[int, int]]] = {
    **{kind: (values, size) for kind, (values, size, _) in _KINDS.items()},
    2: (32, 18),  # Q4_0
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    39: (32, 17),  # MXFP4
}
"""type: (values per block, bytes per block)"""
