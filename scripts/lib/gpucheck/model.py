"""The embedded model as a folder that ExLlamaV2 loads: FP16 weights in Hugging Face's form.

Decides nothing. So a machine needs no download: the GGUF file of the package is dequantised and written once.

Source: llama.cpp's conversion of Llama models orders the rows of the query and key projections so that rotary
embedding turns neighbours; Hugging Face's order turns halves. It is undone here.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.exllamav2.cpu_reference import model_directory
from engine_service.backends.exllamav2.gguf import GgufFile
from engine_service.backends.llama_cpp.provision import default_model_path

_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def embedded_model(cache_dir: Path, path: Path | None = None) -> Path:
    """Return the folder; it is written once, whole or not at all."""
    file = GgufFile(path or default_model_path())
    target = cache_dir / f"{file.path.stem}-{file.path.stat().st_size}-fp16"
    if (target / "model.safetensors").exists():
        return target
    texts = model_directory(file, cache_dir)
    with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
        partial = Path(folder) / "model"
        shutil.copytree(texts, partial)
        known = json.loads((partial / "config.json").read_text())
        (partial / "config.json").write_text(json.dumps({**known, **_config(file)}))
        from safetensors.numpy import save_file

        save_file(dict(_weights(file)), partial / "model.safetensors")
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    return target


def _config(file: GgufFile) -> dict[str, object]:
    data = file.metadata
    return {
        "model_type": "llama",
        "hidden_size": data["llama.embedding_length"],
        "intermediate_size": data["llama.feed_forward_length"],
        "num_attention_heads": data["llama.attention.head_count"],
        "num_key_value_heads": data["llama.attention.head_count_kv"],
        "num_hidden_layers": data["llama.block_count"],
        "rms_norm_eps": data["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": data.get("llama.rope.freq_base", 10000.0),
        "max_position_embeddings": data["llama.context_length"],
        "vocab_size": len(data["tokenizer.ggml.tokens"]),
        "bos_token_id": data["tokenizer.ggml.bos_token_id"],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }


def _weights(file: GgufFile) -> Iterator[tuple[str, NDArray[np.float16]]]:
    """Yield the tensors by the names that transformers gives them."""
    embedding = file.tensor("token_embd.weight")
    yield "model.embed_tokens.weight", _half(embedding)
    output = file.tensor("output.weight") if file.has("output.weight") else embedding
    yield "lm_head.weight", _half(output).copy()
    yield "model.norm.weight", _half(file.tensor("output_norm.weight"))
    heads = {
        "attn_q": file.metadata["llama.attention.head_count"],
        "attn_k": file.metadata["llama.attention.head_count_kv"],
    }
    for index in range(file.metadata["llama.block_count"]):
        for short, name in _LAYER.items():
            weight = file.tensor(f"blk.{index}.{short}.weight")
            if short in heads:
                weight = in_halves(weight, heads[short])
            yield f"model.layers.{index}.{name}.weight", _half(weight)


def in_halves(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Return a projection's rows, shape (heads * head size, n), in the order whose halves are turned."""
    size = weight.shape[0] // num_heads
    pairs = weight.reshape(num_heads, size // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _half(weight: NDArray[np.float32]) -> NDArray[np.float16]:
    return weight.astype(np.float16)
