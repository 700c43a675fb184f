"""A small vision model for the real ExLlamaV2 generator on a CPU, with the library's own tower.

Configuration, preprocessing, the modules of the tower, embeddings and their token ids are the library's own.
Three things are not: three functions of its compiled part, its reader of weight files, which asks for a GPU,
and moving a tensor to the device it is on. `SeeingModel` stores in the paged cache, for every token of a
picture, a number made of that token's embedding, so that the text depends on what the tower made of the
picture, and on nothing else of it.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exllamav2 import ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer, ExLlamaV2VisionTower
from exllamav2.stloader import STFile
from exllamav2.vlm import vision_tower
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine_service.backends.base import PlacedPicture
from engine_service.backends.exllama.tokenizer import DirectoryTokenizer
from engine_service.backends.exllamav2.backend import ExLlamaV2Backend, Loaded
from engine_service.backends.exllamav2.eye import eye_of
from tests.backends.echo import make_model_directory
from tests.backends.exllamav2_cpu import EchoModel

HIDDEN, TOWER, INNER, PATCH = 16, 32, 48, 16
_FIRST_ID = 1_000_000_000  # of the embeddings' ids
_MEAN, _DEVIATION = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
_NAMES = ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
          "<start_of_image>", "<end_of_image>", "<image_soft_token>"]  # fmt: skip

PIXTRAL = {
    "architectures": ["LlavaForConditionalGeneration"],
    "vision_feature_layer": -1,
    "vision_config": {
        "model_type": "pixtral",
        "head_dim": 16,
        "num_attention_heads": 2,
        "hidden_act": "silu",
        "hidden_size": TOWER,
        "patch_size": PATCH,
        "rope_theta": 10000,
        "num_hidden_layers": 2,
        "intermediate_size": INNER,
    },
}
PIXTRAL_PREPARING = {
    "image_processor_type": "PixtralImageProcessor",
    "image_mean": _MEAN,
    "image_std": _DEVIATION,
    "patch_size": {"height": PATCH, "width": PATCH},
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 1024},
}


def make_seeing_directory(directory: Path) -> Path:
    """Write the folder of a small Pixtral: configuration, tokenizer and random weights of the tower."""
    make_model_directory(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(_NAMES)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text()) | PIXTRAL
    config["text_config"] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "intermediate_size": INNER,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(PIXTRAL_PREPARING))
    save_file(_weights(tokenizer.get_vocab_size()), str(directory / "model.safetensors"))
    return directory


def _weights(vocab_size: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=chance) * 0.2).half()

    layer = "language_model.model.layers.0."
    parts = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{n}_proj" for n in "qkvo"))
    weights = {
        # Of the language model only the embeddings are used; the library wants to see the other names.
        "language_model.model.embed_tokens.weight": random(vocab_size, HIDDEN),
        "language_model.model.norm.weight": random(HIDDEN),
        "language_model.lm_head.weight": random(vocab_size, HIDDEN),
        **{f"{layer}{part}.weight": random(1) for part in parts},
        **{f"{layer}mlp.{name}_proj.weight": random(1) for name in ("gate", "up", "down")},
        "vision_tower.patch_conv.weight": random(TOWER, 3, PATCH, PATCH),
        "vision_tower.ln_pre.weight": random(TOWER) + 1,
        "multi_modal_projector.linear_1.weight": random(INNER, TOWER),
        "multi_modal_projector.linear_1.bias": random(INNER),
        "multi_modal_projector.linear_2.weight": random(HIDDEN, INNER),
        "multi_modal_projector.linear_2.bias": random(HIDDEN),
    }
    for index in range(2):
        layer = f"vision_tower.transformer.layers.{index}."
        weights |= {f"{layer}{name}.weight": random(TOWER) + 1 for name in ("attention_norm", "ffn_norm")}
        weights |= {f"{layer}attention.{name}_proj.weight": random(TOWER, TOWER) for name in "qkvo"}
        weights |= {
            f"{layer}feed_forward.{name}_proj.weight": random(INNER, TOWER) for name in ("gate", "up")
        }
        weights[f"{layer}feed_forward.down_proj.weight"] = random(TOWER, INNER)
    return weights


def lend_a_processor(patch: pytest.MonkeyPatch) -> None:
    """Let the library's tower load and compute without a GPU."""
    extension = sys.modules["exllamav2_ext"]
    patch.setattr(extension, "rms_norm", _rms_norm, raising=False)
    patch.setattr(extension, "rope_", _rope, raising=False)
    patch.setattr(extension, "gen_mrope_pos_ids", _positions, raising=False)
    patch.setattr(vision_tower, "safe_move_tensor", lambda tensor, *_, **__: tensor)
    patch.setattr(STFile, "get_tensor", _tensor_of_file)


