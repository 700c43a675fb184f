"""Every text that the code asks for exists, every text that exists is asked for, and none uses jargon in a
name."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import probatio
import pytest
import yaml

import custom_components.fairhearth
from custom_components.fairhearth import config_flow, errors, number, sensor, services
from custom_components.fairhearth.attribution import WorkloadClass
from custom_components.fairhearth.engine_client import FINAL_STATES
from custom_components.fairhearth.moments import MomentKind

ROOT = Path(custom_components.fairhearth.__file__).parent
TEXTS: dict[str, Any] = json.loads((ROOT / "translations" / "en.json").read_text(encoding="utf-8"))
ICONS: dict[str, Any] = json.loads((ROOT / "icons.json").read_text(encoding="utf-8"))
SOURCE = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("*.py")}


def entity_keys() -> dict[str, set[str]]:
    """Return what each platform shows, by the keys of its descriptions and of its single entities."""
    by_class = {f"{description.key}_{item}" for description in sensor.CLASS_SENSORS for item in WorkloadClass}
    by_class |= {f"{row.key}_{item}" for row in sensor.ANSWER_SENSORS for item in sensor.ANSWERED_CLASSES}
    keys = {
        "number": {description.key for description in number.RESIDENT_NUMBERS},
        "sensor": by_class
        | {description.key for description in (*sensor.RESIDENT_SENSORS, *sensor.ENGINE_SENSORS)},
    }
    for name, text in SOURCE.items():
        if single := set(re.findall(r'_attr_translation_key = "(\w+)"', text)):
            keys[name.removesuffix(".py")] = keys.get(name.removesuffix(".py"), set()) | single
    return keys


def literal_exception_keys() -> set[str]:
    """Return the keys written where an error is raised."""
    keys: set[str] = set()
    for text in SOURCE.values():
        keys |= {
            keyword.value.value
            for call in ast.walk(ast.parse(text))
            if isinstance(call, ast.Call)
            and any(keyword.arg == "translation_domain" for keyword in call.keywords)
            for keyword in call.keywords
            if keyword.arg == "translation_key" and isinstance(keyword.value, ast.Constant)
        }
    return keys


def test_every_entity_has_a_name_and_an_icon() -> None:
    assert {platform: set(rows) for platform, rows in TEXTS["entity"].items()} == entity_keys()
    assert {platform: set(rows) for platform, rows in ICONS["entity"].items()} == entity_keys()


def test_every_error_has_a_text_and_every_text_an_error() -> None:
    spoken = set(re.findall(r'async_text\(self\.hass, "(\w+)"', SOURCE["conversation.py"]))
    by_class = set(errors._KEYS.values()) | set(errors._LIMITS.values()) | {"engine_error"}
    told = {f"logbook_{state}" for state in FINAL_STATES}
    raised = literal_exception_keys() | by_class | spoken | told
    assert TEXTS["exceptions"].keys() == raised


def test_every_workload_class_has_a_name() -> None:
    assert TEXTS["selector"]["class_name"]["options"].keys() == set(WorkloadClass)


def test_every_device_trigger_has_a_name() -> None:
    assert TEXTS["device_automation"].keys() == {"trigger_type"}
    assert TEXTS["device_automation"]["trigger_type"].keys() == set(MomentKind)


def test_every_issue_has_a_text_and_every_text_an_issue() -> None:
    source = SOURCE["issues.py"]
    named = set(re.findall(r'_set\(f?"([a-z_]+?)(?:_\{|")', source)) | {"changing_prompt"}
    assert TEXTS["issues"].keys() == named
    assert all(f'"{key}"' in source or f'f"{key}_' in source for key in TEXTS["issues"])


def test_every_refusal_of_a_dialog_has_a_text() -> None:
    source = SOURCE["config_flow.py"] + SOURCE["subentry_flow.py"]
    refused = set(re.findall(r'Refused\("(\w+)"', source))
    subentry_errors = TEXTS["config_subentries"]["resident"]["error"].keys()
    assert refused == TEXTS["config"]["error"].keys() | subentry_errors
    aborted = set(re.findall(r'reason="(\w+)"', source))
    known = TEXTS["config"]["abort"].keys() | TEXTS["config_subentries"]["conversation"]["abort"].keys()
    assert aborted <= known


def test_every_field_of_a_dialog_has_a_name_and_a_description() -> None:
    for step in TEXTS["config"]["step"].values():
        assert step["data"].keys() == step["data_description"].keys()
    user = {str(key) for key in config_flow.ENGINE_SCHEMA.schema}
    assert TEXTS["config"]["step"]["user"]["data"].keys() == user
    assert TEXTS["config"]["step"]["reconfigure"]["data"].keys() == user
    for kind in TEXTS["config_subentries"].values():
        for step in kind["step"].values():
            assert step["data"].keys() == step["data_description"].keys()


def test_the_actions_are_described() -> None:
    described = yaml.safe_load((ROOT / "services.yaml").read_text(encoding="utf-8"))
    assert described.keys() == TEXTS["services"].keys() == ICONS["services"].keys()
    schemas = {
        "generate": services.GENERATE_SCHEMA,
        "submit_summary": services.SUBMIT_SUMMARY_SCHEMA,
        "get_job": services.JOB_SCHEMA,
        "cancel_job": services.JOB_SCHEMA,
        "list_jobs": services.LIST_JOBS_SCHEMA,
        "set_policy": services.SET_POLICY_SCHEMA,
        "rehearse": services.REHEARSE_SCHEMA,
    }
    assert described.keys() == schemas.keys()
    for name, schema in schemas.items():
        if isinstance(schema.schema, probatio.All):
            schema = probatio.Schema(schema.schema.validators[0])
        fields = {str(key) for key in schema.schema}
        assert described[name]["fields"].keys() == TEXTS["services"][name]["fields"].keys() == fields
        required = {str(key) for key in schema.schema if isinstance(key, probatio.Required)}
        assert required == {key for key, row in described[name]["fields"].items() if row.get("required")}


@pytest.mark.parametrize("word", ["p95", "KV", "token_", "TTFT", "prefill", "decode", "preempt", "queue"])
def test_names_are_in_plain_words(word: str) -> None:
    names = [row["name"] for platform in TEXTS["entity"].values() for row in platform.values()]
    assert not [name for name in names if word.lower() in name.lower()]


def test_texts_are_written_out() -> None:
    """References to other texts are not resolved for a custom integration, and addresses and markup are not
    allowed."""
    text = json.dumps(TEXTS, ensure_ascii=False)
    assert "[%key" not in text
    assert "://" not in text
    assert not re.search(r"<\w+>", text)
