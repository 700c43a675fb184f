"""The household's own instruments: what they read and what they say. Starts nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from household import checks, documents, logs, measure, workload
from household.phases import Phase

RESIDENTS = ("alice", "bob", "guest", "house")


def arrived(
    now: float, request_id: str, class_id: str, resident: str = "alice", **more: Any
) -> dict[str, Any]:
    request = {
        "request_id": request_id,
        "resident_id": resident,
        "class_id": class_id,
        "prompt_tokens": 30,
        "paid_by_system": False,
        **more,
    }
    admit = {"type": "Admit", "request_id": request_id, "reserved_tokens": 64}
    return {"now": now, "event": {"type": "Arrived", "request": request}, "decisions": [admit]}


def computed(now: float, request_id: str, *, tokens: int = 1, finished: bool = False) -> dict[str, Any]:
    result = {
        "request_id": request_id,
        "prefill_tokens": 10,
        "cached_tokens": 20,
        "decode_tokens": tokens,
        "finished": finished,
        "failed": False,
    }
    return {"now": now, "event": {"type": "IterationDone", "results": [result]}, "decisions": []}


def facts_of(tmp_path: Path, *turns: dict[str, Any]) -> list[measure.RequestFacts]:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return measure.read_event_log(path)


def test_time_to_the_first_token_runs_from_arrival_to_the_iteration_that_computed_it(tmp_path: Path) -> None:
    (fact,) = facts_of(
        tmp_path,
        arrived(10.0, "r1", "voice"),
        computed(10.2, "r1", tokens=0),
        computed(10.5, "r1"),
        computed(11.0, "r1", finished=True),
    )
    assert fact.first_token_s == pytest.approx(0.5)
    assert fact.finished_at == 11.0
    assert (fact.prefill_tokens, fact.cached_tokens, fact.decode_tokens) == (30, 60, 2)


def test_what_the_engine_computes_for_itself_is_no_request_of_anybody(tmp_path: Path) -> None:
    assert facts_of(tmp_path, arrived(1.0, "r1", "chat", paid_by_system=True), computed(2.0, "r1")) == []


def test_commands_are_told_apart_by_what_was_under_way_when_they_came(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        arrived(1.0, "idle", "voice"),
        computed(1.1, "idle", finished=True),
        arrived(2.0, "summary", "background", "house"),
        arrived(3.0, "busy", "voice"),
        computed(3.4, "busy", finished=True),
        computed(5.0, "summary", finished=True),
        arrived(6.0, "chat", "chat", "bob"),
        arrived(6.5, "neither", "voice"),
        computed(9.0, "neither", finished=True),
    )
    assert measure.idle_voice(facts).most_s == pytest.approx(0.1)
    saturated = measure.saturated_voice(facts)
    assert (saturated.count, saturated.most_s) == (1, pytest.approx(0.4))
    assert measure.summaries_done_s(facts) == [pytest.approx(3.0)]


def test_an_answer_that_never_came_counts_as_an_endless_wait(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, arrived(1.0, "r1", "background", "house"))
    assert measure.first_tokens(facts, "background").p95_s == math.inf
    assert measure.summaries_done_s(facts) == [math.inf]


def test_percentiles_are_by_nearest_rank() -> None:
    assert measure.percentile(range(1, 101), 0.95) == 95
    assert measure.percentile([1.0] * 17 + [9.0], 0.95) == 9.0
    with pytest.raises(ValueError, match="no values"):
        measure.percentile([], 0.5)


def test_every_run_has_the_same_work() -> None:
    assert workload.evening(18, every_s=2, chats_at=(2, 14)) == workload.evening(
        18, every_s=2, chats_at=(2, 14)
    )
    texts = [document.instructions for document in documents.DOCUMENTS]
    assert len(set(texts)) == 3
    sentences = [sentence for text in texts for sentence in text.split(". ")]
    assert len(set(sentences)) > 0.9 * len(sentences), (
        "prose that a prompt cache could reuse measures nothing"
    )


HOME_LOG = """\
2026-11-29 23:36:48.226+00:00 WARNING (MainThread) [aiohttp_fast_zlib] zlib_ng and isal are not available
2026-11-29 23:36:48.464+00:00 ERROR (MainThread) [haffmpeg.core] FFmpeg fails [Errno 2] No such file: 'ffmpeg'
Traceback (most recent call last):
FileNotFoundError: [Errno 2] No such file or directory: 'ffmpeg'
"""
ENGINE_LOG = """\
fairhearth: SmolLM2-135M-Instruct is ready after 1.6 s
2026-11-29 23:35:46,872 INFO engine_service.server: Request r000009 said ERROR once
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (HOME_LOG, []),
        (ENGINE_LOG, []),
        (HOME_LOG + "2026-11-29 23:36:50.000+00:00 ERROR (MainThread) [x] no\nTraceback\n", ["ERROR"]),
        ("Traceback (most recent call last):\n  File x\n", ["Traceback"]),
        (ENGINE_LOG + "2026-11-29 23:35:47,000 CRITICAL engine: lost\n", ["CRITICAL"]),
    ],
)
def test_a_log_is_judged_by_its_records_and_only_known_ones_are_allowed(
    tmp_path: Path, log: str, expected: list[str]
) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    found = logs.faults(path)
    assert len(found) == len(expected)
    assert all(word in line for word, line in zip(expected, found, strict=True))


