"""Scenarios: a household, its habits and what it may expect, read from a TOML file.

Decides what a scenario file may hold. A mistake in one is a `ScenarioError` that names file, key, value and
what is allowed. The files that come with the project lie in `scenarios/`; docs/simulator.md lists every key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final

import voluptuous as vol

from engine_service.checks import (
    boolean,
    list_of,
    member,
    number,
    path_and_message,
    table,
    text,
    whole_number,
)
from engine_service.errors import SettingsError
from engine_service.scheduling.model import GUEST, HOUSE, Policy, Resident, ResidentId, WorkloadClass
from engine_service.settings import policy_from
from engine_service.simulator import criteria
from engine_service.simulator.criteria import Criterion, CriterionError, Names
from engine_service.simulator.profiles import PROFILES, DeviceProfile
from engine_service.simulator.summary import RunSummary
from engine_service.simulator.workload import (
    Arrivals,
    Faults,
    Length,
    Pattern,
    RecordedOrder,
    Shape,
    Stream,
    WallDay,
)

_SUFFIX: Final = ".toml"


class ScenarioError(ValueError):
    """The scenario cannot be run; the message names file, key and what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of a run whose shares are reported apart."""

    name: str
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything a run is made of, but the policy and the seed."""

    name: str
    title: str
    description: str
    duration_s: float
    drain_s: float  #: most seconds after the duration in which what arrived may end
    profile: str
    device: Mapping[str, Any]  #: changes of the profile's capacity
    policy: Policy
    residents: tuple[Resident, ...]
    streams: tuple[Stream, ...]
    phases: tuple[Phase, ...]
    faults: Faults
    criteria: tuple[Criterion, ...]
    recorded: tuple[RecordedOrder, ...] = ()  #: requests of a recorded day, instead of streams

    def machine(self, profile: DeviceProfile) -> DeviceProfile:
        """Return the profile with this scenario's changes."""
        return replace(profile, capacity=replace(profile.capacity, **self.device)) if self.device else profile

    @property
    def compared_policies(self) -> tuple[str, ...]:
        """Policies that criteria compare with, by the names of the command line."""
        names = {name for criterion in self.criteria for name in criterion.needs.policies}
        return tuple(sorted(name.replace("_", "-") if name != "class_only" else name for name in names))

    @property
    def groups_alone(self) -> tuple[str, ...]:
        """Groups of which criteria ask how they fare alone."""
        return tuple(sorted({name for criterion in self.criteria for name in criterion.needs.alone}))

    def only(self, group: str) -> Scenario:
        """Return the scenario with nobody but that class, resident or stream, and nothing going wrong."""
        streams = tuple(s for s in self.streams if group in (s.name, s.resident_id, s.class_id.value))
        return replace(self, streams=streams, faults=Faults(), criteria=())


# ---- what a file may hold

_NAME: Final = text(at_least=1, at_most=64)
_SECONDS: Final = number(0)
_POSITIVE: Final = number(above=0)
_FRACTION: Final = number(0, 1)
_MOST_PER_S: Final = 1000  #: requests a second; a household has a few a minute
_LONGEST_S: Final = 31 * 86_400
_PAIR: Final = list_of(whole_number(1), at_least=2, at_most=2)

_LENGTH_KEYS: Final = table(
    {
        vol.Exclusive("uniform", "shape"): list_of(whole_number(0), at_least=2, at_most=2),
        vol.Exclusive("lognormal", "shape"): list_of(number(), at_least=2, at_most=2),
        vol.Optional("least"): whole_number(0),
        vol.Optional("most"): whole_number(1),
    },
    what="key",
)
_ARRIVALS_KEYS: Final = table(
    {
        vol.Required("pattern"): member(Pattern),
        vol.Optional("rate"): number(above=0, maximum=_MOST_PER_S),
        vol.Optional("rate_end"): number(0, _MOST_PER_S),
        vol.Optional("swing"): _FRACTION,
        vol.Optional("period_s"): _POSITIVE,
        vol.Optional("calls"): _PAIR,
        vol.Optional("every_s"): _POSITIVE,
        vol.Optional("gap_s"): _SECONDS,
        vol.Optional("count"): whole_number(1, 100_000),
        vol.Optional("concurrency"): whole_number(1, 10_000),
        vol.Optional("think_s"): _SECONDS,
        vol.Optional("on_s"): _POSITIVE,
        vol.Optional("off_s"): _POSITIVE,
    },
    what="key",
)
_PATTERN_KEYS: Final[Mapping[Pattern, tuple[str, ...]]] = {
    Pattern.POISSON: ("rate",),
    Pattern.UNIFORM: ("rate",),
    Pattern.RAMP: ("rate", "rate_end"),
    Pattern.DIURNAL: ("rate", "swing", "period_s"),
    Pattern.BURSTS: ("calls", "every_s", "gap_s"),
    Pattern.TOGETHER: ("count",),
    Pattern.CLOSED: ("concurrency",),
}
_PATTERN_MORE: Final[Mapping[Pattern, tuple[str, ...]]] = {
    Pattern.POISSON: ("on_s", "off_s"),
    Pattern.UNIFORM: ("on_s", "off_s"),
    Pattern.CLOSED: ("think_s",),
}


