"""Drives a backend by hand, one iteration after the other, the way the engine thread does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_service.backends.base import (
    Backend,
    ChunkOrder,
    FinishReason,
    GenerationOrder,
    Sampling,
    SequenceOutcome,
    StepOutcome,
    TokenLogprob,
)
from engine_service.scheduling.model import RequestId

GREEDY = Sampling(temperature=0.0)
# The gap between the two best tokens below which a change of rounding may turn one into the other. llama.cpp
# adds attention in the order of cells; measured flips had gaps up to 0.25 (natural logarithm).
NEAR_TIE = 0.3


@dataclass
class Output:
    """What one request has given so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prefilled: int = 0
    reason: FinishReason | None = None
    error: Exception | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_over(self) -> bool:
        return self.reason is not None or self.error is not None

    def add(self, outcome: SequenceOutcome) -> None:
        assert not self.is_over, "an outcome after the end"
        self.texts.append(outcome.text)
        self.token_ids.extend(outcome.token_ids)
        self.logprobs.extend(outcome.logprobs)
        self.prefilled += outcome.prefill_tokens
        self.reason, self.error = outcome.finish_reason, outcome.error


class Driver:
    """Keeps, for every request, how much of it is computed."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.outputs: dict[RequestId, Output] = {}
        self.left: dict[RequestId, int] = {}  # tokens to compute before the next one can be chosen
        self._orders: dict[RequestId, GenerationOrder] = {}

    # -- orders

    def prompt(self, text: str) -> tuple[int, ...]:
        chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return tuple(self.backend.tokenizer.encode(chat, parse_special=True))

    def order(self, name: str, prompt: str | Sequence[int], max_tokens: int, **rest: Any) -> GenerationOrder:
        ids = self.prompt(prompt) if isinstance(prompt, str) else tuple(prompt)
        rest.setdefault("sampling", GREEDY)
        return GenerationOrder(request_id=RequestId(name), prompt_ids=ids, max_tokens=max_tokens, **rest)

    def admit(self, order: GenerationOrder, *, reserved_tokens: int | None = None) -> int:
        reserved = reserved_tokens or len(order.prompt_ids) + order.max_tokens
        cached = self.backend.admit(order, reserved_tokens=reserved)
        self._orders[order.request_id] = order
        self.outputs[order.request_id] = Output()
        self.left[order.request_id] = len(order.prompt_ids) - cached
        return cached

    def resume(self, request_id: RequestId) -> int:
        order, output = self._orders[request_id], self.outputs[request_id]
        length = len(order.prompt_ids) + len(output.token_ids)
        reserved = len(order.prompt_ids) + order.max_tokens
        cached = self.backend.resume(request_id, reserved_tokens=reserved)
        self.left[request_id] = length - cached
        return cached

    # -- iterations

    def step(self, *, decodes: Iterable[str] = (), chunks: dict[str, int] | None = None) -> StepOutcome:
        orders = [ChunkOrder(request_id=RequestId(r), num_tokens=n) for r, n in (chunks or {}).items()]
        result = self.backend.step([RequestId(r) for r in decodes], orders)
        for outcome in result.outcomes:
            output = self.outputs[outcome.request_id]
            output.add(outcome)
            self.left[outcome.request_id] -= outcome.prefill_tokens
            if outcome.token_ids:
                self.left[outcome.request_id] = 1
        return result

    def decodes(self, request_id: str) -> bool:
        """Return whether the request's next token needs one row only."""
        return bool(self.outputs[RequestId(request_id)].token_ids) and self.left[RequestId(request_id)] == 1

    def prefill(self, request_id: str, *, chunk: int = 1 << 30) -> None:
        """Compute what is left of a prompt; its first token is chosen by the last chunk."""
        before = len(self.outputs[RequestId(request_id)].token_ids)
        output = self.outputs[RequestId(request_id)]
        while len(output.token_ids) == before and not output.is_over:
            left = self.left[RequestId(request_id)]
            self.step(chunks={request_id: min(chunk, left)})

    def finish(self, *request_ids: str, chunk: int = 1 << 30, budget: int = 1 << 30) -> None:
        """Run these together to their ends: decodes first, then chunks within the budget of tokens."""
        while running := [r for r in request_ids if not self.outputs[RequestId(r)].is_over]:
            decodes = [r for r in running if self.decodes(r)]
            chunks, room = {}, budget
            for request_id in running:
                if request_id not in decodes and room > 0:
                    chunks[request_id] = min(chunk, room, self.left[RequestId(request_id)])
                    room -= chunks[request_id]
            self.step(decodes=decodes, chunks=chunks)

    def run(self, order: GenerationOrder, *, chunk: int = 1 << 30) -> Output:
        """Run one order alone from admission to its end."""
        self.admit(order)
        self.finish(order.request_id, chunk=chunk)
        return self.outputs[order.request_id]


def assert_same_but_near_ties(reference: Output, other: Output) -> None:
    """Compare two greedy outputs whose rounding may differ.

    The reference was generated with two log probabilities per token. Both must be equal up to the first
    token where the reference itself nearly chose the other one.
    """
    for mine, theirs in zip(reference.logprobs, other.token_ids, strict=False):
        if mine.token_id != theirs:
            best, second = mine.top[0], mine.top[1]
            assert theirs == second[0], "not even the second best token"
            assert best[2] - second[2] < NEAR_TIE, "a clear choice came out differently"
            return
    assert reference.token_ids == other.token_ids
