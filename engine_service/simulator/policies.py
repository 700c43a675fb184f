"""Policies by the names of the command line: the real scheduler's, the baselines', and files.

Decides what `--policy` means. A file is a settings file (`fairhearth.toml`); its `[policy]` table is what the
real scheduler is given instead of the scenario's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from engine_service.errors import SettingsError
from engine_service.scheduling.model import FairnessGoal, Policy
from engine_service.scheduling.scheduler import Scheduler
from engine_service.settings import load
from engine_service.simulator.baselines import PureVtc, Ungated, VllmPriority, strict_classes

DEFAULT: Final = "default"


class PolicyError(ValueError):
    """There is no such policy, or its file is wrong; the message says what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A policy that can be run."""

    name: str
    summary: str
    make: Callable[[Policy], Scheduler]
    is_baseline: bool = False
    policy: Policy | None = None  #: of a file; None: the scenario's

    def scheduler(self, scenario_policy: Policy) -> Scheduler:
        """Return a fresh scheduler."""
        return self.make(self.policy or scenario_policy)

    @property
    def criterion_name(self) -> str:
        """The name inside criteria."""
        return self.name.replace("-", "_")


def _with_goal(goal: FairnessGoal) -> Callable[[Policy], Scheduler]:
    return lambda policy: Scheduler(dataclasses.replace(policy, fairness=goal))


CHOICES: Final[Mapping[str, Choice]] = MappingProxyType(
    {
        choice.name: choice
        for choice in (
            Choice(name=DEFAULT, summary="this project's policy", make=Scheduler),
            Choice(
                name="waiting",
                summary="the same, where equal means equal waiting",
                make=_with_goal(FairnessGoal.WAITING),
            ),
            Choice(
                name="completions",
                summary="the same, where equal means as many answers",
                make=_with_goal(FairnessGoal.COMPLETIONS),
            ),
            Choice(
                name="fifo",
                summary="first come, first served, as an ungated ExLlamaV2 generator does",
                make=Ungated,
                is_baseline=True,
            ),
            Choice(
                name="fifo-chunked",
                summary="the same with small chunks",
                make=lambda policy: Ungated(policy, chunk_tokens=policy.max_chunk_tokens),
                is_baseline=True,
            ),
            Choice(
                name="class_only",
                summary="strict classes, then arrival",
                make=lambda policy: Scheduler(strict_classes(policy)),
                is_baseline=True,
            ),
            Choice(
                name="vtc",
                summary="Virtual Token Counter without classes",
                make=lambda policy: PureVtc(policy, chunk_tokens=policy.max_chunk_tokens),
                is_baseline=True,
            ),
            Choice(
                name="vllm-priority",
                summary="vLLM's priority scheduling",
                make=VllmPriority,
                is_baseline=True,
            ),
        )
    }
)


def choose(name_or_path: str) -> Choice:
    """Return a policy by name, or by the path of a settings file."""
    known = {name.replace("_", "-"): choice for name, choice in CHOICES.items()}
    choice = known.get(name_or_path.replace("_", "-"))
    if choice is not None:
        return choice
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise PolicyError(
            f"there is no policy {name_or_path!r}; there are {', '.join(CHOICES)}, or give a .toml file"
        )
    try:
        policy = load(path, environment={}).policy
    except SettingsError as error:
        raise PolicyError(error.message) from None
    return Choice(name=path.stem, summary=f"the policy of {path}", make=Scheduler, policy=policy)
