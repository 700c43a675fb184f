"""The baselines do what they are said to do, and fail where they are known to fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_service.scheduling.decisions import Admit, Compose, Preempt
from engine_service.scheduling.events import Arrived
from engine_service.scheduling.model import RequestId, WorkloadClass
from engine_service.simulator import measure
from engine_service.simulator.runner import Run
from engine_service.simulator.summary import RunSummary
from tests.simulator.builders import parsed, run

CROWD = """
title = "A crowd before a voice"
duration_s = 30
drain_s = 600
profile = "rtx4090-8b"

[residents]
night = { max_waiting = 1000 }
grandma = {}

[[stream]]
resident = "night"
class = "background"
arrivals = { pattern = "together", count = 30 }
prompt = 3000
output = 800

[[stream]]
resident = "grandma"
class = "voice"
arrivals = { pattern = "together", count = 1 }
from_s = 12
prompt = 1200
output = 20
"""


def summary(ended: Run, policy: str) -> RunSummary:
    return measure.summarise(ended, policy=policy, seed=1)


@pytest.fixture(scope="module")
def crowd() -> dict[str, RunSummary]:
    names = ("default", "fifo", "fifo-chunked", "vtc", "vllm-priority", "class_only")
    return {name: summary(run(parsed(CROWD), name), name) for name in names}


def test_voice_waits_for_the_whole_crowd_when_first_come_is_first_served(
    crowd: dict[str, RunSummary],
) -> None:
    fifo, ours = (crowd[name].groups["voice"].ttft.max for name in ("fifo", "default"))
    assert fifo is not None
    assert ours is not None
    assert fifo > 10 * ours


def test_an_ungated_generator_stalls_for_a_chunk_of_every_prompt(crowd: dict[str, RunSummary]) -> None:
    """Sixteen prompts of one chunk each in one iteration; smaller chunks only shorten it."""
    assert crowd["fifo"].longest_iteration > 10 * crowd["default"].longest_iteration
    assert crowd["fifo-chunked"].longest_iteration > 5 * crowd["default"].longest_iteration
    assert crowd["fifo"].over_bound > 0
    assert crowd["default"].over_bound == 0


def test_priority_without_preemption_lets_voice_wait_for_a_place(crowd: dict[str, RunSummary]) -> None:
    """vLLM: a waiting request never preempts a running one, however urgent it is."""
    voice = crowd["vllm-priority"].groups["voice"]
    assert voice.queue.max is not None
    assert voice.queue.max > 1.0
    assert not any(p.beneficiary_class == "voice" for p in crowd["vllm-priority"].preempted)


def test_pure_fairness_is_blind_to_urgency(crowd: dict[str, RunSummary]) -> None:
    voice = crowd["vtc"].groups["voice"]
    assert voice.queue.max is not None
    assert voice.queue.max > 1.0


def test_strict_classes_serve_voice_at_once(crowd: dict[str, RunSummary]) -> None:
    voice = crowd["class_only"].groups["voice"]
    assert voice.queue.max is not None
    assert voice.queue.max <= crowd["class_only"].longest_iteration


STARVED = """
title = "Chats without end"
duration_s = 120
drain_s = 0
profile = "rtx4090-8b"

[residents]
anna = { max_waiting = 1000 }
night = {}

[[stream]]
resident = "anna"
class = "chat"
arrivals = { pattern = "uniform", rate = 3 }
prompt = 1000
output = 300

[[stream]]
resident = "night"
class = "background"
arrivals = { pattern = "closed", concurrency = 4 }
from_s = 10
prompt = 4000
output = 300
"""


def test_strict_classes_starve_the_background_and_the_reserve_does_not() -> None:
    starved = summary(run(parsed(STARVED), "class_only"), "class_only").groups["background"]
    served = summary(run(parsed(STARVED)), "default").groups["background"]
    assert starved.finished == 0
    assert served.finished > 0
    assert served.share > 0.07


TWO_GREEDY = """
title = "Two greedy residents"
duration_s = 120
drain_s = 0
profile = "a10g-7b"

[residents]
c1 = { max_waiting = 10000 }
c2 = { max_waiting = 10000 }

[policy]
max_waiting = 100000

[[stream]]
resident = "c1"
class = "chat"
arrivals = { pattern = "uniform", rate = 1.5 }
prompt = 256
output = 256

[[stream]]
resident = "c2"
class = "chat"
arrivals = { pattern = "uniform", rate = 3 }
prompt = 256
output = 256
"""


@pytest.mark.parametrize("policy", ["fifo", "vllm-priority"])
def test_orders_of_arrival_give_twice_as_much_to_who_asks_twice(policy: str) -> None:
    found = summary(run(parsed(TWO_GREEDY), policy), policy)
    assert found.groups["c2"].share == pytest.approx(2 / 3, abs=0.03)
    assert found.service_difference > 10_000


def test_vtc_splits_in_half_within_its_bound() -> None:
    found = summary(run(parsed(TWO_GREEDY), "vtc"), "vtc")
    assert found.groups["c1"].share == pytest.approx(1 / 2, abs=0.03)
    assert found.bound_used < 0.25


BIG_AND_SMALL = """
title = "A big one among small ones"
duration_s = 60
drain_s = 600
profile = "rtx4090-8b"

