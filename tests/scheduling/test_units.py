"""Small parts on their own: counters, windows, ledger, quota, cost model, settings of the policy."""

from __future__ import annotations

import pytest

from engine_service.scheduling.counters import Counters
from engine_service.scheduling.estimator import CostEstimator, IterationShape
from engine_service.scheduling.model import (
    MICRO,
    Capacity,
    Policy,
    Request,
    RequestId,
    Resident,
    ResidentId,
    WorkloadClass,
)
from engine_service.scheduling.pages import PageLedger
from engine_service.scheduling.quota import DailyQuota
from engine_service.scheduling.windows import WindowSum

A, B, C = ResidentId("a"), ResidentId("b"), ResidentId("c")


def counters(**weights: int) -> Counters:
    made = Counters()
    made.set_weights({ResidentId(name): weight for name, weight in weights.items()})
    return made


def test_the_order_of_charges_cannot_change_a_sum() -> None:
    one, other = counters(a=3), counters(a=3)
    for units in (1, 1, 1):
        one.charge(A, units)
    other.charge(A, 3)
    assert one.value(A) == other.value(A) == MICRO


def test_lift_goes_to_the_least_who_waits_else_to_the_last_who_left() -> None:
    made = counters(a=1, b=1, c=1)
    made.charge(B, 50)
    made.charge(C, 80)
    made.lift(A, backlogged=[B, C])
    assert made.value(A) == 50 * MICRO
    made.left_queue(C)
    made.lift(B, backlogged=[])
    assert made.value(B) == 80 * MICRO


def test_lift_never_lowers() -> None:
    made = counters(a=1, b=1)
    made.charge(A, 90)
    made.charge(B, 10)
    made.lift(A, backlogged=[B])
    assert made.value(A) == 90 * MICRO


def test_rebase_keeps_the_order_and_a_new_weight_keeps_the_value() -> None:
    made = counters(a=1, b=2)
    made.charge(A, 2**54)
    made.charge(B, 2**54 + 7)
    before = made.value(A) - made.value(B)
    made.rebase()
    assert made.value(A) - made.value(B) == before
    assert min(made.value(A), made.value(B)) == 0
    held = made.value(B)
    made.set_weights({B: 5})
    assert made.value(B) == held


def test_a_window_forgets_what_is_older_than_itself() -> None:
    window = WindowSum(24.0)
    for second in range(100):
        window.add(1, now=float(second))
    assert 23 <= window.total(now=99.0) <= 25
    assert window.total(now=200.0) == 0


def test_pages_are_conserved_through_reserve_pin_and_release() -> None:
    ledger = PageLedger()
    ledger.total = 100
    ledger.reserve(RequestId("x"), A, 10)
    ledger.reserve(RequestId("x"), A, 5)
    ledger.reserve(RequestId("y"), B, 20)
    ledger.pin(RequestId("y"), num_pages=12)
    assert (ledger.free, ledger.num_held, ledger.num_pinned) == (73, 15, 12)
    assert ledger.release(RequestId("x")) == 15
    assert ledger.release(RequestId("x")) == 0
    assert ledger.unpin(RequestId("y")) == 12
    assert ledger.free == 100
    assert ledger.held_by(A) == ledger.held_by(B) == 0


def test_a_day_resets_once_whatever_the_wall_clock_does() -> None:
    quota = DailyQuota()
    quota.set_residents([Resident(resident_id=A, daily_tokens=100, daily_is_hard=True)])
    quota.start_day("2026-10-25", ends_at=1000.0)
    quota.spend(A, 150)
    assert quota.left(A) == 0
    quota.start_day("2026-10-25", ends_at=900.0)
    quota.start_day("2026-10-24", ends_at=900.0)
    assert quota.is_spent(A)
    assert quota.resets_in_s(now=300.0) == 600.0
    quota.start_day("2026-10-26", ends_at=2000.0)
    assert quota.left(A) == 100
    assert quota.left(B) is None


def test_the_cost_model_learns_a_machine_and_follows_its_change() -> None:
    def truth(shape: IterationShape, scale: float) -> float:
        return scale * (
            0.004 + 0.0003 * shape.chunk_tokens + 0.002 * shape.num_decodes + 1e-6 * shape.decode_context
        )

    model = CostEstimator()
    assert model.predict(IterationShape(chunk_tokens=64)) is None
    for scale in (1.0, 3.0):
        for i in range(600):
            shape = IterationShape(
                chunk_tokens=(i * 37) % 512, num_decodes=i % 7, decode_context=(i % 7) * 300
            )
            model.observe(shape, truth(shape, scale))
        probe = IterationShape(chunk_tokens=200, num_decodes=4, decode_context=1200)
        predicted = model.predict(probe)
        assert predicted is not None
        assert abs(predicted - truth(probe, scale)) < 0.1 * truth(probe, scale)
    assert model.relative_error < 0.2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Resident(resident_id=A, weight=0), "weight"),
        (lambda: Resident(resident_id=ResidentId("")), "empty"),
        (lambda: Resident(resident_id=A, page_cap=0), "page_cap"),
        (lambda: Policy(background_reserve=1.0), "background_reserve"),
        (lambda: Policy(max_chunk_tokens=8), "max_chunk_tokens"),
        (lambda: Policy(classes={}), "voice"),
        (lambda: Policy(voice_bucket=0), "voice_bucket"),
        (lambda: Capacity(num_pages=-1, page_tokens=1, max_sequences=1, max_context_tokens=1), "num_pages"),
        (
            lambda: Request(
                request_id=RequestId("r"),
                resident_id=A,
                class_id=WorkloadClass.CHAT,
                prompt_tokens=0,
                max_tokens=1,
            ),
            "prompt_tokens",
        ),
    ],
)
def test_what_cannot_be_scheduled_is_refused_by_name(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]
