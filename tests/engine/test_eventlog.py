"""The event log: bounded on the disk, whole for a replay, and never a reason to stop serving."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from pathlib import Path

import pytest

from engine_service.engine import eventlog
from engine_service.engine.eventlog import EventLog
from engine_service.scheduling.decisions import Decision
from engine_service.scheduling.events import Arrived, CapacityChanged, Event, ResidentsChanged
from engine_service.scheduling.scheduler import Scheduler
from engine_service.simulator import fit
from engine_service.simulator.recorded import read, replay_recording
from tests.engine.conftest import MakeEngine, ask
from tests.scheduling.household import Household
from tests.scheduling.promises import ALICE, BOB

Turn = tuple[float, Event, list[Decision]]


def lived() -> list[Turn]:
    """Return the turns of a household that lived some seconds."""
    home = Household(residents=(ALICE, BOB))
    for i in range(12):
        home.ask("alice", ("chat", "background")[i % 2], 200 + 40 * i, 60)
        home.ask("bob", ("voice", "agent")[i % 2], 90, 20)
        home.run_until(home.now + 0.4)
    home.run_dry()
    return home.log


def written(turns: list[Turn], path: Path, **options: int) -> Path:
    log = EventLog(path, **options)
    for now, event, decisions in turns:
        log.write(event, decisions, now=now)
    log.close()
    return path


def as_bytes(turns: list[Turn]) -> bytes:
    """Return the decisions as the log has them."""
    return b"\n".join(json.dumps([eventlog.encode(d) for d in ds]).encode() for _, _, ds in turns)


def test_a_log_in_many_files_replays_to_the_same_decisions_byte_for_byte(tmp_path: Path) -> None:
    turns = lived()
    path = written(turns, tmp_path / "events.jsonl", max_bytes=20_000, num_kept=1000)
    assert len(eventlog.files(path)) > 3
    recorded = list(eventlog.read(path))
    assert len(recorded) == len(turns)
    scheduler = Scheduler()
    again = [(now, event, scheduler.handle(event, now=now)) for now, event, _ in recorded]
    assert as_bytes(again) == as_bytes(turns)


def test_full_files_are_kept_up_to_a_number_and_the_newest_is_whole(tmp_path: Path) -> None:
    turns = lived()
    path = written(turns, tmp_path / "events.jsonl", max_bytes=30_000, num_kept=2)
    assert [p.name for p in eventlog.files(path)] == ["events.jsonl.2", "events.jsonl.1", "events.jsonl"]
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in eventlog.files(path)}
    assert all(p.stat().st_size < 40_000 for p in tmp_path.iterdir())
    recorded = list(eventlog.read(path))
    assert [event for _, event, _ in recorded[-50:]] == [event for _, event, _ in turns[-50:]]


def test_a_log_whose_beginning_is_gone_starts_with_what_held(tmp_path: Path) -> None:
    turns = lived()
    path = written(turns, tmp_path / "events.jsonl", max_bytes=60_000, num_kept=1)
    assert {type(event) for _, event, _ in list(eventlog.read(path))[:2]} == {
        ResidentsChanged,
        CapacityChanged,
    }
    recording = read(path)
    assert {r.resident_id for r in recording.residents} == {"alice", "bob"}
    told = sum(isinstance(event, Arrived) for _, event, _ in eventlog.read(path))
    assert 0 < len(recording.seen) == told < 24


def test_a_restart_goes_on_in_the_same_file(tmp_path: Path) -> None:
    turns = lived()
    written(turns[:10], tmp_path / "events.jsonl")
    path = written(turns[10:], tmp_path / "events.jsonl")
    assert len(list(eventlog.read(path))) == len(turns)


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    log._file = FullDisk()
    with caplog.at_level(logging.ERROR):
        for now, event, decisions in lived()[:5]:
            log.write(event, decisions, now=now)
    assert [r.message for r in caplog.records] == [
        f"{tmp_path}/events.jsonl: No space left on device; nothing more is recorded"
    ]
    log.close()


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"num_kept": 0}])
def test_a_log_of_no_size_is_refused(options: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        EventLog(tmp_path / "events.jsonl", **options)


async def test_a_day_of_the_real_engine_is_a_machine_and_can_be_lived_again(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    async with make_engine(event_log=path) as (engine, _):
        (offered,) = engine.capacities
        background = asyncio.create_task(
            ask(engine, "bob", "background", "The keeper of the light. " * 30, 24)
        )
        for i in range(4):
            await ask(engine, "alice", ("voice", "chat")[i % 2], "Turn on the kitchen light. " * (i + 1), 6)
        await background
    machine = fit.profile_from(path)
    assert machine.capacity == offered
    assert machine.cost.seconds(chunk_tokens=64, num_decodes=2) > 0
    outcome = replay_recording(path, ["default", "fifo"], profile=None)
    for runs in outcome.runs.values():
        assert runs[0].groups["voice"].finished == runs[0].groups["chat"].finished == 2
        assert runs[0].groups["background"].finished == 1
        (document,) = [s for s in read(path).seen if s.request.resident_id == "bob"]
        assert runs[0].groups["bob"].tokens == document.request.prompt_tokens - document.cached + 24