[device]
num_pages = 64

[policy]
prefix_share = 0.0

[residents]
anna = { max_waiting = 1000 }

[[stream]]
name = "small"
resident = "anna"
class = "chat"
arrivals = { pattern = "uniform", rate = 4 }
prompt = 2000
output = 300

[[stream]]
name = "big"
resident = "anna"
class = "chat"
arrivals = { pattern = "together", count = 1 }
from_s = 5.1
prompt = 11000
output = 200
"""


def test_four_pass_the_one_that_does_not_fit_and_then_the_queue_stops() -> None:
    ended = run(parsed(BIG_AND_SMALL), "fifo", keep_turns=True)
    arrived: list[RequestId] = []
    started: list[RequestId] = []
    for _, event, decisions in ended.turns:
        if isinstance(event, Arrived):
            arrived.append(event.request.request_id)
        started += [d.request_id for d in decisions if isinstance(d, Admit)]
    big = next(name for name in arrived if name.startswith("big"))
    behind = set(arrived[arrived.index(big) + 1 :])
    passed = [name for name in started[: started.index(big)] if name in behind]
    assert len(passed) == 4


def test_fifo_reserves_the_longest_output_and_never_preempts() -> None:
    ended = run(parsed(BIG_AND_SMALL), "fifo", keep_turns=True)
    admitted = [d for _, _, ds in ended.turns for d in ds if isinstance(d, Admit)]
    requests = {name: o.sequence.request for name, o in ended.meter.outcomes.items()}
    assert admitted
    for admit in admitted:
        request = requests[admit.request_id]
        assert admit.reserved_tokens == request.prompt_tokens + request.max_tokens
    assert not any(isinstance(d, Preempt) for _, _, ds in ended.turns for d in ds)


CROWDED = """
title = "Answers that outgrow the memory"
duration_s = 20
drain_s = 900
profile = "rtx4090-8b"

[device]
num_pages = 48

[policy]
prefix_share = 0.0

[residents]
anna = { max_waiting = 1000 }
night = { max_waiting = 1000 }

[[stream]]
resident = "anna"
class = "chat"
arrivals = { pattern = "uniform", rate = 0.5 }
prompt = 500
output = 1500

[[stream]]
resident = "night"
class = "background"
arrivals = { pattern = "together", count = 12 }
prompt = 500
output = 1500
"""


def test_vllm_takes_pages_from_the_last_in_priority_and_admits_nobody_in_that_step() -> None:
    ended = run(parsed(CROWDED), "vllm-priority", check_every=1, keep_turns=True)
    classes = {name: o.class_id for name, o in ended.meter.outcomes.items()}
    preempted = [(ds, d) for _, _, ds in ended.turns for d in ds if isinstance(d, Preempt)]
    assert preempted
    first = preempted[0][1]
    assert classes[first.request_id] is WorkloadClass.BACKGROUND
    for decisions, _ in preempted:
        assert not any(isinstance(d, Admit) for d in decisions)
    assert all(o.end == "finished" for o in ended.meter.outcomes.values())


def test_vllm_spends_its_token_budget_in_the_order_of_admission() -> None:
    ended = run(parsed(CROWD), "vllm-priority", keep_turns=True)
    for _, _, decisions in ended.turns:
        for order in decisions:
            if isinstance(order, Compose):
                tokens = sum(chunk.num_tokens for chunk in order.prefills) + len(order.decode_ids)
                assert tokens <= 2048


def test_baselines_have_no_queue_limits() -> None:
    text = CROWD.replace("night = { max_waiting = 1000 }", "night = { max_waiting = 3 }")
    assert text != CROWD
    assert summary(run(parsed(text), "fifo"), "fifo").groups["background"].rejected == 0
    assert summary(run(parsed(text)), "default").groups["background"].rejected > 0


@pytest.mark.parametrize("policy", ["fifo", "fifo-chunked", "vtc", "vllm-priority", "class_only"])
def test_baselines_end_what_they_start_after_losses_and_disconnects(policy: str) -> None:
    scenario = parsed(CROWD + "[faults]\ndisconnects = 0.3\nlosses_per_hour = 600\n")
    ended = run(replace(scenario, duration_s=30.0), policy, check_every=1)
    found = summary(ended, policy)
    assert (found.leaked_pages, found.stuck) == (0, 0)
    assert all(o.end is not None for o in ended.meter.outcomes.values())
