"""Compiling grammars in several threads: nobody waits for another's, and each is compiled once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llguidance import LLTokenizer

from engine_service.backends.base import Constraint, ConstraintKind, InvalidConstraint
from engine_service.backends.grammar import GrammarCompiler

VOCAB_SIZE = LLTokenizer("byte").vocab_size


def regex(text: str) -> Constraint:
    return Constraint(kind=ConstraintKind.REGEX, text=text)


KNOWN, LARGE, WRONG = regex("[a-z]+"), regex("[a-z]{100}"), regex("(")


class Slow(GrammarCompiler):
    """A compiler whose grammars named in `slow` take as long as the test wants."""

    def __init__(self, *slow: Constraint) -> None:
        super().__init__(VOCAB_SIZE, lambda llguidance: llguidance.LLTokenizer("byte"))
        self.slow = slow
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.begun: list[Constraint] = []

    def _compile(self, constraint: Constraint) -> Any:
        self.begun.append(constraint)
        if constraint in self.slow:
            self.has_begun.set()
            assert self.may_go_on.wait(60)
        return super()._compile(constraint)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_who_has_another_grammar_does_not_wait_for_one_that_is_compiled(threads: ThreadPoolExecutor) -> None:
    compiler = Slow(LARGE)
    compiler.compile(KNOWN)
    large = threads.submit(compiler.compile, LARGE)
    assert compiler.has_begun.wait(60)
    try:
        for other in (KNOWN, regex("[0-9]+")):
            assert threads.submit(compiler.compile, other).result(30).allowed_ids().size
    finally:
        compiler.may_go_on.set()
    assert large.result(60).allowed_ids().size == 26


def test_a_grammar_that_many_want_at_once_is_compiled_once(threads: ThreadPoolExecutor) -> None:
    compiler = Slow(LARGE)
    wanted = [threads.submit(compiler.compile, LARGE) for _ in range(4)]
    assert compiler.has_begun.wait(60)
    compiler.may_go_on.set()
    matchers = [one.result(60) for one in wanted]
    assert compiler.begun == [LARGE]
    matchers[0].accept(ord("a"))
    assert len({id(matcher) for matcher in matchers}) == 4


def test_a_grammar_that_cannot_be_compiled_is_refused_each_time_and_not_kept(
    threads: ThreadPoolExecutor,
) -> None:
    compiler = Slow(WRONG)
    wanted = [threads.submit(compiler.compile, WRONG) for _ in range(2)]
    assert compiler.has_begun.wait(60)
    compiler.may_go_on.set()
    for one in wanted:
        with pytest.raises(InvalidConstraint, match="regex"):
            one.result(60)
    num_before = len(compiler.begun)
    with pytest.raises(InvalidConstraint, match="regex"):
        compiler.compile(WRONG)
    assert len(compiler.begun) == num_before + 1
