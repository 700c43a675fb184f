"""What cannot be is refused by name, when a model is loaded or a request handed in; nothing hangs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_service.backends.base import Constraint, ConstraintKind, FinishReason, ModelError, Sampling
from engine_service.engine.loop import Engine
from engine_service.engine.sessions import Finished, Order
from engine_service.errors import EngineError, InvalidRequest, PromptTooLong
from engine_service.scheduling.model import Policy, Resident, ResidentId, WorkloadClass
from tests.backends.conftest import Library
from tests.backends.echo import PAGE, folder_with_weights

ALICE = ResidentId("alice")
ASKED = Order(
    resident_id=ALICE,
    class_id=WorkloadClass.CHAT,
    prompt_ids=tuple(range(100)),
    max_tokens=10,
    sampling=Sampling(temperature=0.0),
    ignore_eos=True,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_type": "fp8"}, r"cache_type must be one of fp16, q8, q6, q4, not 'fp8'"),
        ({"chunk_tokens": 128}, "chunk_tokens must be a multiple of 256, at least 256, not 128"),
        ({"draft_path": Path("x")}, "draft_path needs draft_tokens of at least 1"),
        ({"draft_path": Path("none"), "draft_tokens": 2}, "none: this is not a folder"),
        ({"context_tokens": 255}, "context_tokens must be at least 256 with ExLlamaV., one page, not 255"),
    ],
)
def test_a_setting_that_cannot_be_is_named(
    library: Library, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    model = folder_with_weights(tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        library.opened(model, **options)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("config.json", r"there is no config\.json; is the download complete"),
        ("tokenizer.json", r"there is no tokenizer\.json; is the download complete"),
        (
            "model.safetensors",
            r"there are no \*\.safetensors files; ExLlamaV. loads EXL",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_named(
    library: Library, tmp_path: Path, broken: str, message: str
) -> None:
    model = folder_with_weights(tmp_path / "model")
    (model / broken).unlink()
    with pytest.raises(ModelError, match=message) as raised:
        library.opened(model)
    assert str(model) in str(raised.value)


def test_a_file_that_is_cut_short_or_no_folder_at_all_is_named(library: Library, tmp_path: Path) -> None:
    model = folder_with_weights(tmp_path / "model")
    header = b'{"a":{"data_offsets":[0,64]}}'
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(ModelError, match="the file is cut short: 41 bytes instead of 101"):
        library.opened(model)
    (model / "model.safetensors").write_bytes((99).to_bytes(8, "little") + b"{")
    with pytest.raises(ModelError, match=r"model\.safetensors: the header is damaged"):
        library.opened(model)
    with pytest.raises(ModelError, match="this is not a folder; give the folder of an EXL"):
        library.opened(model / "config.json")
    with pytest.raises(ModelError, match=r"model\.path must name a folder with EXL"):
        library.opened(None)


def test_what_a_source_describes_is_what_its_backend_offers(
    library: Library, echo_directory: Path, tmp_path: Path
) -> None:
    """Requests are judged by the description while the model is not in memory."""
    folder = folder_with_weights(tmp_path / "model")
    described = library.source(folder, context_tokens=8 * PAGE + 9, max_sequences=3).describe()
    backend = library.make_backend(echo_directory, cache_tokens=8 * PAGE, max_sequences=3)
    assert described.capacity == backend.capacity
    assert replace(described.info, name="echo") == backend.info
    backend.close()


def test_a_model_that_drafts_must_have_the_same_vocabulary(library: Library, tmp_path: Path) -> None:
    model, drafting = folder_with_weights(tmp_path / "model"), folder_with_weights(tmp_path / "draft")
    path = drafting / "tokenizer.json"
    described = json.loads(path.read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(described))
    with pytest.raises(ModelError, match="draft: a model that drafts must have the vocabulary of the one"):
        library.opened(model, draft_path=drafting, draft_tokens=2)
    shutil.copy(model / "tokenizer.json", path)
    with pytest.raises(ModelError, match=r"without CUDA|no usable NVIDIA GPU"):
        library.opened(model, draft_path=drafting, draft_tokens=2)


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
    library: Library,
    echo_directory: Path,
    changes: dict[str, Any],
    error: type[EngineError],
    status: int,
    message: str,
) -> None:
    backend = library.make_backend(echo_directory, cache_tokens=8 * PAGE, max_sequences=2)
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


async def test_more_tokens_than_ever_fit_are_cut_to_what_fits(library: Library, echo_directory: Path) -> None:
    backend = library.make_backend(echo_directory, cache_tokens=4 * PAGE, max_sequences=2)
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
