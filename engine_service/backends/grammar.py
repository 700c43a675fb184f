"""Grammars that force an output: JSON schema, regex and lark, compiled by llguidance.

Decides which tokens may come next. Knows no request. llguidance is imported when the first grammar is
compiled, so that the backend works without it until then.

JSON is written without free white space: a small model given the choice produces blanks until its budget is
spent.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np

from engine_service.backends.base import Constraint, ConstraintKind, InvalidConstraint
from engine_service.backends.sampling import TokenIds

_NUM_KEPT: Final = 64


class GrammarCompiler:
    """Compiles constraints for one model (any thread) and keeps the latest."""

    def __init__(
        self,
        vocab_size: int,
        build_tokenizer: Callable[[Any], Any],
        *,
        in_use: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Prepare nothing yet: the token table takes a quarter of a second and may never be needed.

        build_tokenizer gets the module llguidance and returns its LLTokenizer for the model. in_use keeps
        the model's vocabulary from being freed meanwhile, where that can happen.
        """
        self._vocab_size = vocab_size
        self._build_tokenizer = build_tokenizer
        self._in_use = in_use
        self._lock = threading.Lock()  # of the table; nothing is compiled under it
        self._compiled: OrderedDict[Constraint, Future[Any]] = OrderedDict()
        self._tokenizer: Any = None
        self._tokenizer_lock = threading.Lock()

    def compile(self, constraint: Constraint) -> GrammarMatcher:
        """Return a matcher at the beginning of an output; raise InvalidConstraint that says where and why.

        Who asks for one that is being compiled waits for it, and nobody for another's: a large schema takes
        a while, and the engine's thread asks for grammars while everybody waits for it.

        llguidance reads the model's vocabulary while it compiles: BackendError once the model is closed.
        """
        with self._in_use():
            compiled, is_new = self._entry(constraint)
            if is_new:
                self._fill(compiled, constraint)
            return GrammarMatcher(compiled.result().deep_copy(), self._vocab_size)

    def _entry(self, constraint: Constraint) -> tuple[Future[Any], bool]:
        """Return what holds the constraint's grammar or will, and whether the caller is to compile it."""
        with self._lock:
            compiled = self._compiled.get(constraint)
            if compiled is not None:
                self._compiled.move_to_end(constraint)
                return compiled, False
            compiled = self._compiled[constraint] = Future()
            if len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
            return compiled, True

    def _fill(self, compiled: Future[Any], constraint: Constraint) -> None:
        try:
            compiled.set_result(self._compile(constraint))
        except BaseException as error:
            with self._lock:
                if self._compiled.get(constraint) is compiled:
                    del self._compiled[constraint]
            compiled.set_exception(error)

    def _compile(self, constraint: Constraint) -> Any:
        llguidance = _import_llguidance()
        matcher_type = llguidance.LLMatcher
        grammar = _grammar_source(constraint, matcher_type)
        tokenizer = self._own_tokenizer(llguidance)
        is_wrong, messages = matcher_type.validate_grammar_with_warnings(grammar, tokenizer)
        if is_wrong:
            raise InvalidConstraint(f"{constraint.kind.value}: {'; '.join(messages)}")
        matcher = matcher_type(tokenizer, grammar)
        if matcher.is_error():
            raise InvalidConstraint(f"{constraint.kind.value}: {matcher.get_error()}")
        self._check_beginning(constraint, matcher)
        return matcher

    def _own_tokenizer(self, llguidance: Any) -> Any:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._build_tokenizer(llguidance)
            return self._tokenizer

    def _check_beginning(self, constraint: Constraint, matcher: Any) -> None:
        """Raise InvalidConstraint for a grammar without a first token: it compiles and fails later."""
        try:
            GrammarMatcher(matcher.deep_copy(), self._vocab_size).allowed_ids()
        except ValueError as error:
            raise InvalidConstraint(f"{constraint.kind.value}: nothing matches it: {error}") from error


class GrammarMatcher:
    """A compiled grammar's state within one output."""

    __slots__ = ("_bits", "_matcher", "_vocab_size")

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        """Begin at the start of the grammar."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.uint32)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow any more."""
        return bool(self._matcher.is_stopped())

    def allows(self, token_id: int) -> bool:
        """Return whether this one token may come next (microseconds; no mask is computed)."""
        return int(self._matcher.validate_tokens([token_id])) == 1

    def allowed_ids(self) -> TokenIds:
        """Return every token that may come next, ascending (about 0.3 ms)."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=self._vocab_size)
        return np.flatnonzero(bits)

    def accept(self, token_id: int) -> None:
        """Advance by a token; raise ValueError if the grammar does not allow it."""
        if not self._matcher.consume_token(token_id):
            raise ValueError(f"token {token_id} is not allowed here: {self._reason()}")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the grammar failed: {self._reason()}")

    def _reason(self) -> str:
        """Return llguidance's message without the dump of its state that follows."""
        return str(self._matcher.get_error()).partition("\n")[0]


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidConstraint("grammars need the package llguidance: pip install llguidance") from error
    return llguidance


def _grammar_source(constraint: Constraint, matcher_type: Any) -> Any:
    try:
        match constraint.kind:
            case ConstraintKind.JSON_SCHEMA:
                return matcher_type.grammar_from_json_schema(
                    _schema(constraint.text), overrides={"whitespace_flexible": False}
                )
            case ConstraintKind.REGEX:
                return matcher_type.grammar_from_regex(constraint.text)
            case ConstraintKind.LARK:
                return matcher_type.grammar_from_lark(constraint.text)
    except (ValueError, TypeError) as error:
        raise InvalidConstraint(f"{constraint.kind.value}: {error}") from error


def _schema(text: str) -> dict[str, Any]:
    schema = json.loads(text)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object, not {text.strip()[:40]}")
    return schema
