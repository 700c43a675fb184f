"""A loaded GGUF model: its vocabulary, tokenizer and metadata.

Decides nothing about generation. Everything here may be used from any thread once the model is loaded: the
vocabulary never changes. It is read inside `Model.in_use`, which keeps it from being freed meanwhile:
llama.cpp ends the whole process where a freed vocabulary is read.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from engine_service.backends.base import BackendError, GenerationOrder, ModelError, ModelInfo, Tell
from engine_service.backends.generation import Vocabulary
from engine_service.backends.grammar import GrammarCompiler
from engine_service.backends.llama_cpp import huge_pages
from engine_service.backends.llama_cpp.binding import Library

_MAGIC: Final = b"GGUF"
_SPECIAL_MARK: Final = b"\xff"  # llguidance's mark of tokens that are not text
_CONTROL, _USER_DEFINED = 1 << 3, 1 << 4  # llama_token_attr
_FILE_SUFFIX: Final = re.compile(r"[.-](I?Q\d\w*|B?F16|F32|MXFP4)(-[0-9a-f]{12})?$", re.IGNORECASE)


class Model:
    """One GGUF file, opened."""

    def __init__(
        self, library: Library, path: Path, *, vocab_only: bool = False, tell: Tell | None = None
    ) -> None:
        """Open the file; raise ModelError that says what is wrong with it.

        vocab_only leaves the weights out: such a model reads and writes text and cannot compute.
        """
        check_is_gguf(path)
        self.library = library
        self.path = path
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_closed = False
        is_copied = not vocab_only and huge_pages.are_worth_a_copy(path)
        with library.fresh_log(), huge_pages.backing_what_is_new() if is_copied else nullcontext():
            handle = library.load_model(
                os.fsencode(path), vocab_only=vocab_only, is_copied=is_copied, tell=tell
            )
            if not handle:
                raise ModelError(_refusal(path, library.recent_log()))
        self.handle: int = handle
        if not library.is_plain_decoder(handle):
            architecture = library.metadata(handle, "general.architecture")
            library.free_model(handle)
            raise ModelError(
                f"{path}: models of the architecture {architecture!r} keep a state that cannot be cut at a "
                "token, or do not generate text; use a plain decoder model such as Llama, Qwen2 or SmolLM2"
            )
        self.vocab = library.vocabulary(handle)
        self.vocab_size = library.vocabulary_size(self.vocab)
        self.end_ids = frozenset(i for i in range(self.vocab_size) if library.is_end(self.vocab, i))
        self.eos_id = library.end_of_text(self.vocab)
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    @property
    def name(self) -> str:
        """The name the API lists: the file's, without the quantisation."""
        return _FILE_SUFFIX.sub("", self.path.stem)

    @property
    def trained_context(self) -> int:
        """The context length (tokens) the model was trained for; 0 if the file does not say."""
        return self._number("context_length")

    @property
    def hidden_size(self) -> int:
        """How many numbers the model makes of a token before it chooses the next one."""
        return self._number("embedding_length")

    @property
    def architecture(self) -> str:
        """What the file says of its kind."""
        return self.library.metadata(self.handle, "general.architecture")

    def _number(self, key: str) -> int:
        # Asked of the file: a model without weights knows only its vocabulary.
        found = self.library.metadata(self.handle, f"{self.architecture}.{key}")
        return int(found) if found.isdecimal() else 0

    def token_bytes(self, token_id: int) -> bytes:
        """Return what the token shows; empty for control tokens."""
        known = self._bytes[token_id]
        if known is None:
            with self.in_use():
                known = self.library.piece(self.vocab, token_id, show_special=False)
            self._bytes[token_id] = known
        return known

    def special_text(self, token_id: int) -> str:
        """Return a token's text, control tokens included; empty for id -1."""
        if token_id < 0:
            return ""
        with self.in_use():
            return self.library.piece(self.vocab, token_id, show_special=True).decode("utf-8", "replace")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the model from being freed while the block runs; raise BackendError once it is closed."""
        with self._lock:
            if self._is_closed:
                raise BackendError(f"the model {self.name} is closed")
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                self._free_if_unused()

    def grammar_tokenizer(self, llguidance: Any) -> Any:
        """Return llguidance's own view of the vocabulary."""
        table = []
        for token_id in range(self.vocab_size):
            piece = self.library.piece(self.vocab, token_id, show_special=True)
            attributes = self.library.token_attributes(self.vocab, token_id)
            is_tag = bool(attributes & _USER_DEFINED) and piece[:1] == b"<" and piece[-1:] == b">"
            table.append(_SPECIAL_MARK + piece if attributes & _CONTROL or is_tag else piece)
        return llguidance.LLTokenizer.from_llamacpp(
            tokens=table,
            vocab_ptr=self.vocab,
            tokenize_fptr=self.library.tokenize_address,
            eos_token=self.eos_id,
        )

    def close(self) -> None:
        """Free the model, at the latest when the last use of it ends; no context may use it any more."""
        with self._lock:
            self._is_closed = True
            self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._is_closed and not self._num_users and self.handle:
            self.library.free_model(self.handle)
            self.handle = 0


