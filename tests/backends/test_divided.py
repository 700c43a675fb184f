"""The real backend where every request has a part of the cache: what is copied, what is gone on with."""

from __future__ import annotations

import pytest

from engine_service.backends.llama_cpp.backend import DividedLlamaCppBackend
from engine_service.scheduling.model import PreemptionMode, RequestId
from tests.backends.conftest import CONTEXT_TOKENS, MAX_SEQUENCES
from tests.backends.driver import Driver

LONG = "Tell me about the lamps in the hall, one after the other, and about the windows, too. " * 3


@pytest.fixture
def parts(llama_cpp_divided: DividedLlamaCppBackend) -> Driver:
    return Driver(llama_cpp_divided)


def rid(name: str) -> RequestId:
    return RequestId(name)


def test_a_request_is_as_long_as_a_part_at_most(parts: Driver) -> None:
    capacity = parts.backend.capacity
    assert capacity.max_context_tokens == CONTEXT_TOKENS
    assert capacity.num_pages * capacity.page_tokens == MAX_SEQUENCES * CONTEXT_TOKENS
    with pytest.raises(ValueError, match=f"there are {CONTEXT_TOKENS} slots"):
        parts.admit(parts.order("long", "Hello", 4), reserved_tokens=CONTEXT_TOKENS + 1)
    parts.admit(parts.order("full", "Hello", 4), reserved_tokens=CONTEXT_TOKENS)


def test_a_conversation_goes_on_in_its_part(llama_cpp_divided: DividedLlamaCppBackend, parts: Driver) -> None:
    first = parts.order("first", LONG, 4)
    answer = parts.run(first)
    cached = llama_cpp_divided.num_cells_cached
    next_turn = (*first.prompt_ids, *answer.token_ids, *parts.prompt("And at night?"))
    assert parts.admit(parts.order("second", next_turn, 4)) == cached == len(first.prompt_ids) + 3
    assert llama_cpp_divided.num_cells_cached == 0, "nothing was copied"


def test_a_beginning_that_questions_share_is_not_computed_again(
    llama_cpp_divided: DividedLlamaCppBackend, parts: Driver
) -> None:
    first, second = (parts.order(n, f"Please answer in one word: is {n} a number?", 40) for n in "ab")
    shared = next(
        i for i, (x, y) in enumerate(zip(first.prompt_ids, second.prompt_ids, strict=True)) if x != y
    )
    cold = parts.run(parts.order("cold", second.prompt_ids, 40))
    llama_cpp_divided.drop_cache()
    answer = parts.run(first)
    assert parts.admit(second) == shared > 4
    parts.finish("b")
    assert parts.outputs[rid("b")].text == cold.text
    next_turn = (*first.prompt_ids, *answer.token_ids, *parts.prompt("Why?"))
    assert parts.admit(parts.order("next", next_turn, 4)) >= len(first.prompt_ids), "it was moved, not lost"


def test_a_long_conversation_keeps_its_part_where_little_is_shared(
    llama_cpp_divided: DividedLlamaCppBackend, parts: Driver
) -> None:
    parts.run(parts.order("long", LONG * 2, 4))
    assert parts.admit(parts.order("other", "Hello", 4)) == 0
    assert llama_cpp_divided.num_parked == 0


def test_more_conversations_than_parts_come_back_from_host_memory(
    llama_cpp_divided: DividedLlamaCppBackend, parts: Driver
) -> None:
    orders = [parts.order(f"r{i}", f"Conversation {i}. {LONG}", 2) for i in range(MAX_SEQUENCES + 3)]
    for order in orders:
        parts.run(order)
    assert llama_cpp_divided.num_parked >= 3
    again = parts.order("again", (*orders[0].prompt_ids, *parts.prompt("Go on.")), 6)
    assert parts.admit(again) >= len(orders[0].prompt_ids)
    parts.finish("again")
    llama_cpp_divided.drop_cache()
    assert parts.run(parts.order("cold", again.prompt_ids, 6)).text == parts.outputs[rid("again")].text


def test_what_a_preempted_request_left_is_gone_on_with_by_nobody_else(parts: Driver) -> None:
    order = parts.order("mine", LONG, 6)
    parts.admit(order)
    parts.prefill("mine")
    parts.backend.preempt(rid("mine"), PreemptionMode.RELEASE)
    assert parts.admit(parts.order("twin", LONG, 6)) == len(order.prompt_ids) - 1
    assert parts.resume(rid("mine")) == len(order.prompt_ids)
    parts.finish("mine", "twin")
    assert parts.outputs[rid("mine")].token_ids == parts.outputs[rid("twin")].token_ids


def test_a_short_pinned_beginning_is_copied_into_every_part(parts: Driver) -> None:
    prefix = parts.prompt("You are the voice of this house.")
    parts.run(parts.order("system", prefix, 0, keep_prefix=True))
    reference = parts.run(parts.order("alone", prefix + parts.prompt("Who are you?"), 6))
    names = [f"r{i}" for i in range(MAX_SEQUENCES)]
    for name in names:
        order = parts.order(name, prefix + parts.prompt("Who are you?"), 6)
        assert parts.admit(order) >= len(prefix)
    parts.finish(*names)
    assert {parts.outputs[rid(name)].text for name in names} == {reference.text}


def test_parts_that_do_not_lie_side_by_side_are_computed_together(parts: Driver) -> None:
    reference = parts.run(parts.order("alone", "Count to ten.", 8))
    for name in ("first", "between", "last"):
        parts.admit(parts.order(name, "Count to ten.", 8))
    parts.backend.release(rid("between"))
    parts.finish("last", "first")
    assert parts.outputs[rid("first")].text == parts.outputs[rid("last")].text == reference.text


def test_texts_embedded_side_by_side_are_what_each_is_alone(parts: Driver) -> None:
    """llama.cpp computes unequally long pieces apart, in an order of its own."""
    texts = {"short": (5, 6, 7, 8), "other": (9, 10, 11, 12, 13, 14, 15), "long": tuple(range(20, 40))}

    def embedded(*names: str) -> dict[str, tuple[float, ...]]:
        for name in names:
            order = parts.order(name, texts[name], 0, wants_embedding=True)
            assert parts.admit(order) == 0
        outcomes = parts.step(chunks={name: len(texts[name]) for name in names}).outcomes
        return {str(one.request_id): one.embedding for one in outcomes if one.embedding is not None}

    together = embedded("short", "other", "long")
    for name in texts:
        assert embedded(name)[name] == pytest.approx(together[name], abs=1e-5)
    assert together["short"] != pytest.approx(together["other"], abs=1e-2)
