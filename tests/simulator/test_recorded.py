"""A recorded day can be run again: same requests, another policy, a machine as fast as the recorded one."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from engine_service.backends.cost_model import CPU_SMOLLM2, CostModel
from engine_service.cli import main
from engine_service.engine.eventlog import EventLog
from engine_service.scheduling.events import Arrived, Cancelled, IterationDone, PolicyChanged
from engine_service.simulator import fit, recorded
from engine_service.simulator.fit import FitError
from engine_service.simulator.policies import choose
from engine_service.simulator.profiles import PROFILES
from engine_service.simulator.recorded import RecordingError
from engine_service.simulator.runner import Run, Runner
from tests.simulator.builders import TWO, assert_same, parsed

DAY = TWO.replace("uniform = [2000, 6000]", "uniform = [200, 600]").replace(
    "uniform = [900, 1400]", "uniform = [90, 140]"
)


def lived(faults: str = "", machine: str = "cpu-smollm2") -> Run:
    """Live a day on a machine, remembering every turn."""
    scenario = parsed(DAY + faults)
    scheduler = choose("default").scheduler(scenario.policy)
    return Runner(scenario, scheduler, profile=PROFILES[machine], seed=1, keep_turns=True).run()


def written(run: Run, path: Path) -> Path:
    """Write a day as the engine does, after what is there."""
    log = EventLog(path)
    log.write(PolicyChanged(policy=parsed(DAY).policy), [], now=1000.0)
    for now, event, decisions in run.turns:
        log.write(event, decisions, now=now + 1000.0)  # the engine's clock starts anywhere
    log.close()
    return path


def test_the_machine_is_recovered_from_the_log(tmp_path: Path) -> None:
    day = lived()
    machine = fit.profile_from(written(day, tmp_path / "day.jsonl"))
    assert machine.capacity == PROFILES["cpu-smollm2"].capacity
    for field in fields(CostModel):
        true, found = (getattr(cost, field.name) for cost in (CPU_SMOLLM2, machine.cost))
        assert found == pytest.approx(true, rel=0.02), field.name
    seen = list(fit.observations(day.turns, machine.capacity))
    assert fit.relative_error(machine.cost, seen) < 0.001


def test_a_pass_per_prompt_is_recovered_too() -> None:
    day = lived(machine="rtx4090-8b")
    cost = fit.fitted(day.turns, name="day").cost
    seen = list(fit.observations(day.turns, PROFILES["rtx4090-8b"].capacity))
    # A prompt that ends decodes in the same iteration, which no log tells; that is the error left.
    assert fit.relative_error(cost, seen) < 0.02


def test_no_coefficient_is_negative_however_odd_the_times() -> None:
    odd = [fit.Observation(features=(1, n, 0, 1, 1, 100 * n), seconds=1.0 / (n + 1)) for n in range(1, 60)]
    assert all(getattr(fit.fit(odd), f.name) >= 0 for f in fields(CostModel))


def test_too_few_iterations_are_refused() -> None:
    day = lived()
    with pytest.raises(FitError, match="iterations are too few, 20 are needed"):
        fit.fitted(day.turns[:12], name="day")


def test_the_same_policy_on_the_same_machine_lives_the_same_day(tmp_path: Path) -> None:
    day = lived()
    recording = recorded.read(written(day, tmp_path / "day.jsonl"))
    scenario = recorded.scenario_of(recording, name="day")
    again = Runner(
        scenario,
        choose("default").scheduler(scenario.policy),
        profile=PROFILES["cpu-smollm2"],
        seed=0,
        keep_turns=True,
    ).run()
    own = [[e for _, e, _ in run.turns if isinstance(e, Arrived | IterationDone)] for run in (day, again)]
    assert len(own[0]) == len(own[1])
    assert_same(
        [[r.request_id for r in e.results] for e in own[0] if isinstance(e, IterationDone)],
        [[r.request_id for r in e.results] for e in own[1] if isinstance(e, IterationDone)],
    )


def test_another_policy_serves_the_same_requests(tmp_path: Path) -> None:
    path = written(lived(), tmp_path / "day.jsonl")
    outcome = recorded.replay_recording(path, ["default", "fifo"], profile=None)
    ours, fifo = (outcome.runs[name][0] for name in ("default", "fifo"))
    for name, group in ours.groups.items():
        assert group.requests == fifo.groups[name].requests
        assert group.finished == group.requests
    assert ours.completed_tokens == fifo.completed_tokens
    assert ours.groups["voice"].ttft.p95 is not None
    assert fifo.groups["voice"].ttft.p95 is not None
    assert ours.groups["voice"].ttft.p95 < fifo.groups["voice"].ttft.p95


def test_who_went_away_goes_away_again(tmp_path: Path) -> None:
    day = lived("[faults]\ndisconnects = 0.5\n")
    gone = [e.request_id for _, e, _ in day.turns if isinstance(e, Cancelled)]
    assert gone
    path = written(day, tmp_path / "day.jsonl")
    orders = {o.request.request_id: o for o in recorded.orders_of(recorded.read(path))}
    assert {name for name, o in orders.items() if o.cancelled_at_s is not None} == set(gone)
    run = recorded.replay_recording(path, ["default"], profile=None).runs["default"][0]
    assert sum(run.groups[name].cancelled for name in ("anna", "ben")) == pytest.approx(len(gone), abs=1)


def test_what_the_log_found_in_a_cache_is_left_out(tmp_path: Path) -> None:
    path = written(lived(), tmp_path / "day.jsonl")
    lines = path.read_text().splitlines()
    turns = [json.loads(line) for line in lines]
    first = next(r for t in turns if t["event"]["type"] == "IterationDone" for r in t["event"]["results"])
    first["cached_tokens"] = 50
    path.write_text("\n".join(json.dumps(turn) for turn in turns) + "\n")
    recording = recorded.read(path)
    asked = recording.latest[first["request_id"]].request.prompt_tokens
    order = next(o for o in recorded.orders_of(recording) if o.request.request_id == first["request_id"])
    assert order.request.prompt_tokens == asked - 50


def test_a_last_line_that_was_cut_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    day = lived()
    path = written(day, tmp_path / "day.jsonl")
    path.write_text(path.read_text()[:-30])
    assert len(recorded.read(path).turns) == len(day.turns)
    assert f"line {len(day.turns) + 1}, column" in caplog.text
    assert "the last line was cut and is left out" in caplog.text


def test_an_engine_that_starts_again_goes_on_after_a_cut_line(tmp_path: Path) -> None:
    day = lived()
    path = written(day, tmp_path / "day.jsonl")
    path.write_text(path.read_text()[:-30])
    written(day, path)
    assert len(recorded.read(path).turns) == 2 * len(day.turns) + 1


def test_a_torn_line_amid_the_others_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = written(lived(), tmp_path / "day.jsonl")
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:-30]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordingError, match=r"day\.jsonl: is not an event log .*: line 5, column"):
        recorded.read(path)


def test_every_request_of_a_log_over_two_starts_is_lived_again(tmp_path: Path) -> None:
    day = lived()
    path = written(day, tmp_path / "day.jsonl")
    once = len(recorded.orders_of(recorded.read(path)))
    written(day, path)  # the ids and the clock begin anew
    recording = recorded.read(path)
    orders = recorded.orders_of(recording)
    assert len(orders) == len({o.request.request_id for o in orders}) == 2 * once
    times = [now for now, _, _ in recording.turns]
    assert times == sorted(times)
    run = recorded.replay_recording(path, ["default"], profile=None).runs["default"][0]
    assert sum(group.requests for name, group in run.groups.items() if name in ("anna", "ben")) == 2 * once


def test_replay_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = written(lived(), tmp_path / "day.jsonl"), tmp_path / "day.html"
    status = main(["replay", str(path), "--policy", "default", "--policy", "fifo", "--report", str(page)])
    assert status == 0
    out = capsys.readouterr().out
    assert "fitted to day.jsonl" in out
    assert "voice/anna" in out
    assert "a recorded day" in page.read_text()


def test_a_scenario_runs_on_the_machine_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, scenario = written(lived(), tmp_path / "day.jsonl"), tmp_path / "two.toml"
    scenario.write_text(DAY.replace("voice.ttft.p95 <= 1.0", "voice.ttft.p95 >= 0.1"))
    status = main(["simulate", str(scenario), "--profile", str(path), "--seeds", "1", "--quiet"])
    assert status == 0, capsys.readouterr().out


def test_the_log_decides_the_machine_unless_another_is_named(tmp_path: Path) -> None:
    path = written(lived(), tmp_path / "day.jsonl")
    slow = recorded.replay_recording(path, ["default"], profile=None)
    fast = recorded.replay_recording(path, ["default"], profile=PROFILES["rtx4090-8b"])
    waits = [outcome.runs["default"][0].groups["voice"].ttft.p95 for outcome in (fast, slow)]
    assert waits[0] is not None
    assert waits[1] is not None
    assert waits[0] < waits[1] / 2