class ModelTokenizer:
    """The model's tokenizer, as `base.Tokenizer`."""

    def __init__(self, model: Model) -> None:
        """Use the vocabulary of a loaded model."""
        self._model = model

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return token ids; lone surrogates are encoded as U+FFFD."""
        with self._model.in_use():
            return self._model.library.tokenize(self._model.vocab, utf8(text), parse_special=parse_special)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without control tokens; raise ValueError for ids that do not exist."""
        size = self._model.vocab_size
        if any(not 0 <= token_id < size for token_id in token_ids):
            raise ValueError(f"token ids must be in 0 to {size - 1}")
        return b"".join(map(self._model.token_bytes, token_ids)).decode("utf-8", "replace")


class Words:
    """What a model reads and writes: vocabulary, tokenizer, grammars. Never its weights.

    Answers that were put back keep pointing to it, so one of a model without weights outlives all backends
    of that model.
    """

    def __init__(self, model: Model) -> None:
        """Use the vocabulary of an opened model."""
        self._model = model
        self.tokenizer = ModelTokenizer(model)
        self.grammars = GrammarCompiler(model.vocab_size, model.grammar_tokenizer, in_use=model.in_use)

    def validate(self, order: GenerationOrder) -> None:
        """Raise InvalidConstraint for a grammar that cannot be compiled (any thread)."""
        if order.constraint is not None:
            self.grammars.compile(order.constraint)

    def vocabulary(self, max_context_tokens: int) -> Vocabulary:
        """Return what a generation of at most that many tokens must know."""
        return Vocabulary(
            size=self._model.vocab_size,
            end_ids=self._model.end_ids,
            token_bytes=self._model.token_bytes,
            max_context_tokens=max_context_tokens,
        )

    def info(self, max_context_tokens: int, *, parking_bytes: int = 0, name: str | None = None) -> ModelInfo:
        """Return the model's description; name None is the file's, without the quantisation."""
        model, library = self._model, self._model.library
        return ModelInfo(
            name=name or model.name,
            architecture=model.architecture,
            max_context_tokens=max_context_tokens,
            vocab_size=model.vocab_size,
            chat_template=library.chat_template(model.handle),
            bos_text=model.special_text(library.begin_of_text(model.vocab)),
            eos_text=model.special_text(model.eos_id),
            can_embed=True,
            embedding_size=model.hidden_size,
            backend="llama_cpp",
            parking_bytes=parking_bytes,
        )


def utf8(text: str) -> bytes:
    """Return text as UTF-8; surrogates, which JSON can smuggle in, become U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def check_is_gguf(path: Path) -> None:
    """Raise ModelError unless the path is a readable file that begins like GGUF."""
    if not path.exists():
        raise ModelError(f"{path}: there is no such file; give the path of a GGUF model file")
    if not path.is_file():
        raise ModelError(f"{path}: this is not a file; give the path of a GGUF model file")
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"{path}: the file cannot be read ({error.strerror})") from error
    if magic != _MAGIC:
        raise ModelError(f"{path}: this is not a GGUF file: it begins with {magic!r} instead of {_MAGIC!r}")


def _refusal(path: Path, log: str) -> str:
    reason = log or "no reason given"
    return (
        f"{path}: llama.cpp cannot load this file of {path.stat().st_size} bytes (is it complete?): {reason}"
    )
