"""The real ExLlamaV2 generator on a CPU, with a model that makes every paging mistake visible.

Generator, jobs, page table, cache and tokenizer are the library's own. Two things are not: its compiled
extension (`cpu_extension`, installed by conftest.py before anything imports the library), and the
transformer. `EchoModel` stores the token ids it is fed in the paged key-value cache, through the block
table, and derives the next token from what it reads back: a wrong page, a stale one, one that was written
twice or not at all changes the text.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from exllamav2 import ExLlamaV2Cache, ExLlamaV2Tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_service.backends.exllamav2.backend import ExLlamaV2Backend, Loaded
from engine_service.backends.exllamav2.tokenizer import DirectoryTokenizer

PAGE = 256
_WORDS = "the a of to in on at is was it for with from light lamp room rain sky door clock home warm"
WORDS = tuple(_WORDS.split())
SPECIAL = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_END_ONE_IN = 1024
_MASK = (1 << 64) - 1
_POWERS = np.cumprod(np.full(1 << 15, 0x9E3779B97F4A7C15, dtype=np.uint64), dtype=np.uint64)


def make_model_directory(directory: Path) -> Path:
    """Write a byte-level tokenizer with some whole words, in the files of a Hugging Face model."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for word in WORDS:
        left = "Ġ"
        for character in word:
            merges.append((left, character))
            left += character
            pieces.append(left)
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    end_id = tokenizer.token_to_id("<|im_end|>")
    (directory / "config.json").write_text(json.dumps({"architectures": ["Echo"], "eos_token_id": end_id}))
    options = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(options))
    return directory


def digest(ids: np.ndarray[Any, Any]) -> int:
    """Return 64 bits that depend on every token and its position."""
    mixed = int(((ids.astype(np.uint64) + np.uint64(1)) * _POWERS[: len(ids)]).sum(dtype=np.uint64))
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 31)


