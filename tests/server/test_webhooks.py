"""Webhooks at a receiver on loopback: told until it takes the message, to nobody else, without text."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engine_service.backends.simulated import SimulatedBackend
from engine_service.jobs import teller
from engine_service.jobs.model import Job, JobState, TellState
from engine_service.jobs.store import JobStore
from engine_service.jobs.teller import MayNotTellError, Teller
from engine_service.protocol import Extension, Webhook
from engine_service.server import webhooks
from engine_service.server.serving import bind
from engine_service.server.webhooks import signature_of, teller_for
from tests.server.conftest import Start
from tests.server.household import Household, household

SECRET = "a-secret-of-the-receiver"
SIGNING = "a-secret-for-signing"
DIGEST = "ff96853b014eaba2c1c5c8a78d37d43dfb671bbd4d48576743748eb7e9ae61ea"
ORDER = {"messages": [{"role": "user", "content": "Sum up"}], "max_tokens": 4, "ignore_eos": True}


class Receiver:
    """Takes messages, after as many other answers as it is told to give first."""

    def __init__(self) -> None:
        self.port = 0
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []  # of every try
        self.received: list[tuple[dict[str, str], bytes]] = []  # headers and body of every try
        self.first: list[int | str] = []  # a status, or "hang"
        self.before_answer: Callable[[], None] = lambda: None  # called when `first` is without this answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api/webhook/{SECRET}"

    async def take(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        assert request.content_type == "application/json"
        message = await request.json()
        self.received.append((dict(request.headers), await request.read()))
        if self.first:
            answer = self.first.pop(0)
            self.before_answer()
            if answer == "hang":
                await asyncio.Event().wait()
            assert isinstance(answer, int)
            return web.Response(status=answer, headers={"Location": "/elsewhere"})
        self.messages.append(message)
        return web.Response(status=204)

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.take)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        bound = bind("127.0.0.1", self.port)
        self.port = bound.getsockname()[1]
        await web.SockSite(runner, bound).start()
        return runner


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    runner = await made.start()
    yield made
    await runner.cleanup()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let three further tries follow at once."""
    monkeypatch.setattr(teller, "DELAYS_S", (0.01, 0.02, 0.03))


async def submitted(home: Household, webhook: dict[str, Any], **more: Any) -> str:
    message = {"request": ORDER, "webhook": webhook, **more}
    answer = await home.ask("POST", "/v1/jobs", message)
    assert answer.status == 202, answer.body
    assert answer.json()["webhook"] == {"host": "127.0.0.1", "state": "waiting", "tries": 0}
    job_id: str = answer.json()["id"]
    return job_id


async def until_told(home: Household, job_id: str) -> dict[str, Any]:
    """Wait until the webhook waits no more; the test's own timeout ends it."""
    while True:
        answer = await home.ask("GET", f"/v1/jobs/{job_id}")
        job: dict[str, Any] = answer.json()
        if job["webhook"]["state"] != "waiting":
            assert SECRET.encode() not in answer.body
            return job
        await asyncio.sleep(0.02)


async def test_the_end_of_a_job_is_told_once_and_without_text(home: Household, receiver: Receiver) -> None:
    job_id = await submitted(home, {"url": receiver.url}, title="Monday")
    job = await until_told(home, job_id)
    assert job["webhook"] == {"host": "127.0.0.1", "state": "delivered", "tries": 1}
    [message] = receiver.messages
    assert message["event"] == "job"
    told = message["job"]
    assert (told["id"], told["state"], told["title"]) == (job_id, "finished", "Monday")
    assert told["result_sha256"] == job["result_sha256"]
    assert not {"result", "partial", "request"} & told.keys()
    assert job["result"]["choices"][0]["message"]["content"] not in json.dumps(message)


async def test_what_a_job_wrote_is_told_if_that_was_asked_for(home: Household, receiver: Receiver) -> None:
    job = await until_told(home, await submitted(home, {"url": receiver.url, "with_result": True}))
    assert receiver.messages[0]["job"]["result"] == job["result"]


def is_from_engine(secret: str, headers: Mapping[str, str], body: bytes) -> bool:
    """As docs/wire.md tells receivers to check."""
    sent_at = headers.get("X-Fairhearth-Timestamp", "")
    signed = hmac.new(secret.encode(), sent_at.encode() + b"." + body, hashlib.sha256).hexdigest()
    is_ours = hmac.compare_digest("sha256=" + signed, headers.get("X-Fairhearth-Signature", ""))
    return is_ours and abs(time.time() - int(sent_at)) < 300


