"""scripts/bench-peer: this project's engine beside llama.cpp's own server.

Decides the bars, says what is done, prints the table, writes the JSON.
Exit codes: 0 every bar is met, 1 one is missed, 2 wrong usage, 3 a server or the machine failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.client import ServerFailed
from bench.loads import Mixed, Prompts
from bench.measure import Bench, MixedPair, Tried, fastest, promptest, tried_settings
from bench.servers import Common, PeerSetting
from bench.verdict import Bar, Pair, Result, quantile, table
from engine_service.backends.base import ModelError
from engine_service.backends.llama_cpp import open_backend
from engine_service.backends.llama_cpp.binding import open_library
from engine_service.backends.llama_cpp.model import Model, ModelTokenizer
from engine_service.backends.llama_cpp.provision import default_model_path

NUM_CLIENTS: Final = (1, 2, 4, 8)
CONTEXT_TOKENS: Final = 8192
STREAM_SLOTS: Final = 8
REPEATS: Final = 7
QUICK_REPEATS: Final = 5
STREAM_REPEATS: Final = 3
"""Times as many pairs of the streams: one takes seconds, and a median of few says little on a busy host."""
MOST_SHOWN: Final = 3
"""Pairs of what is far from its bar or has none."""
SPEED: Final = Bar(at_least=0.95)
MAKESPAN: Final = Bar(at_most=1.1)
TTFT: Final = Bar(at_most=1 / 50)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return the exit code."""
    parsed = _parser().parse_args(arguments)
    started = time.monotonic()
    try:
        model = _model_file(parsed.model, parsed.cache_dir)
        results, report = asyncio.run(_measured(parsed, model))
    except (ServerFailed, ModelError, OSError) as error:
        print(f"[bench-peer] error: {error}", file=sys.stderr)
        return 3
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("[bench-peer] interrupted", file=sys.stderr)
        return 130
    passed = all(result.passed for result in results)
    report |= {"passed": passed, "seconds": round(time.monotonic() - started, 1)}
    print(f"\n{table(results)}\n")
    if parsed.json:
        parsed.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    missed = [result.name for result in results if not result.passed]
    _say("every bar is met" if passed else f"missed: {', '.join(missed)}")
    return 0 if passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench-peer", description=(__doc__ or "").split("\n", 1)[0].partition(": ")[2]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--quick", action="store_true", help="the peer's best known setting; fewer repeats")
    parser.add_argument(
        "--threads", type=_positive, metavar="N", default=os.cpu_count() or 1, help="for each server (all)"
    )
    parser.add_argument(
        "--repeats",
        type=_positive,
        metavar="N",
        help=f"mixed pairs ({REPEATS}, quick: {QUICK_REPEATS}); {STREAM_REPEATS} times as many of streams",
    )
    parser.add_argument("--slots", type=_positive, metavar="N", default=4, help="slots under the mix (4)")
    parser.add_argument(
        "--model",
        metavar="q8_0|q4_1|PATH",
        default="q8_0",
        help="the default model as it is run, or as it is shipped, or another GGUF",
    )
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", default=_cache_dir(), help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=["streams", "mix"], help="one of the two loads")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairhearth"


def _say(text: str) -> None:
    print(text if text.startswith(" ") else f"[bench-peer] {text}", flush=True)


def _model_file(name: str, cache_dir: Path) -> Path:
    """Return the GGUF file; the requantised one is made by the engine itself if it is not there yet."""
    if name == "q4_1":
        return default_model_path()
    if name != "q8_0":
        path = Path(name)
        if not path.is_file():
            raise ModelError(f"--model {name}: there is no such file; give q8_0, q4_1 or the path of a GGUF")
        return path.resolve()
    pattern = "SmolLM2-135M-Instruct.Q8_0-*.gguf"
    if not list(cache_dir.glob(pattern)):
        open_backend(None, cache_dir=cache_dir, context_tokens=256, max_sequences=1, progress=_say).close()
    found = sorted(cache_dir.glob(pattern))
    if not found:
        raise ModelError(f"{cache_dir} has no {pattern}: the default model could not be requantised")
    return found[-1]


# --- measuring ---


async def _measured(parsed: argparse.Namespace, model: Path) -> tuple[list[Result], dict[str, Any]]:
    # A terminated run ends its servers too.
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    repeats = parsed.repeats or (QUICK_REPEATS if parsed.quick else REPEATS)
    with tempfile.TemporaryDirectory(prefix="bench-peer-") as folder:
        common = Common(
            model=model, threads=parsed.threads, context_tokens=CONTEXT_TOKENS, folder=Path(folder)
        )
        bench = Bench(common, Prompts(_encoder(model)), sys.executable, _say)
        _say(f"{model.name}, {parsed.threads} thread(s), {CONTEXT_TOKENS} token slots, {repeats} mixed pairs")
        results: list[Result] = []
        report: dict[str, Any] = {"model": model.name, "threads": parsed.threads, "machine": _machine()}
        if parsed.only != "mix":
            results += await _streams(bench, repeats * STREAM_REPEATS, is_quick=parsed.quick)
        if parsed.only != "streams":
            results += await _mix(bench, parsed.slots, repeats, report, is_quick=parsed.quick)
        worst = max((d.foreign_share for d in bench.disturbances), default=0.0)
        _say(f"other programs took at most {worst:.0%} of the processors during what counted")
        report["most_foreign_share"] = round(worst, 3)
        report["results"] = [_as_json(result) for result in results]
    return results, report


