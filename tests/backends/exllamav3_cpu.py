"""The real ExLlamaV3 generator on a CPU, with a model that makes every paging mistake visible.

Generator, jobs, page table and filters are the library's own. Two things are not: its compiled parts
(exllamav3_extension.py, installed by conftest.py before anything imports the library), and the transformer
with its cache, for which a model stands that reads its own cache back (echo.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from exllamav3 import Generator, Job

from engine_service.backends.exllama.backend import Loaded
from engine_service.backends.exllama.folder import Options
from engine_service.backends.exllama.tokenizer import DirectoryTokenizer
from engine_service.backends.exllamav3.backend import ExLlamaV3Backend
from engine_service.backends.exllamav3.provision import ExLlamaV3Source
from tests.backends.echo import PAGE, Echo, chained, read_back


class EchoCache:
    """Stands for a Cache: one layer, of keys and values."""

    initialized = True
    max_history = 0

    @torch.inference_mode()
    def __init__(self, model: EchoModel, num_tokens: int) -> None:
        self.model = model
        self.max_num_tokens = num_tokens
        self.keys = torch.zeros((num_tokens // PAGE, PAGE), dtype=torch.int32)
        self.values = torch.zeros((num_tokens // PAGE, PAGE), dtype=torch.int32)

    def copy_page(self, source: EchoCache, from_page: int, to_page: int, num_tokens: int) -> None:
        for own, other in ((self.keys, source.keys), (self.values, source.values)):
            own[to_page, :num_tokens].copy_(other[from_page, :num_tokens])

    def get_all_tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values]


class EchoModel(Echo):
    """Stands for a Model: `prefill` and `forward` over the paged cache, and nothing else."""

    loaded_tp = False
    output_device = torch.device("cpu")

    def __init__(self, config: Any, texts: DirectoryTokenizer) -> None:
        super().__init__(texts)
        self.config = config
        self.caps: dict[str, Any] = {}
        self.draft_verifier_params: dict[str, Any] = {}
        self.prefetched: list[int] = []

    def prefill(self, input_ids: torch.Tensor, params: dict[str, Any]) -> None:
        self._store("prefill", input_ids, params)

    def forward(self, input_ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        self._store("decode", input_ids, params)
        length = input_ids.shape[-1]
        read = [self._read(params, row, length) for row in range(len(input_ids))]
        return self.logits(read, length)

    def get_cache_layers(self) -> list[Any]:
        return []

    def prefetch_tokens(self, ids: list[int]) -> None:
        self.prefetched.extend(ids)

    def _store(self, kind: str, input_ids: torch.Tensor, params: dict[str, Any]) -> None:
        num_rows, length = input_ids.shape
        self.calls.append((kind, num_rows, length))
        if kind == "prefill" and self.on_prefill is not None:
            self.on_prefill()
        error = self._due(kind)
        cache = params["cache"]
        for row in range(num_rows):
            start = int(params["cache_seqlens"][row])
            slots = self._slots(params, row, start + length)
            values = cache.values.view(-1)
            chain = chained(int(values[slots[start - 1]]) if start else 0, input_ids[row].tolist())
            cache.keys.view(-1)[slots[start:]] = input_ids[row].int()
            if error is None:
                values[slots[start:]] = torch.tensor(chain).int()
        if error is not None:
            raise error

    def _slots(self, params: dict[str, Any], row: int, end: int) -> torch.Tensor:
        places = torch.arange(end)
        return params["block_table"][row].long()[places // PAGE] * PAGE + places % PAGE

    def _read(self, params: dict[str, Any], row: int, length: int) -> np.ndarray[Any, Any]:
        slots = self._slots(params, row, int(params["cache_seqlens"][row]) + length)
        keys, values = params["cache"].keys.view(-1)[slots], params["cache"].values.view(-1)[slots]
        return read_back(keys.long().numpy(), values.long().numpy())


Backend = ExLlamaV3Backend
STOPS_WITHIN_A_PASS = False


def with_threads(num_threads: int) -> dict[str, Any]:
    """Return no option: tokens are chosen one after the other."""
    return {}


def make_loaded(
    directory: Path, *, cache_tokens: int, context_tokens: int | None = None, drafts: bool = False
) -> Loaded:
    """Return an echo model with an empty cache of cache_tokens slots."""
    texts = DirectoryTokenizer(directory)
    config = SimpleNamespace(
        directory=str(directory),
        vocab_size=texts.vocab_size,
        max_position_embeddings=context_tokens or cache_tokens,
        infer_params=SimpleNamespace(),
    )
    model = EchoModel(config, texts)
    draft = EchoModel(config, texts) if drafts else None
    return Loaded(
        name="echo",
        model=model,
        cache=EchoCache(model, cache_tokens),
        texts=texts,
        draft_model=draft,
        draft_cache=EchoCache(draft, cache_tokens) if draft else None,
    )


def make_backend(
    directory: Path,
    *,
    cache_tokens: int = 2048,
    context_tokens: int | None = None,
    max_sequences: int = 8,
    drafts: bool = False,
    **options: Any,
) -> ExLlamaV3Backend:
    """Return the backend over an echo model."""
    loaded = make_loaded(directory, cache_tokens=cache_tokens, context_tokens=context_tokens, drafts=drafts)
    return ExLlamaV3Backend(loaded, max_sequences=max_sequences, **options)


def iterate_ungated(loaded: Loaded, prompts: Sequence[tuple[int, ...]], *, chunk: int) -> None:
    """Let the library by itself begin with these prompts, and iterate once."""
    library = Generator(loaded.model, loaded.cache, None, max_batch_size=8, max_chunk_size=chunk)
    for ids in prompts:
        library.enqueue(Job(input_ids=torch.tensor([ids]), max_new_tokens=50))
    library.iterate()


def source(path: Path | None, *, context_tokens: int, max_sequences: int, **options: Any) -> ExLlamaV3Source:
    """Return where the model of a folder comes from."""
    return ExLlamaV3Source(
        path,
        options=Options(**options),
        context_tokens=context_tokens,
        max_sequences=max_sequences,
        progress=lambda _: None,
    )


def opened(path: Path | None, *, context_tokens: int = 2048, **options: Any) -> ExLlamaV3Backend:
    """Open a folder as the engine does; there is no GPU, so that fails at the latest when one is needed."""
    return source(path, context_tokens=context_tokens, max_sequences=2, **options).open(lambda _: None)
