"""How much memory a model takes, read from its files: weights, and cache for every token it remembers.

Decides nothing and loads nothing: a GGUF file's header, or the config.json of a folder of safetensors. A file
that ends before its weights do is named, for no library would load it.

Sources: the GGUF specification (ggml-org/ggml); config.json as transformers writes it. A token's
cache is two vectors (key, value) per layer of key/value heads times their width; models that mix in layers of
another kind take less.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine_service.backends.base import ModelError
from engine_service.backends.exllama.folder import check_weights
from engine_service.backends.exllamav2.gguf import GgufFile
from engine_service.backends.parking import PARKING_BYTES

GIB: Final = 2**30
CACHE_BITS: Final = {"fp16": 16.0, "q8": 8.5, "q6": 6.5, "q4": 4.5}
"""Bits per cached value. Quantised caches keep a 16-bit scale for every 32 values."""

CACHE_STEP: Final = 256
"""Both llama.cpp and ExLlamaV2 make caches of multiples of this (token slots)."""

_UNEVEN: Final = (
    "attention.sliding_window",
    "attention.shared_kv",
    "attention.kv_lora",
    "attention.value_",
    "ssm.",
)
"""How the keys begin of layers that remember less than two vectors of one width for every token."""

_FIRST_PART: Final = re.compile(r"(?P<prefix>.+-)00001-of-\d{5}\.gguf$")

_GPU_OVERHEAD: Final = 768 * 2**20
_CPU_OVERHEAD: Final = 256 * 2**20
"""What computing takes beside weights and cache: buffers of activations, the library itself. Estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one model takes."""

    path: Path
    name: str
    architecture: str
    weight_bytes: int
    num_layers: int
    num_kv_heads: int
    head_width: int  #: values per head and token
    max_context_tokens: int  #: that the model was trained for
    overhead_bytes: int  #: what computing takes beside weights and cache
    parking_bytes: int  #: most host memory that idle conversations are kept in, beside the cache
    page_tokens: int  #: of the backend that runs such files
    rounds_up: bool  #: whether the backend makes up whole steps of CACHE_STEP, or leaves a rest unused
    is_even: bool  #: whether all layers are of one kind; else the cache takes less than is counted here

    def cache_tokens(self, context_tokens: int) -> int:
        """Return the token slots that the backend makes of the setting."""
        more = CACHE_STEP - 1 if self.rounds_up else 0
        return (context_tokens + more) // CACHE_STEP * CACHE_STEP

    def cache_bytes(self, num_tokens: int, cache_type: str) -> int:
        """Return what num_tokens remembered tokens take; cache_type is a key of CACHE_BITS."""
        values = 2 * self.num_layers * self.num_kv_heads * self.head_width
        return int(values * num_tokens * CACHE_BITS[cache_type] / 8)

    def needed_bytes(self, num_tokens: int, cache_type: str) -> int:
        """Return weights, cache, what computing takes and where idle conversations are kept."""
        beside = self.overhead_bytes + self.parking_bytes
        return self.weight_bytes + self.cache_bytes(num_tokens, cache_type) + beside

    def most_tokens(self, memory_bytes: int, cache_type: str) -> int:
        """Return the cache (tokens) that memory_bytes leave room for; 0 if not even the weights fit."""
        left = memory_bytes - self.needed_bytes(0, cache_type)
        return max(0, left) // self.cache_bytes(CACHE_STEP, cache_type) * CACHE_STEP


def footprint_of(path: Path) -> Footprint:
    """Return what the model at path takes; raise ModelError that says what is wrong with it."""
    if path.is_dir():
        return _of_folder(path)
    if not path.exists():
        raise ModelError(f"{path}: there is no such file; give a GGUF file or a folder of safetensors")
    return _of_gguf(path)


def _of_gguf(path: Path) -> Footprint:
    file = GgufFile(path)
    file.check_is_whole()
    found = file.metadata
    parts = _parts(path, found)
    for part in parts:
        GgufFile(part).check_is_whole()
    architecture = str(found.get("general.architecture", ""))

    def number(key: str, default: int | None = None) -> int:
        value = found.get(f"{architecture}.{key}", default)
        # Some models have another number for every layer; the plan is for the largest.
        value = max(value, default=None) if isinstance(value, list) else value
        if not isinstance(value, int) or value < 1:
            raise ModelError(
                f"{path}: the header does not say {architecture or 'which architecture it is'}.{key}"
            )
        return value

    heads = number("attention.head_count")
    return Footprint(
        path=path,
        name=path.stem,
        architecture=architecture,
        weight_bytes=sum(part.stat().st_size for part in (path, *parts)),
        num_layers=number("block_count"),
        num_kv_heads=number("attention.head_count_kv", heads),
        head_width=number("attention.key_length", number("embedding_length") // heads),
        max_context_tokens=number("context_length"),
        overhead_bytes=_CPU_OVERHEAD,
        parking_bytes=PARKING_BYTES,
        page_tokens=32,
        rounds_up=True,
        is_even=not any(_is_of_uneven(key.removeprefix(f"{architecture}."), found[key]) for key in found),
    )


def _is_of_uneven(key: str, value: Any) -> bool:
    """Return whether an entry of the header is one that only models have whose layers differ."""
    if key in ("attention.head_count_kv", "attention.key_length"):
        return isinstance(value, list)
    return key == "full_attention_interval" or key.startswith(_UNEVEN)


def _parts(path: Path, found: dict[str, Any]) -> list[Path]:
    """Return the other files of a model that llama.cpp's gguf-split cut into several; path is the first."""
    count = found.get("split.count", 1)
    if not isinstance(count, int) or count < 2 or not (name := _FIRST_PART.match(path.name)):
        return []
    return [
        path.with_name(f"{name['prefix']}{number:05d}-of-{count:05d}.gguf") for number in range(2, count + 1)
    ]


def _of_folder(path: Path) -> Footprint:
    config = _config(path)
    text = config.get("text_config", config)  # models that see keep their language part apart

    def number(key: str, default: int | None = None) -> int:
        value = text.get(key) or default
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{path / 'config.json'}: {key} is missing or no whole number")
        return value

    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{path}: there are no *.safetensors files in this folder")
    check_weights(path, "the weights of such a folder are *.safetensors files")
    heads = number("num_attention_heads")
    return Footprint(
        path=path,
        name=path.name,
        architecture=str(text.get("model_type", "")),
        weight_bytes=weights,
        num_layers=number("num_hidden_layers"),
        num_kv_heads=number("num_key_value_heads", heads),
        head_width=number("head_dim", number("hidden_size") // heads),
        max_context_tokens=number("max_position_embeddings"),
        overhead_bytes=_GPU_OVERHEAD,
        parking_bytes=0,
        page_tokens=256,
        rounds_up=False,
        is_even=False,  # config.json has a name of its own for every kind of mixture
    )


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); is this a model's folder?") from error
    except ValueError as error:
        raise ModelError(f"{file}: is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file}: must be an object")
    return config