def _tensor_of_file(
    file: STFile, key: str, device: str, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    assert device == "cpu"
    return load_file(file.filename)[key]


def _rms_norm(source: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, epsilon: float) -> None:
    target.copy_(torch.nn.functional.rms_norm(source.float(), source.shape[-1:], weight.float(), epsilon))


def _rope(states: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, past: int, *rest: Any) -> None:
    is_neox = rest[-1]
    assert is_neox
    length, half = states.shape[1], states.shape[-1] // 2
    sines, cosines = (table.reshape(-1, table.shape[-1])[past : past + length, None] for table in (sin, cos))
    turned = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    states.copy_((states.float() * cosines.float() + turned.float() * sines.float()).half())


def _positions(
    positions: torch.Tensor,
    ids: torch.Tensor,
    merge: int,
    spans: list[tuple[int, int]],
    grids: list[tuple[int, int, int]],
) -> int:
    """Write time, row and column of every token; return the place behind the last."""
    base = following = 0
    for index, token_id in enumerate(ids.tolist()):
        inside = [
            (token_id - a, grid) for (a, b), grid in zip(spans, grids, strict=True) if a <= token_id < b
        ]
        if inside:
            [(place, (times, rows, columns))] = inside
            rows, columns = rows // merge, columns // merge
            triple = (place // columns // rows % times, place // columns % rows, place % columns)
        else:
            base, triple = following + 1, (-1, -1, -1)
        positions[:, index] = torch.tensor([base + one for one in triple])
        following = max(following, base + max(triple) + 1)
    return following


class Tower(ExLlamaV2VisionTower):  # type: ignore[misc]
    """The library's tower on a processor; counts the pictures it encoded."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_encoded = 0
        self.fail_next: Exception | None = None
        with torch.inference_mode():
            for module in self.modules:
                module.set_device_idx(-1)
                module.load()

    def process(self, *arguments: Any, **options: Any) -> Any:
        assert torch.is_inference_mode_enabled()
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.num_encoded += 1
        return super().process(*arguments, **options)


class _Embedding:
    """Stands for the language model's first module, of which the library asks single tokens."""

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._weights[ids]


class SeeingModel(EchoModel):
    """Reads the tokens of pictures from the embeddings that it is handed."""

    def __init__(self, config: Any, texts: DirectoryTokenizer, weights: torch.Tensor) -> None:
        super().__init__(config, texts)
        self.modules = [_Embedding(weights)]
        self.positions: list[
            int
        ] = []  # of the first token of every row, where pictures have rows and columns

    def forward_chunk(self, input_ids: torch.Tensor, attn_params: Any, cache: Any, **options: Any) -> Any:
        if self.config.arch.lm.mrope:
            self._note_positions(attn_params, *input_ids.shape)
        ids = input_ids.clone()
        for embedding in options.get("indexed_embeddings") or ():
            is_its = (ids >= embedding.first_index) & (ids < embedding.first_index + embedding.length)
            ids[is_its] = gists(embedding)[ids[is_its] - embedding.first_index]
        assert int(ids.max()) < _FIRST_ID, "a token of a picture without its embedding"
        return super().forward_chunk(ids, attn_params, cache, **options)

    def _note_positions(self, attn_params: Any, num_rows: int, length: int) -> None:
        """Note where the first token of each row stands; fail where the table ends too early."""
        tables = attn_params.get_alt_rope_embed("cpu")
        for row in range(num_rows):
            stored = int(attn_params.cache_seqlens[row])
            if tables is None:
                self.positions.append(stored + int(attn_params.rope_offsets[row]))
                continue
            assert tables[0].flatten(0, -2).shape[0] >= stored + length, "a token without a place"


def gists(embedding: Any) -> torch.Tensor:
    """Return a number for every token of a picture, made of its embedding; int64 of shape (n,).

    From 1,024 to 2,047: no token of a text, and stored exactly in half precision.
    """
    bits = embedding.embeddings.contiguous().view(torch.int16).long() & 0xFFFF
    factors = torch.arange(1, bits.shape[-1] + 1) * 40_503
    mixed = (bits * factors).sum(-1)
    return 1024 + ((mixed ^ (mixed >> 10)) & 0x3FF)


def make_seeing_loaded(directory: Path, *, cache_tokens: int, context_tokens: int | None = None) -> Loaded:
    """Return a seeing model with an empty cache of cache_tokens slots."""
    texts = DirectoryTokenizer(directory)
    config = ExLlamaV2Config(str(directory))
    config.no_flash_attn = config.no_xformers = True  # of the tower
    tower = Tower(config)
    config.no_flash_attn = False  # paged mode asks for it
    config.max_input_len, config.max_batch_size = 1024, 64
    config.max_seq_len = context_tokens or cache_tokens
    weights = load_file(str(directory / "model.safetensors"))["language_model.model.embed_tokens.weight"]
    model = SeeingModel(config, texts, weights)
    return Loaded(
        name="seeing",
        model=model,
        cache=ExLlamaV2Cache(model, max_seq_len=cache_tokens),
        tokenizer=ExLlamaV2Tokenizer(config),
        texts=texts,
        tower=tower,
        eye=eye_of(directory, texts),
    )


def make_seeing_backend(directory: Path, *, cache_tokens: int = 4096, **options: Any) -> ExLlamaV2Backend:
    """Return the backend over a seeing model."""
    loaded = make_seeing_loaded(directory, cache_tokens=cache_tokens)
    return ExLlamaV2Backend(loaded, **{"max_sequences": 8, **options})


def drawing(width: int = 100, height: int = 70, *, seed: int = 0, kind: str = "PNG") -> bytes:
    """Return the file of a picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def with_pictures(
    backend: ExLlamaV2Backend, *parts: tuple[int, ...] | bytes
) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
    """Return a prompt of tokens and picture files, in their order, and where the pictures stand."""
    ids: list[int] = []
    placed = []
    assert backend.eye is not None
    for part in parts:
        if isinstance(part, bytes):
            picture = backend.eye.look(part)
            placed.append(PlacedPicture(start=len(ids), picture=picture))
            ids += [backend.eye.placeholder_id] * picture.num_tokens
        else:
            ids += part
    return tuple(ids), tuple(placed)