@pytest.mark.usefixtures("impatient")
async def test_a_receiver_that_knows_the_secret_can_tell_that_the_engine_sent_it(
    tmp_path: Path, receiver: Receiver
) -> None:
    receiver.first = [500]
    async with household(tmp_path, SimulatedBackend(), webhook_secret=SIGNING) as home:
        job = await until_told(home, await submitted(home, {"url": receiver.url, "with_result": True}))
        assert job["webhook"]["state"] == "delivered"
        assert SIGNING not in repr(home.settings)
    assert len(receiver.received) == 2, "a second try is signed too"
    for headers, body in receiver.received:
        assert is_from_engine(SIGNING, headers, body)
        assert not is_from_engine(SIGNING + "x", headers, body)
        assert not is_from_engine(SIGNING, headers, body.replace(b"finished", b"failed"))
        assert not is_from_engine(SIGNING, headers | {"X-Fairhearth-Timestamp": "1764457000"}, body)


async def test_without_a_secret_nothing_is_signed(home: Household, receiver: Receiver) -> None:
    await until_told(home, await submitted(home, {"url": receiver.url}))
    [(headers, _)] = receiver.received
    assert not [name for name in headers if name.startswith("X-Fairhearth")]


def test_a_signature_is_the_documented_one() -> None:
    # echo -n '1764457000.{}' | openssl dgst -sha256 -hmac a-secret-for-signing
    assert signature_of("a-secret-for-signing", "1764457000", b"{}") == "sha256=" + DIGEST


@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_every_end_is_told(home: Household, receiver: Receiver, end: str) -> None:
    long = {"request": ORDER | {"max_tokens": 3000}}
    limit = {"deadline_s": 0.2} if end == "expired" else {}
    job_id = await submitted(home, {"url": receiver.url}, **long, **limit)
    if end == "cancelled":
        await home.ask("DELETE", f"/v1/jobs/{job_id}")
    await until_told(home, job_id)
    assert [message["job"]["state"] for message in receiver.messages] == [end]


async def test_a_job_without_a_webhook_tells_nobody(home: Household, receiver: Receiver) -> None:
    assert (await home.ask("POST", "/v1/jobs", {"request": ORDER})).json()["webhook"] is None
    await until_told(home, await submitted(home, {"url": receiver.url}))
    assert len(receiver.messages) == 1


