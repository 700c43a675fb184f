"""The device `cpu-reference`: a plain Llama transformer on the CPU, behind ExLlamaV2's own generator.

A test vehicle: it answers real text through the real page table, slowly (about ten tokens a second).
Decides nothing. It reads and writes keys and values in the generator's paged cache, as flash-attn does on a
GPU. Only the weights and the tokenizer come from elsewhere: a GGUF file of a Llama model, dequantised.

Source: Llama (Touvron et al. 2023) with grouped queries; the file's query and key rows are in llama.cpp's
order, so rotary embedding turns neighbouring values.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.nn import functional

from engine_service.backends.base import ModelError
from engine_service.backends.exllamav2.gguf import GgufFile

_PAGE: Final = 256
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens in GGUF
_PRE_TOKENIZERS: Final = ("smollm",)


class ReferenceModel:
    """A Llama model of 32-bit weights; `forward_chunk` as ExLlamaV2's."""

    def __init__(self, file: GgufFile, directory: Path, *, max_seq_len: int, max_input_len: int) -> None:
        """Dequantise the weights; raise ModelError for another architecture."""
        data = file.metadata
        if data.get("general.architecture") != "llama":
            architecture = data.get("general.architecture")
            raise ModelError(f"{file.path}: cpu-reference computes Llama models, not {architecture!r}")
        self.num_heads: int = data["llama.attention.head_count"]
        num_kv_heads: int = data["llama.attention.head_count_kv"]
        self.head_dim: int = data["llama.embedding_length"] // self.num_heads
        self.epsilon: float = data["llama.attention.layer_norm_rms_epsilon"]
        self.embedding = torch.from_numpy(file.tensor("token_embd.weight"))
        self.config = SimpleNamespace(
            model_dir=str(directory),
            vocab_size=self.embedding.shape[0],
            bos_token_id=data["tokenizer.ggml.bos_token_id"],
            eos_token_id=data["tokenizer.ggml.eos_token_id"],
            pad_token_id=data.get("tokenizer.ggml.padding_token_id"),
            no_flash_attn=False,
            max_input_len=max_input_len,
            max_batch_size=256,
            max_seq_len=min(max_seq_len, data["llama.context_length"]),
            num_key_value_heads=num_kv_heads,
            num_hidden_layers=data["llama.block_count"],
            head_dim=self.head_dim,
            arch=SimpleNamespace(lm=SimpleNamespace(mrope=False)),
        )
        self.cache_map = dict.fromkeys(range(self.config.num_hidden_layers), "cpu")
        self.layers = [_Layer(file, index) for index in range(self.config.num_hidden_layers)]
        self.norm = torch.from_numpy(file.tensor("output_norm.weight"))
        has_output = file.has("output.weight")
        self.output = torch.from_numpy(file.tensor("output.weight")) if has_output else self.embedding
        base = data.get("llama.rope.freq_base", 10000.0)
        self._frequencies = 1.0 / base ** (torch.arange(0, self.head_dim, 2) / self.head_dim)

    def forward_chunk(
        self,
        input_ids: torch.Tensor,
        attn_params: Any,
        cache: Any,
        preprocess_only: bool = False,
        abort_event: threading.Event | None = None,
        **_: Any,
    ) -> Any:
        """Compute input_ids, int64 of shape (rows, n), at the places that attn_params names; store keys and
        values.

        Returns {"logits": float32 of shape (rows, n, padded vocabulary)}, or nothing of it for
        preprocess_only; a pair of nothing if abort_event was set.
        """
        num_rows, length = input_ids.shape
        places = [_places(attn_params, row, length) for row in range(num_rows)]
        starts = torch.tensor([len(slots) - length for slots in places])
        positions = starts[:, None] + torch.arange(length)
        angles = positions[:, :, None, None] * self._frequencies
        hidden = self.embedding[input_ids]
        for index, layer in enumerate(self.layers):
            if abort_event is not None and abort_event.is_set():
                return None, None
            keys, values = cache.key_states[index][0], cache.value_states[index][0]
            hidden = hidden + self._attend(layer, hidden, angles, places, keys, values)
            normed = self._normed(hidden, layer.ffn_norm)
            gate = functional.silu(functional.linear(normed, layer.gate))
            hidden = hidden + functional.linear(gate * functional.linear(normed, layer.up), layer.down)
        if preprocess_only:
            return {}
        logits = functional.linear(self._normed(hidden, self.norm), self.output)
        padding = -logits.shape[-1] % 32
        return {"logits": functional.pad(logits, (0, padding), value=-65504.0)}

    def _attend(
        self,
        layer: _Layer,
        hidden: torch.Tensor,
        angles: torch.Tensor,
        places: list[torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Return what attention adds; keys and values are the cache's: (slots, key heads, head size)."""
        num_rows, length, _ = hidden.shape
        normed = self._normed(hidden, layer.attn_norm)
        query = self._heads(functional.linear(normed, layer.query), angles)
        key = self._heads(functional.linear(normed, layer.key), angles)
        value = functional.linear(normed, layer.value).view(num_rows, length, -1, self.head_dim)
        rows = []
        for row, slots in enumerate(places):
            keys[slots[-length:]] = key[row].to(keys.dtype)
            values[slots[-length:]] = value[row].to(values.dtype)
            mask = torch.arange(len(slots)) <= torch.arange(len(slots) - length, len(slots))[:, None]
            attended = functional.scaled_dot_product_attention(
                query[row].transpose(0, 1),
                keys[slots].float().transpose(0, 1).repeat_interleave(self._group, dim=0),
                values[slots].float().transpose(0, 1).repeat_interleave(self._group, dim=0),
                attn_mask=mask,
            )
            rows.append(attended.transpose(0, 1).reshape(length, -1))
        return functional.linear(torch.stack(rows), layer.output)

    @property
    def _group(self) -> int:
        """Query heads per key head."""
        return int(self.num_heads // self.config.num_key_value_heads)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, (hidden.shape[-1],), weight, self.epsilon)

    def _heads(self, flat: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Cut into heads and turn neighbouring values by their position's angles."""
        heads = flat.view(*flat.shape[:2], -1, self.head_dim)
        even, odd = heads[..., 0::2], heads[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class _Layer:
    """The weights of one layer, float32."""

    def __init__(self, file: GgufFile, index: int) -> None:
        def weight(name: str) -> torch.Tensor:
            return torch.from_numpy(file.tensor(f"blk.{index}.{name}.weight"))

        self.attn_norm, self.ffn_norm = weight("attn_norm"), weight("ffn_norm")
        self.query, self.key, self.value = weight("attn_q"), weight("attn_k"), weight("attn_v")
        self.output = weight("attn_output")
        self.gate, self.up, self.down = weight("ffn_gate"), weight("ffn_up"), weight("ffn_down")


def _places(attn_params: Any, row: int, length: int) -> torch.Tensor:
    """Return the cache slots of a row's tokens, those that are about to be stored included."""
    if not hasattr(attn_params, "block_index"):
        return torch.arange(int(attn_params.past_len) + length)
    places = torch.arange(int(attn_params.cache_seqlens[row]) + length)
    return attn_params.block_index[row].long()[places // _PAGE] * _PAGE + places % _PAGE


# -- the files that the library and the tokenizer read ---------------------------------------------------


def model_directory(file: GgufFile, cache_dir: Path) -> Path:
    """Return a folder with the file's tokenizer in Hugging Face's form; it is written once, whole or not at
    all.

    Raises ModelError for a tokenizer that is not known here.
    """
    target = cache_dir / f"{file.path.stem}-{file.path.stat().st_size}-huggingface"
    if (target / "tokenizer.json").exists():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
        partial = Path(folder) / "model"
        partial.mkdir()
        for name, text in _files(file):
            (partial / name).write_text(text, encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    return target


def _files(file: GgufFile) -> Iterator[tuple[str, str]]:
    data = file.metadata
    tokens: list[str] = data["tokenizer.ggml.tokens"]
    yield "tokenizer.json", _tokenizer_json(file, tokens)
    options = {
        "bos_token": tokens[data["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[data["tokenizer.ggml.eos_token_id"]],
        "chat_template": data.get("tokenizer.chat_template", ""),
    }
    yield "tokenizer_config.json", json.dumps(options)
    ends = [data["tokenizer.ggml.eos_token_id"]]
    if "<|endoftext|>" in tokens:
        ends.append(tokens.index("<|endoftext|>"))
    config = {"architectures": ["LlamaForCausalLM"], "eos_token_id": sorted(set(ends))}
    yield "config.json", json.dumps(config)


def _tokenizer_json(file: GgufFile, tokens: list[str]) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    data = file.metadata
    kind, pre = data.get("tokenizer.ggml.model"), data.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: the tokenizer {kind!r} with {pre!r} is not known to cpu-reference; "
            "the embedded model's is 'gpt2' with 'smollm'"
        )
    merges = [tuple(pair.split(" ", 1)) for pair in data["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = data["tokenizer.ggml.token_type"]
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    text: str = tokenizer.to_str()
    return text
