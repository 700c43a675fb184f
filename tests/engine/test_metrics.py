"""What is told of the policy: the truth about who waits, in words that a household understands."""

from __future__ import annotations

from typing import Any

from engine_service.engine.metrics import Observer
from engine_service.scheduling.events import (
    Arrived,
    Cancelled,
    CapacityChanged,
    PolicyChanged,
    ResidentsChanged,
)
from engine_service.scheduling.model import (
    Capacity,
    FairnessGoal,
    Policy,
    Request,
    RequestId,
    Resident,
    ResidentId,
    WorkloadClass,
)
from engine_service.scheduling.scheduler import Scheduler
from engine_service.scheduling.targets import TARGETS

NAMES = {ResidentId("alice"): "Alice", ResidentId("bob"): "Bob Smith"}


def busy(**classes: str) -> tuple[Scheduler, Observer]:
    """Return a machine that somebody else keeps busy, and residents who wait with work of a class."""
    scheduler = Scheduler()
    scheduler.handle(ResidentsChanged(residents=tuple(Resident(resident_id=r) for r in NAMES)), now=0.0)
    memory = Capacity(num_pages=64, page_tokens=16, max_sequences=1, max_context_tokens=512)
    scheduler.handle(CapacityChanged(capacity=memory), now=0.0)
    for resident, class_id in {"guest": "chat", **classes}.items():
        request = Request(
            request_id=RequestId(resident),
            resident_id=ResidentId(resident),
            class_id=WorkloadClass(class_id),
            prompt_tokens=100,
            max_tokens=50,
        )
        scheduler.handle(Arrived(request=request), now=1.0)
    return scheduler, Observer(window_s=300.0, started_at=0.0)


def serve_out_of_turn(scheduler: Scheduler, resident: str, units: int) -> None:
    """Do what the core never does: serve somebody's flow in order while another waits in the same class."""
    state = scheduler.state
    resident_id = ResidentId(resident)
    for flow in state.waiting_flows:
        if flow.resident_id == resident_id:
            flow.in_order += units
            state.counters.charge(resident_id, units)
            state.account(resident_id).service += units
            state.class_accounts[flow.class_id].service += units
            state.account(resident_id).prefill_tokens += units


def told(scheduler: Scheduler, observer: Observer) -> Any:
    engine = observer.snapshot(scheduler, NAMES, version=1, now=2.0).engine
    assert engine["policy_met"] is not bool(engine["policy_notes"])
    return engine["policy_notes"]


def test_who_got_too_much_while_both_waited_is_named() -> None:
    scheduler, observer = busy(alice="chat", bob="chat")
    assert told(scheduler, observer) == []
    serve_out_of_turn(scheduler, "bob", 9000)
    # What may be under way is 2 * 1024 tokens of memory, and a request may cost 3 * 512.
    words = "Bob Smith was served 9000 tokens more than Alice while both waited; the policy allows 3584"
    assert told(scheduler, observer) == [words]


def test_a_complaint_does_not_forget_the_other_pairs() -> None:
    scheduler, observer = busy(alice="chat", bob="chat", house="chat")
    assert told(scheduler, observer) == []
    serve_out_of_turn(scheduler, "bob", 4000)
    assert told(scheduler, observer)[0].startswith("Bob Smith was served 4000 tokens more than")
    serve_out_of_turn(scheduler, "house", 3000)
    assert told(scheduler, observer)[0].startswith("Bob Smith was served 4000 tokens more than Alice")
    serve_out_of_turn(scheduler, "house", 6000)
    assert told(scheduler, observer)[0].startswith("house was served 9000 tokens more than Alice")


def test_who_waits_for_something_else_is_not_compared() -> None:
    scheduler, observer = busy(alice="background", bob="chat")
    serve_out_of_turn(scheduler, "bob", 1_000_000)
    assert told(scheduler, observer) == []


def test_the_widest_difference_between_two_who_wait_is_told_as_part_of_the_bound() -> None:
    scheduler, observer = busy(alice="chat", bob="chat")

    def used() -> Any:
        return observer.snapshot(scheduler, NAMES, version=1, now=2.0).engine["bound_used"]

    assert used() == 0.0
    bound = 2 * 1024 + 20_000 + 8_000  # U + V + A: memory full of output, voice bucket, due budget
    serve_out_of_turn(scheduler, "bob", 3000)
    assert used() == round(3000 / (2 * bound), 4)
    serve_out_of_turn(scheduler, "alice", 5000)  # from +3000 to -2000: over all intervals 5000
    assert used() == round(5000 / (2 * bound), 4)
    scheduler.handle(Cancelled(request_id=RequestId("bob")), now=3.0)
    assert used() == 0.0, "nobody waits beside Alice any more"


def test_another_goal_has_no_bound_of_service() -> None:
    scheduler, observer = busy(alice="chat", bob="chat")
    scheduler.handle(PolicyChanged(policy=Policy(fairness=FairnessGoal.WAITING)), now=1.0)
    assert observer.snapshot(scheduler, NAMES, version=1, now=2.0).engine["bound_used"] is None


def test_who_waits_longest_says_for_how_long_a_class_starves() -> None:
    scheduler, observer = busy(alice="chat", bob="background")
    classes = observer.snapshot(scheduler, NAMES, version=1, now=31.04).classes
    ages = {name: row["starvation_age_s"] for name, row in classes.items()}
    assert ages == {**dict.fromkeys(ages, 0.0), "chat": 30.0, "background": 30.0}


def test_the_longest_iteration_is_that_of_the_window() -> None:
    scheduler, observer = busy()

    def longest(now: float) -> Any:
        return observer.snapshot(scheduler, NAMES, version=1, now=now).engine["longest_iteration_s"]

    assert longest(2.0) is None
    observer.iteration_done(scheduler, seconds=0.4, now=10.0)
    observer.iteration_done(scheduler, seconds=0.1, now=11.0)
    observer.iteration_done(scheduler, seconds=0.2, now=200.0)
    assert longest(201.0) == 0.4
    assert longest(400.0) == 0.2
    assert longest(900.0) is None


def test_the_share_of_answers_within_their_targets_is_that_of_the_window() -> None:
    scheduler, observer = busy()

    def share(now: float) -> Any:
        return observer.snapshot(scheduler, NAMES, version=1, now=now).classes["voice"]["slo_attainment"]

    assert share(2.0) is None
    for is_met in (False, True, True):
        observer.answered(WorkloadClass.VOICE, is_met=is_met, now=10.0)
    assert share(11.0) == 0.6667
    observer.answered(WorkloadClass.VOICE, is_met=False, now=300.0)
    assert share(400.0) == 0.0
    assert share(900.0) is None


def test_an_answer_keeps_its_target_by_its_first_token_and_95_of_100_gaps() -> None:
    target = TARGETS[WorkloadClass.VOICE]
    assert target.is_met(first_token_s=0.8, num_gaps=40, num_late=2)
    assert not target.is_met(first_token_s=0.81, num_gaps=40, num_late=0)
    assert not target.is_met(first_token_s=0.1, num_gaps=40, num_late=3)
    assert target.is_met(first_token_s=0.1, num_gaps=0, num_late=0)
    assert WorkloadClass.BACKGROUND not in TARGETS