def _encoder(model: Path) -> Callable[[str], Sequence[int]]:
    tokenizer = ModelTokenizer(Model(open_library(), model, vocab_only=True))
    return lambda text: tokenizer.encode(text, parse_special=True)


def _machine() -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {"processors": os.cpu_count(), "processor": names[0] if names else platform.machine()}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


async def _streams(bench: Bench, repeats: int, *, is_quick: bool) -> list[Result]:
    """Measure answers of 64 tokens to several clients, and take the peer's better way for each number."""
    settings = [PeerSetting(slots=STREAM_SLOTS, unified=False)]
    if not is_quick:
        settings.append(PeerSetting(slots=STREAM_SLOTS, unified=True))
        settings.append(PeerSetting(slots=STREAM_SLOTS, unified=False, is_mapped=False))
    results = []
    for num_clients in NUM_CLIENTS:
        name = f"tokens/s, {num_clients} stream{'s' * (num_clients > 1)}"
        _say(name)
        found = [
            Result(
                name=name, unit="", setting=setting.title, bar=SPEED,
                pairs=tuple(await bench.streams(setting, num_clients, repeats)),
            )
            for setting in settings
        ]  # fmt: skip
        results.append(min(found, key=lambda result: result.ratio))
    return results


async def _mix(
    bench: Bench, slots: int, repeats: int, report: dict[str, Any], *, is_quick: bool
) -> list[Result]:
    """Measure the household's mix against the peer's best setting for each figure."""
    settings = tried_settings(slots)
    fast = prompt = settings[0]
    if not is_quick:
        _say("the mix on the peer, setting by setting")
        found = await bench.tried(settings)
        fast, prompt = fastest(found), promptest(found)
        report["tried"] = [_tried_as_json(one) for one in found]
    _say(f"the mix, the peer with {fast.title}")
    pairs = await bench.mixes(fast, repeats, num_all_chat=MOST_SHOWN)
    results = _speed_results(fast, pairs)
    shared = next(setting for setting in settings if setting.unified)
    if fast != shared:
        _say(
            f"the mix again, the peer with {shared.title}: every request may use the whole cache, as ours may"
        )
        results += _equal_terms(shared, await bench.mixes(shared, min(repeats, MOST_SHOWN)))
    if prompt != fast:
        _say(f"the mix again, the peer with {prompt.title}, which answers speech sooner")
        pairs = await bench.mixes(prompt, min(repeats, MOST_SHOWN))
    return results + _speech_results(prompt, pairs)


def _speed_results(setting: PeerSetting, pairs: Sequence[MixedPair]) -> list[Result]:
    def compared(
        name: str, unit: str, bar: Bar | None, value: Callable[[Mixed], float], *, all_chat: bool = False
    ) -> Result:
        both = [(pair.peer, pair.ours_all_chat if all_chat else pair.ours) for pair in pairs]
        values = tuple(Pair(peer=value(a), ours=value(b)) for a, b in both if b is not None)
        return Result(name=name, unit=unit, setting=setting.title, pairs=values, bar=bar)

    return [
        compared("mix: makespan", "s", MAKESPAN, lambda run: run.makespan_s),
        compared("mix: tokens/s", "", SPEED, lambda run: run.tokens_per_s),
        compared("mix: documents done", "s", None, lambda run: run.documents_done_s),
        compared("mix: longest gap in a chat", "s", None, lambda run: run.chat_gap_s),
        compared("all as chat: makespan", "s", None, lambda run: run.makespan_s, all_chat=True),
        compared("all as chat: voice TTFT p95", "s", None, _ttft_p95_s, all_chat=True),
    ]


def _equal_terms(setting: PeerSetting, pairs: Sequence[MixedPair]) -> list[Result]:
    """Show, without a bar, the speed where the peer, too, lets any request use the whole cache."""
    makespan = tuple(Pair(peer=pair.peer.makespan_s, ours=pair.ours.makespan_s) for pair in pairs)
    speed = tuple(Pair(peer=pair.peer.tokens_per_s, ours=pair.ours.tokens_per_s) for pair in pairs)
    title = setting.title
    return [
        Result(name="one cache: makespan", unit="s", setting=title, pairs=makespan),
        Result(name="one cache: tokens/s", unit="", setting=title, pairs=speed),
    ]


def _speech_results(setting: PeerSetting, pairs: Sequence[MixedPair]) -> list[Result]:
    values = tuple(Pair(peer=_ttft_p95_s(pair.peer), ours=_ttft_p95_s(pair.ours)) for pair in pairs)
    done = tuple(Pair(peer=max(pair.peer.spoken_done_s), ours=max(pair.ours.spoken_done_s)) for pair in pairs)
    title = setting.title
    return [
        Result(name="mix: voice TTFT p95", unit="s", setting=title, pairs=values, bar=TTFT),
        Result(name="mix: slowest voice answer", unit="s", setting=title, pairs=done),
    ]


def _ttft_p95_s(run: Mixed) -> float:
    return quantile(run.spoken_ttft_s, 0.95)


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "unit": result.unit,
        "peer_setting": result.setting,
        "pairs": [[round(pair.peer, 4), round(pair.ours, 4)] for pair in result.pairs],
        "ratio": round(result.ratio, 4),
        "bar": str(result.bar) if result.bar else None,
        "passed": result.passed,
    }


def _tried_as_json(one: Tried) -> dict[str, Any]:
    return {"setting": one.setting.title, **asdict(one.mixed)}


if __name__ == "__main__":
    sys.exit(main())
