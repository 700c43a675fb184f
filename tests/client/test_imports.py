"""Who may import whom: the client stands alone, the pure parts stay pure, and nothing reaches into the
engine."""

from __future__ import annotations

import ast
from pathlib import Path

import custom_components.fairhearth

ROOT = Path(custom_components.fairhearth.__file__).parent


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a module imports; "." stands for its own package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level or (node.module or "").partition(".")[0])
    return names


def test_the_client_knows_nothing_of_home_assistant_nor_of_the_engines_code() -> None:
    for path in (ROOT / "engine_client").glob("*.py"):
        assert not imported(path) & {
            "homeassistant",
            "probatio",
            "engine_service",
            "custom_components",
            "..",
        }, path


def test_the_integration_does_not_import_the_engine() -> None:
    assert not [path for path in ROOT.rglob("*.py") if "engine_service" in imported(path)]


def test_attribution_is_pure() -> None:
    assert imported(ROOT / "attribution.py") == {"__future__", "collections", "dataclasses", "enum", "typing"}
