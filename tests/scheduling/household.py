"""A household in virtual time: the real scheduler, driven by a device that only knows lengths.

Every call of `handle` is followed by `check`, so that each test is also a test of the invariants. The
device keeps its own account of pages and tokens and refuses what a real one could not do.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine_service.scheduling.decisions import (
    AbortIteration,
    Admit,
    Cancel,
    Compose,
    Decision,
    Grow,
    Pause,
    Preempt,
    Reject,
    Resume,
)
from engine_service.scheduling.events import (
    Arrived,
    BackendLost,
    Cancelled,
    CapacityChanged,
    Event,
    IterationDone,
    ResidentsChanged,
    SequenceResult,
    ServingStopped,
)
from engine_service.scheduling.invariants import check
from engine_service.scheduling.model import (
    THE_MODEL,
    Capacity,
    ModelId,
    Policy,
    Request,
    RequestId,
    Resident,
    ResidentId,
    WorkloadClass,
    pages_for,
)
from engine_service.scheduling.scheduler import Scheduler

CAPACITY = Capacity(num_pages=256, page_tokens=32, max_sequences=16, max_context_tokens=4096, can_abort=True)


def linear_cost(chunk: int, num_decodes: int) -> float:
    """4090-like: prefill 0.16 ms/token, decode 8.5 ms + 0.35 ms each."""
    return (0.003 + 0.00016 * chunk if chunk else 0.0) + (
        0.0085 + 0.00035 * num_decodes if num_decodes else 0.0
    )


@dataclass
class Sequence:
    """What the device holds of a request."""

    request: Request
    output_length: int
    stored: int = 0
    output: int = 0
    reserved: int = 0
    is_on_device: bool = False
    tokens_at: list[float] = field(default_factory=list)
    finished_at: float | None = None
    admitted_at: list[float] = field(default_factory=list)
    preempted: int = 0


@dataclass
class Household:
    """The scheduler, the clock and the device."""

    policy: Policy = field(default_factory=Policy)
    capacity: Capacity = CAPACITY
    residents: tuple[Resident, ...] = ()
    cost: Callable[[int, int], float] = linear_cost
    make: Callable[[Policy], Scheduler] = Scheduler
    now: float = 100.0
    serving: ModelId = THE_MODEL
    flying: Compose | None = None
    flying_until: float = 0.0
    flying_since: float = 0.0
    rejected: dict[str, Reject] = field(default_factory=dict)
    log: list[tuple[float, Event, list[Decision]]] = field(default_factory=list)
    sequences: dict[RequestId, Sequence] = field(default_factory=dict)
    iterations: list[tuple[float, float, Compose]] = field(default_factory=list)
    was_aborted: bool = False
    num_aborts: int = 0

    def __post_init__(self) -> None:
        """Introduce everybody."""
        self.scheduler = self.make(self.policy)
        self._count = 0
        self.tell(ResidentsChanged(residents=self.residents))
        self.tell(CapacityChanged(capacity=self.capacity, model_id=self.serving))

    # ---- events

    def tell(self, event: Event) -> list[Decision]:
        """Hand an event to the scheduler, check it, carry out what it says."""
        decisions = self.scheduler.handle(event, now=self.now)
        check(self.scheduler)
        self.log.append((self.now, event, decisions))
        for decision in decisions:
            self._carry_out(decision)
        return decisions

    def ask(
        self,
        resident: str,
        class_id: WorkloadClass | str,
        prompt: int,
        output: int,
        *,
        max_tokens: int | None = None,
        shared: int = 0,
        keep_prefix: bool = False,
        program: str | None = None,
        model: str = THE_MODEL,
        may_have_company: bool = False,
    ) -> RequestId:
        """Let a request arrive now; output is how long its answer will really be."""
        self._count += 1
        request = Request(
            request_id=RequestId(f"{resident}-{self._count:05d}"),
            resident_id=ResidentId(resident),
            class_id=WorkloadClass(class_id),
            prompt_tokens=prompt,
            max_tokens=output if max_tokens is None else max_tokens,
            shared_prefix_tokens=shared,
            keep_prefix=keep_prefix,
            program_id=program,
            paid_by_system=keep_prefix,
            model_id=ModelId(model),
        )
        self.sequences[request.request_id] = Sequence(request=request, output_length=output)
        self.tell(Arrived(request=request, may_have_company=may_have_company))
        return request.request_id

    def cancel(self, request_id: RequestId) -> None:
        """Let the caller go away now."""
        self.tell(Cancelled(request_id=request_id))

    def lose_backend(self, *, back: bool = True) -> None:
        """Let the device forget everything; with back, it returns empty."""
        self.flying, self.was_aborted = None, False
        for sequence in self.sequences.values():
            sequence.is_on_device, sequence.stored = False, 0
            sequence.request = dataclasses.replace(sequence.request, shared_prefix_tokens=0)
        self.tell(BackendLost())
        if back:
            self.tell(CapacityChanged(capacity=self.capacity, model_id=self.serving))

    def leave(self, puts_back_from: int | None = None) -> None:
        """Admit nobody any more, and put back who is no more urgent than that."""
        self.tell(ServingStopped(puts_back_from=puts_back_from))

    def enter(self, model: str, **more: Any) -> None:
        """Let that model serve, when nobody runs."""
        assert self.flying is None
        self.serving = ModelId(model)
        self.tell(CapacityChanged(capacity=self.capacity, model_id=self.serving, **more))

    def restart(self, *, elapsed_s: float = 0.0) -> None:
        """Let the scheduler's process end and come back from its snapshot; the device lost everything.

        Requests do not survive: they are the shell's to submit again.
        """
        saved = json.loads(json.dumps(self.scheduler.snapshot(now=self.now)))
        policy = self.scheduler.state.policy
        self.flying, self.was_aborted = None, False
        for sequence in self.sequences.values():
            sequence.is_on_device = False
        self.scheduler = self.make(policy)
        self.now += elapsed_s
        self.scheduler.restore(saved, now=self.now, elapsed_s=elapsed_s)
        check(self.scheduler)
        self.tell(ResidentsChanged(residents=self.residents))
        self.tell(CapacityChanged(capacity=self.capacity, model_id=self.serving))

    # ---- time

    def step(self) -> bool:
        """Finish the iteration under way; return False when the device is idle."""
        if self.flying is None:
            return False
        self.now = max(self.now, self.flying_until)
        composed, aborted = self.flying, self.was_aborted
        self.flying, self.was_aborted = None, False
        results = () if aborted else self._results(composed)
        self.iterations.append((self.flying_since, self.now, composed))
        self.tell(IterationDone(results=results, seconds=self.now - self.flying_since, aborted=aborted))
        return True

    def run_until(self, when: float) -> None:
        """Run iterations that end before `when`, then let the clock stand there."""
        while self.flying is not None and self.flying_until <= when:
            self.step()
        self.now = max(self.now, when)

    def run_dry(self, *, max_iterations: int = 200_000) -> None:
        """Run until nothing is left to do; fails if that does not happen."""
        for _ in range(max_iterations):
            if not self.step():
                return
        raise AssertionError(f"still running after {max_iterations} iterations")

    # ---- the device

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Admit(request_id=request_id, reserved_tokens=reserved):
                sequence = self.sequences[request_id]
                assert not sequence.is_on_device
                sequence.is_on_device, sequence.reserved = True, reserved
                sequence.stored = sequence.request.shared_prefix_tokens
                sequence.admitted_at.append(self.now)
                self._assert_pages()
            case Grow(request_id=request_id, reserved_tokens=reserved):
                assert reserved > self.sequences[request_id].reserved
                self.sequences[request_id].reserved = reserved
                self._assert_pages()
            case Preempt(request_id=request_id):
                sequence = self.sequences[request_id]
                assert sequence.is_on_device
                sequence.is_on_device, sequence.stored = False, 0
                sequence.preempted += 1
            case Cancel(request_id=request_id):
                self.sequences[request_id].is_on_device = False
            case Compose():
                assert self.flying is None, "two iterations at once"
                self.flying, self.flying_since = decision, self.now
                chunk = sum(c.num_tokens for c in decision.prefills)
                self.flying_until = self.now + self.cost(chunk, len(decision.decode_ids))
            case AbortIteration():
                self.was_aborted, self.flying_until = True, self.now
                self.num_aborts += 1
            case Reject(request_id=request_id):
                self.rejected[request_id] = decision
            case Pause() | Resume():
                pass

    def _assert_pages(self) -> None:
        held = sum(
            pages_for(s.reserved - s.request.shared_prefix_tokens, self.capacity.page_tokens)
            for s in self.sequences.values()
            if s.is_on_device
        )
        assert held <= self.capacity.num_pages, f"{held} pages of {self.capacity.num_pages} promised"

    def _results(self, composed: Compose) -> tuple[SequenceResult, ...]:
        results = []
        for request_id in composed.decode_ids:
            results.append(self._token(request_id, prefilled=0))
        for chunk in composed.prefills:
            sequence = self.sequences[chunk.request_id]
            assert sequence.is_on_device
            length = sequence.request.prompt_tokens + sequence.output
            size = min(chunk.num_tokens, length - sequence.stored)
            sequence.stored += size
            assert sequence.stored <= sequence.reserved
            if sequence.stored == length and sequence.request.max_tokens:
                results.append(self._token(chunk.request_id, prefilled=size))
            else:
                is_done = sequence.stored == length
                if is_done:
                    sequence.finished_at, sequence.is_on_device = self.now, False
                results.append(
                    SequenceResult(request_id=chunk.request_id, prefill_tokens=size, finished=is_done)
                )
        return tuple(results)

    def _token(self, request_id: RequestId, *, prefilled: int) -> SequenceResult:
        sequence = self.sequences[request_id]
        assert sequence.is_on_device
        if not prefilled:
            sequence.stored += 1
            assert sequence.stored <= sequence.reserved
        sequence.output += 1
        sequence.tokens_at.append(self.now)
        finished = sequence.output >= sequence.output_length
        if finished:
            sequence.finished_at, sequence.is_on_device = self.now, False
        return SequenceResult(
            request_id=request_id,
            prefill_tokens=prefilled,
            cached_tokens=sequence.request.shared_prefix_tokens if prefilled else 0,
            decode_tokens=1,
            finished=finished,
        )

    # ---- questions

    def ttft(self, request_id: RequestId, arrived_at: float) -> float:
        """Return seconds from arrival to the first token."""
        return self.sequences[request_id].tokens_at[0] - arrived_at

    def served(self, resident: str) -> int:
        """Return the service units charged to the resident."""
        return self.scheduler.state.account(ResidentId(resident)).service

    def all_finished(self) -> bool:
        """Return whether every request that was not rejected is finished."""
        return all(s.finished_at is not None for r, s in self.sequences.items() if r not in self.rejected)
