"""What cannot be is refused by name, when a model is loaded or a request handed in; nothing hangs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_service.backends.base import Constraint, ConstraintKind, FinishReason, ModelError, Sampling
from engine_service.backends.exllamav2.backend import ExLlamaV2Backend
from engine_service.backends.exllamav2.provision import Options, open_backend
from engine_service.engine.loop import Engine
from engine_service.engine.sessions import Finished, Order
from engine_service.errors import EngineError, InvalidRequest, PromptTooLong
from engine_service.scheduling.model import Policy, Resident, ResidentId, WorkloadClass
from tests.backends.echo import make_model_directory
from tests.backends.exllamav2_cpu import PAGE, make_backend

ALICE = ResidentId("alice")
ASKED = Order(
    resident_id=ALICE,
    class_id=WorkloadClass.CHAT,
    prompt_ids=tuple(range(100)),
    max_tokens=10,
    sampling=Sampling(temperature=0.0),
    ignore_eos=True,
)


def folder_with_weights(folder: Path) -> Path:
    """Return a model folder whose files are whole, with weights of nothing."""
    folder.mkdir(parents=True)
    make_model_directory(folder)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def lora(folder: Path, config: Mapping[str, Any] | str) -> Path:
    folder.mkdir()
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "adapter_config.json").write_text(text)
    return folder


def opened(model: Path, **options: Any) -> ExLlamaV2Backend:
    return open_backend(
        model,
        options=Options(**options),
        cache_dir=model.parent / "cache",
        context_tokens=2048,
        max_sequences=2,
        progress=lambda _: None,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_type": "fp8"}, r"cache_type must be one of fp16, q8, q6, q4, not 'fp8'"),
        ({"chunk_tokens": 128}, "chunk_tokens must be a multiple of 256, at least 256, not 128"),
        ({"draft_path": Path("x")}, "draft_path needs draft_tokens of at least 1"),
        ({"draft_path": Path("none"), "draft_tokens": 2}, "none: this is not a folder"),
        ({"lora_paths": (Path("none"),)}, r"none: there is no adapter_config\.json"),
    ],
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    model = folder_with_weights(tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        opened(model, **options)


def test_a_model_that_drafts_must_have_the_same_vocabulary(tmp_path: Path) -> None:
    model, drafting = folder_with_weights(tmp_path / "model"), folder_with_weights(tmp_path / "draft")
    path = drafting / "tokenizer.json"
    described = json.loads(path.read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(described))
    with pytest.raises(ModelError, match="draft: a model that drafts must have the vocabulary of the one"):
        opened(model, draft_path=drafting, draft_tokens=2)
    shutil.copy(model / "tokenizer.json", path)
    with pytest.raises(ModelError, match=r"without CUDA|no usable NVIDIA GPU"):
        opened(model, draft_path=drafting, draft_tokens=2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "must be a JSON object with the numbers r and lora_alpha"),
        ({"r": 8}, "must be a JSON object with the numbers r and lora_alpha"),
        ({"r": "eight", "lora_alpha": 16}, "must be a JSON object with the numbers r and lora_alpha"),
        ({"r": 0, "lora_alpha": 16}, "r and lora_alpha must be above 0"),
        ({"r": 8, "lora_alpha": 16, "fan_in_fan_out": True}, "fan_in_fan_out must not be set"),
        ({"r": 8, "lora_alpha": 16}, r"there are no \*\.safetensors files"),
    ],
)
def test_a_lora_that_cannot_be_is_named(
    tmp_path: Path, config: Mapping[str, Any] | str, message: str
) -> None:
    model, adapter = folder_with_weights(tmp_path / "model"), lora(tmp_path / "lora", config)
    with pytest.raises(ModelError, match=message) as raised:
        opened(model, lora_paths=(adapter,))
    assert str(adapter) in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "error", "status", "message"),
    [
        ({"prompt_ids": ()}, InvalidRequest, 400, "the prompt is empty"),
        ({"prompt_ids": (1,) * 3000}, PromptTooLong, 413, r"has 3000 tokens; .* at most \d+ fit"),
        ({"stop": ("end", "")}, InvalidRequest, 400, "stop must not hold an empty text"),
        ({"banned": ("",)}, InvalidRequest, 400, "banned_strings must not hold an empty text"),
        (
            {"constraint": Constraint(kind=ConstraintKind.JSON_SCHEMA, text='{"type": "nothing"}')},
            InvalidRequest,
            400,
            "json_schema: ",
        ),
        (
            {"constraint": Constraint(kind=ConstraintKind.REGEX, text="[a-")},
            InvalidRequest,
            400,
            "regex: ",
        ),
    ],
)
async def test_a_request_that_cannot_be_is_named_and_the_next_one_is_served(
    echo_directory: Path, changes: dict[str, Any], error: type[EngineError], status: int, message: str
) -> None:
    backend = make_backend(echo_directory, cache_tokens=8 * PAGE, max_sequences=2)
    engine = Engine(backend, residents=(Resident(resident_id=ALICE),), policy=Policy(voice_headroom_pages=1))
    await engine.start()
    try:
        with pytest.raises(error, match=message) as raised:
            await engine.submit(replace(ASKED, **changes))
        assert raised.value.http_status in (status, 422)
        session = await engine.submit(ASKED)
        assert [e.reason async for e in session.events() if isinstance(e, Finished)] == [FinishReason.LENGTH]
        backend.check()
        assert backend.num_pages_held == 0
    finally:
        await engine.stop(drain_s=0)


async def test_more_tokens_than_ever_fit_are_cut_to_what_fits(echo_directory: Path) -> None:
    backend = make_backend(echo_directory, cache_tokens=4 * PAGE, max_sequences=2)
    engine = Engine(backend, residents=(Resident(resident_id=ALICE),), policy=Policy(voice_headroom_pages=1))
    await engine.start()
    try:
        session = await engine.submit(replace(ASKED, max_tokens=1_000_000))
        (finished,) = [event async for event in session.events() if isinstance(event, Finished)]
        assert finished.reason is FinishReason.LENGTH
        most = engine._scheduler.most_tokens(WorkloadClass.CHAT, shared=0)
        assert 2 * PAGE <= most <= 4 * PAGE
        assert len(ASKED.prompt_ids) + finished.timings.decode_tokens == most
        assert backend.num_pages_held == 0
    finally:
        await engine.stop(drain_s=0)
