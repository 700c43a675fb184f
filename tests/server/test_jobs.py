"""Durable jobs over HTTP, on a running engine: accepted once, run, shown, cancelled, gone on with."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine_service.errors import StorageUnavailable
from engine_service.identity.caller import Caller
from engine_service.identity.tokens import TokenBook
from engine_service.jobs.model import JobState, Output
from engine_service.jobs.store import JobStore
from engine_service.protocol import parse_chat_request
from engine_service.scheduling.model import ResidentId
from engine_service.server.chatwork import resumable
from engine_service.server.plans import plan_chat
from engine_service.settings import Scope
from tests.server.conftest import Start
from tests.server.household import ADMIN, READER, SPEAKER, Answer, Household, bearer, payloads

FINAL = {"finished", "failed", "cancelled", "expired"}


def order(max_tokens: int = 6, **more: Any) -> dict[str, Any]:
    """Return a job's request that writes exactly max_tokens tokens."""
    return {
        "messages": [{"role": "user", "content": "Sum up the day"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **more,
    }


async def submitted(home: Household, message: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = await home.ask("POST", "/v1/jobs", {"request": message, **more})
    assert answer.status == 202, answer.body
    job: dict[str, Any] = answer.json()
    return job


async def until(home: Household, job_id: str, states: set[str] = FINAL) -> dict[str, Any]:
    """Wait until the job is in one of the states; the test's own timeout ends it."""
    while True:
        job: dict[str, Any] = (await home.ask("GET", f"/v1/jobs/{job_id}")).json()
        if job["state"] in states:
            return job
        await asyncio.sleep(0.02)


async def until_writing(home: Household, job_id: str, num_tokens: int = 1) -> dict[str, Any]:
    while True:
        job = await until(home, job_id, {"running"})
        if job["progress"]["output_tokens"] >= num_tokens:
            return job
        await asyncio.sleep(0.02)


async def test_a_job_is_run_and_its_answer_kept_with_its_hash(home: Household) -> None:
    job = await submitted(home, order(), title="Monday")
    assert (job["state"], job["title"], job["workload_class"]) == ("submitted", "Monday", "background")
    done = await until(home, job["id"])
    assert (done["state"], done["attempts"], done["error"]) == ("finished", 1, None)
    assert done["result"]["usage"]["completion_tokens"] == 6
    assert done["progress"] == {"output_tokens": 6, "max_tokens": 6}
    text = json.dumps(done["result"]["choices"], ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    assert done["result_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert done["created_at"] <= done["started_at"] <= done["ended_at"] < done["kept_until"]


async def test_the_same_key_is_the_same_job(home: Household) -> None:
    first = await submitted(home, order(), idempotency_key="k")
    again = await home.ask("POST", "/v1/jobs", {"request": order(), "idempotency_key": "k"})
    assert (again.status, again.json()["id"]) == (200, first["id"])
    other = await home.ask("POST", "/v1/jobs", {"request": order(7), "idempotency_key": "k"})
    assert (other.status, other.error["code"]) == (409, "idempotency_conflict")
    assert (other.error["param"], first["id"] in other.error["message"]) == ("idempotency_key", True)
    stranger = await home.ask("POST", "/v1/jobs", {"request": order(), "idempotency_key": "k"}, token=SPEAKER)
    assert (stranger.status, stranger.json()["id"] != first["id"]) == (202, True)


@pytest.mark.parametrize("names_model", [False, True])
async def test_a_job_whose_prompt_can_never_fit_is_refused_as_a_chat_is(
    home: Household, names_model: bool
) -> None:
    more = {"model": home.engine.info.name} if names_model else {}
    more |= {"fairhearth": {"workload_class": "background"}}
    chat = await home.chat("word " * 50_000, **more)
    messages = [{"role": "user", "content": "word " * 50_000}]
    job = await home.ask("POST", "/v1/jobs", {"request": order(messages=messages, **more)})
    assert (job.status, job.error["code"], job.error["param"]) == (413, "prompt_too_long", "request.messages")
    assert job.error["message"] == chat.error["message"]
    assert (await home.ask("GET", "/v1/jobs")).json()["jobs"] == []


async def test_a_job_that_only_the_policy_of_today_keeps_out_is_kept(home: Household) -> None:
    classes = {"background": {"max_context_tokens": 64}}
    assert (await home.ask("PATCH", "/v1/policy", {"policy": {"classes": classes}})).status == 200
    long = [{"role": "user", "content": "word " * 100}]
    assert (await submitted(home, order(messages=long)))["state"] == "submitted"


@pytest.mark.parametrize(
    ("message", "status", "param"),
    [
        ({}, 400, "request"),
        ({"request": "hello"}, 400, "request"),
        ({"request": {"messages": []}}, 400, "request.messages"),
        ({"request": order(stream=True)}, 400, "request.stream"),
        ({"request": order(model="gpt-9")}, 404, "request.model"),
        ({"request": order(fairhearth={"resident": "bob"})}, 404, "request.fairhearth.resident"),
        (
            {
                "request": order(
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": {"type": "x"}},
                    }
                )
            },
            400,
            "request.response_format.json_schema.schema.type",
        ),
        (
            {
                "request": order(
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": {"$ref": "#"}},
                    }
                )
            },
            400,
            "request.response_format.json_schema.schema",
        ),
        ({"request": order(), "deadline_s": 0}, 400, "deadline_s"),
        ({"request": order(), "keep_s": -1}, 400, "keep_s"),
        ({"request": order(), "idempotency_key": ""}, 400, "idempotency_key"),
        ({"request": order(), "webhook": "http://evil.example"}, 400, "webhook"),
    ],
)
async def test_a_job_that_cannot_be_done_is_refused_at_once(
    home: Household, message: object, status: int, param: str
) -> None:
    answer = await home.ask("POST", "/v1/jobs", message)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert (await home.ask("GET", "/v1/jobs")).json() == {"jobs": []}


async def test_jobs_need_the_scope_to_generate(home: Household) -> None:
    for address in ("POST /v1/jobs", "GET /v1/jobs", "GET /v1/jobs/x", "DELETE /v1/jobs/x"):
        method, path = address.split()
        assert (await home.ask(method, path, token=READER)).error["code"] == "not_allowed"


async def test_a_job_nobody_has_is_unknown(home: Household) -> None:
    for method in ("GET", "DELETE"):
        answer = await home.ask(method, "/v1/jobs/job-0")
        assert (answer.status, answer.error["code"]) == (404, "unknown_job")


async def test_jobs_are_listed_newest_first_and_without_what_they_wrote(home: Household) -> None:
    ids = [(await submitted(home, order(fairhearth={"resident": who})))["id"] for who in ("alice", "house")]
    for job_id in ids:
        await until(home, job_id)
    listed = (await home.ask("GET", "/v1/jobs?state=finished")).json()["jobs"]
    assert [job["id"] for job in listed] == ids[::-1]
    assert not {"result", "partial"} & set(listed[0])
    alices = (await home.ask("GET", "/v1/jobs?resident=alice&limit=1")).json()["jobs"]
    assert [job["resident"] for job in alices] == ["alice"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("state=done", "state"),
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("since=1", "since"),
        ("resident=A", "resident"),
    ],
)
async def test_a_wrong_question_for_jobs_is_named(home: Household, query: str, param: str) -> None:
    answer = await home.ask("GET", f"/v1/jobs?{query}")
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_a_cancelled_job_stops_keeps_what_it_wrote_and_frees_its_pages(home: Household) -> None:
    job = await submitted(home, order(3000))
    await until_writing(home, job["id"], 3)
    cancelled = (await home.ask("DELETE", f"/v1/jobs/{job['id']}")).json()
    assert cancelled["state"] == "cancelled"
    assert cancelled["partial"] != ""
    assert cancelled["progress"]["output_tokens"] >= 3
    await home.until_idle()
    again = (await home.ask("DELETE", f"/v1/jobs/{job['id']}")).json()
    assert again == cancelled


async def test_a_job_past_its_deadline_expires_and_keeps_what_it_wrote(home: Household) -> None:
    job = await submitted(home, order(100_000), deadline_s=0.5)
    expired = await until(home, job["id"])
    assert (expired["state"], expired["result"]) == ("expired", None)
    await home.until_idle()


async def test_an_ended_job_is_forgotten_when_it_was_kept_long_enough(home: Household) -> None:
    job = await submitted(home, order(1), keep_s=0)
    while (await home.ask("GET", f"/v1/jobs/{job['id']}")).status == 200:
        await asyncio.sleep(0.02)
        await submitted(home, order(1))


async def test_a_token_of_a_resident_sees_that_residents_jobs_only(home: Household) -> None:
    other = await submitted(home, order(fairhearth={"resident": "house"}))
    caller = Caller(name="phone", scopes=frozenset({Scope.GENERATE}), resident_id=ResidentId("alice"))
    token = TokenBook(home.settings.paths.state_dir).create(caller)[0]
    mine = (await home.ask("POST", "/v1/jobs", {"request": order()}, token=token)).json()
    assert mine["resident"] == "alice"
    listed = (await home.ask("GET", "/v1/jobs?resident=house", token=token)).json()["jobs"]
    assert [job["id"] for job in listed] == [mine["id"]]
    for method in ("GET", "DELETE"):
        assert (await home.ask(method, f"/v1/jobs/{other['id']}", token=token)).status == 404


async def test_listeners_hear_of_open_jobs_and_of_what_becomes_of_them(home: Household) -> None:
    first = await submitted(home, order(200))
    heard: dict[str, list[str]] = {}
    async with home.stream("/v1/jobs/stream") as lines:
        second: dict[str, Any] = {}
        async for line in lines:
            if line.startswith("event: "):
                assert line == "event: job"
                continue
            for job in payloads([line]):
                assert "result" not in job
                heard.setdefault(job["id"], []).append(job["state"])
            if not second:
                second = await submitted(home, order(2))
            if all(heard.get(job["id"], [""])[-1] == "finished" for job in (first, second)):
                break
    assert heard[first["id"]][0] in ("submitted", "running")


async def _heard(response: aiohttp.ClientResponse) -> list[Any]:
    async with response, asyncio.timeout(30):
        assert response.status == 200
        return payloads((await response.text()).split("\n"))


async def test_listeners_are_told_in_the_stream_that_the_disk_fails(
    home: Household, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def fails() -> list[Any]:
        raise StorageUnavailable("the disk is gone")

    monkeypatch.setattr(home.service.jobs.runner._store, "open_jobs", fails)
    (told,) = await _heard(await home.http.get(f"{home.url}/v1/jobs/stream", headers=bearer(ADMIN)))
    assert told["error"]["code"] == "storage_unavailable"
    assert "the disk is gone" in told["error"]["message"]


async def test_listeners_hear_news_of_the_moment_in_which_the_engine_stops(
    home: Household, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await submitted(home, order(100_000))
    runner = home.service.jobs.runner
    response = await home.http.get(f"{home.url}/v1/jobs/stream", headers=bearer(ADMIN))
    assert await response.content.readline() == b"event: job\n"
    known = await runner.get(job["id"])
    assert known is not None
    runner._tell(replace(known, job_id="job-0", title="the last news"))
    home.service.stopping.set()
    with monkeypatch.context() as stopped:
        stopped.setattr(home.service.jobs, "_runner", None)
        told = await _heard(response)
    assert "the last news" in [entry["title"] for entry in told]


async def test_a_running_job_says_how_long_it_takes_yet(home: Household) -> None:
    job = await submitted(home, order(3000))
    while (running := await until_writing(home, job["id"], 5))["eta_s"] is None:
        await asyncio.sleep(0.02)  # until a pace can be told: all so far may have come at once
    assert running["state"] == "running"
    assert running["eta_s"] > 0
    assert running["partial"] != ""
    await home.ask("DELETE", f"/v1/jobs/{job['id']}")


async def test_a_job_that_waits_says_how_long_it_takes_until_it_is_written(crowded_home: Household) -> None:
    home = crowded_home
    await until(home, (await submitted(home, order(20)))["id"])  # so that something was measured
    first = await submitted(home, order(3000))
    while (await until_writing(home, first["id"]))["eta_s"] is None:
        await asyncio.sleep(0.02)  # until a pace can be told, which the one that waits is told by
    second = await submitted(home, order(3000))
    waiting = await until(home, second["id"], {"running"})
    assert waiting["progress"]["output_tokens"] == 0
    assert waiting["eta_s"] > 0
    unlimited = await submitted(home, {"messages": order()["messages"]})
    assert (await until(home, unlimited["id"], {"running"}))["eta_s"] is None
    for job in (first, second, unlimited):
        await home.ask("DELETE", f"/v1/jobs/{job['id']}")


async def test_a_job_goes_on_after_a_restart_where_it_was(start: Start) -> None:
    async with start() as home:
        job = await submitted(home, order(400), idempotency_key="k")
        before = await until_writing(home, job["id"], 5)
    async with start() as home:
        again = await home.ask("POST", "/v1/jobs", {"request": order(400), "idempotency_key": "k"})
        assert again.json()["id"] == job["id"]
        done = await until(home, job["id"])
        assert (done["state"], done["attempts"]) == ("finished", 2)
        assert done["result"]["usage"]["completion_tokens"] == 400
        answer = done["result"]["choices"][0]["message"]["content"]
        kept = before["partial"]
        assert answer.startswith(kept[: len(kept) // 2])
        tokens = done["result"]["fairhearth"]["tokens"]
        computed = tokens["prefill"] + tokens["cached"]
        assert computed > done["result"]["usage"]["prompt_tokens"]  # what was written came back as a prompt


async def test_an_engine_that_cannot_keep_jobs_says_so_and_serves_the_rest(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "state" / "jobs.sqlite3").mkdir(parents=True)
    async with start() as home:
        refused: Answer = await home.ask("POST", "/v1/jobs", {"request": order()})
        assert (refused.status, refused.error["code"]) == (503, "storage_unavailable")
        assert "jobs.sqlite3: the jobs cannot be opened" in refused.error["message"]
        assert (refused.error["retry_after_s"], refused.headers["Retry-After"]) == (5, "5")
        assert (await home.chat(max_tokens=1)).status == 200


async def test_a_full_disk_refuses_new_jobs_and_loses_none(home: Household) -> None:
    kept = await submitted(home, order(2))
    await until(home, kept["id"])
    database = home.service.jobs.runner._store._db
    async with database.execute("PRAGMA page_count") as rows:
        pages = (await rows.fetchone() or (0,))[0]
    await database.execute(f"PRAGMA max_page_count = {pages}")
    large = order(2, messages=[{"role": "user", "content": "word " * 500}])
    refused = await home.ask("POST", "/v1/jobs", {"request": large, "title": "y" * 200})
    for _ in range(50):
        if refused.status != 202:
            break
        refused = await home.ask("POST", "/v1/jobs", {"request": large, "title": "y" * 200})
    assert (refused.status, refused.error["code"]) == (503, "storage_unavailable")
    assert "full" in refused.error["message"]
    await database.execute("PRAGMA max_page_count = 1000000")
    assert (await home.ask("GET", f"/v1/jobs/{kept['id']}")).json()["state"] == "finished"
    assert (await submitted(home, large))["state"] == "submitted"


# --- going on ---


@pytest.mark.parametrize("dropped", [1, 3])
async def test_an_answer_goes_on_from_where_text_and_tokens_agree(home: Household, dropped: int) -> None:
    decode = home.engine.tokenizer.decode
    message = parse_chat_request(order(100))
    who = Caller(name="x", scopes=frozenset()).attribute(None)
    plan = await plan_chat(home.service, message, who)
    token_ids = tuple(home.engine.tokenizer.encode("The day was long and the cat slept."))
    output = Output(token_ids=token_ids, text=decode(token_ids[: len(token_ids) - dropped]))
    going_on = resumable(output, plan, message.options, decode)
    assert going_on.token_ids == token_ids[: len(token_ids) - dropped]
    assert going_on.text == output.text
    assert resumable(Output(), plan, message.options, decode) == Output()
    assert resumable(Output(token_ids=token_ids, text="else"), plan, message.options, decode) == Output()


async def test_an_answer_of_a_model_with_other_tokens_begins_anew_and_says_so(
    home: Household, caplog: pytest.LogCaptureFixture
) -> None:
    message = parse_chat_request(order(100))
    plan = await plan_chat(home.service, message, Caller(name="x", scopes=frozenset()).attribute(None))
    foreign = Output(token_ids=(10**6, 10**6 + 1, 10**6 + 2), text="The day")
    with caplog.at_level("INFO"):
        assert resumable(foreign, plan, message.options, home.engine.tokenizer.decode) == Output()
    assert "begins anew, another model wrote its beginning" in caplog.text


async def test_an_answer_in_a_grammar_begins_anew(home: Household) -> None:
    message = parse_chat_request(order(100, response_format={"type": "json_object"}))
    plan = await plan_chat(home.service, message, Caller(name="x", scopes=frozenset()).attribute(None))
    decode = home.engine.tokenizer.decode
    token_ids = tuple(home.engine.tokenizer.encode('{"a": '))
    assert resumable(Output(token_ids=token_ids, text='{"a": '), plan, message.options, decode) == Output()


# --- the store ---


@pytest.mark.parametrize("content", [b"this is no database" * 100, b"SQLite format 3\x00" + b"\xff" * 5000])
async def test_a_damaged_file_is_set_aside_and_said_loudly(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "state" / "jobs.sqlite3"
    path.parent.mkdir()
    path.write_bytes(content)
    async with start() as home:
        assert (await until(home, (await submitted(home, order(2)))["id"]))["state"] == "finished"
    aside = [entry for entry in path.parent.iterdir() if ".damaged-" in entry.name]
    assert [entry.read_bytes() for entry in aside] == [content]
    assert "are damaged" in caplog.text
    assert aside[0].name in caplog.text


async def test_a_page_damaged_in_the_middle_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "jobs.sqlite3"
    store = await JobStore.open(path)
    await store.close()
    content = bytearray(path.read_bytes())
    content[4096 : 4096 + 512] = b"\xa5" * 512
    path.write_bytes(content)
    store = await JobStore.open(path)
    assert await store.newest(limit=5) == []
    await store.close()
    assert "are damaged" in caplog.text


async def test_a_file_of_a_later_version_is_left_alone(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "state" / "jobs.sqlite3"
    path.parent.mkdir()
    store = await JobStore.open(path)
    await store._db.execute("PRAGMA user_version = 99")
    await store.close()
    async with start() as home:
        refused = await home.ask("GET", "/v1/jobs")
        assert (refused.status, "later version (99)" in refused.error["message"]) == (503, True)


async def test_a_job_ends_once(home: Household) -> None:
    job = await submitted(home, order(2))
    await until(home, job["id"])
    store = home.service.jobs.runner._store
    for state in (JobState.FINISHED, JobState.CANCELLED, JobState.EXPIRED):
        assert not await store.end(job["id"], state, now=0.0)
    assert not await store.begin(job["id"], now=0.0, model="simulated")
