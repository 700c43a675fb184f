"""Two unequal cards behind one queue, in virtual time: nothing is lost, and speech and summaries gain."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

from engine_service.backends.cost_model import CostModel
from engine_service.scheduling.model import (
    GUEST,
    HOUSE,
    Policy,
    Request,
    RequestId,
    Resident,
    ResidentId,
    WorkloadClass,
)
from engine_service.scheduling.placement import InstanceId, MoveRule
from engine_service.simulator.fleet import Fleet
from engine_service.simulator.profiles import DeviceProfile, profile

LARGE, SMALL = InstanceId("large"), InstanceId("small")
ANNA = Resident(resident_id=ResidentId("anna"), max_waiting=1000)
BEN = Resident(resident_id=ResidentId("ben"), max_waiting=1000)
RESIDENTS = (ANNA, BEN, Resident(resident_id=GUEST), Resident(resident_id=HOUSE))
CARD: Final = profile("rtx4090-8b")


def slower(card: DeviceProfile, factor: float) -> CostModel:
    return CostModel(**{name: getattr(card.cost, name) * factor for name in card.cost.__dataclass_fields__})


CARDS: Final = {
    LARGE: CARD,
    SMALL: replace(
        CARD, cost=slower(CARD, 2.5), capacity=replace(CARD.capacity, num_pages=64, max_context_tokens=8192)
    ),
}

Arrival = tuple[float, Request, int]


def order(
    name: str, resident: Resident, class_id: str, prompt: int, output: int, most: int | None = None
) -> Request:
    return Request(
        request_id=RequestId(name),
        resident_id=resident.resident_id,
        class_id=WorkloadClass(class_id),
        prompt_tokens=prompt,
        max_tokens=most or output,
    )


def evening(seed: int, *, summaries: int = 60, seconds: float = 120.0) -> list[Arrival]:
    """Return an evening: Ben's summaries come all at once, Anna speaks every three seconds or so."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    for i in range(summaries):
        output = rng.randint(150, 400)
        request = order(f"summary-{i:03d}", BEN, "background", rng.randint(1000, 4000), output, 512)
        arrivals.append((i * 0.01, request, output))
    at, number = 1.0, 0
    while at < seconds:
        output = rng.randint(12, 40)
        request = order(f"voice-{number:03d}", ANNA, "voice", rng.randint(900, 1400), output)
        arrivals.append((at, request, output))
        at, number = at + rng.expovariate(1 / 3.0), number + 1
    return sorted(arrivals, key=lambda a: (a[0], a[1].request_id))


def in_turn(pattern: tuple[InstanceId, ...]) -> Callable[[Request], InstanceId]:
    """Return how it is done without a common queue: each kind of work goes to the cards in a fixed turn."""
    turns: dict[WorkloadClass, int] = {}

    def assign(request: Request) -> InstanceId:
        turns[request.class_id] = turns.get(request.class_id, -1) + 1
        return pattern[turns[request.class_id] % len(pattern)]

    return assign


def lived(arrivals: list[Arrival], **options: object) -> Fleet:
    fleet = Fleet(CARDS, residents=RESIDENTS, **options)  # type: ignore[arg-type]
    fleet.run(arrivals)
    return fleet


def nobody_is_lost_or_served_twice(fleet: Fleet, arrivals: list[Arrival]) -> None:
    assert fleet.tickets.keys() == {request.request_id for _, request, _ in arrivals}
    for _, request, output in arrivals:
        ticket = fleet.tickets[request.request_id]
        assert ticket.ended_at is not None, f"{request.request_id} never ended"
        if request.request_id not in fleet.rejected:
            assert ticket.output == output, f"{request.request_id} got {ticket.output} of {output}"
    assert not fleet.queue.total_waiting
    assert fleet.is_empty


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def first_words(fleet: Fleet, kind: str) -> list[float]:
    tickets = [t for name, t in fleet.tickets.items() if name.startswith(kind)]
    return [t.first_token_at - t.arrived_at for t in tickets if t.first_token_at is not None]


def last_end(fleet: Fleet, kind: str) -> float:
    return max(t.ended_at or 0.0 for name, t in fleet.tickets.items() if name.startswith(kind))


def charged(fleet: Fleet, resident: Resident) -> int:
    return fleet.queue.counters.service(resident.resident_id)


