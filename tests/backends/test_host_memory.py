"""How much memory there is: files as Linux writes them, in and out of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_service.backends.host_memory import whole_bytes

KIB = 1024


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 150),
        ({"memory.max": "max", "memory.swap.max": "max"}, 150),
        ({"memory.max": str(40 * KIB), "memory.swap.max": "max"}, 150),
        ({"memory.max": str(40 * KIB)}, 150),
        ({"memory.max": str(40 * KIB), "memory.swap.max": str(20 * KIB)}, 60),
        ({"memory.max": str(400 * KIB), "memory.swap.max": "0"}, 150),
    ],
    ids=["none", "free", "swap is free", "swap is not told", "both", "more than there is"],
)
def test_all_there_is_counts_swap_and_what_a_container_may_take(
    tmp_path: Path, limits: dict[str, str], expected: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 10 kB\nSwapTotal: 50 kB\n")
    for name, value in limits.items():
        (tmp_path / name).write_text(f"{value}\n")
    assert whole_bytes(proc=tmp_path, group=tmp_path) == expected * KIB


def test_nobody_knows_how_much_there_is_where_nothing_says_so(tmp_path: Path) -> None:
    assert whole_bytes(proc=tmp_path, group=tmp_path) is None
