"""What scripts/gpu-check measures, on a model without a GPU: the figures mean what their names say."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from exllamav2 import ExLlamaV2Config

from engine_service.backends.exllamav2.gguf import GgufFile
from engine_service.backends.llama_cpp.provision import default_model_path
from tests.backends.exllamav2_cpu import PAGE, make_backend, make_loaded

ROOT = Path(__file__).parents[2]
LIB = str(ROOT / "scripts" / "lib")
sys.path.insert(0, LIB)
try:
    from gpucheck import __main__ as command, gate, library, model, work
finally:
    sys.path.remove(LIB)

SMALL = work.Work(
    seconds=2.0,
    document_tokens=1200,
    document_output=40,
    documents_in_flight=5,
    voice_tokens=300,
    voice_output=5,
    voice_every_s=0.25,
    idle_voices=3,
    cache_tokens=16 * PAGE,
    max_sequences=4,
    chunk_tokens=256,
)


def test_both_sides_do_the_work_and_no_page_is_lost(echo_directory: Path) -> None:
    loaded = make_loaded(echo_directory, cache_tokens=SMALL.cache_tokens)
    result = command.compare(loaded, work=SMALL, paged=True)
    assert command.is_right(result)
    assert result["preempt_resume"] == {
        "is_exact": True,
        "tokens": 64,
        "preemptions": 3,
        "first_difference": None,
    }
    for side in ("gated", "ungated"):
        figures = result[side]
        assert figures["voices"] + figures["voices_unanswered"] == len(list(work.voice_times(SMALL)))
        assert figures["iterations"] > 10
        assert figures["tokens_per_s"] > 0
        assert 0 < figures["voice_ttft_p50_ms"] <= figures["voice_ttft_p95_ms"]
    assert result["throughput_ratio"] > 0
    assert result["idle_voice_ttft_ms"] > 0
    assert result["cost_model"]["iterations"] >= 20
    json.dumps(result)


def test_the_library_counts_every_token_once(echo_directory: Path) -> None:
    alone = dataclasses.replace(SMALL, documents_in_flight=1, voice_every_s=100.0, seconds=0.5)
    loaded = make_loaded(echo_directory, cache_tokens=alone.cache_tokens)
    watched = library.Library(loaded, work=alone, paged=True).run()
    computed = sum(rows * length for kind, rows, length in loaded.model.calls if kind == "prefill")
    decoded = sum(rows for kind, rows, _ in loaded.model.calls if kind == "decode")
    assert watched.tokens == computed + decoded
    assert watched.documents > 0


def test_a_text_that_comes_out_differently_is_noticed(
    echo_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(echo_directory, cache_tokens=16 * PAGE)
    decode = gate._decode

    def wrong(backend: object, name: str, num_tokens: int) -> list[int]:
        ids = decode(backend, name, num_tokens)
        return [*ids[:-1], ids[-1] + 1] if name == "preempted" and num_tokens == 8 else ids

    monkeypatch.setattr(gate, "_decode", wrong)
    result = gate.preempts_exactly(backend, num_tokens=32)
    assert not result["is_exact"]
    assert result["first_difference"] == 8
    assert not command.is_right({"page_leaks": 0, "preempt_resume": result})
    assert not command.is_right({"page_leaks": 1, "preempt_resume": {"is_exact": True}})


def test_a_voice_that_was_never_answered_counts_as_the_whole_time() -> None:
    watched = work.Watched(waits=[0.1] * 9, seconds=40.0, unanswered=1)
    assert watched.as_dict()["voice_ttft_p95_ms"] == 40_000
    assert watched.as_dict()["voice_ttft_p50_ms"] == 100


def test_the_embedded_model_becomes_a_folder_that_the_library_reads(tmp_path: Path) -> None:
    folder = model.embedded_model(tmp_path)
    assert model.embedded_model(tmp_path) == folder, "written once"
    config = ExLlamaV2Config(str(folder))
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.rotary_embedding_base == 100_000


def test_turning_halves_of_the_written_weights_is_turning_neighbours_of_the_files(tmp_path: Path) -> None:
    """The scores of attention are the same in both orders, at every distance."""
    file = GgufFile(default_model_path())
    hidden = np.random.default_rng(1).normal(size=(8, 576)).astype(np.float32)
    frequencies = 1.0 / 100_000.0 ** (np.arange(0, 64, 2) / 64)
    angles = np.arange(8)[:, None, None] * frequencies

    def neighbours(x: np.ndarray) -> np.ndarray:
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.stack((even * cos - odd * sin, even * sin + odd * cos), axis=-1).reshape(x.shape)

    def halves(x: np.ndarray) -> np.ndarray:
        first, second = x[..., :32], x[..., 32:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)

    scores = []
    for turn, order in ((neighbours, lambda w, _: w), (halves, model.in_halves)):
        query = turn((hidden @ order(file.tensor("blk.0.attn_q.weight"), 9).T).reshape(8, 9, 64))
        key = turn((hidden @ order(file.tensor("blk.0.attn_k.weight"), 3).T).reshape(8, 3, 64))
        scores.append(torch.einsum("qhd,khd->hqk", torch.tensor(query), torch.tensor(key.repeat(3, axis=1))))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-2)


@pytest.mark.nightly
def test_the_script_itself_runs_in_its_tiny_form(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = subprocess.run(
        [ROOT / "scripts" / "gpu-check", "--tiny", "--json", out],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert json.loads(done.stdout[done.stdout.index("{") :]) == result
    assert not result["is_gpu"]
    assert "cpu-reference" in result["model"]
