"""Residents, fairness, metrics and readiness as a client sees them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_service import __version__
from engine_service.engine import loop
from engine_service.protocol import SCHEMA_VERSION
from engine_service.scheduling.model import WorkloadClass
from engine_service.scheduling.targets import Target
from tests.server.conftest import Start
from tests.server.household import READER, Household, payloads

GOLDEN = Path(__file__).parents[1] / "contract" / "golden"


def shape(value: Any) -> Any:
    """Return the kinds in a message, names of residents and numbers left out."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if value is None or isinstance(value, bool | str):
        return type(value).__name__
    return "number"


def golden(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def covers(live: Any, wanted: Any, path: str = "") -> None:
    """Assert that live has everything wanted has, of the same kind; null and number are both a measure."""
    if isinstance(wanted, dict):
        assert isinstance(live, dict), path
        for key, inner in wanted.items():
            assert key in live, f"{path}.{key} is missing"
            covers(live[key], inner, f"{path}.{key}")
    elif isinstance(wanted, list):
        assert isinstance(live, list), path
        for entry in live:
            covers(entry, wanted[0], f"{path}[]") if wanted else None
    elif {live, wanted} != {"NoneType", "number"}:
        assert live == wanted, path


async def test_residents_that_cannot_be_kept_are_not_changed_and_told_so(
    home: Household, tmp_path: Path
) -> None:
    await home.ask("PUT", "/v1/residents/carol", {"weight": 2})
    before = (await home.ask("GET", "/v1/residents")).json()
    kept = tmp_path / "state" / "residents.json"
    kept.rename(tmp_path / "aside")
    kept.mkdir()  # as little can be written there as on a full disk
    changes = (("PUT", "bob", {}), ("PUT", "carol", {"weight": 3}), ("DELETE", "carol", None))
    for method, resident, message in changes:
        answer = await home.ask(method, f"/v1/residents/{resident}", message)
        assert (answer.status, answer.error["code"]) == (503, "storage_unavailable")
        assert answer.error["message"].endswith(", and were not changed")
        assert (await home.ask("GET", "/v1/residents")).json() == before
        living = (await home.ask("GET", "/v1/fairness")).json()["residents"]
        assert "bob" not in living
        assert "carol" in living
    kept.rmdir()
    for method, resident, message in changes:
        assert (await home.ask(method, f"/v1/residents/{resident}", message)).status in (200, 204)
    listed = (await home.ask("GET", "/v1/residents")).json()["residents"]
    assert {"bob", "carol"} & {entry["id"] for entry in listed} == {"bob"}


@pytest.mark.parametrize(
    ("path", "name"),
    [("/health", "health"), ("/ready", "ready"), ("/v1/engine", "engine"), ("/v1/models", "models")],
)
async def test_who_answers_is_told_in_the_golden_shape(home: Household, path: str, name: str) -> None:
    answer = (await home.ask("GET", path)).json()
    covers(shape(answer), shape(golden(name)))
    assert answer.keys() == golden(name).keys()


async def test_one_model_is_described_as_in_the_list(home: Household) -> None:
    listed = (await home.ask("GET", "/v1/models")).json()["data"]
    assert [(await home.ask("GET", f"/v1/models/{one['id']}")).json() for one in listed] == listed


async def test_a_model_that_is_not_served_is_told_which_one_is(home: Household) -> None:
    error = (await home.ask("GET", "/v1/models/gpt-4")).error
    assert (error["code"], error["param"]) == ("unknown_model", "model_id")
    assert error["message"] == "the model 'gpt-4' is not served here; 'simulated' is"


async def test_the_engine_keeps_its_identity_over_a_restart(start: Start) -> None:
    async with start() as first:
        before = (await first.ask("GET", "/health")).json()
    async with start() as second:
        after = (await second.ask("GET", "/health")).json()
    assert before["engine_id"] == after["engine_id"]
    assert (after["version"], after["schema_version"]) == (__version__, SCHEMA_VERSION)


async def test_a_snapshot_has_the_golden_shape(home: Household) -> None:
    await home.chat(
        max_tokens=4, ignore_eos=True, fairhearth={"resident": "alice", "workload_class": "voice"}
    )
    live = (await home.ask("GET", "/v1/fairness")).json()
    wanted = golden("fairness")
    one = wanted["residents"].pop("alice")
    wanted["residents"] = dict.fromkeys(live["residents"], one)
    covers(shape(live), shape(wanted))
    assert live["classes"].keys() == wanted["classes"].keys()
    assert live["residents"]["alice"]["name"] == "Alice"
    assert live["residents"]["alice"]["tokens"]["decode"] == 4


async def test_the_ledger_of_the_snapshot_is_the_sum_of_the_answers(home: Household) -> None:
    totals = {"prefill": 0, "cached": 0, "decode": 0}
    for number in range(4):
        answer = await home.chat(f"Say {number}", max_tokens=3 + number, ignore_eos=True)
        for kind in totals:
            totals[kind] += answer.json()["fairhearth"]["tokens"][kind]
    guest = (await home.ask("GET", "/v1/fairness")).json()["residents"]["guest"]
    assert guest["tokens"] == totals
    assert guest["tokens_served"] == totals["prefill"] + totals["decode"]


async def test_the_fairness_stream_begins_at_once_and_goes_on_with_every_change(home: Household) -> None:
    async with home.stream("/v1/fairness/stream") as lines:
        assert await anext(lines) == "event: fairness"
        first = payloads([await anext(lines)])[0]
        assert first["engine"]["tokens_served"] == 0
        asking = asyncio.create_task(home.chat(max_tokens=4, ignore_eos=True))
        async for line in lines:
            if line.startswith("data: ") and payloads([line])[0]["residents"]["guest"]["finished"]:
                break
        await asking


async def test_the_fairness_stream_ends_when_the_engine_stops(start: Start) -> None:
    async with start() as home:
        opened = await home.http.get(
            home.url + "/v1/fairness/stream", headers={"Authorization": "Bearer token-of-the-admin-000"}
        )
        assert await opened.content.readline() == b"event: fairness\n"
        reading = asyncio.create_task(opened.content.read())
        home.service.stopping.set()
        assert (await reading).startswith(b"data: ")
        opened.close()


async def test_a_resident_can_be_made_listed_served_and_removed(home: Household) -> None:
    made = await home.ask("PUT", "/v1/residents/bob", {"name": "Bob", "weight": 3, "daily_tokens": 1000})
    assert made.json() == {
        "id": "bob",
        "name": "Bob",
        "weight": 3,
        "daily_tokens": 1000,
        "daily_is_hard": False,
        "rolling_tokens": None,
        "rolling_window_s": 3600.0,
        "rolling_is_hard": False,
        "page_cap": None,
        "max_running": None,
        "max_waiting": 64,
    }
    listed = (await home.ask("GET", "/v1/residents")).json()["residents"]
    assert [entry["id"] for entry in listed] == ["alice", "bob", "guest", "house"]
    assert (await home.chat(max_tokens=2, fairhearth={"resident": "bob"})).status == 200
    assert (await home.ask("DELETE", "/v1/residents/bob")).status == 204
    assert (await home.chat(fairhearth={"resident": "bob"})).error["code"] == "unknown_resident"
    assert "bob" not in (await home.ask("GET", "/v1/fairness")).json()["residents"]


async def test_what_a_put_leaves_out_is_reset(home: Household) -> None:
    await home.ask("PUT", "/v1/residents/bob", {"name": "Bob", "weight": 3, "page_cap": 9})
    again = (await home.ask("PUT", "/v1/residents/bob", {})).json()
    assert (again["name"], again["weight"], again["page_cap"]) == ("bob", 1, None)


async def test_guest_and_house_can_be_changed(home: Household) -> None:
    await home.ask("PUT", "/v1/residents/guest", {"name": "Besuch", "weight": 2})
    guest = (await home.ask("GET", "/v1/fairness")).json()["residents"]["guest"]
    assert (guest["name"], guest["weight"]) == ("Besuch", 2)


async def test_residents_of_the_api_outlive_a_restart_and_win_over_the_file(start: Start) -> None:
    async with start() as home:
        await home.ask("PUT", "/v1/residents/bob", {"name": "Bob"})
        alice = {
            "name": "Alice",
            "weight": 5,
            "rolling_tokens": 900,
            "rolling_window_s": 60,
            "max_running": 2,
        }
        await home.ask("PUT", "/v1/residents/alice", alice)
        await home.ask("PUT", "/v1/residents/carol", {})
        await home.ask("DELETE", "/v1/residents/carol")
    async with start() as home:
        listed = (await home.ask("GET", "/v1/residents")).json()["residents"]
        assert {entry["id"]: entry["weight"] for entry in listed} == {
            "alice": 5,
            "bob": 1,
            "guest": 1,
            "house": 1,
        }
        assert alice.items() <= listed[0].items()
        assert (await home.chat(max_tokens=1, fairhearth={"resident": "bob"})).status == 200


@pytest.mark.parametrize(
    ("limit", "most_s", "is_of_today"),
    [
        ({"daily_tokens": 5, "daily_is_hard": True}, 25 * 3600, True),
        ({"rolling_tokens": 5, "rolling_is_hard": True}, 3600, False),
    ],
    ids=["of the day", "of the window"],
)
async def test_a_spent_limit_is_named_and_says_when_it_accepts_again(
    home: Household, limit: dict[str, Any], most_s: float, is_of_today: bool
) -> None:
    await home.ask("PUT", "/v1/residents/bob", limit)
    caller = {"resident": "bob"}
    assert (await home.chat(max_tokens=2, fairhearth=caller)).status == 200
    refused = await home.chat(max_tokens=2, fairhearth=caller)
    assert (refused.status, refused.error["code"]) == (429, "quota_exhausted")
    assert refused.error["param"] == next(iter(limit))
    assert 0 < float(refused.headers["Retry-After"]) <= most_s
    assert ("today" in refused.error["message"]) is is_of_today


async def test_a_request_may_say_whether_the_model_thinks_first(home: Household) -> None:
    for thinking in (True, False):
        answer = await home.chat(max_tokens=2, chat_template_kwargs={"enable_thinking": thinking})
        assert answer.status == 200, "this model's template has no switch, and answers all the same"
    refused = await home.chat(max_tokens=2, chat_template_kwargs={"enable_thinking": "off"})
    assert (refused.status, refused.error["param"]) == (400, "chat_template_kwargs.enable_thinking")


async def test_a_prefix_is_computed_once_and_spares_later_prompts_its_tokens(home: Household) -> None:
    system = {"role": "system", "content": "You are the voice of a home. " * 12}
    first = (await home.ask("POST", "/v1/prefix", {"messages": [system]})).json()
    assert first["prefix_tokens"] > 64
    assert first["computed_tokens"] == first["prefix_tokens"]
    again = (await home.ask("POST", "/v1/prefix", {"messages": [system]})).json()
    assert again == {"prefix_tokens": first["prefix_tokens"], "computed_tokens": 0}
    message = {"messages": [system, {"role": "user", "content": "Light!"}], "max_tokens": 2}
    answer = (await home.ask("POST", "/v1/chat/completions", message)).json()
    assert answer["fairhearth"]["tokens"]["cached"] >= first["prefix_tokens"]
    assert (
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["fairhearth"]["tokens"]["cached"]
    )


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_count_finished_requests_by_class_and_resident(home: Household) -> None:
    caller = {"resident": "alice", "workload_class": "voice"}
    await home.chat(max_tokens=3, ignore_eos=True, fairhearth=caller)
    await home.chat("word " * 50_000, fairhearth=caller)
    answer = await home.ask("GET", "/metrics", token=READER)
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    seen = samples(answer.body.decode())
    who = {("class", "voice"), ("resident", "alice")}
    assert seen["fairhearth_requests_total", frozenset(who | {("outcome", "finished")})] == 1
    assert seen["fairhearth_requests_total", frozenset(who | {("outcome", "refused")})] == 1
    assert seen["fairhearth_tokens_total", frozenset(who | {("kind", "decode")})] == 3
    assert seen["fairhearth_time_to_first_token_seconds_count", frozenset(who)] == 1
    assert seen["fairhearth_engine_policy_met", frozenset()] == 1
    labels = {name for _, pairs in seen for name, _ in pairs}
    assert labels <= {"class", "resident", "outcome", "kind", "le", "version"}


async def test_metrics_tell_what_each_class_is_promised_and_what_is_paused(
    home: Household, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A target that a busy machine keeps, too.
    monkeypatch.setattr(loop, "TARGETS", {WorkloadClass.VOICE: Target(first_token_s=60, inter_token_s=60)})
    await home.ask("PATCH", "/v1/policy", {"policy": {"paused_classes": ["background"]}})
    await home.chat(max_tokens=2, fairhearth={"workload_class": "voice"})
    seen = samples((await home.ask("GET", "/metrics", token=READER)).body.decode())

    def of(name: str) -> dict[str, float]:
        return {dict(labels)["class"]: value for (key, labels), value in seen.items() if key == name}

    assert of("fairhearth_class_slo_attainment") == {"voice": 1.0}, "no sample where nothing was judged"
    assert {name for name, value in of("fairhearth_class_paused").items() if value} == {"background"}
    assert of("fairhearth_class_starvation_age_s").keys() == of("fairhearth_class_paused").keys()
    assert seen["fairhearth_engine_bound_used", frozenset()] == 0


async def test_a_removed_resident_leaves_the_metrics(home: Household) -> None:
    await home.ask("PUT", "/v1/residents/bob", {})
    await home.chat(max_tokens=1, fairhearth={"resident": "bob"})
    await home.ask("DELETE", "/v1/residents/bob")
    assert b'"bob"' not in (await home.ask("GET", "/metrics")).body
