"""One request's tokens and everything its next token depends on, apart from the cache.

Decides when an output ends and what of it may be shown. Knows no device: a backend hands in a row of logits
and gets the outcome. It is untouched by preemption, which is why a request resumes exactly where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.base import FinishReason, GenerationOrder, SequenceOutcome, TokenLogprob
from engine_service.backends.sampling import Floats, Sampler, TokenFilter, log_probabilities
from engine_service.backends.text import BannedStrings, TextAssembler


class Matcher(TokenFilter, Protocol):
    """A grammar's state within one output."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow any more."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by a token that is allowed; raise ValueError if it is not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a generation must know about the model."""

    size: int
    end_ids: frozenset[int]  #: tokens that end an output
    token_bytes: Callable[[int], bytes]  #: what a token shows; empty for control tokens
    max_context_tokens: int  #: prompt plus output
    can_see: bool = False  #: pictures


class Generation:
    """The token ids of one request (prompt, then output) with sampler, grammar and text state."""

    __slots__ = ("_banned", "_healed", "_logprobs_wanted", "_matcher", "_sampler", "_text", "_tokens",
                 "_vocabulary", "num_prompt", "num_tokens", "order")  # fmt: skip

    def __init__(
        self, order: GenerationOrder, *, vocabulary: Vocabulary, matcher: Matcher | None = None
    ) -> None:
        """Check the order against the model; raise ValueError that names what is wrong."""
        check_order(order, vocabulary)
        self.order = order
        self.num_prompt = self.num_tokens = len(order.prompt_ids)
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._tokens = np.array(order.prompt_ids, dtype=np.int32)
        self._text = TextAssembler(order.stop)
        self._banned = BannedStrings(order.banned) if order.banned else None
        self._healed = order.healed.encode()
        self._logprobs_wanted = order.sampling.num_logprobs
        banned = vocabulary.end_ids if order.ignore_eos and matcher is None else ()
        self._sampler = Sampler(
            order.sampling, prompt_ids=order.prompt_ids, vocab_size=vocabulary.size, banned_ids=tuple(banned)
        )

    @property
    def matcher(self) -> Matcher | None:
        """The grammar's state, if there is one."""
        return self._matcher

    @property
    def vocab_size(self) -> int:
        """Tokens the model can choose from; a row of logits may be longer."""
        return self._vocabulary.size

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return self.num_tokens - self.num_prompt

    def tokens(self, start: int, end: int) -> NDArray[np.int32]:
        """Return the token ids [start, end); valid until the next token is added."""
        return self._tokens[start : min(end, self.num_tokens)]

    @property
    def last_token(self) -> int:
        """The newest token id."""
        return int(self._tokens[self.num_tokens - 1])

    def choose_next(self, logits: Floats, *, prefill_tokens: int = 0) -> SequenceOutcome:
        """Choose, keep and describe the next output token. Raises ValueError if none can be chosen."""
        token_id = self._choose(logits)
        logprobs = () if self._logprobs_wanted is None else (self._logprob(logits, token_id),)
        self._append(token_id)
        text, reason = self._take(token_id)
        return SequenceOutcome(
            request_id=self.order.request_id,
            prefill_tokens=prefill_tokens,
            token_ids=(token_id,),
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
        )

    def _choose(self, logits: Floats) -> int:
        is_healing = self._healed and not self.num_output
        is_refused = self._is_refused if is_healing or self._banned is not None else None
        return self._sampler.choose(logits, self._matcher, is_refused)

    def _is_refused(self, token_id: int) -> bool:
        """Return whether a token would break a promise: what the text begins with, or what is banned."""
        piece = self._vocabulary.token_bytes(token_id)
        if not self.num_output and not piece.startswith(self._healed):
            return True
        return self._banned is not None and self._banned.completes(self._own(piece, self.num_output))

    def _own(self, piece: bytes, place: int) -> bytes:
        """Return the bytes of output token number place without what belongs to the prompt."""
        return piece if place else piece[len(self._healed) :]

    def _take(self, token_id: int) -> tuple[str, FinishReason | None]:
        if token_id in self._vocabulary.end_ids:
            return self._text.finish(), FinishReason.STOP
        if self._matcher is not None:
            self._matcher.accept(token_id)
        piece = self._own(self._vocabulary.token_bytes(token_id), self.num_output - 1)
        if self._banned is not None:
            self._banned.push(piece)
        text = self._text.push(piece)
        if self._text.is_stopped:
            return text, FinishReason.STOP
        if self._matcher is not None and self._matcher.is_complete:
            return text + self._text.finish(), FinishReason.STOP
        if self.num_output >= self.order.max_tokens or self.num_tokens >= self._vocabulary.max_context_tokens:
            return text + self._text.finish(), FinishReason.LENGTH
        return text, None

    def _append(self, token_id: int) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate(
                (self._tokens, np.zeros(max(64, self.num_tokens // 2), dtype=np.int32))
            )
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def _logprob(self, logits: Floats, token_id: int) -> TokenLogprob:
        show = self._vocabulary.token_bytes
        own, best = log_probabilities(logits, token_id, self._logprobs_wanted or 0)
        return TokenLogprob(
            token_id=token_id, text=show(token_id), logprob=own, top=tuple((i, show(i), p) for i, p in best)
        )


def check_order(order: GenerationOrder, vocabulary: Vocabulary) -> None:
    """Raise ValueError for an order that this model can never carry out."""
    num_prompt = len(order.prompt_ids)
    if num_prompt < 1:
        raise ValueError("the prompt must have at least one token")
    if order.healed and order.constraint is not None:
        raise ValueError("a prompt cannot be healed where a grammar rules from the first token on")
    if order.max_tokens < 0:
        raise ValueError(f"max_tokens must be >= 0, not {order.max_tokens}")
    if order.wants_embedding and (order.max_tokens or order.keep_prefix):
        raise ValueError("an embedding is made of a prompt alone: with max_tokens 0, not kept as a prefix")
    if min(order.prompt_ids) < 0 or max(order.prompt_ids) >= vocabulary.size:
        raise ValueError(f"the prompt has token ids outside 0 to {vocabulary.size - 1}")
    _check_pictures(order, vocabulary)
    if num_prompt + min(order.max_tokens, 1) > vocabulary.max_context_tokens:
        raise ValueError(
            f"a prompt of {num_prompt} tokens leaves no room for an answer in a context of "
            f"{vocabulary.max_context_tokens} tokens"
        )


def _check_pictures(order: GenerationOrder, vocabulary: Vocabulary) -> None:
    if not order.pictures:
        return
    if not vocabulary.can_see:
        raise ValueError("this model cannot look at pictures")
    if order.keep_prefix:
        raise ValueError("a prompt with pictures cannot be kept as a prefix")
    ends = [0, *(placed.end for placed in order.pictures)]
    starts = [*(placed.start for placed in order.pictures), len(order.prompt_ids)]
    if any(start < end for end, start in zip(ends, starts, strict=True)):
        raise ValueError("pictures must stand one behind the other, within the prompt")


def common_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Return how many leading tokens both share."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


def as_tokens(token_ids: Sequence[int]) -> NDArray[np.int32]:
    """Return token ids as an array."""
    return np.array(token_ids, dtype=np.int32)
