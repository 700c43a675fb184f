"""The texts of a model directory: tokenizer, bytes of every token, end tokens, chat template.

Decides nothing about generation. Knows the Hugging Face files by name and neither torch nor exllamav2.
Everything may be used from any thread.

Source: tokenizer.json as written by the library `tokenizers`; its byte-level alphabet is that of GPT-2
(Radford et al. 2019), its byte fallback that of SentencePiece (`<0x0A>`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from engine_service.backends.base import ModelError

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_MARK: Final = "▁"


class DirectoryTokenizer:
    """The tokenizer of a model directory, as `base.Tokenizer`."""

    def __init__(self, directory: Path) -> None:
        """Read the directory; raise ModelError that names the file that is missing or wrong."""
        from tokenizers import Tokenizer

        path = directory / "tokenizer.json"
        self._source = _text(path)
        described = _parsed(path, self._source)
        try:
            self._special = Tokenizer.from_str(self._source)
            self._plain = Tokenizer.from_str(self._source)
        except Exception as error:  # the library raises nothing more precise
            raise ModelError(f"{path}: the tokenizer cannot be read ({error})") from error
        self._plain.encode_special_tokens = True
        self.vocab_size: int = self._special.get_vocab_size(with_added_tokens=True)
        self._bytes = _token_bytes(described, self.vocab_size)
        config = _optional(directory / "config.json")
        options = _optional(directory / "tokenizer_config.json")
        self.architecture = str(next(iter(config.get("architectures") or ["unknown"])))
        self.bos_text = _token_text(options.get("bos_token"))
        self.eos_text = _token_text(options.get("eos_token"))
        self.chat_template = _chat_template(directory, options)
        generation = _optional(directory / "generation_config.json")
        self.end_ids = frozenset(self._end_ids(config, generation))
        if not self.end_ids:
            raise ModelError(f"{directory}: no end-of-text token; config.json must have eos_token_id")
        self.eos_id = min(self.end_ids)
        if self.eos_text:
            self.eos_id = self._special.token_to_id(self.eos_text) or self.eos_id

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return token ids; lone surrogates are encoded as U+FFFD."""
        tokenizer = self._special if parse_special else self._plain
        ids: list[int] = tokenizer.encode(_without_surrogates(text), add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without control tokens; raise ValueError for ids that do not exist."""
        if any(not 0 <= token_id < self.vocab_size for token_id in token_ids):
            raise ValueError(f"token ids must be in 0 to {self.vocab_size - 1}")
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return what the token shows; empty for control tokens."""
        return self._bytes[token_id]

    def has_vocabulary_of(self, other: DirectoryTokenizer) -> bool:
        """Return whether every token id means the same in both."""
        return self._bytes == other._bytes and self.end_ids == other.end_ids

    def grammar_tokenizer(self, llguidance: Any) -> Any:
        """Return llguidance's own view of the vocabulary."""
        return llguidance.LLTokenizer(self._source, n_vocab=self.vocab_size, eos_token=self.eos_id)

    def _end_ids(self, config: dict[str, Any], generation: dict[str, Any]) -> Iterator[int]:
        for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
            yield from (i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
        if self.eos_text and (token_id := self._special.token_to_id(self.eos_text)) is not None:
            yield token_id


def _token_bytes(described: dict[str, Any], vocab_size: int) -> list[bytes]:
    table = [b""] * vocab_size
    vocabulary = described["model"]["vocab"]
    pieces = (
        vocabulary.items()
        if isinstance(vocabulary, dict)
        else ((p, i) for i, (p, _) in enumerate(vocabulary))
    )
    is_byte_level = any(kind == "ByteLevel" for kind in _types(described.get("decoder")))
    alphabet = _byte_alphabet() if is_byte_level else {}
    for piece, token_id in pieces:
        table[token_id] = _byte_level(piece, alphabet) if is_byte_level else _with_fallback(piece)
    for added in described.get("added_tokens", ()):
        table[added["id"]] = b"" if added.get("special") else added["content"].encode()
    return table


def _types(component: Any) -> Iterator[str]:
    """Yield the types of a component of tokenizer.json and of its parts."""
    if isinstance(component, dict):
        yield str(component.get("type"))
        for part in component.get("decoders", ()):
            yield from _types(part)


def _byte_alphabet() -> dict[str, int]:
    """Return which byte each character of the byte-level alphabet stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _byte_level(piece: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes(alphabet[character] for character in piece)
    except KeyError:
        return piece.encode()  # an added token, which is stored as it is


def _with_fallback(piece: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(_WORD_MARK, " ").encode()


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file; give the folder of a Hugging Face model") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: the file cannot be read ({error})") from error


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: this is not JSON ({error}); is the file complete?") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must be a JSON object")
    return value


def _optional(path: Path) -> dict[str, Any]:
    return _parsed(path, _text(path)) if path.exists() else {}


def _chat_template(directory: Path, options: dict[str, Any]) -> str:
    path = directory / "chat_template.jinja"
    if path.exists():
        return _text(path)
    template = options.get("chat_template") or ""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template", "") for entry in template}
        template = named.get("default", "")
    return str(template)


def _token_text(token: Any) -> str:
    """Return a token's text; it is written as text or as an object with the text in it."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _without_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
