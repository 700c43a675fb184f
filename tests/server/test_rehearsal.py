"""A rehearsal over HTTP: the real simulator in its own process, one at a time, for a bounded time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine_service.errors import EngineError, TooManyRequests
from engine_service.scheduling.model import Policy
from engine_service.server.rehearsal import Rehearsals, as_toml
from engine_service.settings import load
from tests.server.household import SPEAKER, Household

pytestmark = pytest.mark.usefixtures("favoured_rehearsals")

GOLDEN = Path(__file__).parents[1] / "contract" / "golden" / "rehearsal.json"


async def ask(home: Household, message: Any, **more: Any) -> Any:
    return await home.ask("POST", "/v1/rehearse", message, **more)


async def test_the_simulator_judges_the_policy_with_the_changes_that_are_sent(home: Household) -> None:
    answer = await ask(home, {"scenario": "kitchen_light"})
    verdict = answer.json()
    assert (answer.status, verdict["passes"]) == (200, True), answer.body
    assert [c["holds"] for c in verdict["criteria"]] == [True] * 3
    example = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert verdict.keys() == example.keys()
    assert verdict["criteria"][0].keys() == example["criteria"][0].keys()
    paused = {"scenario": "kitchen_light", "policy": {"paused_classes": ["background"]}}
    verdict = (await ask(home, paused)).json()
    assert not verdict["passes"]
    assert [c["name"] for c in verdict["criteria"] if not c["holds"]] == [
        "All summaries are done, at most a quarter later"
    ]
    assert (await home.ask("GET", "/v1/policy")).json()["revision"] == 0, "nothing was changed"


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"scenario": "nope"}, "scenario", "there is no scenario 'nope'; there are H1"),
        ({"scenario": "../../etc/passwd"}, "scenario", "must be the name of a scenario"),
        ({"scenario": "evil.toml"}, "scenario", "must be the name of a scenario"),
        ({"scenario": "--list"}, "scenario", "must be the name of a scenario"),
        ({}, "scenario", "is missing"),
        ({"scenario": "H1", "seeds": 6}, "seeds", "5"),
        ({"scenario": "H1", "policy": {"max_skip": 1}}, "policy.max_skip", "did you mean 'max_skips'"),
    ],
)
async def test_what_cannot_be_rehearsed_is_named(
    home: Household, message: Any, param: str, words: str
) -> None:
    answer = await ask(home, message)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert words in answer.error["message"]


async def test_only_the_scope_policy_may_rehearse(home: Household) -> None:
    answer = await ask(home, {"scenario": "kitchen_light"}, token=SPEAKER)
    assert answer.error["code"] == "not_allowed"


async def test_there_is_one_at_a_time_and_one_that_is_given_up_makes_room() -> None:
    rehearsals = Rehearsals()
    first = asyncio.create_task(rehearsals.run("H1", Policy(), num_seeds=5))
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests, match="one at a time"):
        await rehearsals.run("kitchen_light", Policy(), num_seeds=1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await rehearsals.run("kitchen_light", Policy(), num_seeds=1))["passes"]


async def test_one_that_takes_too_long_is_ended() -> None:
    with pytest.raises(EngineError, match=r"more than 0\.05 s and was ended"):
        await Rehearsals(most_s=0.05).run("H1", Policy(), num_seeds=5)


def test_a_policy_is_written_as_the_settings_read_it(tmp_path: Any) -> None:
    policy = Policy(pace_ahead_s=2.5, sprint=False, max_skips=1)
    path = tmp_path / "fairhearth.toml"
    path.write_text(as_toml(policy), encoding="utf-8")
    assert load(path=path).policy == policy
