"""How ExLlamaV3 itself reads a model folder, without a GPU: what is refused, and what a cache takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exllamav3 import Config, Model

from engine_service.backends.base import ModelError
from engine_service.backends.exllama.folder import CACHE_TYPES, Options
from engine_service.backends.exllamav3.provision import into_memory, unloaded
from engine_service.footprint import footprint_of
from tests.backends.echo import folder_with_weights

TOKENS = 4096
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 512,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN_NEXT = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def folder_of(folder: Path, config: dict[str, Any]) -> Path:
    folder_with_weights(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_cache_takes_what_was_foretold(tmp_path: Path, cache_type: str) -> None:
    folder = folder_of(tmp_path / "model", LLAMA)
    _, cache = unloaded(folder, Options(cache_type=cache_type), TOKENS)
    taken = sum(layer.storage_size() for layer in cache.layers.values())
    assert taken == footprint_of(folder).cache_bytes(TOKENS, cache_type)


def test_a_model_that_the_library_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", LLAMA | {"architectures": ["NobodyForCausalLM"]})
    with pytest.raises(ModelError, match=r"cannot read this model .*Unknown architecture NobodyForCausalLM"):
        unloaded(folder, Options(), TOKENS)


def test_a_model_with_a_recurrent_state_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", QWEN_NEXT)
    with pytest.raises(ModelError, match="Qwen3NextForCausalLM keeps a state beside the pages of its cache"):
        unloaded(folder, Options(), TOKENS)


def test_a_model_of_sliding_windows_keeps_pages_instead_of_a_state(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", GPT_OSS)
    by_itself = Model.from_config(Config.from_directory(str(folder)))
    assert by_itself.caps.get("recurrent_states")
    model, cache = unloaded(folder, Options(), TOKENS)
    assert not model.caps.get("recurrent_states")
    assert len(cache.layers) == GPT_OSS["num_hidden_layers"]


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_a_model_that_cannot_be_loaded_is_told_with_what_it_takes(
    tmp_path: Path, tensor_parallel: bool
) -> None:
    options = Options(tensor_parallel=tensor_parallel)
    model, cache = unloaded(folder_of(tmp_path / "model", LLAMA), options, TOKENS)
    with pytest.raises(ModelError, match=r"could not be loaded \(.*its cache 0\.0 GiB, and 0\.0 GiB of GPU"):
        into_memory(torch, model, cache, options, 2, lambda _: None)
