"""The policy over HTTP: read, tried, changed while the engine runs, taken back, kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_service.errors import SettingsError
from engine_service.scheduling.model import FairnessGoal, Policy, WorkloadClass
from engine_service.server.policies import MAX_REVISIONS, PolicyBook
from engine_service.settings import changed_policy, policy_as_table
from engine_service.state import StateFolder
from tests.server.conftest import Start
from tests.server.household import SPEAKER, Household, payloads


async def changed(home: Household, changes: Any, method: str = "PATCH") -> dict[str, Any]:
    answer = await home.ask(method, "/v1/policy", {"policy": changes, "note": "trial"})
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json()
    return body


async def test_the_whole_policy_is_told_with_where_it_comes_from(home: Household) -> None:
    body = (await home.ask("GET", "/v1/policy", token=SPEAKER)).json()
    assert (body["scheduler"], body["revision"], body["by"]) == ("fairhearth", 0, "settings")
    assert body["policy"]["fairness"] == "service"
    assert body["policy"]["classes"]["voice"]["max_wait_s"] == 2.0
    assert changed_policy(Policy(), body["policy"]) == home.settings.policy


async def test_a_change_holds_at_once_and_is_written_down(home: Household) -> None:
    body = await changed(home, {"fairness": "waiting", "classes": {"voice": {"max_wait_s": 1}}})
    assert (body["revision"], body["by"], body["note"]) == (1, "admin", "trial")
    policy = home.engine._scheduler.state.policy
    assert policy.fairness is FairnessGoal.WAITING
    assert policy.classes[WorkloadClass.VOICE].max_wait_s == 1
    assert policy.classes[WorkloadClass.CHAT].max_wait_s == 30
    assert [entry["revision"] for entry in body["history"]] == [1, 0]
    assert (await home.chat(max_tokens=2)).status == 200


async def test_patch_changes_what_holds_and_put_the_defaults(home: Household) -> None:
    await changed(home, {"max_skips": 7})
    both = await changed(home, {"max_preemptions": 1})
    assert (both["policy"]["max_skips"], both["policy"]["max_preemptions"]) == (7, 1)
    fresh = await changed(home, {"max_preemptions": 2}, "PUT")
    assert (fresh["policy"]["max_skips"], fresh["policy"]["max_preemptions"]) == (Policy().max_skips, 2)


async def test_how_much_a_conversation_may_have_is_told_as_soon_as_a_policy_changes_it(
    home: Household,
) -> None:
    async with home.stream("/v1/fairness/stream") as lines:
        assert await anext(lines) == "event: fairness"
        told = payloads([await anext(lines)])[0]["engine"]["max_context_tokens"]
        assert told == (await home.ask("GET", "/v1/engine")).json()["max_context_tokens"] > 300
        await changed(home, {"classes": {"chat": {"max_context_tokens": 300}}})
        async with asyncio.timeout(20):
            async for line in lines:
                if line.startswith("data: ") and payloads([line])[0]["engine"]["max_context_tokens"] == 300:
                    break
    assert (await home.ask("GET", "/v1/engine")).json()["max_context_tokens"] == 300


async def test_what_a_policy_probably_does_not_mean_is_said(home: Household) -> None:
    assert (await home.ask("GET", "/v1/policy")).json()["notes"] == []
    change = {"policy": {"voice_headroom_pages": 9999}}
    (tried,) = (await home.ask("POST", "/v1/policy/validate", change)).json()["notes"]
    assert "voice_headroom_pages is 9999 of" in tried
    assert (await changed(home, change["policy"]))["notes"] == [tried]


async def test_a_trial_changes_nothing(home: Household) -> None:
    answer = await home.ask("POST", "/v1/policy/validate", {"policy": {"max_skips": 9}})
    assert answer.json()["policy"]["max_skips"] == 9
    assert (await home.ask("GET", "/v1/policy")).json()["revision"] == 0


@pytest.mark.parametrize("path", ["PATCH /v1/policy", "PUT /v1/policy", "POST /v1/policy/validate"])
@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"policy": {"max_skip": 1}}, "policy.max_skip", "did you mean 'max_skips'"),
        ({"policy": {"max_skips": "x"}}, "policy.max_skips", "must be a whole number"),
        ({"policy": {"background_reserve": 1.5}}, "policy", "must be in [0, 1)"),
        ({"policy": {"fairness": "best"}}, "policy.fairness", "must be one of service"),
        ({"policy": {"classes": {"vip": {}}}}, "policy.classes.vip", "not a known workload class"),
        ({"policy": {"max_chunk_tokens": 1}}, "policy", "must be >= min_chunk_tokens"),
        ({"policy": {"paused_classes": ["chat"]}}, "policy", "agent, embedding and background, not chat"),
        ({"policy": {"paused_classes": ["vip"]}}, "policy.paused_classes[0]", "must be one of voice"),
        ({"policy": {"paused_classes": "background"}}, "policy.paused_classes", "must be a list"),
        ({"policy": {"prefix_share": 0.9999}}, "policy", "every voice request would be refused"),
        ({"policy": {"classes": {"voice": {"max_context_tokens": 1}}}}, "policy", "at most 1 tokens"),
        ({"policy": []}, "policy", "must be an object"),
        ({"fairness": "waiting"}, "fairness", "not a known field"),
    ],
)
async def test_a_policy_that_cannot_be_is_named_and_changes_nothing(
    home: Household, path: str, message: object, param: str, words: str
) -> None:
    method, address = path.split()
    answer = await home.ask(method, address, message)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert words in answer.error["message"]
    assert (await home.ask("GET", "/v1/policy")).json()["revision"] == 0


async def test_an_earlier_policy_can_be_taken_back(home: Household) -> None:
    await changed(home, {"max_skips": 7})
    await changed(home, {"max_skips": 8})
    answer = await home.ask("POST", "/v1/policy/rollback", {"revision": 1})
    body = answer.json()
    assert (body["revision"], body["policy"]["max_skips"]) == (3, 7)
    assert body["note"] == "back to revision 1"
    assert home.engine._scheduler.state.policy.max_skips == 7
    unknown = await home.ask("POST", "/v1/policy/rollback", {"revision": 9})
    assert (unknown.status, unknown.error["param"]) == (400, "revision")
    assert "must be one of 0, 1, 2, 3" in unknown.error["message"]


async def test_only_the_scope_policy_may_change_it(home: Household) -> None:
    for method, path in (("PATCH", ""), ("PUT", ""), ("POST", "/validate"), ("POST", "/rollback")):
        answer = await home.ask(method, "/v1/policy" + path, {}, token=SPEAKER)
        assert answer.error["code"] == "not_allowed"


async def test_a_changed_policy_holds_after_a_restart(start: Start) -> None:
    async with start() as home:
        await changed(home, {"max_skips": 7})
    async with start() as home:
        assert (await home.ask("GET", "/v1/policy")).json()["revision"] == 1
        assert home.engine._scheduler.state.policy.max_skips == 7
        body = (await home.ask("POST", "/v1/policy/rollback", {"revision": 0})).json()
        assert body["policy"]["max_skips"] == Policy().max_skips


async def test_a_paused_background_waits_across_a_restart_and_is_answered_when_it_is_resumed(
    start: Start,
) -> None:
    async with start() as home:
        body = await changed(home, {"paused_classes": ["background"]})
        assert body["policy"]["paused_classes"] == ["background"]
    async with start() as home:
        extension = {"workload_class": "background"}
        waiting = asyncio.create_task(home.chat(max_tokens=2, fairhearth=extension))
        await until(home, lambda classes: classes["background"]["requests_waiting"] == 1)
        assert (await home.chat(max_tokens=2)).status == 200
        snapshot = (await home.ask("GET", "/v1/fairness")).json()
        assert snapshot["engine"]["paused_classes"] == ["background"]
        assert snapshot["classes"]["background"]["requests_waiting"] == 1
        assert (await home.ask("GET", "/ready")).status == 200
        assert not waiting.done()
        await changed(home, {"paused_classes": []})
        assert (await waiting).status == 200


async def until(home: Household, holds: Callable[[Any], bool]) -> None:
    while not holds((await home.ask("GET", "/v1/fairness")).json()["classes"]):
        await asyncio.sleep(0.02)


async def test_the_settings_hold_again_once_they_are_taken_back(home: Household) -> None:
    await changed(home, {"max_skips": 7})
    book, fresh = home.service.policies, Policy(max_skips=3)
    assert not await book.reconfigure(home.engine, fresh)
    assert home.engine._scheduler.state.policy.max_skips == 7
    await home.ask("POST", "/v1/policy/rollback", {"revision": 0})
    assert home.engine._scheduler.state.policy == fresh
    later = Policy(max_skips=2)
    assert await book.reconfigure(home.engine, later)
    assert home.engine._scheduler.state.policy == later
    reopened = PolicyBook(fresh, StateFolder(home.settings.paths.state_dir))
    assert (reopened.current.number, reopened.current.policy) == (2, fresh)


async def test_the_history_is_bounded_and_its_numbers_only_grow(home: Household) -> None:
    for _ in range(MAX_REVISIONS + 3):
        body = await changed(home, {"max_skips": 5})
    assert body["revision"] == MAX_REVISIONS + 3
    assert len(body["history"]) == MAX_REVISIONS + 1


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"revisions": [{}]}',
        '{"revisions": [{"revision": 1, "at": 1, "by": "x", "note": "", "policy": {"max_skips": -1}}]}',
    ],
)
def test_a_damaged_file_of_policies_stops_the_start_and_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "policy.json").write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=r"policy\.json: .*delete the file"):
        PolicyBook(Policy(), StateFolder(tmp_path))


def test_every_field_of_a_policy_survives_the_wire() -> None:
    table = policy_as_table(Policy())
    assert changed_policy(Policy(max_skips=99), table) == Policy()
