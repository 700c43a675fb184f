"""A model that makes every paging mistake visible, for the real generators of ExLlamaV2 and ExLlamaV3.

It stores the token ids it is fed in the paged key-value cache, through the block table, and derives the next
token from what it reads back: a wrong page, a stale one, one that was written twice, behind other tokens or
not at all changes the text. How it is fed is the library's affair: exllamav2_cpu.py, exllamav3_cpu.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_service.backends.exllama.tokenizer import DirectoryTokenizer

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


def folder_with_weights(folder: Path) -> Path:
    """Return a model folder whose files are whole, with weights of nothing."""
    folder.mkdir(parents=True)
    make_model_directory(folder)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def chained(before: int, ids: Sequence[int]) -> list[int]:
    """Return what is stored with tokens: 10 bits that depend on each token and on all before it."""
    chain = []
    for token_id in ids:
        before = (before * 37 + token_id * 5 + 1) % 1024
        chain.append(before)
    return chain


def read_back(ids: np.ndarray[Any, Any], chain: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the token ids read from a cache; those that were stored behind others are not what they were."""
    before = np.concatenate((np.zeros(1, dtype=np.int64), chain[:-1]))
    return ids + ((chain != (before * 37 + ids * 5 + 1) % 1024).astype(np.int64) << 20)


class Echo:
    """What the model thinks, and what tests can do to it."""

    def __init__(self, texts: DirectoryTokenizer) -> None:
        self.calls: list[tuple[str, int, int]] = []  # (pass, sequences, tokens of each)
        self.fail_next: list[tuple[str, Exception]] = []  # (pass, what to raise)
        self.on_prefill: Any = None  # called at the start of every prefill pass
        self.is_unloaded = False
        self._word_ids = np.array([texts.encode(f" {word}")[0] for word in WORDS])
        self._half, self._other_half = texts.encode("é")
        self._end = texts.eos_id
        self._vocab_size = texts.vocab_size

    def unload(self) -> None:
        self.is_unloaded = True

    def logits(self, sequences: Sequence[np.ndarray[Any, Any]], length: int) -> torch.Tensor:
        """Return scores after each of the last tokens of sequences: (rows, length, padded vocabulary)."""
        logits = torch.full((len(sequences), length, -(-self._vocab_size // 32) * 32), -20.0)
        for row, ids in enumerate(sequences):
            for position in range(length):
                seen = ids[: len(ids) - length + 1 + position]
                logits[row, position, : self._vocab_size] = torch.from_numpy(self.scores(seen))
        return logits

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