def cost(arrivals: list[Arrival], resident: Resident) -> int:
    policy = Policy()
    return sum(
        request.prompt_tokens * policy.prefill_cost + output * policy.decode_cost
        for _, request, output in arrivals
        if request.resident_id == resident.resident_id
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_queue_serves_speech_sooner_than_fixed_shares_and_ends_no_later(seed: int) -> None:
    arrivals = evening(seed)
    one = lived(arrivals)
    nobody_is_lost_or_served_twice(one, arrivals)
    for pattern in ((LARGE, SMALL), (LARGE, LARGE, SMALL, LARGE, LARGE, SMALL, LARGE)):
        fixed = lived(arrivals, assign=in_turn(pattern))
        nobody_is_lost_or_served_twice(fixed, arrivals)
        assert p95(first_words(one, "voice")) < 0.9 * p95(first_words(fixed, "voice"))
        assert last_end(one, "summary") < 1.05 * last_end(fixed, "summary")


@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("rule", [MoveRule(), MoveRule(min_gap_tokens=256, min_gain=0.05, max_moving=2)])
def test_whoever_is_moved_gets_every_token_once_and_pays_once(seed: int, rule: MoveRule) -> None:
    arrivals = evening(seed, summaries=40, seconds=40.0)
    fleet = lived(arrivals, rule=rule)
    nobody_is_lost_or_served_twice(fleet, arrivals)
    assert fleet.moves, "nobody was moved, nothing was shown"
    for resident in (ANNA, BEN):
        assert charged(fleet, resident) == cost(arrivals, resident)
    for ticket in fleet.tickets.values():
        assert ticket.times_moved <= Policy().max_preemptions
        assert not (ticket.times_moved and ticket.record.class_id is WorkloadClass.VOICE)


def test_long_answers_leave_the_slow_card_once_the_fast_one_is_empty() -> None:
    documents = [(0.0, order(f"document-{i}", BEN, "background", 9000, 100), 100) for i in range(7)]
    long = [(0.1, order(f"long-{i}", ANNA, "background", 400, 2500), 2500) for i in range(4)]
    arrivals = [*documents, *long]
    moved, stayed = lived(arrivals), lived(arrivals, rule=MoveRule(max_moving=0))
    for fleet in (moved, stayed):
        nobody_is_lost_or_served_twice(fleet, arrivals)
    assert not stayed.moves
    assert any(t.places == [SMALL, LARGE] for t in moved.tickets.values())
    assert last_end(moved, "long") < 0.8 * last_end(stayed, "long")


def test_residents_are_equal_over_all_cards_and_not_on_each() -> None:
    """Both want more than there is; with a card each, the one with the slow card gets less."""
    rng = random.Random(7)
    arrivals = []
    for i in range(120):
        for resident in (ANNA, BEN):
            name, output = f"{resident.resident_id}-{i:03d}", rng.randint(100, 300)
            arrivals.append((i * 0.05, order(name, resident, "chat", rng.randint(500, 1500), output), output))
    one, own = Fleet(CARDS, residents=RESIDENTS), Fleet(CARDS, residents=RESIDENTS, assign=own_card)
    for fleet in (one, own):
        fleet.run(arrivals, until=30.0)
    assert one.queue.num_waiting[ANNA.resident_id] > 0
    assert one.queue.num_waiting[BEN.resident_id] > 0
    assert abs(charged(one, ANNA) - charged(one, BEN)) < 0.1 * charged(one, ANNA)
    assert charged(own, ANNA) > 1.5 * charged(own, BEN)


def own_card(request: Request) -> InstanceId:
    return LARGE if request.resident_id == ANNA.resident_id else SMALL


def test_what_no_card_could_ever_hold_is_refused_and_the_rest_goes_on() -> None:
    arrivals = [
        (0.0, order("huge", BEN, "chat", 32_000, 1000), 1000),
        (0.0, order("large", BEN, "chat", 12_000, 10), 10),
        (0.0, order("usual", BEN, "chat", 100, 10), 10),
    ]
    fleet = lived(arrivals)
    assert fleet.rejected == ["huge"]
    assert fleet.tickets[RequestId("large")].places == [LARGE], "the small card takes 8192 tokens"
    nobody_is_lost_or_served_twice(fleet, arrivals)


def test_the_same_evening_gives_the_same_placements() -> None:
    arrivals = evening(4, summaries=20, seconds=30.0)
    places = [[(name, t.places, t.ended_at) for name, t in lived(arrivals).tickets.items()] for _ in range(2)]
    assert places[0] == places[1]
