"""What is looked at before a library is: options, packages, and the files of a model folder.

Decides what is refused, by name; loads nothing. The libraries' `provision` modules do the loading.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from engine_service.backends.base import Eye, GenerationOrder, Language, ModelError, ModelInfo
from engine_service.backends.exllama.tokenizer import DirectoryTokenizer
from engine_service.backends.grammar import GrammarCompiler
from engine_service.scheduling.model import Capacity

Progress = Callable[[str], None]

CACHE_TYPES: Final = ("fp16", "q8", "q6", "q4")
PAGE_TOKENS: Final = 256  #: of both libraries' paged caches


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a model is loaded."""

    cache_type: str = "fp16"  #: one of CACHE_TYPES
    chunk_tokens: int = 512  #: longest forward pass of a prefill; a multiple of 256
    gpu_split: tuple[float, ...] = ()  #: GiB per GPU; none: filled one after the other
    tensor_parallel: bool = False
    draft_tokens: int = 0  #: tokens drafted per iteration; 0 is off
    draft_path: Path | None = None  #: a smaller model of the same vocabulary; none: drafts by n-grams

    def check(self, context_tokens: int, *, library: str) -> None:
        """Raise ModelError for what cannot be."""
        if context_tokens < PAGE_TOKENS:
            raise ModelError(
                f"context_tokens must be at least 256 with {library}, one page, not {context_tokens}"
            )
        if self.cache_type not in CACHE_TYPES:
            raise ModelError(f"cache_type must be one of {', '.join(CACHE_TYPES)}, not {self.cache_type!r}")
        if self.chunk_tokens < PAGE_TOKENS or self.chunk_tokens % PAGE_TOKENS:
            raise ModelError(f"chunk_tokens must be a multiple of 256, at least 256, not {self.chunk_tokens}")
        if self.draft_path is not None and not self.draft_tokens:
            raise ModelError("draft_path needs draft_tokens of at least 1; with 0 nothing is drafted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """How a library is called, and what it loads."""

    backend: str  #: as in the settings
    name: str
    packages: tuple[str, ...]  #: what must be importable to read a model's folder
    kernels: tuple[str, ...]  #: and to compute
    weights: str  #: the kinds of weights it loads

    def check_packages(self, *, computes: bool = False) -> None:
        """Raise ModelError that names the packages that are missing, those that `computes` needs included."""
        wanted = self.packages + (self.kernels if computes else ())
        listed = ", ".join(name for name in wanted if find_spec(name) is None)
        if listed:
            raise ModelError(
                f"the backend {self.backend} needs Python packages that are not installed here: "
                f"{listed}; docs/gpu.md says which (scripts/setup exllamav2 builds an environment "
                "for the CPU)"
            )

    def check_folder(self, path: Path | None) -> Path:
        """Return the folder of a model; raise ModelError for what is none."""
        if path is None:
            raise ModelError(
                f"model.path must name a folder with {self.weights} weights; there is no default on a GPU"
            )
        if not path.is_dir():
            kind = self.weights.split(maxsplit=1)[0].rstrip(",")
            raise ModelError(
                f"{path}: this is not a folder; give the folder of an {kind} model, not a file in it"
            )
        for name in ("config.json", "tokenizer.json"):
            if not (path / name).is_file():
                raise ModelError(f"{path}: there is no {name}; is the download complete?")
        check_weights(path, f"{self.name} loads {self.weights} weights")
        return path

    def check_draft(self, path: Path, draft_path: Path) -> None:
        """Raise ModelError for a folder whose model cannot draft for that of path."""
        own, drafting = DirectoryTokenizer(path), DirectoryTokenizer(self.check_folder(draft_path))
        if not own.has_vocabulary_of(drafting):
            raise ModelError(
                f"{draft_path}: a model that drafts must have the vocabulary of the one it drafts for "
                f"({own.vocab_size} tokens); this one has another ({drafting.vocab_size} tokens)"
            )


def check_weights(path: Path, wanted: str) -> None:
    """Raise ModelError if there are no weights in a folder, or not all; wanted says which would do."""
    files = weight_files(path)
    if not files:
        raise ModelError(f"{path}: there are no *.safetensors files; {wanted}")
    for file in files:
        try:
            end = _end_of_weights(file)
            size = file.stat().st_size
        except OSError as error:
            raise ModelError(f"{file}: cannot be read ({error.strerror})") from error
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ModelError(f"{file}: the header is damaged; is the download complete?") from error
        if end > size:
            raise ModelError(f"{file}: the file is cut short: {size} bytes instead of {end}")


def _end_of_weights(file: Path) -> int:
    """Return where the file's last tensor ends, as its header says."""
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
        described = json.loads(opened.read(min(header, file.stat().st_size)))
    ends = [entry["data_offsets"][1] for name, entry in described.items() if name != "__metadata__"]
    return 8 + header + int(max(ends, default=0))


def weight_files(path: Path) -> Sequence[Path]:
    """Return the folder's files of weights."""
    return sorted(path.glob("*.safetensors"))


def describe(
    directory: Path,
    *,
    name: str | None,
    backend: str,
    context_tokens: int,
    max_sequences: int,
    drafts: bool,
    untold_tokens: int | None = None,
    eye_of: Callable[[DirectoryTokenizer], Eye | None] = lambda _: None,
) -> Language:
    """Return what a backend of this folder will offer; raise ModelError for a folder that is no model.

    name is what the API lists, else it is called as its folder. drafts: tokens are drafted. untold_tokens:
    what the library takes for the longest context where config.json has none. eye_of returns what reads
    pictures for the model.
    """
    texts = DirectoryTokenizer(directory)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    num_pages = context_tokens // PAGE_TOKENS
    # As the backend does: each request that drafts may need one page more.
    num_pages -= max_sequences if drafts else 0
    trained_tokens = _trained_tokens(config) or untold_tokens or context_tokens
    capacity = Capacity(
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        max_sequences=max_sequences,
        max_context_tokens=min(num_pages * PAGE_TOKENS, trained_tokens),
        can_abort=True,
        mixes_prefill_and_decode=False,
    )
    grammars = GrammarCompiler(texts.vocab_size, texts.grammar_tokenizer)
    eye = eye_of(texts)

    def validate(order: GenerationOrder) -> None:
        if order.constraint is not None:
            grammars.compile(order.constraint)

    info = ModelInfo(
        name=name or directory.name,
        architecture=texts.architecture,
        max_context_tokens=capacity.max_context_tokens,
        vocab_size=texts.vocab_size,
        chat_template=texts.chat_template,
        bos_text=texts.bos_text,
        eos_text=texts.eos_text,
        backend=backend,
        can_see=eye is not None,
    )
    return Language(info=info, tokenizer=texts, capacity=capacity, validate=validate, eye=eye)


def _trained_tokens(config: dict[str, object]) -> int | None:
    """Return the longest context that a config.json names; models that also see have it one level deeper."""
    for part in (config, config.get("text_config")):
        most = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(most, int):
            return most
    return None