def evening_of(tmp_path: Path, policy: str, wait_s: float, done_at: float) -> Phase:
    """Return a phase in which every command waited so long, and the last summary was done then."""
    turns = [arrived(0.0, "idle", "voice"), computed(0.1, "idle", finished=True)]
    turns += [arrived(1.0, f"s{i}", "background", "house") for i in range(3)]
    for i in range(12):
        turns += [arrived(2.0 + i, f"v{i}", "voice"), computed(2.0 + i + wait_s, f"v{i}", finished=True)]
    turns.append(arrived(3.0, "c", "chat", "bob"))
    turns.append(computed(3.5, "c", finished=True))
    turns += [computed(done_at - 1 + i / 2, f"s{i}", finished=True) for i in range(3)]
    report = {"tokens_served": 10, "service_share": 0.25, "entitled_share": 0.25}
    return Phase(
        policy=policy,
        evening=workload.Evening(summaries={d.title: "text" for d in documents.DOCUMENTS}),
        facts=facts_of(tmp_path, *turns),
        snapshot={
            "residents": dict.fromkeys(RESIDENTS, report),
            "engine": {"policy_met": True, "policy_notes": []},
        },
        sensors=dict.fromkeys(RESIDENTS, "10"),
        shares=dict.fromkeys(RESIDENTS, "25.0"),
        policy_met="on",
    )


def failed(evidence: checks.Evidence) -> set[str]:
    return {check.name for check in checks.judge(evidence) if not check.holds}


def test_a_good_evening_passes_every_check(tmp_path: Path) -> None:
    fair, fifo = evening_of(tmp_path, "fairhearth", 0.3, 40.0), evening_of(tmp_path, "fifo", 30.0, 35.0)
    assert failed(checks.Evidence(fair=fair, fifo=fifo, reconnect_s=1.0, faults=())) == set()


def test_each_broken_promise_fails_its_own_check(tmp_path: Path) -> None:
    def with_fair(**changes: Any) -> set[str]:
        fair, fifo = evening_of(tmp_path, "fairhearth", 0.3, 40.0), evening_of(tmp_path, "fifo", 30.0, 35.0)
        for name, value in changes.items():
            setattr(fair, name, value)
        return failed(checks.Evidence(fair=fair, fifo=fifo, reconnect_s=1.0, faults=()))

    slow = evening_of(tmp_path, "fairhearth", 0.5, 40.0).facts
    late = evening_of(tmp_path, "fairhearth", 0.3, 60.0).facts
    assert with_fair(facts=slow) == {"voice_not_waiting"}
    assert with_fair(facts=late) == {"summaries_in_time"}
    assert with_fair(sensors=dict.fromkeys(RESIDENTS, "11")) == {"sensors_equal_ledger"}
    assert with_fair(shares=dict.fromkeys(RESIDENTS, "unavailable")) == {"shares_shown"}
    assert with_fair(policy_met="off") == {"policy_met"}
    assert with_fair(evening=workload.Evening(faults=["no"])) == {"answered", "summaries_finish"}

    good, fifo = evening_of(tmp_path, "fairhearth", 0.3, 40.0), evening_of(tmp_path, "fifo", 5.0, 35.0)
    broken = checks.Evidence(fair=good, fifo=fifo, reconnect_s=1.0, faults=("ERROR",))
    assert failed(broken) == {"fifo_is_worse", "no_errors"}
