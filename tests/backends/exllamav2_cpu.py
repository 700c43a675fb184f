"""The real ExLlamaV2 generator on a CPU, with a model that makes every paging mistake visible.

Generator, jobs, page table, cache and tokenizer are the library's own. Two things are not: its compiled
extension (`cpu_extension`, installed by conftest.py before anything imports the library), and the
transformer, for which a model stands that reads its own cache back (echo.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from exllamav2 import ExLlamaV2Cache, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

from engine_service.backends.exllama.tokenizer import DirectoryTokenizer
from engine_service.backends.exllamav2.backend import ExLlamaV2Backend, Loaded
from engine_service.backends.exllamav2.provision import ExLlamaV2Source, Options
from tests.backends.echo import PAGE, SPECIAL, Echo, chained, read_back


class EchoModel(Echo):
    """Stands for ExLlamaV2: `forward_chunk` over the paged cache, and nothing else."""

    def __init__(self, config: Any, texts: DirectoryTokenizer) -> None:
        self.config = config
        self.cache_map = {0: "cpu"}
        super().__init__(texts)

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
            slots = self._slots(attn_params, row, start + length)
            values = cache.value_states[0][0, :, 0, 0]
            chain = chained(int(values[slots[start - 1]]) if start else 0, input_ids[row].tolist())
            cache.key_states[0][0, slots[start:], 0, 0] = input_ids[row].half()
            if error is None:
                values[slots[start:]] = torch.tensor(chain).half()
        if error is not None:
            raise error
        if preprocess_only:
            return {}
        ends = [self._stored(attn_params, row) + length for row in range(num_rows)]
        read = [self._read(attn_params, row, cache, end) for row, end in enumerate(ends)]
        return {"logits": self.logits(read, length)}

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
        keys, values = cache.key_states[0][0, slots, 0, 0], cache.value_states[0][0, slots, 0, 0]
        return read_back(keys.long().numpy(), values.long().numpy())


Backend = ExLlamaV2Backend
STOPS_WITHIN_A_PASS = True


def with_threads(num_threads: int) -> dict[str, Any]:
    """Return the option for so many sampling threads."""
    return {"sampling_threads": num_threads}


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


def iterate_ungated(loaded: Loaded, prompts: Sequence[tuple[int, ...]], *, chunk: int) -> None:
    """Let the library by itself begin with these prompts, and iterate once."""
    library = ExLlamaV2DynamicGenerator(
        model=loaded.model,
        cache=loaded.cache,
        tokenizer=loaded.tokenizer,
        max_batch_size=8,
        max_chunk_size=chunk,
    )
    settings = ExLlamaV2Sampler.Settings.greedy()
    for ids in prompts:
        job = ExLlamaV2DynamicJob(input_ids=torch.tensor([ids]), max_new_tokens=50, gen_settings=settings)
        library.enqueue(job)
    library.iterate()


def source(path: Path | None, *, context_tokens: int, max_sequences: int, **options: Any) -> ExLlamaV2Source:
    """Return where the model of a folder comes from."""
    return ExLlamaV2Source(
        path,
        options=Options(**options),
        cache_dir=Path("unused"),
        context_tokens=context_tokens,
        max_sequences=max_sequences,
        threads=None,
        progress=lambda _: None,
    )


def opened(path: Path | None, *, context_tokens: int = 2048, **options: Any) -> ExLlamaV2Backend:
    """Open a folder as the engine does; there is no GPU, so that fails at the latest when one is needed."""
    return source(path, context_tokens=context_tokens, max_sequences=2, **options).open(lambda _: None)
