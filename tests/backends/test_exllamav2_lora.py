"""LoRA adapters, which only ExLlamaV2 loads: what cannot be is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine_service.backends.base import ModelError
from tests.backends.echo import folder_with_weights
from tests.backends.exllamav2_cpu import opened


def lora(folder: Path, config: Mapping[str, Any] | str) -> Path:
    folder.mkdir()
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "adapter_config.json").write_text(text)
    return folder


def test_a_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    model = folder_with_weights(tmp_path / "model")
    with pytest.raises(ModelError, match=r"none: there is no adapter_config\.json"):
        opened(model, lora_paths=(Path("none"),))


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
