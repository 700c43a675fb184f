"""Which tests belong to which environment, and which wait for the night. Fixtures live in the suites."""

from importlib.util import find_spec

import pytest

# Collected only where Home Assistant is installed (.venv/ha), and nothing else is collected there.
_NEEDS_HOME_ASSISTANT = ("client", "e2e", "ha", "scripts")
_NEEDS_ENGINE = ("backends", "chat", "cli", "contract", "engine", "scheduling", "server", "simulator")

collect_ignore = [*(_NEEDS_ENGINE if find_spec("homeassistant") else _NEEDS_HOME_ASSISTANT)]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch that brings in the tests marked nightly."""
    parser.addoption(
        "--nightly", action="store_true", help="also run the tests marked nightly: long seeds and fuzz"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked nightly unless they were asked for."""
    if config.getoption("--nightly"):
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