def _length(value: Any) -> Length:
    if isinstance(value, int) and not isinstance(value, bool):
        fixed = whole_number(0)(value)
        return Length(shape=Shape.FIXED, low=fixed, high=fixed)
    if not isinstance(value, dict):
        raise vol.Invalid(
            "must be a whole number, { uniform = [from, to] } or { lognormal = [mu, sigma], most = n }, "
            f"not {value!r}"
        )
    given = _LENGTH_KEYS(value)
    if "uniform" in given:
        low, high = given["uniform"]
        if low > high:
            raise vol.Invalid(f"must go from the smaller to the larger, not {given['uniform']}", ["uniform"])
        return Length(shape=Shape.UNIFORM, low=low, high=high)
    if "lognormal" not in given or "most" not in given:
        raise vol.Invalid("needs uniform, or lognormal with most")
    mu, sigma = given["lognormal"]
    if sigma < 0:
        raise vol.Invalid(f"sigma must be >= 0, not {sigma}", ["lognormal"])
    low = given.get("least", 1)
    if low > given["most"]:
        raise vol.Invalid(f"must be >= least ({low}), not {given['most']}", ["most"])
    return Length(shape=Shape.LOGNORMAL, low=low, high=given["most"], mu=mu, sigma=sigma)


def _arrivals(value: Any) -> Arrivals:
    given = _ARRIVALS_KEYS(value)
    pattern: Pattern = given["pattern"]
    needed, more = _PATTERN_KEYS[pattern], _PATTERN_MORE.get(pattern, ())
    for key in needed:
        if key not in given:
            raise vol.Invalid(f"is needed by the pattern {pattern.value!r}", [key])
    for key in given:
        if key not in ("pattern", *needed, *more):
            raise vol.Invalid(
                f"has no meaning for the pattern {pattern.value!r}; it takes {', '.join((*needed, *more))}",
                [key],
            )
    if ("on_s" in given) != ("off_s" in given):
        raise vol.Invalid("needs both on_s and off_s, or neither")
    if "calls" in given:
        low, high = given["calls"]
        if low > high:
            raise vol.Invalid(f"must go from the smaller to the larger, not {given['calls']}", ["calls"])
        given["calls"] = (low, high)
    return Arrivals(**given)


