"""Answers: what the server writes for the story of a golden message is that message."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from engine_service import errors
from engine_service.backends.base import FinishReason
from engine_service.chat.parsing import CallStyle, OutputParser
from engine_service.engine.sessions import Accepted, Delta, Finished, Timings
from engine_service.jobs.model import Job, JobState, Output, sha256_of
from engine_service.protocol import (
    Extension,
    parse_job_request,
    parse_resident_id,
    parse_resident_request,
)
from engine_service.scheduling.model import RequestId, ResidentId, WorkloadClass
from engine_service.server import replies
from engine_service.server.embeddings import Embedded, embeddings_body
from engine_service.settings import named

GOLDEN = Path(__file__).parent / "golden"

HEAD = replies.Head(
    request_id="r1",
    created=1764457000,
    model="SmolLM2-135M-Instruct",
    caller=Extension(resident_id=ResidentId("alice"), class_id=WorkloadClass.VOICE),
    prompt_tokens=211,
)
ACCEPTED = Accepted(request_id=RequestId("r1"), num_ahead=2)
TIMINGS = Timings(
    queue_s=0.01,
    time_to_first_token_s=0.08,
    completion_s=0.9,
    prefill_tokens=31,
    cached_tokens=180,
    decode_tokens=24,
    recomputed_tokens=0,
    preemptions=0,
)


def golden(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def chunks(reply: replies.Reply, texts: list[str], reason: FinishReason) -> list[Any]:
    """Return everything a stream of these texts says, up to [DONE]."""
    said = list(reply.begin(ACCEPTED))
    for text in texts:
        said += reply.more(Delta(text=text, token_ids=(1,)))
    return [*said, *reply.end(Finished(reason=reason, timings=TIMINGS)), "[DONE]"]


def chat(style: CallStyle = CallStyle.NONE, *, include_usage: bool = False) -> replies.ChatReply:
    parser = OutputParser(style=style, new_call_id=lambda: "call_1")
    return replies.ChatReply(HEAD, parser, include_usage=include_usage)


CALL = '{"name": "intent__HassTurnOn", "arguments": {"name": "kitchen light"}}'
LIGHT = ["The kitchen", " light is on. 🙂"]


def test_a_chat_stream_is_the_golden_one() -> None:
    said = chunks(chat(include_usage=True), LIGHT, FinishReason.STOP)
    assert said == golden("chat_stream")


def test_a_chat_stream_with_a_call_is_the_golden_one() -> None:
    assert chunks(chat(CallStyle.BARE), [CALL[:9], CALL[9:]], FinishReason.STOP) == golden(
        "chat_stream_tools"
    )


def test_a_chat_stream_with_reasoning_is_the_golden_one() -> None:
    texts = ["<think>The user wants light.", "</think>\n\n", "Done."]
    assert chunks(chat(), texts, FinishReason.STOP) == golden("chat_stream_reasoning")


def test_a_chat_answer_in_one_piece_is_the_golden_one() -> None:
    reply = chat()
    chunks(reply, LIGHT, FinishReason.STOP)
    assert reply.whole() == golden("chat_response")


def test_a_call_in_one_piece_is_the_golden_one() -> None:
    reply = chat(CallStyle.BARE)
    chunks(reply, [CALL], FinishReason.STOP)
    assert reply.whole() == golden("chat_response_tools")


def test_a_completion_stream_is_the_golden_one() -> None:
    reply = replies.TextReply(HEAD, include_usage=True)
    assert chunks(reply, [" there was", " a house."], FinishReason.LENGTH) == golden("completion_stream")
    assert reply.whole() == golden("completion_response")


def test_an_error_in_a_stream_is_the_golden_one() -> None:
    reply = chat()
    said: list[Any] = [*reply.begin(ACCEPTED), *reply.more(Delta(text="The", token_ids=(1,)))]
    failed = errors.GenerationFailed("this request failed inside the engine; others go on")
    assert [*said, replies.error_body(failed)] == golden("chat_stream_error")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (
            "error",
            errors.UnknownResident(
                "there is no resident 'bob'; known are alice, guest, house", param="fairhearth.resident"
            ),
        ),
        (
            "error_rate_limit",
            errors.QuotaExhausted(
                "the tokens of today are spent", param="daily_tokens", retry_after_s=3600.5
            ),
        ),
    ],
)
def test_an_error_is_the_golden_one(name: str, error: errors.EngineError) -> None:
    assert replies.error_body(error) == golden(name)


def test_a_resident_is_the_golden_one() -> None:
    entry = named(parse_resident_id("alice"), parse_resident_request(golden("resident_request")))
    assert replies.resident_body(entry) == golden("resident")


def test_embeddings_are_the_golden_ones_in_both_encodings() -> None:
    caller = Extension(resident_id=ResidentId("alice"), class_id=WorkloadClass.EMBEDDING)
    found = [Embedded(vector=v, num_tokens=31, timings=TIMINGS) for v in ((0.6, -0.8), (0.0, 1.0))]
    body = embeddings_body(found, HEAD.model, caller, encoding="float")
    assert body == golden("embeddings_response")
    coded = embeddings_body(found, HEAD.model, caller, encoding="base64")["data"][1]["embedding"]
    assert base64.b64decode(coded) == b"\0\0\0\0\0\0\x80?"


def test_a_job_is_the_golden_one() -> None:
    wanted, order = golden("job"), parse_job_request(golden("job_request"))
    created_at = wanted["created_at"]
    job = Job(
        job_id=wanted["id"],
        owner="Home Assistant",
        request=order.request,
        who=Extension(resident_id=ResidentId("house"), class_id=WorkloadClass.BACKGROUND),
        created_at=created_at,
        title=order.title,
        idempotency_key=order.idempotency_key,
        deadline_at=created_at + (order.deadline_s or 0),
        keep_s=order.keep_s or 0,
        state=JobState.FINISHED,
        started_at=wanted["started_at"],
        ended_at=wanted["ended_at"],
        attempts=1,
        output=Output(token_ids=(7,) * 24, text="The kitchen light is on."),
        result=wanted["result"],
        model="SmolLM2-135M-Instruct",
        result_sha256=sha256_of(wanted["result"]["choices"]),
    )
    assert replies.job_body(job, eta_s=None, is_whole=True) == wanted


def test_nothing_generated_is_an_empty_text_and_not_null() -> None:
    reply = chat()
    chunks(reply, [], FinishReason.STOP)
    assert reply.whole()["choices"][0]["message"] == {"role": "assistant", "content": ""}


def _all_errors(kind: type[errors.EngineError] = errors.EngineError) -> list[type[errors.EngineError]]:
    return [kind, *(below for sub in kind.__subclasses__() for below in _all_errors(sub))]


def test_error_codes_are_stable_and_told_apart() -> None:
    """A code is a promise to clients: change this list only together with schema_version."""
    assert {kind.code: kind.http_status for kind in _all_errors()} == {
        "engine_error": 500,
        "invalid_request": 400,
        "not_authenticated": 401,
        "not_allowed": 403,
        "pairing_closed": 403,
        "wrong_code": 403,
        "unknown_resident": 404,
        "unknown_model": 404,
        "unknown_job": 404,
        "not_found": 404,
        "method_not_allowed": 405,
        "idempotency_conflict": 409,
        "request_too_large": 413,
        "prompt_too_long": 413,
        "quota_exhausted": 429,
        "too_many_requests": 429,
        "too_many_failures": 429,
        "queue_full": 503,
        "engine_unavailable": 503,
        "model_unavailable": 503,
        "storage_unavailable": 503,
        "not_supported": 422,
        "generation_failed": 500,
        "bad_settings": 500,
    }
    assert len(_all_errors()) == 24
