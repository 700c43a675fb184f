"""The promises that need a run to be seen, over random loads: P2, P3, P6, P7."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from engine_service.scheduling.model import Capacity, ClassPolicy, Policy, Resident, ResidentId, WorkloadClass
from tests.scheduling.household import Household, linear_cost

NAMES = ("alice", "bob", "carol")
RESIDENTS = tuple(Resident(resident_id=ResidentId(name), max_waiting=1000) for name in NAMES)
CAPACITY = Capacity(num_pages=90, page_tokens=16, max_sequences=6, max_context_tokens=640, can_abort=True)
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])

Asked = tuple[float, str, WorkloadClass, int, int]
LOADS = st.lists(
    st.tuples(
        st.floats(0.0, 0.4),
        st.sampled_from(NAMES),
        st.sampled_from(list(WorkloadClass)),
        st.integers(1, 400),
        st.integers(1, 80),
    ),
    min_size=5,
    max_size=60,
)


def played(load: list[Asked], policy: Policy) -> Household:
    """Run a load to its end: pause before each arrival, resident, class, prompt, output."""
    home = Household(policy=policy, capacity=CAPACITY, residents=RESIDENTS)
    for pause, name, class_id, prompt, output in load:
        home.run_until(home.now + pause)
        home.ask(name, class_id, prompt, output)
    home.run_dry()
    return home


@SLOW
@given(load=LOADS, chunk=st.sampled_from([32, 64, 128, 512]))
def test_no_iteration_is_longer_than_one_chunk_beside_all_decodes(load: list[Asked], chunk: int) -> None:
    policy = Policy(max_chunk_tokens=chunk, min_chunk_tokens=16, voice_headroom_pages=4)
    home = played(load, policy)
    longest = linear_cost(chunk, CAPACITY.max_sequences)
    assert max(end - start for start, end, _ in home.iterations) <= longest + 1e-9


@SLOW
@given(load=LOADS)
def test_who_was_admitted_gains_a_token_or_is_counted_as_paused(load: list[Asked]) -> None:
    policy = Policy(voice_headroom_pages=4)
    home = Household(policy=policy, capacity=CAPACITY, residents=RESIDENTS)

    def step() -> bool:
        state = home.scheduler.state
        if home.flying is not None:
            going = {*home.flying.decode_ids, *(c.request_id for c in home.flying.prefills)}
            assert going | set(state.paused) >= set(state.holding)
        return home.step()

    for _, name, class_id, prompt, output in load:
        home.ask(name, class_id, prompt, output)
        step()
    while step():
        pass
    assert home.all_finished()


@SLOW
@given(
    outputs=st.lists(st.integers(10, 150), min_size=1, max_size=6),
    max_wait_s=st.floats(0.5, 4.0),
    budget=st.sampled_from([200, 600, 2_000]),
)
def test_a_request_waits_its_class_s_time_and_the_older_due_work_and_one_drain(
    outputs: list[int], max_wait_s: float, budget: int
) -> None:
    """P6: due work runs in the order it became due, as fast as the due budget lets it."""
    classes = dict(Policy().classes)
    classes[WorkloadClass.BACKGROUND] = ClassPolicy(max_wait_s=max_wait_s, inter_token_target_s=None)
    classes[WorkloadClass.CHAT] = ClassPolicy(max_wait_s=1e9, inter_token_target_s=0.2)
    window_s = 2.0
    policy = Policy(
        classes=classes, due_budget=budget, due_window_s=window_s, background_reserve=0.0, max_preemptions=0
    )
    capacity = Capacity(num_pages=400, page_tokens=16, max_sequences=3, max_context_tokens=640)
    home = Household(policy=policy, capacity=capacity, residents=RESIDENTS)
    for _ in range(4):
        home.ask("alice", "chat", 100, 100)
    asked_at = home.now
    summaries = [home.ask("bob", "background", 200, output) for output in outputs]
    older = 0.0
    drain_s = 2 * 150 * linear_cost(0, 3) + linear_cost(512, 3)
    for request_id, output in zip(summaries, outputs, strict=True):
        while not home.sequences[request_id].admitted_at:
            while home.scheduler.state.num_waiting["alice"] < 4:
                home.ask("alice", "chat", 100, 100)
            home.step()
        waited = home.sequences[request_id].admitted_at[0] - asked_at
        windows = older // budget + (1 if older else 0)
        assert waited <= max_wait_s + windows * window_s * 25 / 24 + (len(summaries) + 1) * drain_s
        older += 200 + 2 * output


def digest() -> str:
    """Return a digest of all decisions of one load, to be compared between interpreters."""
    load = [
        (0.03 * (i % 7), NAMES[i % 3], list(WorkloadClass)[i * 5 % 6], 20 + 37 * i % 380, 3 + 11 * i % 70)
        for i in range(80)
    ]
    policy = Policy(voice_headroom_pages=4, predict_output=True, pace_ahead_s=0.5, output_slice_tokens=16)
    return hashlib.sha256(repr([(now, d) for now, _, d in played(load, policy).log]).encode()).hexdigest()


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_decisions_do_not_depend_on_how_the_interpreter_hashes(seed: str) -> None:
    code = "from tests.scheduling.test_properties import digest; print(digest())"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ran.stdout.strip() == digest()