_RESIDENT: Final = table(
    {
        vol.Optional("weight"): whole_number(1, 1_000_000),
        vol.Optional("daily_tokens"): whole_number(1),
        vol.Optional("daily_is_hard"): boolean,
        vol.Optional("rolling_tokens"): whole_number(1),
        vol.Optional("rolling_window_s"): number(1),
        vol.Optional("rolling_is_hard"): boolean,
        vol.Optional("page_cap"): whole_number(1),
        vol.Optional("max_running"): whole_number(1),
        vol.Optional("max_waiting"): whole_number(1),
    },
    what="key",
)
_STREAM: Final = table(
    {
        vol.Optional("name"): _NAME,
        vol.Required("resident"): _NAME,
        vol.Required("class"): member(WorkloadClass),
        vol.Required("arrivals"): _arrivals,
        vol.Required("prompt"): _length,
        vol.Required("output"): _length,
        vol.Optional("max_tokens"): whole_number(0),
        vol.Optional("from_s"): _SECONDS,
        vol.Optional("until_s"): _POSITIVE,
        vol.Optional("most_requests"): whole_number(1),
    },
    what="key",
)
_DEVICE: Final = table(
    {
        vol.Optional("num_pages"): whole_number(1),
        vol.Optional("page_tokens"): whole_number(1),
        vol.Optional("max_sequences"): whole_number(1),
        vol.Optional("max_context_tokens"): whole_number(1),
        vol.Optional("chunk_granularity"): whole_number(1),
        vol.Optional("can_release"): boolean,
        vol.Optional("can_abort"): boolean,
        vol.Optional("mixes_prefill_and_decode"): boolean,
    },
    what="key",
)
_DAY: Final = table(
    {
        vol.Required("at_s"): _SECONDS,
        vol.Required("day"): text(at_least=10, at_most=10),
        vol.Required("ends_in_s"): _POSITIVE,
    },
    what="key",
)
_FAULTS: Final = table(
    {
        vol.Optional("disconnects"): _FRACTION,
        vol.Optional("failures"): _FRACTION,
        vol.Optional("losses_per_hour"): _SECONDS,
        vol.Optional("down_s"): _POSITIVE,
        vol.Optional("clock_jumps"): list_of(list_of(_POSITIVE, at_least=2, at_most=2)),
        vol.Optional("days"): list_of(_DAY),
    },
    what="key",
)
_CRITERION: Final = table(
    {
        vol.Required("name"): text(at_least=1, at_most=160),
        vol.Required("check"): text(at_least=3),
        vol.Optional("over"): vol.Any("every seed", "median", msg='must be "every seed" or "median"'),
        vol.Optional("note"): text(),
    },
    what="key",
)
_FILE: Final = table(
    {
        vol.Required("title"): text(at_least=1, at_most=100),
        vol.Optional("description"): text(),
        vol.Required("duration_s"): number(above=0, maximum=_LONGEST_S),
        vol.Optional("drain_s"): _SECONDS,
        vol.Required("profile"): vol.In(PROFILES, msg=f"must be one of {', '.join(PROFILES)}"),
        vol.Optional("device"): _DEVICE,
        vol.Optional("policy"): dict,
        vol.Required("residents"): dict,
        vol.Required("stream"): list_of(_STREAM, at_least=1),
        vol.Optional("phase"): list_of(
            table(
                {
                    vol.Required("name"): _NAME,
                    vol.Required("from_s"): _SECONDS,
                    vol.Required("to_s"): _POSITIVE,
                },
                what="key",
            )
        ),
        vol.Optional("faults"): _FAULTS,
        vol.Optional("criterion"): list_of(_CRITERION),
    },
    what="key",
)


# ---- reading


def names() -> tuple[str, ...]:
    """Return the names of the scenarios that come with the project, households first."""
    folder = resources.files("engine_service.simulator") / "scenarios"
    found = [entry.name.removesuffix(_SUFFIX) for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)]
    return tuple(sorted(found, key=_natural))


def _natural(name: str) -> tuple[int, int, str]:
    number_part = name[1:] if name[:1] in "hH" and name[1:].isdigit() else ""
    return (0, int(number_part), "") if number_part else (1, 0, name)


def load(name_or_path: str) -> Scenario:
    """Return a scenario by the name of one that comes with the project, or by the path of a file."""
    path = Path(name_or_path)
    if path.suffix == _SUFFIX:
        return parse(_read(path), name=path.stem, source=str(path))
    known = {name.lower(): name for name in names()}
    name = known.get(name_or_path.lower())
    if name is None:
        raise ScenarioError(
            f"there is no scenario {name_or_path!r}; there are {', '.join(names())}, or give a .toml file"
        )
    folder = resources.files("engine_service.simulator") / "scenarios"
    return parse((folder / (name + _SUFFIX)).read_text("utf-8"), name=name, source=name + _SUFFIX)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: is not UTF-8 (byte {error.start}); TOML files are") from None


def parse(content: str, *, name: str, source: str) -> Scenario:
    """Return the scenario that a TOML text describes; source is named in errors."""
    try:
        raw = _FILE(tomllib.loads(content))
        return _scenario(raw, name=name, source=source)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{source}: is not valid TOML: {error}") from None
    except vol.Invalid as error:
        key, message = path_and_message(error)
        raise ScenarioError(f"{source}: {key or 'the file'} {message}") from None
    except SettingsError as error:
        raise ScenarioError(error.message) from None


def _scenario(raw: Mapping[str, Any], *, name: str, source: str) -> Scenario:
    residents = _residents(raw["residents"])
    known = [r.resident_id for r in residents]
    duration = raw["duration_s"]
    streams = tuple(_stream(given, f"stream[{i}]", known, duration) for i, given in enumerate(raw["stream"]))
    _refuse_twins(streams, known)
    phases = tuple(_phase(given, f"phase[{i}]", duration) for i, given in enumerate(raw.get("phase", [])))
    scenario = Scenario(
        name=name,
        title=raw["title"],
        description=raw.get("description", "").strip(),
        duration_s=duration,
        drain_s=raw.get("drain_s", 600.0),
        profile=raw["profile"],
        device=raw.get("device", {}),
        policy=policy_from(raw.get("policy", {}), source),
        residents=residents,
        streams=streams,
        phases=phases,
        faults=_faults(raw.get("faults", {})),
        criteria=(),
    )
    _check_machine(scenario)
    promises = tuple(_criterion(scenario, given, i) for i, given in enumerate(raw.get("criterion", [])))
    return replace(scenario, criteria=promises)


