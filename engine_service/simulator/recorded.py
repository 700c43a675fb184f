"""A recorded day of the real engine as a scenario: who asked when, how long it was, who went away.

Decides what of an event log (`engine.eventlog`) is the household's and what was the scheduler's. The
household's is kept: arrivals, lengths, cancellations, residents, days. The scheduler's is decided again. The
log holds no text, so neither does anything here.

What is taken as recorded: tokens found in a prefix cache stay found (they are left out of the prompt), and
the answers of requests that were refused or cut short are as long as the median of their class. Losses of
the backend are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from engine_service.engine import eventlog
from engine_service.scheduling.events import (
    Arrived,
    Cancelled,
    CapacityChanged,
    DayStarted,
    Event,
    IterationDone,
    PolicyChanged,
    ResidentsChanged,
)
from engine_service.scheduling.model import (
    THE_MODEL,
    Capacity,
    Policy,
    Request,
    RequestId,
    Resident,
    WorkloadClass,
)
from engine_service.simulator import fit, policies, suite
from engine_service.simulator.profiles import DeviceProfile
from engine_service.simulator.runner import Runner
from engine_service.simulator.scenario import Scenario
from engine_service.simulator.suite import Outcome
from engine_service.simulator.workload import Faults, RecordedOrder, WallDay

_GUESSED_OUTPUT: Final = 64  #: where no request of the class was ever answered
_DRAIN_S: Final = 600.0

Turn = eventlog.Turn


class RecordingError(ValueError):
    """The event log cannot be read; the message names file and line."""


@dataclass(slots=True)
class _Seen:
    """What the log says of one request."""

    request: Request
    at_s: float
    output: int = 0
    cached: int = 0
    is_new: bool = True
    is_whole: bool = False  #: it was answered to its end
    cancelled_at_s: float | None = None


@dataclass(slots=True)
class Recording:
    """An event log, read."""

    turns: list[Turn]
    residents: tuple[Resident, ...] = ()
    policy: Policy = field(default_factory=Policy)
    capacity: Capacity | None = None
    seen: list[_Seen] = field(default_factory=list)  #: as they arrived
    latest: dict[RequestId, _Seen] = field(default_factory=dict)
    """Who has an id now: every start of the engine counts its requests anew."""
    days: list[WallDay] = field(default_factory=list)

    @property
    def started_at(self) -> float:
        """The engine's clock at the first turn."""
        return self.turns[0][0]

    @property
    def duration_s(self) -> float:
        """From the first turn to the last."""
        return self.turns[-1][0] - self.started_at


def read(path: Path) -> Recording:
    """Return what an event log says; raise RecordingError for what is none."""
    try:
        turns = _on_one_clock(eventlog.read(path))
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecordingError(f"{path}: is not an event log as --event-log writes it: {error}") from None
    recording = Recording(turns=turns)
    for now, event, _ in turns:
        _note(recording, now - recording.started_at, event)
    if recording.capacity is None or not recording.seen:
        raise RecordingError(f"{path}: holds no requests; was the engine used while it was recorded?")
    return recording


def _on_one_clock(turns: Iterable[Turn]) -> list[Turn]:
    """Return the turns on one clock: the engine's begins anew when the machine does.

    An engine begins by telling the policy. What a rotated log says again keeps its old times.
    """
    result: list[Turn] = []
    ahead = 0.0
    for now, event, decided in turns:
        if result and isinstance(event, PolicyChanged) and now + ahead < result[-1][0]:
            ahead = result[-1][0] - now
        if ahead and isinstance(event, DayStarted):
            event = replace(event, ends_at=event.ends_at + ahead)
        result.append((now + ahead, event, decided))
    return result


