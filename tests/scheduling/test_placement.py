"""Where a request goes and what is moved: pure functions of how the machines stand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from engine_service.scheduling.model import RequestId
from engine_service.scheduling.placement import (
    Instance,
    InstanceId,
    Movable,
    MoveRule,
    choose_instance,
    movables,
    plan_rebalance,
    view,
)
from tests.scheduling.household import Household

EMPTY = Instance(
    instance_id=InstanceId("a"), num_pages=100, page_tokens=16, max_sequences=8, most_tokens=1280
)
Loads = dict[InstanceId, tuple[Instance, Sequence[Movable]]]


def named(name: str, **changes: int) -> Instance:
    return replace(EMPTY, instance_id=InstanceId(name), **changes)


def summary(name: str, *, pages: int = 10, urgency: int = 4) -> Movable:
    return Movable(
        request_id=RequestId(name), urgency=urgency, tokens=pages * 16, most_tokens=pages * 16, pages=pages
    )


# --- dispatch


def test_a_request_goes_to_the_freest_machine() -> None:
    busy = named("a", held_pages=60, num_sequences=2)
    idle = named("b", held_pages=30, num_sequences=1)
    assert busy.freeness == 40 * 16 // 2
    assert choose_instance([busy, idle], tokens=100, most_tokens=200) == "b"
    assert choose_instance([idle, busy], tokens=100, most_tokens=200) == "b"


def test_equals_are_told_apart_by_name() -> None:
    assert choose_instance([named("b"), named("a")], tokens=1, most_tokens=1) == "a"


def test_what_a_machine_was_given_counts_before_it_is_admitted() -> None:
    given_one = named("a", waiting_pages=70, num_waiting=1)
    assert given_one.freeness == 30 * 16
    assert given_one.virtual_usage == 70
    assert choose_instance([given_one], tokens=100, most_tokens=100) is None, "one in hand is enough"


@pytest.mark.parametrize(
    "changes",
    [
        {"held_pages": 95},
        {"held_pages": 85, "headroom_pages": 10},
        {"num_sequences": 8},
        {"num_sequences": 7, "headroom_sequences": 1},
        {"prompt_tokens_left": 513},
        {"most_tokens": 99},
    ],
)
def test_what_no_machine_could_begin_stays_in_the_queue(changes: dict[str, int]) -> None:
    assert choose_instance([named("a", **changes)], tokens=96, most_tokens=100) is None


def test_speech_finds_the_headroom_and_never_stays() -> None:
    full, headroom = named("a", held_pages=99, num_sequences=8), named("b", held_pages=85, headroom_pages=10)
    speech = {"tokens": 96, "most_tokens": 100, "is_spoken": True}
    assert choose_instance([full, headroom], **speech) == "b"  # type: ignore[arg-type]
    assert choose_instance([full], **speech) == "a", "its scheduler makes room"  # type: ignore[arg-type]
    assert choose_instance([named("a", most_tokens=50)], **speech) is None  # type: ignore[arg-type]


def test_pages_of_other_sizes_compare_in_tokens() -> None:
    coarse = named("a", num_pages=10, page_tokens=256)
    assert coarse.freeness == 2560
    assert choose_instance([named("b"), coarse], tokens=300, most_tokens=300) == "a"


def test_the_view_is_what_the_scheduler_knows() -> None:
    home = Household()
    home.ask("guest", "chat", 700, 10)
    second = home.ask("guest", "background", 64, 10)
    seen = view(InstanceId("a"), home.scheduler.state)
    state = home.scheduler.state
    assert (seen.num_sequences, seen.num_waiting) == (len(state.holding), state.total_waiting) == (1, 1)
    assert (seen.held_pages, seen.waiting_pages) == (state.pages.num_held, -(-74 // 32))
    assert seen.prompt_tokens_left == 700
    assert [(m.request_id, m.is_waiting) for m in movables(state)] == [(second, True)], "no progress, no move"


# --- rebalancing


def loads_of(*loads: tuple[Instance, Sequence[Movable]]) -> Loads:
    return {instance.instance_id: (instance, held) for instance, held in loads}


FULL = named("a", held_pages=80, num_sequences=8)
RULE = MoveRule(min_gap_tokens=200, min_gain=0.1, max_moving=1)


def test_low_classes_move_first_then_short_requests_and_speech_never() -> None:
    held = [
        summary("chat", urgency=1),
        summary("long", pages=20),
        summary("short"),
        summary("voice", pages=1, urgency=0),
    ]
    (move,) = plan_rebalance(loads_of((FULL, held), (named("b"), [])), RULE)
    assert (move.request_id, move.source, move.target) == ("short", "a", "b")
    assert not plan_rebalance(loads_of((FULL, [held[-1]]), (named("b"), [])), RULE)


def test_nobody_moves_for_a_small_gap_or_a_small_gain() -> None:
    held = [summary("one")]
    loads = loads_of((FULL, held), (named("b", held_pages=40, num_sequences=3), []))
    gap = loads[InstanceId("b")][0].freeness - FULL.freeness
    assert plan_rebalance(loads, RULE)
    assert not plan_rebalance(loads, replace(RULE, min_gap_tokens=gap + 1))
    assert not plan_rebalance(loads, replace(RULE, min_gain=1.0))


def test_no_more_move_at_once_than_the_rule_says() -> None:
    loads = loads_of((FULL, [summary(str(i)) for i in range(8)]), (named("b"), []), (named("c"), []))
    assert len(plan_rebalance(loads, replace(RULE, max_moving=2))) == 2
    assert not plan_rebalance(loads, replace(RULE, max_moving=2), num_moving=2)
    assert not plan_rebalance(loads, replace(RULE, max_moving=0))


def test_the_only_request_does_not_walk_about() -> None:
    alone = named("a", held_pages=60, num_sequences=1)
    assert not plan_rebalance(loads_of((alone, [summary("one", pages=60)]), (named("b"), [])), RULE)


@pytest.mark.parametrize(
    "changes", [{"min_gap_tokens": 0}, {"min_gain": 0.0}, {"min_gain": 1.1}, {"max_moving": -1}]
)
def test_a_rule_that_moves_for_nothing_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        MoveRule(**changes)  # type: ignore[arg-type]


@st.composite
def fleets(draw: st.DrawFn) -> Loads:
    """Two to four machines, each with requests that it really holds."""
    loads: Loads = {}
    for index in range(draw(st.integers(2, 4))):
        name = "abcd"[index]
        page_tokens = draw(st.sampled_from([16, 32, 256]))
        held = [
            Movable(
                request_id=RequestId(f"{name}{i}"),
                urgency=draw(st.integers(0, 4)),
                tokens=pages * page_tokens,
                most_tokens=pages * page_tokens,
                pages=pages,
                is_waiting=i == 0 and draw(st.booleans()),
            )
            for i, pages in enumerate(draw(st.lists(st.integers(1, 30), max_size=8)))
        ]
        waiting = [m for m in held if m.is_waiting]
        instance = Instance(
            instance_id=InstanceId(name),
            num_pages=draw(st.integers(50, 400)),
            page_tokens=page_tokens,
            max_sequences=draw(st.integers(8, 16)),
            most_tokens=20 * page_tokens,
            held_pages=sum(m.pages for m in held if not m.is_waiting),
            waiting_pages=sum(m.pages for m in waiting),
            num_sequences=len(held) - len(waiting),
            num_waiting=len(waiting),
            headroom_pages=draw(st.integers(0, 16)),
        )
        loads[instance.instance_id] = (instance, held)
    return loads


def spread(loads: Loads) -> int:
    values = [instance.freeness for instance, _ in loads.values()]
    return max(values) - min(values)


def moved(loads: Loads, rule: MoveRule) -> tuple[Loads, int]:
    """Carry a plan out: the request is admitted elsewhere, in pages of the machine it came to."""
    after = {i: (instance, list(held)) for i, (instance, held) in loads.items()}
    plan = plan_rebalance(loads, rule)
    for move in plan:
        source, held = after[move.source]
        (request,) = [m for m in held if m.request_id == move.request_id]
        held.remove(request)
        changes = (
            {"waiting_pages": source.waiting_pages - request.pages, "num_waiting": source.num_waiting - 1}
            if request.is_waiting
            else {"held_pages": source.held_pages - request.pages, "num_sequences": source.num_sequences - 1}
        )
        after[move.source] = replace(source, **changes), held
        target, there = after[move.target]
        pages = -(-request.tokens // target.page_tokens)
        assert request.urgency > 0
        assert request.most_tokens <= target.most_tokens
        there.append(replace(request, pages=pages, is_waiting=False))
        grown = {"held_pages": target.held_pages + pages, "num_sequences": target.num_sequences + 1}
        after[move.target] = replace(target, **grown), there
    return {i: (instance, held) for i, (instance, held) in after.items()}, len(plan)


RULES = st.builds(
    MoveRule,
    min_gap_tokens=st.integers(1, 500),
    min_gain=st.floats(0.01, 0.5),
    max_moving=st.integers(1, 4),
)


@given(fleets(), RULES)
def test_the_gap_never_grows_and_nobody_is_lost_or_doubled(loads: Loads, rule: MoveRule) -> None:
    after, num_moves = moved(loads, rule)
    assert num_moves <= rule.max_moving
    assert spread(after) <= spread(loads)
    before_ids = sorted(m.request_id for _, held in loads.values() for m in held)
    assert sorted(m.request_id for _, held in after.values() for m in held) == before_ids
    for instance, _ in after.values():
        assert instance.num_sequences + instance.num_waiting <= instance.max_sequences


@given(fleets(), RULES)
def test_moving_comes_to_an_end_and_nobody_goes_back_and_forth(loads: Loads, rule: MoveRule) -> None:
    places: dict[RequestId, list[InstanceId]] = {}
    for instance_id, (_, held) in loads.items():
        places.update({m.request_id: [instance_id] for m in held})
    for _ in range(60):
        loads, num_moves = moved(loads, rule)
        if not num_moves:
            break
        for instance_id, (_, held) in loads.items():
            for m in held:
                if places[m.request_id][-1] != instance_id:
                    places[m.request_id].append(instance_id)
    else:
        raise AssertionError("still moving after 60 plans in which nothing else happened")
    for path in places.values():
        assert all(a != c for a, c in zip(path, path[2:], strict=False)), f"there and back: {path}"


@given(fleets(), RULES, st.randoms(use_true_random=False))
def test_equal_machines_give_equal_plans_in_any_order(
    loads: Loads, rule: MoveRule, rng: random.Random
) -> None:
    shuffled = [(i, (instance, rng.sample(held, len(held)))) for i, (instance, held) in loads.items()]
    rng.shuffle(shuffled)
    assert plan_rebalance(dict(shuffled), rule) == plan_rebalance(loads, rule)
    instances = [instance for instance, _ in loads.values()]
    chosen = choose_instance(instances, tokens=100, most_tokens=200)
    assert choose_instance(reversed(instances), tokens=100, most_tokens=200) == chosen
