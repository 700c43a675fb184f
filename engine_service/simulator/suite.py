"""Runs a scenario under several policies and seeds, and judges it.

Decides which runs are needed (the named policies, what criteria compare with, who must be alone), what a
criterion's verdict over all seeds is, and who is judged: the policies that are not baselines; a baseline only
where nobody else is named.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engine_service.simulator import measure, policies, scenario as scenarios
from engine_service.simulator.criteria import Criterion, Judgement, Runs
from engine_service.simulator.policies import Choice
from engine_service.simulator.profiles import DeviceProfile, profile as profile_named
from engine_service.simulator.runner import Run, Runner
from engine_service.simulator.scenario import Scenario
from engine_service.simulator.summary import RunSummary
from engine_service.simulator.workload import Faults

_CHECK_FAULTS_EVERY = 50  #: turns between two checks of the invariants where faults are injected


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run to be made; small and simple, so that it can be sent to another process."""

    scenario: str  #: name or path
    policy: str  #: name or path
    seed: int
    profile: DeviceProfile
    only: str | None = None

    @property
    def label(self) -> str:
        """What is said about it while it runs."""
        alone = f", {self.only} alone" if self.only else ""
        return f"{self.policy}, seed {self.seed}{alone}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A criterion, a policy, and every seed's judgement."""

    criterion: Criterion
    policy: str
    judgements: tuple[Judgement, ...]

    @property
    def holds(self) -> bool:
        """Return whether enough seeds keep the criterion."""
        # A seed in which neither side has a figure (nobody spoke) says nothing; if all say nothing, it fails.
        told = [j for j in self.judgements if j.left is not None or j.right is not None]
        kept = sum(judgement.holds for judgement in told)
        needed = len(told) if self.criterion.over == "every seed" else (len(told) + 1) // 2
        return bool(told) and kept >= needed

    @property
    def middle(self) -> Judgement:
        """The seed in the middle, by the ratio of both sides."""
        return sorted(self.judgements, key=self._badness)[(len(self.judgements) - 1) // 2]

    @property
    def worst(self) -> Judgement:
        """The seed that comes nearest to breaking it, or breaks it most."""
        return max(self.judgements, key=self._badness)

    def _badness(self, judgement: Judgement) -> float:
        if judgement.left is None and judgement.right is None:
            return float("-inf")
        if judgement.left is None or judgement.right is None:
            return float("inf")
        excess = judgement.left - judgement.right
        scale = abs(judgement.right) or 1.0
        if self.criterion.sign == "==":
            return abs(excess) / scale
        return excess / scale if self.criterion.sign in ("<=", "<") else -excess / scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A scenario that was run: every policy and seed, and the verdicts."""

    scenario: Scenario
    profile: DeviceProfile
    seeds: tuple[int, ...]
    choices: tuple[Choice, ...]
    runs: Mapping[str, tuple[RunSummary, ...]]  #: by policy, in the order of the seeds
    alone: Mapping[tuple[str, str], tuple[RunSummary, ...]]  #: by policy and group
    verdicts: tuple[Verdict, ...]

    @property
    def passes(self) -> bool:
        """Return whether every criterion that counts holds."""
        return all(verdict.holds for verdict in self.verdicts)


def make_run(task: Task, on_time: Callable[[float], None] | None = None) -> RunSummary:
    """Make one run and sum it up."""
    scenario = scenarios.load(task.scenario)
    if task.only is not None:
        scenario = scenario.only(task.only)
    choice = policies.choose(task.policy)
    has_faults = scenario.faults != Faults()
    wants_replay = has_faults and task.only is None
    run = Runner(
        scenario,
        choice.scheduler(scenario.policy),
        profile=scenario.machine(task.profile),
        seed=task.seed,
        check_every=_CHECK_FAULTS_EVERY if has_faults else 0,
        keep_turns=wants_replay,
        on_time=on_time,
    ).run()
    return summarise_run(run, choice, seed=task.seed, only=task.only, with_replay=wants_replay)


def summarise_run(
    run: Run, choice: Choice, *, seed: int, only: str | None = None, with_replay: bool = False
) -> RunSummary:
    """Return the figures of a run; with_replay compares its event log with a fresh scheduler's decisions."""
    policy = run.scenario.policy
    return measure.summarise(
        run,
        policy=choice.name,
        seed=seed,
        only=only,
        replay=(lambda: choice.scheduler(policy)) if with_replay else None,
        with_timeline=only is None,
    )


def tasks(
    name_or_path: str,
    scenario: Scenario,
    choices: Sequence[tuple[str, Choice]],
    seeds: Sequence[int],
    profile: DeviceProfile,
) -> list[Task]:
    """Return every run that is needed: choices are (name or path, choice)."""
    named = {choice.name: spec for spec, choice in choices}
    for compared in scenario.compared_policies:
        named.setdefault(compared, compared)
    found = [
        Task(scenario=name_or_path, policy=spec, seed=seed, profile=profile)
        for spec in named.values()
        for seed in seeds
    ]
    for spec, choice in choices:
        if _is_judged(choice, [c for _, c in choices]):
            found += [
                Task(scenario=name_or_path, policy=spec, seed=seed, profile=profile, only=group)
                for group in scenario.groups_alone
                for seed in seeds
            ]
    return found


def _is_judged(choice: Choice, choices: Sequence[Choice]) -> bool:
    return not choice.is_baseline or all(other.is_baseline for other in choices)


def run_all(
    needed: Sequence[Task], *, num_processes: int, on_done: Callable[[Task], None]
) -> Iterator[tuple[Task, RunSummary]]:
    """Make the runs, several at a time if asked; they come as they end."""
    if num_processes <= 1:
        for task in needed:
            summary = make_run(task)
            on_done(task)
            yield task, summary
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        pending = {pool.submit(make_run, task): task for task in needed}
        for future in concurrent.futures.as_completed(pending):
            on_done(pending[future])
            yield pending[future], future.result()


def simulate(
    name_or_path: str,
    policy_specs: Sequence[str],
    *,
    num_seeds: int,
    profile: DeviceProfile | None = None,
    num_processes: int = 1,
    first_seed: int = 1,
    on_start: Callable[[int], None] = lambda num_runs: None,
    on_done: Callable[[Task], None] = lambda task: None,
) -> Outcome:
    """Run the scenario under the policies with seeds first_seed, first_seed + 1, ... and judge it.

    profile None is the scenario's own. Raises ScenarioError and PolicyError before anything is run.
    """
    scenario = scenarios.load(name_or_path)
    choices = [(spec, policies.choose(spec)) for spec in policy_specs]
    machine = profile or profile_named(scenario.profile)
    scenario.machine(machine)
    seeds = tuple(range(first_seed, first_seed + num_seeds))
    needed = tasks(name_or_path, scenario, choices, seeds, machine)
    on_start(len(needed))
    made = {
        (summary.policy, task.only, task.seed): summary
        for task, summary in run_all(needed, num_processes=num_processes, on_done=on_done)
    }
    return _judged(scenario, [choice for _, choice in choices], seeds, machine, made)


def _judged(
    scenario: Scenario,
    choices: Sequence[Choice],
    seeds: tuple[int, ...],
    profile: DeviceProfile,
    made: Mapping[tuple[str, str | None, int], RunSummary],
) -> Outcome:
    names = list(dict.fromkeys(name for name, only, _ in made if only is None))
    ordered = [c.name for c in choices] + [n for n in names if n not in {c.name for c in choices}]
    runs = {name: tuple(made[name, None, seed] for seed in seeds) for name in ordered}
    alone = {
        (name, only): tuple(made[name, only, seed] for seed in seeds)
        for name, only in dict.fromkeys((n, o) for n, o, _ in made if o is not None)
    }
    judged = [choice for choice in choices if _is_judged(choice, choices)]
    verdicts = tuple(
        _verdict(criterion, choice, seeds, runs, alone)
        for choice in judged
        for criterion in scenario.criteria
    )
    known = {choice.name: choice for choice in choices}
    return Outcome(
        scenario=scenario,
        profile=profile,
        seeds=seeds,
        choices=tuple(known.get(name) or policies.choose(name) for name in ordered),
        runs=runs,
        alone=alone,
        verdicts=verdicts,
    )


def _verdict(
    criterion: Criterion,
    choice: Choice,
    seeds: Sequence[int],
    runs: Mapping[str, tuple[RunSummary, ...]],
    alone: Mapping[tuple[str, str], tuple[RunSummary, ...]],
) -> Verdict:
    judgements = []
    for i in range(len(seeds)):
        among = Runs(
            judged=runs[choice.name][i],
            policies={name.replace("-", "_"): summaries[i] for name, summaries in runs.items()},
            alone={group: summaries[i] for (name, group), summaries in alone.items() if name == choice.name},
        )
        judgements.append(criterion.judge(among.find))
    return Verdict(criterion=criterion, policy=choice.name, judgements=tuple(judgements))


def without_timeline(summary: RunSummary) -> RunSummary:
    """Return the summary without what only charts need."""
    return replace(summary, timeline=None)


def median(values: Sequence[float | None]) -> float | None:
    """Return the median of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