def _residents(raw: Mapping[str, Any]) -> tuple[Resident, ...]:
    found = []
    for key, given in raw.items():
        _check_name(key, f"residents.{key}")
        try:
            found.append(Resident(resident_id=ResidentId(key), **_RESIDENT(given)))
        except vol.Invalid as error:
            error.prepend(["residents", key])
            raise
    if not found:
        raise vol.Invalid("must name at least one resident", ["residents"])
    return tuple(found)


def _check_name(name: str, where: str) -> None:
    reserved = {*criteria.POLICY_NAMES, "alone", *(c.value for c in WorkloadClass)}
    if not name.isidentifier() or name in reserved or name in {f.name for f in fields(RunSummary)}:
        raise vol.Invalid(
            f"{name!r} must be a name of letters, digits and underscores that is no class, policy or figure",
            [where],
        )


def _stream(given: Mapping[str, Any], where: str, residents: Sequence[str], duration_s: float) -> Stream:
    resident = given["resident"]
    if resident not in (*residents, GUEST, HOUSE):
        raise vol.Invalid(
            f"must be one of {', '.join((*residents, GUEST, HOUSE))}, not {resident!r}", [f"{where}.resident"]
        )
    class_id: WorkloadClass = given["class"]
    name = given.get("name", f"{resident}_{class_id.value}")
    _check_name(name, f"{where}.name")
    prompt, output = given["prompt"], given["output"]
    if prompt.low < 1:
        raise vol.Invalid(f"must be at least 1 token, not {prompt.low}", [f"{where}.prompt"])
    most = given.get("max_tokens")
    if output.low < 1 and not (output.high == 0 or most == 0):
        raise vol.Invalid("must be at least 1 token, or 0 for all (embeddings)", [f"{where}.output"])
    until = given.get("until_s")
    if given.get("from_s", 0.0) >= (duration_s if until is None else until):
        raise vol.Invalid(f"must end after it starts and start before {duration_s:g} s", [f"{where}.from_s"])
    return Stream(
        name=name,
        resident_id=ResidentId(resident),
        class_id=class_id,
        arrivals=given["arrivals"],
        prompt=prompt,
        output=output,
        max_tokens=most,
        from_s=given.get("from_s", 0.0),
        until_s=until,
        most_requests=given.get("most_requests"),
    )


def _refuse_twins(streams: Sequence[Stream], residents: Sequence[str]) -> None:
    seen: set[str] = set(residents)
    for i, stream in enumerate(streams):
        if stream.name in seen:
            raise vol.Invalid(
                f"{stream.name!r} is the name of another stream or resident; give this one a name of its own",
                [f"stream[{i}].name"],
            )
        seen.add(stream.name)


def _phase(given: Mapping[str, Any], where: str, duration_s: float) -> Phase:
    _check_name(given["name"], f"{where}.name")
    if not given["from_s"] < given["to_s"] <= duration_s:
        raise vol.Invalid(
            f"must be after from_s and at most {duration_s:g} s, not {given['to_s']:g}", [f"{where}.to_s"]
        )
    return Phase(name=given["name"], from_s=given["from_s"], to_s=given["to_s"])


def _faults(given: Mapping[str, Any]) -> Faults:
    changed = dict(given)
    changed["clock_jumps"] = tuple((at_s, by_s) for at_s, by_s in given.get("clock_jumps", ()))
    changed["days"] = tuple(WallDay(**day) for day in given.get("days", ()))
    return Faults(**changed)


def _check_machine(scenario: Scenario) -> None:
    try:
        scenario.machine(PROFILES[scenario.profile])
    except ValueError as error:
        raise vol.Invalid(str(error), ["device"]) from None


def _criterion(scenario: Scenario, given: Mapping[str, Any], index: int) -> Criterion:
    residents = [*(r.resident_id for r in scenario.residents), GUEST, HOUSE]
    allowed = Names(
        policies=criteria.POLICY_NAMES,
        groups={
            *residents,
            *(s.name for s in scenario.streams),
            *(s.class_id.value for s in scenario.streams),
        },
        phases={phase.name for phase in scenario.phases},
        residents=residents,
    )
    try:
        return criteria.parse(
            given["name"],
            given["check"],
            names=allowed,
            over=given.get("over", "every seed"),
            note=given.get("note", ""),
        )
    except CriterionError as error:
        raise vol.Invalid(str(error), [f"criterion[{index}].check"]) from None
