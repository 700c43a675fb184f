"""The ledger: what was written last is read back, whatever happened in between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine_service.engine.ledger import Ledger


def written(folder: Path, *snapshots: object, at: float = 100.0) -> None:
    ledger = Ledger(folder, wall_clock=lambda: at)
    ledger.load()
    for snapshot in snapshots:
        ledger.write(snapshot)
    ledger.close()


def kept(folder: Path, *, at: float = 130.0) -> object:
    ledger = Ledger(folder, wall_clock=lambda: at)
    found = ledger.load()
    ledger.close()
    return None if found is None else (found.snapshot, found.elapsed_s)


def test_a_new_folder_holds_nothing(tmp_path: Path) -> None:
    assert kept(tmp_path) is None
    assert kept(tmp_path) is None


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_the_last_snapshot_is_the_one_that_counts(tmp_path: Path, count: int) -> None:
    written(tmp_path, *({"n": number} for number in range(count)))
    assert kept(tmp_path) == ({"n": count - 1}, 30.0)
    written(tmp_path, {"n": "later"})
    assert kept(tmp_path) == ({"n": "later"}, 30.0)


def test_a_shorter_snapshot_after_a_longer_one_is_read_whole(tmp_path: Path) -> None:
    written(tmp_path, "x" * 1000, "y" * 1000, "z")
    assert kept(tmp_path) == ("z", 30.0)


def test_a_clock_set_back_makes_nothing_younger_than_now(tmp_path: Path) -> None:
    written(tmp_path, 1)
    assert kept(tmp_path, at=50.0) == (1, 0.0)


@pytest.mark.parametrize("cut", [0, 1, 20, 47, 48, 60])
def test_a_write_cut_short_leaves_the_one_before(tmp_path: Path, cut: int) -> None:
    written(tmp_path, {"n": 1}, {"n": 2, "more": "x" * 100})
    newest = tmp_path / "ledger.0"
    newest.write_bytes(newest.read_bytes()[:cut])
    assert kept(tmp_path) == ({"n": 1}, 30.0)


@pytest.mark.parametrize("place", [0, 16, 40, 50, 70])
def test_a_flipped_byte_is_found(tmp_path: Path, place: int) -> None:
    written(tmp_path, {"n": 1}, {"n": 2, "more": "x" * 100})
    newest = tmp_path / "ledger.0"
    content = bytearray(newest.read_bytes())
    content[place] ^= 0x55
    newest.write_bytes(content)
    assert kept(tmp_path) == ({"n": 1}, 30.0)


def test_two_damaged_files_are_set_aside_and_said_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, 1, 2)
    for number in (0, 1):
        (tmp_path / f"ledger.{number}").write_bytes(b"rubbish")
    assert kept(tmp_path) is None
    assert "counting begins anew" in caplog.text
    assert sorted(path.read_bytes() for path in tmp_path.glob("*.damaged-*")) == [b"rubbish"] * 2
    written(tmp_path, 3)
    assert kept(tmp_path) == (3, 30.0)


def test_a_folder_that_takes_nothing_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(tmp_path / "missing")
    assert ledger.load() is None
    ledger.write(1)
    ledger.write(2)
    ledger.close()
    assert caplog.text.count("cannot be kept") == 1


def test_a_disk_that_takes_a_part_of_a_write_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a full one does: the call returns, and says how little it took."""
    ledger = Ledger(tmp_path, wall_clock=lambda: 100.0)
    ledger.load()
    ledger.write({"n": 1})
    ledger.write({"n": 2})
    whole = os.pwrite

    def part(file: int, content: bytes, offset: int) -> int:
        return whole(file, content[:60], offset)

    monkeypatch.setattr("engine_service.engine.ledger.os.pwrite", part)
    for number in range(3, 8):
        ledger.write({"n": number, "more": "x" * 100})
    assert caplog.text.count("What is served cannot be kept: No space left on device") == 1
    assert kept(tmp_path) == ({"n": 2}, 30.0)
    monkeypatch.undo()
    ledger.write({"n": 8})
    ledger.close()
    assert kept(tmp_path) == ({"n": 8}, 30.0)
