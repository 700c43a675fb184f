"""Several models behind one address: chosen by name, shown with their state, refused in words."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine_service.backends.base import Language, ModelError, Tell
from engine_service.backends.simulated import SimulatedBackend, SimulatedSource
from engine_service.engine.residence import Models
from engine_service.scheduling.model import ModelId, ResidencyPolicy
from tests.server.household import Household, household, payloads

TABLES = """
[[models]]
name = "house"
backend = "simulated"
pinned = true
[[models]]
name = "coder"
backend = "simulated"
context_tokens = 4096
[[models]]
name = "reader"
backend = "simulated"
embeddings = true
[residency]
max_loaded = 2
"""


class Slow(SimulatedSource):
    """A model whose load waits to be let through."""

    def __init__(self, name: str, **more: Any) -> None:
        super().__init__(name, **more)
        self.may_open = threading.Event()
        self.may_open.set()
        self.trouble: str | None = None

    def open(self, tell: Tell) -> SimulatedBackend:
        tell(0.25)
        self.may_open.wait(30)
        if self.trouble:
            raise ModelError(self.trouble)
        return super().open(tell)


class Mute(SimulatedSource):
    """A model whose chat template cannot be read."""

    def describe(self) -> Language:
        language = super().describe()
        return replace(language, info=replace(language.info, chat_template="{% for"))


class Broken(SimulatedSource):
    """A model that is not there."""

    def describe(self) -> Language:
        raise ModelError("there is no such file")


@dataclass
class Home:
    """The household with the source of its second model."""

    house: Household
    coder: Slow


@pytest.fixture
async def several(tmp_path: Path) -> AsyncIterator[Home]:
    """A pinned model, one that swaps beside it, and two that cannot be used."""
    coder = Slow("coder", context_tokens=4096)
    models = Models(
        {
            ModelId("house"): SimulatedSource("house"),
            ModelId("coder"): coder,
            ModelId("broken"): Broken("broken"),
            ModelId("mute"): Mute("mute"),
        },
        pinned=frozenset({ModelId("house")}),
        policy=ResidencyPolicy(max_loaded=2, min_stay_s=0.2, patience_s=0.05, retry_s=3),
    )
    async with household(tmp_path, models.open_first(), models=models) as running:
        yield Home(running, coder)


async def rows(home: Home) -> dict[str, dict[str, Any]]:
    answer = await home.house.ask("GET", "/v1/models")
    return {row["id"]: row["fairhearth"] for row in answer.json()["data"]}


async def test_a_request_chooses_its_model_and_the_answer_says_which_it_was(several: Home) -> None:
    for name, expected in ((None, "house"), ("house", "house"), ("coder", "coder")):
        answer = await several.house.chat(max_tokens=4, **({"model": name} if name else {}))
        assert answer.status == 200
        assert answer.json()["model"] == expected
    async with several.house.stream(
        "/v1/completions", {"prompt": "the rain", "model": "coder", "max_tokens": 4, "stream": True}
    ) as lines:
        said = payloads([line async for line in lines])
    assert {one["model"] for one in said if one != "[DONE]"} == {"coder"}


async def test_an_unknown_model_is_refused_with_the_names_of_those_there_are(several: Home) -> None:
    answer = await several.house.chat(model="gpt-9")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "unknown_model", "model")
    assert "'house', 'coder', 'broken', 'mute'" in answer.error["message"]


async def test_all_models_are_listed_with_their_state_while_one_is_loading(several: Home) -> None:
    several.coder.may_open.clear()
    waiting = asyncio.create_task(several.house.chat(model="coder", max_tokens=4))
    async with asyncio.timeout(20):
        while (await rows(several))["coder"]["progress"] != 0.25:
            await asyncio.sleep(0.01)
    listed = await rows(several)
    assert {name: row["state"] for name, row in listed.items()} == {
        "house": "loaded",
        "coder": "loading",
        "broken": "absent",
        "mute": "absent",
    }
    assert listed["coder"]["requests_waiting"] == 1
    assert listed["coder"]["max_context_tokens"] == 4096
    assert listed["house"]["is_default"]
    assert listed["house"]["is_pinned"]
    assert listed["broken"]["error"] == "there is no such file"
    ready = await several.house.ask("GET", "/ready", token=None)
    assert ready.status == 200, "another model serves"
    assert {"id": "coder", "state": "loading", "progress": 0.25} in ready.json()["models"]
    assert (await several.house.chat(max_tokens=4)).status == 200, "nobody else waits for the load"
    several.coder.may_open.set()
    assert (await waiting).status == 200
    assert (await rows(several))["coder"]["state"] in ("loaded", "idle")


@pytest.mark.parametrize(("name", "why"), [("broken", "no such file"), ("mute", "template")])
async def test_a_model_that_cannot_be_used_is_told_of_and_the_others_serve(
    several: Home, name: str, why: str
) -> None:
    answer = await several.house.chat(model=name)
    assert (answer.status, answer.error["code"]) == (503, "model_unavailable")
    assert why in answer.error["message"]
    assert (await several.house.chat(max_tokens=4)).status == 200


async def test_who_streams_while_a_model_cannot_be_loaded_is_told_in_the_stream(several: Home) -> None:
    several.coder.trouble = "its memory is not there"
    message = {"messages": [{"role": "user", "content": "x"}], "model": "coder", "stream": True}
    async with several.house.stream("/v1/chat/completions", message) as lines:
        said = payloads([line async for line in lines])
    assert said[-1]["error"]["code"] == "model_unavailable"
    assert "its memory is not there" in said[-1]["error"]["message"]
    refused = await several.house.chat(model="coder")
    assert refused.status == 503
    assert int(refused.headers["Retry-After"]) >= 1


async def test_capacity_tells_of_every_model_what_its_memory_is_worth(several: Home) -> None:
    body = (await several.house.ask("GET", "/v1/capacity")).json()
    assert body["serving"] == "house"
    assert {model["id"]: model["kv_pages_total"] for model in body["models"]} == {
        "house": 256,
        "coder": 128,
        "mute": 256,
    }
    longest = {model["id"]: model["conversations"][-1]["context_tokens"] for model in body["models"]}
    assert longest["coder"] < longest["house"]


async def test_prefixes_and_jobs_choose_their_model_too(several: Home) -> None:
    message = {"messages": [{"role": "system", "content": "You are a home."}]}
    kept = await several.house.ask("POST", "/v1/prefix", {**message, "model": "house"})
    assert kept.json()["prefix_tokens"] > 0
    absent = await several.house.ask("POST", "/v1/prefix", {**message, "model": "coder"})
    assert absent.json() == {"prefix_tokens": 0, "computed_tokens": 0}
    unknown = await several.house.ask("POST", "/v1/prefix", {**message, "model": "nobody"})
    assert unknown.error["code"] == "unknown_model"
    request = {"messages": [{"role": "user", "content": "x"}], "model": "coder", "max_tokens": 4}
    job = (await several.house.ask("POST", "/v1/jobs", {"request": request})).json()
    async with asyncio.timeout(20):
        while job["state"] not in ("finished", "failed"):
            await asyncio.sleep(0.05)
            job = (await several.house.ask("GET", f"/v1/jobs/{job['id']}")).json()
    assert job["state"] == "finished"
    assert job["result"]["model"] == "coder"


async def test_a_job_waits_for_a_model_that_cannot_be_loaded_for_now(several: Home) -> None:
    several.coder.trouble = "its disk is asleep"
    request = {"messages": [{"role": "user", "content": "x"}], "model": "coder", "max_tokens": 4}
    job = (await several.house.ask("POST", "/v1/jobs", {"request": request})).json()
    async with asyncio.timeout(30):
        while (await rows(several))["coder"]["error"] is None:
            await asyncio.sleep(0.02)
        several.coder.trouble = None
        while job["state"] not in ("finished", "failed"):
            await asyncio.sleep(0.05)
            job = (await several.house.ask("GET", f"/v1/jobs/{job['id']}")).json()
    assert job["state"] == "finished", job


async def test_an_engine_whose_models_cannot_be_loaded_is_not_ready(tmp_path: Path) -> None:
    a, b = Slow("a"), Slow("b")
    policy = ResidencyPolicy(min_stay_s=0.2, patience_s=0, retry_s=30)
    models = Models({ModelId("a"): a, ModelId("b"): b}, policy=policy)
    async with household(tmp_path, models.open_first(), models=models) as home:
        a.trouble = b.trouble = "no memory"
        assert (await home.chat(model="b")).error["code"] == "model_unavailable"
        assert (await home.chat(model="a")).error["code"] == "model_unavailable"
        ready = await home.ask("GET", "/ready", token=None)
        assert ready.status == 503
        assert [model["state"] for model in ready.json()["models"]] == ["absent", "absent"]


async def test_the_engine_describes_its_first_model_whichever_serves(several: Home) -> None:
    before = (await several.house.ask("GET", "/v1/engine")).json()
    assert (await several.house.chat(model="coder", max_tokens=4)).status == 200
    assert (await several.house.ask("GET", "/v1/engine")).json() == before
    assert before["model"] == "house"
    refused = await several.house.ask("PATCH", "/v1/policy", {"policy": {"prefix_share": 0.999}})
    assert refused.status == 400, "it would leave no room in any of them"


async def test_the_model_for_embeddings_is_asked_for_them_and_no_other_for_chats(tmp_path: Path) -> None:
    names = ("house", "coder", "reader")
    models = Models({ModelId(name): SimulatedSource(name) for name in names})
    async with household(tmp_path, models.open_first(), models=models, more_settings=TABLES) as home:
        assert home.settings.embedding_model == "reader"
        assert home.service.models.choose_for_embeddings(None).info.name == "reader"
        assert home.service.models.choose_for_embeddings("coder").info.name == "coder"
        assert home.service.models.choose(None).info.name == "house"
        refused = await home.ask("POST", "/v1/embeddings", {"input": "x"})
        assert "'reader'" in refused.error["message"], "the simulated ones make none"