@pytest.mark.usefixtures("impatient")
async def test_a_receiver_that_fails_is_told_again_and_a_redirect_is_not_followed(
    home: Household, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.first = [500, 307, "hang"]
    long_s, short_s = webhooks.ANSWER_S, 1.0
    # Only who hangs is waited for briefly, or a busy machine would let the others be given up, too.
    receiver.before_answer = lambda: monkeypatch.setattr(
        webhooks, "ANSWER_S", short_s if receiver.first == ["hang"] else long_s
    )
    job = await until_told(home, await submitted(home, {"url": receiver.url}))
    assert job["webhook"] == {"host": "127.0.0.1", "state": "delivered", "tries": 4}
    assert len(receiver.messages) == 1
    assert receiver.paths == [f"/api/webhook/{SECRET}"] * 4, "no redirect is followed"


@pytest.mark.usefixtures("impatient")
async def test_telling_is_given_up_in_the_end_and_the_log_keeps_the_address_to_itself(
    home: Household, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.first = [404] * 10
    job = await until_told(home, await submitted(home, {"url": receiver.url}))
    assert job["webhook"] == {"host": "127.0.0.1", "state": "given_up", "tries": 4}
    assert (job["state"], receiver.messages) == ("finished", [])
    assert "status 404" in caplog.text
    assert SECRET not in caplog.text


async def test_a_job_that_could_not_be_told_is_kept_and_told_after_a_restart(
    start: Start, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teller, "DELAYS_S", (3600.0,))  # only the restart brings another try
    receiver.first = [503]
    async with start() as home:
        job_id = await submitted(home, {"url": receiver.url}, keep_s=0)
        while (await home.ask("GET", f"/v1/jobs/{job_id}")).json()["webhook"]["tries"] == 0:
            await asyncio.sleep(0.02)
    assert receiver.messages == []
    async with start():
        while not receiver.messages:
            await asyncio.sleep(0.02)
    assert receiver.messages[0]["job"]["id"] == job_id


@pytest.mark.parametrize(
    ("webhook", "param", "words"),
    [
        ({}, "webhook.url", "is missing"),
        ({"url": "http://127.0.0.1/", "secret": "x"}, "webhook.secret", "not a known"),
        ({"url": "http://127.0.0.1/", "with_result": "yes"}, "webhook.with_result", "true or false"),
        ({"url": "http://evil.example/"}, "webhook.url", "server.webhook_hosts allows 127.0.0.1"),
        ({"url": "http://127.0.0.2/"}, "webhook.url", "leads to 127.0.0.2"),
        ({"url": "http://[::1]/"}, "webhook.url", "leads to [::1]"),
        *(
            ({"url": url}, "webhook.url", "must be an address like http://")
            for url in (
                "ftp://127.0.0.1/",
                "file:///etc/passwd",
                "//127.0.0.1/",
                "http://127.0.0.1@evil.example/",
                "http://evil.example\\@127.0.0.1/",
                "http://127.0.0.1#@evil.example/",
                "http://127.0.0.1:0/",
                "http://127.0.0.1:99999/",
                "http://[::zz]/",
                "http://127.0.0.1/a b",
                "http://127.0.0.1/\r\nX: y",
                "http://127.0.0.1/\n",
                "http://bücher.example/",
            )
        ),
    ],
)
async def test_an_address_nobody_allowed_is_refused_at_once(
    home: Household, webhook: dict[str, Any], param: str, words: str
) -> None:
    answer = await home.ask("POST", "/v1/jobs", {"request": ORDER, "webhook": webhook})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert words in answer.error["message"]
    assert (await home.ask("GET", "/v1/jobs")).json() == {"jobs": []}


async def test_one_key_with_another_webhook_is_another_job(home: Household, receiver: Receiver) -> None:
    await submitted(home, {"url": receiver.url}, idempotency_key="k")
    again = {"request": ORDER, "idempotency_key": "k", "webhook": {"url": receiver.url}}
    assert (await home.ask("POST", "/v1/jobs", again)).status == 200
    again["webhook"] = {"url": receiver.url, "with_result": True}
    assert (await home.ask("POST", "/v1/jobs", again)).error["code"] == "idempotency_conflict"


def a_job(url: str) -> Job:
    return Job(
        job_id="job-1",
        owner="x",
        request=ORDER,
        who=Extension(),
        created_at=1.0,
        webhook=Webhook(url=url),
    )


@pytest.mark.parametrize(
    ("url", "hosts", "may"),
    [
        ("http://hub.local/x", {"hub.local"}, True),
        ("http://HUB.local:8123/x", {"hub.local"}, True),
        ("http://hub.local:8123", {"hub.local:8123"}, True),
        ("https://hub.local?x", {"hub.local:443"}, True),
        ("http://[fd00::1]:80/", {"[fd00::1]:80"}, True),
        ("http://hub.local:8124", {"hub.local:8123"}, False),
        ("http://not-hub.local/", {"hub.local"}, False),
        ("http://hub.local.evil.example/", {"hub.local"}, False),
        ("http://hub.local/", set(), False),
    ],
)
def test_an_address_goes_to_a_host_or_to_a_port_of_it(url: str, hosts: set[str], may: bool) -> None:
    assert Webhook(url=url).goes_to(hosts) is may


async def test_a_host_that_is_allowed_no_more_is_not_told(tmp_path: Path, receiver: Receiver) -> None:
    with pytest.raises(MayNotTellError):
        await teller_for({"elsewhere"})(a_job(receiver.url))
    store = await JobStore.open(tmp_path / "jobs.sqlite3")
    await store.submit(a_job(receiver.url))
    await store.end("job-1", JobState.CANCELLED, now=2.0)
    telling = Teller(store, teller_for(()))
    telling.start()
    while await store.untold():
        await asyncio.sleep(0.01)
    await telling.stop()
    job = await store.get("job-1")
    await store.close()
    assert job is not None
    assert (job.webhook_state, receiver.messages) == (TellState.GIVEN_UP, [])


async def test_a_file_of_the_first_version_is_taken_over_with_its_jobs(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite3"
    store = await JobStore.open(path)
    await store.submit(a_job("http://hub.local/"))
    await store.close()
    with sqlite3.connect(path) as old:
        for column in ("webhook", "webhook_state", "webhook_tries", "model"):
            old.execute(f"ALTER TABLE jobs DROP COLUMN {column}")
        old.execute("PRAGMA user_version = 1")
    old.close()
    for _ in range(2):
        store = await JobStore.open(path)
        [job] = await store.newest(limit=5)
        assert (job.job_id, job.webhook, job.request) == ("job-1", None, ORDER)
        await store.close()
