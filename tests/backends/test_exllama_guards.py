"""What goes wrong in ExLlamaV2's and ExLlamaV3's generators once they are gated, and does not here.

Each test fails without its guard. The model reads the tokens back out of the cache, so that every mistake in
paging shows in the text.
"""

from __future__ import annotations

import pytest

from engine_service.backends.base import (
    BackendError,
    Constraint,
    ConstraintKind,
    FinishReason,
    Sampling,
)
from engine_service.backends.exllama.masks import PreparedMatcher
from engine_service.scheduling.model import PreemptionMode
from tests.backends.bench import Bench, MakeBench, prompt, rid
from tests.backends.conftest import Library
from tests.backends.echo import PAGE


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench(cache_tokens=16 * PAGE)


# -- failures inside an iteration ----------------------------------------------------------------------


def test_a_decode_pass_that_fails_costs_nobody_anything(bench: Bench) -> None:
    """The library counts the token before the pass; page and sequence drift apart, and it loops for ever."""
    for name, length in {"a": 200, "b": 230}.items():
        bench.admit(name, prompt(length), 80)
        bench.driver.prefill(name)
    bench.model.fail_next = [("decode", RuntimeError("out of memory"))]
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.driver.step(decodes=["a", "b"])
    for live in bench.backend._live.values():
        page = bench.backend._jobs[live.request_id].pages[0]
        assert page.kv_position == live.num_stored
    bench.driver.finish("a", "b")
    assert bench.is_exact("a", "b")
    assert bench.backend.num_pages_held == 0


def test_what_an_iteration_computed_before_it_failed_is_delivered(bench: Bench) -> None:
    bench.admit("talking", prompt(100), 20)
    bench.driver.prefill("talking")
    bench.admit("new", prompt(700, kind=1), 20)
    bench.model.fail_next = [("decode", RuntimeError("out of memory"))]
    outcome = bench.driver.step(decodes=["talking"], chunks={"new": 400})
    assert outcome.aborted
    assert [(one.prefill_tokens, one.token_ids) for one in outcome.outcomes] == [(0, ()), (400, ())]
    bench.driver.finish("talking", "new")
    assert bench.is_exact("talking", "new")


def test_a_prefill_that_fails_costs_only_its_own_request(bench: Bench) -> None:
    bench.admit("talking", prompt(100), 20)
    bench.driver.prefill("talking")
    bench.admit("too big", prompt(700, kind=1), 20)
    bench.admit("fine", prompt(300, kind=2), 20)
    bench.model.fail_next = [("prefill", RuntimeError("out of memory"))]
    bench.driver.step(decodes=["talking"], chunks={"too big": 700, "fine": 300})
    assert str(bench.driver.outputs[rid("too big")].error) == "out of memory"
    assert len(bench.driver.outputs[rid("talking")].token_ids) == 2, "it decoded in the same iteration"
    bench.driver.finish("talking", "fine")
    assert bench.is_exact("talking", "fine")
    assert rid("too big") not in bench.backend.request_ids


def test_a_page_half_overwritten_by_a_failed_prefill_is_not_trusted_again(make_bench: MakeBench) -> None:
    """A page that was taken gets its old identity back if it was not written; a failed pass writes some."""
    bench = make_bench(cache_tokens=2 * PAGE)
    bench.run("old", prompt(200), 4)
    bench.run("filler", prompt(200, kind=1), 4)
    bench.admit("fails", prompt(150, kind=2), 4)
    bench.model.fail_next = [("prefill", RuntimeError("out of memory"))]
    bench.driver.step(chunks={"fails": 150})
    assert bench.driver.outputs[rid("fails")].error is not None
    bench.run("old again", prompt(200), 4)
    assert bench.is_exact("old again")