def _note(recording: Recording, at_s: float, event: Event) -> None:
    match event:
        case PolicyChanged(policy=policy):
            recording.policy = policy
        case ResidentsChanged(residents=residents):
            # Who was removed during the day may have asked before.
            known = {r.resident_id: r for r in (*recording.residents, *residents)}
            recording.residents = tuple(known.values())
        case CapacityChanged(capacity=capacity):
            recording.capacity = capacity
        case Arrived(request=request):
            known_as = request.request_id
            if known_as in recording.latest:
                fresh_id = RequestId(f"{known_as}+{len(recording.seen)}")
                request = replace(request, request_id=fresh_id)
            recording.seen.append(_Seen(request=request, at_s=at_s))
            recording.latest[known_as] = recording.seen[-1]
        case Cancelled(request_id=request_id):
            seen = recording.latest.get(request_id)
            if seen is not None and not seen.is_whole and seen.cancelled_at_s is None:
                seen.cancelled_at_s = at_s
        case DayStarted(day=day, ends_at=ends_at):
            ends_in_s = ends_at - recording.started_at - at_s
            recording.days.append(WallDay(at_s=at_s, day=day, ends_in_s=ends_in_s))
        case IterationDone():
            _note_results(recording, event)
        case _:
            pass


def _note_results(recording: Recording, event: IterationDone) -> None:
    for result in event.results:
        seen = recording.latest.get(result.request_id)
        if seen is None:
            continue
        if seen.is_new:
            seen.is_new, seen.cached = False, result.cached_tokens
        seen.output += result.decode_tokens
        if result.finished and not result.failed:
            seen.is_whole = True


def orders_of(recording: Recording) -> tuple[RecordedOrder, ...]:
    """Return the requests as a workload."""
    usual = _usual_outputs(recording)
    return tuple(_order(seen, usual) for seen in recording.seen)


def _usual_outputs(recording: Recording) -> dict[WorkloadClass, int]:
    by_class: dict[WorkloadClass, list[int]] = {}
    for seen in recording.seen:
        if seen.is_whole and seen.output:
            by_class.setdefault(seen.request.class_id, []).append(seen.output)
    return {class_id: round(statistics.median(outputs)) for class_id, outputs in by_class.items()}


def _order(seen: _Seen, usual: dict[WorkloadClass, int]) -> RecordedOrder:
    request = seen.request
    output = seen.output
    if not seen.is_whole:
        output = max(output, usual.get(request.class_id, _GUESSED_OUTPUT))
    cached = min(max(seen.cached, request.shared_prefix_tokens), request.prompt_tokens - 1)
    return RecordedOrder(
        at_s=seen.at_s,
        request=replace(
            request,
            prompt_tokens=request.prompt_tokens - cached,
            shared_prefix_tokens=0,
            keep_prefix=False,
            model_id=THE_MODEL,  # of several, as if one had answered all: the simulator switches none
        ),
        output_tokens=min(output, request.max_tokens),
        cancelled_at_s=seen.cancelled_at_s,
    )


def scenario_of(recording: Recording, *, name: str) -> Scenario:
    """Return the recorded day as a scenario without criteria."""
    return Scenario(
        name=name,
        title="a recorded day",
        description=f"{len(recording.seen)} requests of the real engine, run again.",
        duration_s=max(1.0, recording.duration_s),
        drain_s=_DRAIN_S,
        profile="recorded",
        device={},
        policy=recording.policy,
        residents=recording.residents,
        streams=(),
        phases=(),
        faults=Faults(days=tuple(recording.days)),
        criteria=(),
        recorded=orders_of(recording),
    )


def replay_recording(
    path: Path,
    policy_specs: Sequence[str],
    *,
    profile: DeviceProfile | None,
    on_done: Callable[[str], None] = lambda name: None,
) -> Outcome:
    """Run a recorded day under the policies, on a machine as fast as the recorded one was (or profile)."""
    recording = read(path)
    choices = [policies.choose(spec) for spec in policy_specs]
    machine = profile or fit.fitted(recording.turns, name=f"fitted to {path.name}")
    scenario = scenario_of(recording, name=path.stem)
    runs = {}
    for choice in choices:
        run = Runner(scenario, choice.scheduler(scenario.policy), profile=machine, seed=0).run()
        runs[choice.name] = (suite.summarise_run(run, choice, seed=0),)
        on_done(choice.name)
    return Outcome(
        scenario=scenario,
        profile=machine,
        seeds=(0,),
        choices=tuple(choices),
        runs=runs,
        alone={},
        verdicts=(),
    )
