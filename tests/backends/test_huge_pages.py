"""Weights in huge pages: where there is memory for it, and without harm where there is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine_service.backends.base import ModelError
from engine_service.backends.host_memory import available_bytes
from engine_service.backends.llama_cpp import huge_pages
from engine_service.backends.llama_cpp.binding import open_library
from engine_service.backends.llama_cpp.model import Model

MIB = 2**20
MAPS = """\
55d0c0a00000-55d0c0c00000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
7f0000400000-7f0000401000 ---p 00000000 00:00 0
7f0001000000-7f0009000000 r--s 001b3000 fe:00 16064882                   /models/a model.gguf
7f000a000000-7f000a200000 rw-p 00000000 fe:00 12                         /lib/libc.so.6
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
7f000b000000-7f000b800000 rw-p 00000000 00:00 0
"""


def test_memory_of_no_file_is_found() -> None:
    assert list(huge_pages._anonymous(MAPS)) == [
        (0x7F0000000000, 0x7F0000400000),
        (0x7F000B000000, 0x7F000B800000),
    ]


@pytest.mark.parametrize(
    ("ranges", "others", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(2, 4), (6, 8)], [(0, 2), (4, 6), (8, 10)]),
        ([(0, 10), (20, 30)], [(5, 25)], [(0, 5), (25, 30)]),
        ([(5, 10)], [(0, 6), (9, 20)], [(6, 9)]),
    ],
)
def test_only_what_is_new_is_touched(
    ranges: list[tuple[int, int]], others: list[tuple[int, int]], left: list[tuple[int, int]]
) -> None:
    assert list(huge_pages._without(ranges, others)) == left


def memory(
    folder: Path, *, available_kib: int, limit: str | None = None, used: int = 0, cached: int = 0
) -> int | None:
    (folder / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n")
    if limit is not None:
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 7\n")
    return available_bytes(proc=folder, group=folder)


def test_a_container_may_take_no_more_than_its_limit(tmp_path: Path) -> None:
    assert memory(tmp_path, available_kib=2048) == 2 * MIB
    assert memory(tmp_path, available_kib=2048, limit="max") == 2 * MIB
    assert memory(tmp_path, available_kib=2048, limit=str(3 * MIB), used=2 * MIB) == MIB
    assert memory(tmp_path, available_kib=2048, limit=str(MIB), used=2 * MIB) == 0
    assert memory(tmp_path, available_kib=2048, limit=str(3 * MIB), used=3 * MIB, cached=MIB) == MIB
    assert memory(tmp_path, available_kib=1, limit=str(MIB)) == 1024


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone is asked for huge pages")
@pytest.mark.parametrize(
    ("name", "available", "is_worth_it"),
    [
        ("model.gguf", None, False),
        ("model.gguf", 299, False),
        ("model.gguf", 300, True),
        ("model-00001-of-00003.gguf", 10**9, False),
    ],
)
def test_weights_are_copied_only_where_memory_is_plenty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, available: int | None, *, is_worth_it: bool
) -> None:
    path = tmp_path / name
    path.write_bytes(bytes(100))
    monkeypatch.setattr(huge_pages, "available_bytes", lambda: available)
    assert huge_pages.are_worth_a_copy(path) is is_worth_it


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


ENGINE = """
import json, sys
from pathlib import Path
from engine_service.backends.llama_cpp import huge_pages
from engine_service.backends.llama_cpp.binding import open_library
from engine_service.backends.llama_cpp.model import Model

huge_pages.available_bytes = lambda: 2**40
asked, collapse = [], huge_pages._collapse

def noted(start, end):
    asked.append(end - start)
    collapse(start, end)

huge_pages._collapse = noted
model = Model(open_library(), Path(sys.argv[1]))
pages = Path("/proc/self/smaps").read_text().splitlines()
huge = sum(int(line.split()[1]) for line in pages if line.startswith("AnonHugePages:"))
print(json.dumps({"asked": sum(asked), "huge": huge * 1024, "maps": Path("/proc/self/maps").read_text()}))
model.close()
"""
"""In a process of its own, as the engine is: other tests have left memory in this one."""


def kernel_can_collapse() -> bool:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    release = tuple(int(part) for part in Path("/proc/sys/kernel/osrelease").read_text().split(".")[:2])
    return release >= (6, 1) and enabled.exists() and "[never]" not in enabled.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone is asked for huge pages")
def test_weights_lie_in_huge_pages_and_not_in_their_file(default_file: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENGINE, str(default_file)], check=True, capture_output=True, text=True
    )
    told = json.loads(ended.stdout)
    assert str(default_file) not in told["maps"]
    assert told["asked"] > 0.9 * default_file.stat().st_size
    if kernel_can_collapse():
        assert told["huge"] > 0, "some of them; memory may be in pieces"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone is asked for huge pages")
def test_weights_stay_in_their_file_where_memory_is_short(
    default_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "available_bytes", lambda: default_file.stat().st_size)
    model = Model(open_library(), default_file)
    try:
        assert str(default_file) in mapped_files()
    finally:
        model.close()


def test_a_kernel_that_refuses_changes_nothing(default_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_MADV_HUGEPAGE", 12345)
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 12346)
    Model(open_library(), default_file).close()


def test_without_a_list_of_what_is_mapped_nothing_is_done(
    default_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huge_pages, "_MAPS", tmp_path / "absent")
    Model(open_library(), default_file).close()


def test_a_broken_model_is_still_refused_by_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        Model(open_library(), broken)


@pytest.fixture
def default_file() -> Path:
    """The GGUF of the default model's package."""
    from engine_service.backends.llama_cpp.provision import default_model_path

    return default_model_path()
