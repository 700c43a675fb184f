"""What is told of the policy: the truth about who waits, in words that a household understands."""

from __future__ import annotations

from typing import Any

from engine_service.engine.metrics import Observer
from engine_service.scheduling.events import Arrived, CapacityChanged, ResidentsChanged
from engine_service.scheduling.model import Capacity, Request, RequestId, Resident, ResidentId, WorkloadClass
from engine_service.scheduling.scheduler import Scheduler

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
