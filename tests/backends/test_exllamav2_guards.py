"""What only ExLlamaV2 has: a cache without pages, and buffers of a fixed size."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_service.scheduling.model import PreemptionMode
from tests.backends import exllamav2_cpu
from tests.backends.bench import Bench, prompt, rid
from tests.backends.echo import PAGE


def test_without_paging_one_request_runs_at_a_time(echo_directory: Path) -> None:
    bench = Bench(exllamav2_cpu, echo_directory, cache_tokens=8 * PAGE, paged=False)
    assert bench.backend.capacity.max_sequences == bench.backend.capacity.num_pages == 1
    bench.admit("a", prompt(600), 20)
    with pytest.raises(ValueError, match="1 requests hold a sequence already"):
        bench.admit("b", prompt(50, kind=1), 20)
    bench.driver.step(chunks={"a": 300})
    bench.driver.prefill("a")
    for _ in range(5):
        bench.driver.step(decodes=["a"])
    bench.backend.preempt(rid("a"), PreemptionMode.RELEASE)
    bench.run("b", prompt(50, kind=1), 20)
    assert bench.driver.resume(rid("a")) == 0
    bench.driver.finish("a", chunk=200)
    assert bench.is_exact("a", "b")
    assert bench.run("c", (*prompt(600), *bench.driver.outputs[rid("a")].token_ids, 9), 5) == 619
    assert bench.is_exact("c")
    assert bench.backend.num_pages_held == 0


def test_a_chunk_beyond_the_models_buffers_is_refused(echo_directory: Path) -> None:
    with pytest.raises(ValueError, match="chunk_tokens is 2048, but the model was loaded for at most 1024"):
        exllamav2_cpu.make_backend(echo_directory, chunk_tokens=2048)
