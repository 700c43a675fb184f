"""Loads a model, runs the library by itself and the gate with the same work, and prints what was measured.

Exits 1 if a page was lost or a preempted text came out differently, 2 if nothing could be loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.metadata
import json
import logging
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_service.backends.base import ModelError
from engine_service.backends.exllamav2 import provision
from gpucheck.work import FULL, TINY, Work


def main(arguments: list[str] | None = None) -> int:
    """Measure and print one JSON object."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    work = TINY if options.tiny else FULL
    if options.seconds:
        work = dataclasses.replace(work, seconds=options.seconds)
    try:
        result = measure(work, device="cpu-reference" if options.tiny else "cuda", model=options.model)
    except ModelError as error:
        _say(str(error))
        return 2
    text = json.dumps(result, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0 if is_right(result) else 1


def is_right(result: dict[str, Any]) -> bool:
    """Return whether no page was lost and preempted text is exact; speed is shown, not judged."""
    return result["page_leaks"] == 0 and bool(result["preempt_resume"]["is_exact"])


def measure(work: Work, *, device: str, model: Path | None) -> dict[str, Any]:
    """Return everything that was measured."""
    started = time.perf_counter()
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fairhearth"
    if device == "cuda" and model is None:
        from gpucheck.model import embedded_model

        _say("writing the embedded model as a folder of FP16 weights, once")
        model = embedded_model(cache_dir)
    loaded, paged = provision.load(
        model,
        options=provision.Options(device=device, chunk_tokens=work.chunk_tokens),
        cache_dir=cache_dir,
        context_tokens=work.cache_tokens,
        max_sequences=work.max_sequences,
        threads=None,
        progress=_say,
    )
    return {
        **about(device, loaded.name, work, paged=paged),
        **compare(loaded, work=work, paged=paged),
        "seconds": round(time.perf_counter() - started, 1),
    }


def compare(loaded: Any, *, work: Work, paged: bool) -> dict[str, Any]:
    """Return how the library and the gate fared with the same work on one loaded model."""
    # Both import the library, which needs its compiled part or the stand-in for it.
    from engine_service.backends.exllamav2.backend import ExLlamaV2Backend
    from gpucheck.gate import Gate, preempts_exactly
    from gpucheck.library import Library

    _say(f"the library by itself, {work.seconds:g} s")
    ungated = Library(loaded, work=work, paged=paged).run()
    backend = ExLlamaV2Backend(
        loaded, max_sequences=work.max_sequences, chunk_tokens=work.chunk_tokens, paged=paged
    )
    backend.warm_up()
    _say("preemption and exact resume")
    exactness = preempts_exactly(backend, num_tokens=16 if work is TINY else 64)
    _say(f"the gate, {work.seconds:g} s after {work.idle_voices} voices without load")
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(backend, work=work, log=Path(folder) / "events.jsonl")
        idle, gated, leaked = asyncio.run(gate.run())
        cost = gate.cost_model()
    ratio = gated.tokens_per_s / ungated.tokens_per_s if ungated.tokens_per_s else None
    return {
        "idle_voice_ttft_ms": idle.as_dict()["voice_ttft_p50_ms"],
        "gated": gated.as_dict(),
        "ungated": ungated.as_dict(),
        "throughput_ratio": None if ratio is None else round(ratio, 3),
        "page_leaks": leaked,
        "preempt_resume": exactness,
        "cost_model": cost,
    }


def about(device: str, model: str, work: Work, *, paged: bool) -> dict[str, Any]:
    """Return on what it was measured."""
    import torch

    card = torch.cuda.get_device_name() if device == "cuda" else f"none ({platform.processor() or 'CPU'})"
    return {
        "card": card,
        "is_gpu": device == "cuda",
        "model": model,
        "paged": paged,
        "versions": {name: _version(name) for name in ("torch", "exllamav2", "flash-attn")},
        "work": dataclasses.asdict(work),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check", description="Measure ExLlamaV2 under the gate."
    )
    parser.add_argument("--model", type=Path, help="folder of EXL2, GPTQ or FP16 weights (default: embedded)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument("--seconds", type=float, help="how long each side is watched (default: 40)")
    parser.add_argument("--tiny", action="store_true", help="a small form on the CPU, to test the script")
    return parser


def _say(message: str) -> None:
    print(f"[gpu-check] {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
