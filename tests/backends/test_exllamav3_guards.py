"""What only ExLlamaV3 does, and must not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine_service.backends.base import Sampling
from tests.backends import exllamav3_cpu
from tests.backends.bench import Bench, prompt, rid
from tests.backends.echo import PAGE


def test_drafts_behind_the_end_are_refused_whatever_was_drafted(echo_directory: Path) -> None:
    """The library goes on while a token is the drafted one, and reads ahead what it is told was chosen."""
    bench = Bench(
        exllamav3_cpu, echo_directory, cache_tokens=8 * PAGE, drafts=True, num_draft_tokens=4, max_sequences=2
    )
    always_zero = np.full(bench.backend.info.vocab_size, -20.0, dtype=np.float32)
    always_zero[0] = 20.0
    bench.backend._loaded.draft_model.scores = lambda ids: always_zero
    zeros = Sampling(temperature=0.0, logit_bias={0: 1000.0})
    for name, max_tokens in {"to the end": 3, "behind it": 7}.items():
        bench.run(name, prompt(100), max_tokens, sampling=zeros)
        assert bench.driver.outputs[rid(name)].token_ids == [0] * max_tokens
    assert bench.model.prefetched
    assert all(0 <= token_id < bench.backend.info.vocab_size for token_id in bench.model.prefetched)


def test_a_chunk_leaves_the_page_behind_it_in_its_place(echo_directory: Path) -> None:
    """A decode pass does not say what its first page follows; a later prompt could begin with that page."""
    bench = Bench(exllamav3_cpu, echo_directory, cache_tokens=8 * PAGE)
    bench.run("a", prompt(PAGE + 1), 6)
    behind = (*prompt(PAGE + 1)[PAGE:], *bench.driver.outputs[rid("a")].token_ids)
    bench.run("b", (*behind, 1, 2), 6)
    assert bench.is_exact("a", "b")


def test_every_request_gets_its_chunk_and_its_token_in_one_iteration(echo_directory: Path) -> None:
    """The library by itself lets prompts wait for some passes of decode, one chunk at a time."""
    bench = Bench(exllamav3_cpu, echo_directory, cache_tokens=16 * PAGE)
    bench.admit("talking", prompt(100), 20)
    bench.driver.prefill("talking")
    for number in range(3):
        bench.admit(f"new{number}", prompt(600, kind=number + 1), 5)
    for _ in range(2):
        outcome = bench.driver.step(decodes=["talking"], chunks={f"new{n}": 200 for n in range(3)})
        assert [one.prefill_tokens for one in outcome.outcomes] == [0, 200, 200, 200]
        assert len(outcome.outcomes[0].token_ids) == 1
    assert bench.is_exact("talking")