class EchoModel:
    """Stands for ExLlamaV2: `forward_chunk` over the paged cache, and nothing else."""

    def __init__(self, config: Any, texts: DirectoryTokenizer) -> None:
        self.config = config
        self.cache_map = {0: "cpu"}
        self.calls: list[tuple[str, int, int]] = []  # (pass, sequences, tokens of each)
        self.fail_next: list[tuple[str, Exception]] = []  # (pass, what to raise)
        self.stop_in_layer = False  # raise half-way: keys are written, values are not
        self.on_prefill: Any = None  # called at the start of every prefill pass
        self._word_ids = np.array([texts.encode(f" {word}")[0] for word in WORDS])
        self._half, self._other_half = texts.encode("é")
        self._end = texts.eos_id
        self._vocab_size = texts.vocab_size

    def forward_chunk(
        self,
        input_ids: torch.Tensor,
        attn_params: Any,
        cache: Any,
        preprocess_only: bool = False,
        abort_event: threading.Event | None = None,
        **_: Any,
    ) -> Any:
        num_rows, length = input_ids.shape
        assert length <= self.config.max_input_len
        kind = "prefill" if preprocess_only else "decode"
        self.calls.append((kind, num_rows, length))
        if preprocess_only and self.on_prefill is not None:
            self.on_prefill()
        if abort_event is not None and abort_event.is_set():
            return None, None
        error = self._due(kind)
        for row in range(num_rows):
            start = self._stored(attn_params, row)
            slots = self._slots(attn_params, row, start + length)[start:]
            cache.key_states[0][0, slots, 0, 0] = (input_ids[row] & 1023).half()
            if error is None:
                cache.value_states[0][0, slots, 0, 0] = (input_ids[row] >> 10).half()
        if error is not None:
            raise error
        if preprocess_only:
            return {}
        logits = torch.full((num_rows, length, -(-self.config.vocab_size // 32) * 32), -20.0)
        for row in range(num_rows):
            ids = self._read(attn_params, row, cache, self._stored(attn_params, row) + length)
            for position in range(length):
                seen = ids[: len(ids) - length + 1 + position]
                logits[row, position, : self._vocab_size] = torch.from_numpy(self.scores(seen))
        return {"logits": logits}

    def scores(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return what the model thinks of every token after these."""
        scores = np.full(self._vocab_size, -20.0, dtype=np.float32)
        if ids[-1] == self._half:
            scores[self._other_half] = 20.0
            return scores
        mixed = digest(ids)
        chosen = np.append(self._word_ids, self._half)
        noise = (np.arange(1, len(chosen) + 1, dtype=np.uint64) * np.uint64(mixed | 1)) >> np.uint64(40)
        scores[chosen] = noise.astype(np.float32) * np.float32(8 / (1 << 24))
        scores[chosen[mixed % len(chosen)]] = 12.0
        scores[self._end] = 14.0 if (mixed >> 32) % _END_ONE_IN == 0 else -20.0
        return scores

    def continuation(self, prompt: Sequence[int], num_tokens: int, *, ignore_eos: bool = True) -> list[int]:
        """Return the greedy output of a prompt, computed without any cache."""
        ids = list(prompt)
        while len(ids) < len(prompt) + num_tokens:
            scores = self.scores(np.array(ids))
            if ignore_eos:
                scores[self._end] = -np.inf
            ids.append(int(scores.argmax()))
        return ids[len(prompt) :]

    def _due(self, kind: str) -> Exception | None:
        if self.fail_next and self.fail_next[0][0] == kind:
            return self.fail_next.pop(0)[1]
        return None

    def _stored(self, attn_params: Any, row: int) -> int:
        if hasattr(attn_params, "cache_seqlens"):
            return int(attn_params.cache_seqlens[row])
        return int(attn_params.past_len)

    def _slots(self, attn_params: Any, row: int, end: int) -> torch.Tensor:
        places = torch.arange(end)
        if not hasattr(attn_params, "block_index"):
            return places
        return attn_params.block_index[row].long()[places // PAGE] * PAGE + places % PAGE

    def _read(self, attn_params: Any, row: int, cache: Any, end: int) -> np.ndarray[Any, Any]:
        slots = self._slots(attn_params, row, end)
        low, high = cache.key_states[0][0, slots, 0, 0].long(), cache.value_states[0][0, slots, 0, 0].long()
        return (low + (high << 10)).numpy()


def make_loaded(
    directory: Path,
    *,
    cache_tokens: int,
    context_tokens: int | None = None,
    max_input_len: int = 1024,
    drafts: bool = False,
) -> Loaded:
    """Return an echo model with an empty cache of cache_tokens slots."""
    texts = DirectoryTokenizer(directory)
    config = SimpleNamespace(
        model_dir=str(directory),
        vocab_size=texts.vocab_size,
        bos_token_id=texts.encode(SPECIAL[0], parse_special=True)[0],
        eos_token_id=texts.eos_id,
        pad_token_id=None,
        no_flash_attn=False,
        max_input_len=max_input_len,
        max_batch_size=64,
        max_seq_len=context_tokens or cache_tokens,
        num_key_value_heads=1,
        num_hidden_layers=1,
        head_dim=2,
        arch=SimpleNamespace(lm=SimpleNamespace(mrope=False)),
    )
    model = EchoModel(config, texts)
    draft = EchoModel(config, texts) if drafts else None
    return Loaded(
        name="echo",
        model=model,
        cache=ExLlamaV2Cache(model, max_seq_len=cache_tokens),
        tokenizer=ExLlamaV2Tokenizer(config),
        texts=texts,
        draft_model=draft,
        draft_cache=ExLlamaV2Cache(draft, max_seq_len=cache_tokens) if draft else None,
    )


def make_backend(
    directory: Path,
    *,
    cache_tokens: int = 2048,
    context_tokens: int | None = None,
    max_sequences: int = 8,
    drafts: bool = False,
    **options: Any,
) -> ExLlamaV2Backend:
    """Return the backend over an echo model."""
    loaded = make_loaded(directory, cache_tokens=cache_tokens, context_tokens=context_tokens, drafts=drafts)
    return ExLlamaV2Backend(loaded, max_sequences=max_sequences, **options)