def test_repeated_failures_begin_anew_and_everyone_goes_on(bench: Bench) -> None:
    bench.run("prefix", prompt(300, kind=5), 0, keep_prefix=True)
    bench.admit("a", prompt(200), 40)
    bench.driver.prefill("a")
    bench.admit("b", prompt(300, kind=5) + prompt(300, kind=6), 40)
    bench.driver.step(decodes=["a"], chunks={"b": 150})
    bench.model.fail_next = [("decode", RuntimeError("broken"))] * 3
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            bench.driver.step(decodes=["a"])
    before = [page.kv_position for page in bench.backend._pinned[rid("prefix")].pages]
    bench.driver.step(decodes=["a"])  # the third failure: an empty page table, everything computed again
    assert [page.kv_position for page in bench.backend._pinned[rid("prefix")].pages] == before
    assert bench.num_computed("prefill") > 700
    bench.driver.finish("a", "b")
    assert bench.is_exact("a", "b")
    assert bench.run("c", (*prompt(300, kind=5), 1, 2, 3), 5) == 300
    assert bench.is_exact("c")


def test_a_device_that_computes_nothing_is_reported_lost(bench: Bench) -> None:
    bench.admit("a", prompt(200), 40)
    bench.driver.prefill("a")
    bench.model.fail_next = [("decode", RuntimeError("broken"))] * 3 + [("prefill", RuntimeError("dead"))]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            bench.driver.step(decodes=["a"])
    with pytest.raises(BackendError, match="computes nothing any more: dead"):
        bench.driver.step(decodes=["a"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_fails_costs_only_its_own_request(bench: Bench, temperature: float) -> None:
    """An exception inside the iteration would cost everybody this token."""
    digits = Constraint(kind=ConstraintKind.REGEX, text="[0-9]{3}")
    for name in ("a", "b"):
        bench.admit(name, prompt(240, kind=ord(name)), 60)
    sampling = Sampling(temperature=temperature, seed=1)
    bench.admit("guilty", prompt(100), 9, sampling=sampling, constraint=digits)
    for name in ("a", "b", "guilty"):
        bench.driver.prefill(name)
    matcher = bench.backend._live[rid("guilty")].generation.matcher
    assert isinstance(matcher, PreparedMatcher)
    with pytest.raises(ValueError, match="not allowed here"):
        matcher.accept(bench.backend.tokenizer.encode("x")[0])  # the grammar is broken from now on
    outcome = bench.driver.step(decodes=["a", "guilty", "b"])
    assert not outcome.aborted
    assert [len(one.token_ids) for one in outcome.outcomes] == [1, 0, 1]
    assert isinstance(bench.driver.outputs[rid("guilty")].error, ValueError)
    bench.driver.finish("a", "b")
    assert bench.is_exact("a", "b")
    assert bench.backend.num_pages_held == 0


def test_a_mask_is_prepared_by_the_librarys_workers(bench: Bench) -> None:
    """The grammar works while the forward pass runs, and the result is the same as without."""
    digits = Constraint(kind=ConstraintKind.REGEX, text="[0-9]{12}")
    greedy, sampled = Sampling(temperature=0.0), Sampling(temperature=1.0, seed=3)
    workers = bench.backend._generator.filter_pool._threads
    bench.run("greedy", prompt(100), 20, sampling=greedy, constraint=digits)
    assert not workers, "the best token is only asked about"
    bench.run("alone", prompt(100), 20, sampling=sampled, constraint=digits)
    assert workers
    bench.admit("prepared", prompt(100), 20, sampling=sampled, constraint=digits)
    bench.driver.prefill("prepared")
    bench.driver.step(decodes=["prepared"])
    bench.backend.preempt(rid("prepared"), PreemptionMode.RELEASE)
    bench.run("between", prompt(50, kind=2), 2)
    bench.driver.resume(rid("prepared"))
    bench.driver.finish("prepared")
    texts = [bench.driver.outputs[rid(name)].text for name in ("alone", "prepared")]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 12
    assert texts[0].isdigit()


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_mask_that_was_prepared_in_vain_is_forgotten(bench: Bench, kind: str) -> None:
    """A library asserts that no mask is left over from a pass that failed."""
    digits = Constraint(kind=ConstraintKind.REGEX, text="[0-9]{12}")
    sampling = Sampling(temperature=1.0, seed=3)
    bench.run("alone", prompt(100), 20, sampling=sampling, constraint=digits)
    bench.admit("again", prompt(100), 20, sampling=sampling, constraint=digits)
    bench.driver.prefill("again")
    bench.admit("new", prompt(300, kind=1), 5)
    bench.model.fail_next = [(kind, RuntimeError("out of memory"))]
    if kind == "decode":
        with pytest.raises(RuntimeError, match="out of memory"):
            bench.driver.step(decodes=["again"])
    else:
        bench.driver.step(decodes=["again"], chunks={"new": 300})
    bench.driver.finish("again")
    texts = [bench.driver.outputs[rid(name)].text for name in ("alone", "again")]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 12


# -- pages that were named before they were filled -----------------------------------------------------


def test_a_page_can_be_completed_that_another_request_has_named_already(bench: Bench) -> None:
    """The library asserts that whoever has the name is filled; a paused prompt is not."""
    first = prompt(250)
    follow_up = (*first, *bench.model.continuation(first, 40))
    bench.admit("streaming", first, 40)
    bench.driver.prefill("streaming")
    assert bench.admit("follow-up", (*follow_up, 1), 10) == 250
    bench.driver.finish("streaming")
    bench.driver.finish("follow-up")
    assert bench.is_exact("streaming", "follow-up")


def test_two_equal_requests_complete_the_same_page(bench: Bench) -> None:
    for name in ("one", "two"):
        bench.admit(name, prompt(250), 30)
    bench.driver.step(chunks={"one": 100})
    bench.driver.step(chunks={"two": 200})
    bench.driver.finish("one")
    bench.driver.finish("two")
    assert bench.is_exact("one", "two")


def test_a_page_that_lost_its_name_has_it_again_when_it_is_filled(bench: Bench) -> None:
    """Otherwise a pinned prefix is promised, and not found."""
    first = prompt(250)
    longer = (*first, *bench.model.continuation(first, 300))
    bench.admit("streaming", first, 40)
    bench.driver.prefill("streaming")
    bench.admit("prefix", longer, 0, keep_prefix=True)
    for _ in range(8):
        bench.driver.step(decodes=["streaming"])  # completes the page that the prefix has named
    bench.backend.release(rid("streaming"))
    bench.backend.drop_cache()
    bench.driver.finish("prefix")
    bench.backend.drop_cache()
    shared = bench.backend.shared_prefix_tokens((*longer, 1))
    held = bench.backend.num_pages_held
    assert shared == 512
    assert bench.admit("user", (*longer, 1), 5) == len(longer)
    assert bench.backend.num_pages_held == held + 1, "all but the last page is shared"
    bench.driver.finish("user")
    assert bench.is_exact("user")


def test_the_last_reserved_slot_can_be_the_last_of_a_page(bench: Bench) -> None:
    """The library looks at the page after a completed one, which need not be reserved yet."""
    bench.admit("slice", prompt(200), 300, reserved_tokens=PAGE)
    bench.driver.prefill("slice")
    for _ in range(PAGE - 200):
        assert not bench.driver.step(decodes=["slice"]).aborted
    with pytest.raises(ValueError, match="stores 256 tokens and reserved 256"):
        bench.driver.step(decodes=["slice"])
    bench.backend.grow(rid("slice"), reserved_tokens=500)
    for _ in range(10):
        bench.driver.step(decodes=["slice"])
    bench.backend.preempt(rid("slice"), PreemptionMode.RELEASE)
    assert bench.driver.resume(rid("slice")) == PAGE + 10, "the new page is known to follow the old one"
    bench.driver.finish("slice")
    assert bench.is_exact("slice")


def test_a_prompt_that_fills_the_cache_is_computed(make_bench: MakeBench) -> None:
    """A library asks for room for an output, also where none is wanted."""
    bench = make_bench(cache_tokens=4 * PAGE)
    bench.run("full", prompt(4 * PAGE), 0)
    assert bench.driver.outputs[rid("full")].reason is FinishReason.PREFIX
    bench.run("again", prompt(4 * PAGE - 1), 1)
    assert bench.is_exact("again")


# -- what is kept, and for how long --------------------------------------------------------------------


def test_a_filled_page_behind_a_hole_is_kept(bench: Bench) -> None:
    """The library clears the page behind every chunk that ends with its page."""
    bench.run("first", prompt(800), 3)
    bench.table.unreferenced_pages[bench.names_of(prompt(800))[1]].clear()
    bench.num_computed("prefill")
    assert bench.admit("again", prompt(800), 3) == 256
    bench.driver.finish("again", chunk=256)
    assert bench.num_computed("prefill") == 256, "the hole and nothing else"
    assert bench.is_exact("again")


def test_the_end_of_a_preempted_request_is_given_up_before_its_beginning(bench: Bench) -> None:
    """By the library's own order the long-running request loses its beginning, and so everything."""
    bench.admit("long", prompt(1200), 30)
    bench.driver.prefill("long")
    for number in range(4):
        bench.run(f"younger{number}", prompt(300, kind=20 + number), 2)
    bench.backend.preempt(rid("long"), PreemptionMode.RELEASE)
    bench.run("large", prompt(12 * PAGE, kind=60), 2)
    assert bench.driver.resume(rid("long")) == 3 * PAGE, "its first pages are still there"
    bench.driver.finish("long")
    assert bench.is_exact("long")


def test_a_request_does_not_evict_what_it_is_about_to_reuse(make_bench: MakeBench) -> None:
    """By age alone, the page for its beginning would be taken from its own third page."""
    bench = make_bench(cache_tokens=6 * PAGE)
    bench.run("first", prompt(800), 2)
    pages = {page.phash: page for page in bench.table.all_pages}
    for name in bench.names_of(prompt(800))[:2]:
        pages[name].clear()
        pages[name].access_serial = 0
    bench.admit("holder", prompt(300, kind=3), 50)  # takes those two
    bench.run("younger", prompt(300, kind=4), 2)
    bench.num_computed("prefill")
    bench.run("again", prompt(800), 2)
    assert bench.num_computed("prefill") == 2 * PAGE + (799 - 3 * PAGE)
    assert bench.is_exact("again")


def test_a_partly_filled_page_is_reused_even_if_it_is_taken_for_another_part(make_bench: MakeBench) -> None:
    bench = make_bench(cache_tokens=2 * PAGE)
    bench.run("first", prompt(200), 2)
    assert bench.admit("again", prompt(200), 200) == 199
    bench.driver.finish("again")
    assert bench.is_exact("again")


def test_pages_are_not_moved_while_a_request_sits_out(bench: Bench) -> None:
    """The library defragments when it sees no job left, and asserts that no page is held."""
    bench.admit("parked", prompt(600), 20)
    bench.driver.prefill("parked")
    bench.run("prefix", prompt(300, kind=5), 0, keep_prefix=True)
    for number in range(50):
        bench.run(f"r{number}", prompt(500, kind=number), 3)
    bench.driver.finish("parked")
    assert bench.is_exact("parked")


def test_pages_are_moved_when_nobody_holds_any_and_stay_usable(bench: Bench) -> None:
    for number in range(30):
        bench.run(f"r{number}", prompt(300 + 200 * (number % 4), kind=number % 6), 3)
        assert bench.is_exact(f"r{number}")
    moved = [page for page in bench.table.all_pages if page.new_page_index != 0]
    assert moved, "it was defragmented"


@pytest.mark.parametrize("length", [1, 2, 256, 257, 512, 513])
def test_short_and_wholly_cached_prompts_come_to_their_end(bench: Bench, length: int) -> None:
    for name in ("first", "second"):
        bench.run(name, prompt(length), 3)
        assert bench.driver.outputs[rid(name)].reason is FinishReason.LENGTH
        assert bench.is_exact(name)


def test_shared_pages_are_charged_once(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        bench.admit(name, (*prompt(600), ord(name)), 20)
        bench.driver.prefill(name)
    charges = [bench.backend.charge(rid(name)) for name in ("a", "b", "c")]
    assert charges == pytest.approx([2 / 3 + 1] * 3)
    assert sum(charges) == pytest.approx(bench.backend.num_pages_held)


# -- drafts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [5, 6, 7, 8, 60])
def test_drafts_that_come_to_nothing_leave_no_trace_in_a_page(make_bench: MakeBench, max_tokens: int) -> None:
    """What was drafted behind an output's end is stored in its page, but is not the output's."""
    bench = make_bench(cache_tokens=8 * PAGE, max_sequences=2, drafts=True, num_draft_tokens=3)
    first = prompt(250)
    bench.run("first", first, max_tokens)
    ids = (*first, *bench.driver.outputs[rid("first")].token_ids)
    assert len(ids) == 250 + max_tokens
    bench.run("next", (*ids, 1, 2), 20)
    assert bench.is_exact("first", "next")
    passes = [length for kind, _, length in bench.model.calls if kind == "decode"]
    assert max(passes) == 4, "it drafted"


def test_drafts_stay_within_what_was_reserved(make_bench: MakeBench) -> None:
    bench = make_bench(cache_tokens=8 * PAGE, max_sequences=2, drafts=True, num_draft_tokens=3)
    bench.admit("tight", prompt(100), 20, reserved_tokens=101)
    bench.driver.prefill("tight")
    assert len(bench.driver.outputs[rid("tight")].token_ids) == 2, "one is stored, the other not yet"
    with pytest.raises(ValueError, match="stores 101 tokens and reserved 101"):
        bench.driver.step(decodes=["tight"])
    bench.backend.grow(rid("tight"), reserved_tokens=120)
    bench.driver.finish("tight")
    assert bench.is_exact("tight")


def test_drafts_behind_a_token_that_failed_are_taken_back(make_bench: MakeBench) -> None:
    """They reach into the next page, which would say that it begins a prompt."""
    bench = make_bench(cache_tokens=8 * PAGE, max_sequences=2, drafts=True, num_draft_tokens=3)
    digits = Constraint(kind=ConstraintKind.REGEX, text="[0-9]{9}")
    bench.admit("guilty", prompt(250), 9, constraint=digits)
    bench.driver.prefill("guilty")
    for _ in range(3):
        bench.driver.step(decodes=["guilty"])
    matcher = bench.backend._live[rid("guilty")].generation.matcher
    with pytest.raises(ValueError, match="not allowed here"):
        matcher.accept(bench.backend.tokenizer.encode("x")[0])
    bench.driver.step(decodes=["guilty"])
    assert bench.driver.outputs[rid("guilty")].error is not None
    bench.run("next", prompt(300, kind=2), 20)
    assert bench.is_exact("next"), "no page claims to begin with what was drafted"


# -- chunks and aborts ---------------------------------------------------------------------------------


def test_a_chunk_ends_where_it_was_ordered_to(bench: Bench) -> None:
    """The library cuts at pages: 300 would be 256, and 255 would never make any progress."""
    bench.admit("odd", prompt(1200), 5)
    for size in (255, 1, 300, 7, 513):
        outcome = bench.driver.step(chunks={"odd": size})
        assert outcome.outcomes[0].prefill_tokens == size
        assert not outcome.outcomes[0].token_ids
    bench.driver.finish("odd")
    assert bench.is_exact("odd")


def test_a_chunk_that_leaves_one_token_does_not_sample(bench: Bench) -> None:
    bench.admit("almost", prompt(300), 5)
    assert not bench.driver.step(chunks={"almost": 299}).outcomes[0].token_ids
    assert bench.driver.step(chunks={"almost": 1}).outcomes[0].token_ids
    assert bench.is_exact("almost")


def test_no_forward_pass_is_longer_than_the_configured_chunk(make_bench: MakeBench) -> None:
    bench = make_bench(cache_tokens=16 * PAGE, chunk_tokens=256)
    bench.run("long", prompt(1500), 2)
    assert max(length for _, _, length in bench.model.calls) == 256


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_an_aborted_prefill_keeps_what_was_computed(make_bench: MakeBench, passes: int) -> None:
    bench = make_bench(cache_tokens=16 * PAGE, chunk_tokens=256)
    bench.admit("talking", prompt(100), 20)
    bench.driver.prefill("talking")
    bench.admit("long", prompt(1000, kind=1), 5)
    bench.model.calls.clear()

    def abort_later() -> None:
        if len(bench.model.calls) > passes:
            bench.backend.abort()

    bench.model.on_prefill = abort_later
    outcome = bench.driver.step(decodes=["talking"], chunks={"long": 1000})
    assert outcome.aborted
    # ExLlamaV3 finishes the pass under way.
    finished = passes + (not bench.stops_within_a_pass)
    assert outcome.outcomes[1].prefill_tokens == finished * 256
    bench.model.on_prefill = None
    bench.driver.finish("talking", "long")
    assert bench.is_exact("talking", "long")


# -- what is shown ---------------------------------------------------------------------------------------


def test_text_held_back_for_a_stop_string_is_shown_when_the_model_ends(bench: Bench) -> None:
    """The library leaves it out of the text, and tells it apart."""
    end_id = bench.backend._loaded.texts.eos_id
    for kind in range(1000):
        ids = bench.model.continuation(prompt(80, kind=kind), 40, ignore_eos=False)
        if end_id in ids[4:] and ids.index(end_id) >= 4:
            break
    text = bench.backend.tokenizer.decode(ids[: ids.index(end_id)])
    stop = text[-3:] + " and more"
    bench.run("held", prompt(80, kind=kind), 60, stop=(stop,), ignore_eos=False)
    output = bench.driver.outputs[rid("held")]
    assert output.reason is FinishReason.STOP
    assert output.text == text
    assert output.texts[-1] == text[-3:], "it was held back until the end"


# -- compared with the library by itself ---------------------------------------------------------------


def test_five_new_prompts_hold_a_stream_up_for_one_chunk_instead_of_five(
    library: Library, make_bench: MakeBench
) -> None:
    """Tokens of prefill between two decode passes: a library computes a chunk of every new prompt."""
    chunk = 512
    bench = make_bench(cache_tokens=32 * PAGE, chunk_tokens=chunk)
    library.iterate_ungated(bench.backend._loaded, [prompt(1000, kind=n) for n in range(5)], chunk=chunk)
    assert bench.num_computed("prefill") == 5 * chunk

    bench = make_bench(cache_tokens=32 * PAGE, chunk_tokens=chunk)
    bench.admit("stream", prompt(50), 20)
    bench.driver.prefill("stream")
    for number in range(5):
        bench.admit(f"new{number}", prompt(1000, kind=number), 5)
    bench.num_computed("prefill")
    for number in range(5):
        bench.driver.step(decodes=["stream"], chunks={f"new{number}": chunk})
        assert bench.num_computed("prefill") == chunk
    assert len(bench.driver.outputs[rid("stream")].token_ids) == 6
    assert bench.is_exact("stream")


def test_a_backend_that_is_closed_leaves_no_model_in_memory(make_bench: MakeBench) -> None:
    bench = make_bench(cache_tokens=8 * PAGE, max_sequences=2, drafts=True, num_draft_tokens=3)
    bench.run("a", prompt(100), 5)
    bench.backend.close()
    assert bench.model.is_unloaded
    assert bench.backend._loaded.draft_model.is_unloaded
    bench.backend.close()


# -- what cannot be ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, 128, 300, 700])
def test_a_chunk_that_is_no_multiple_of_a_page_is_refused(make_bench: MakeBench, chunk: int) -> None:
    with pytest.raises(
        ValueError, match=f"chunk_tokens must be a multiple of 256, at least 256, not {chunk}"
    ):
        make_bench(chunk_tokens=chunk)


def test_a_cache_too_small_to_draft_is_refused(make_bench: MakeBench) -> None:
    with pytest.raises(ValueError, match="too small to draft for 8 requests"):
        make_bench(cache_tokens=8 * PAGE, num_draft_tokens=4)
