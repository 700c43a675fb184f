"""The promises under everything that can happen, in any order.

`check` runs after every event; the device of `Household` refuses what a real one could not do (two
iterations at once, more pages than there are, tokens beyond the reservation). At the end everything that
was not cancelled or refused must finish, and the ledger must be empty.
"""

from __future__ import annotations

import dataclasses
import os

from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_service.scheduling.decisions import Compose
from engine_service.scheduling.events import (
    Arrived,
    DayStarted,
    PolicyChanged,
    ResidentsChanged,
    Ticked,
)
from engine_service.scheduling.model import (
    MICRO,
    Capacity,
    FairnessGoal,
    Policy,
    Resident,
    ResidentId,
    ServiceUnit,
    WorkloadClass,
)
from tests.scheduling.household import Household

NAMES = ("alice", "bob", "carol", "dave")
RESIDENTS = (
    Resident(resident_id=ResidentId("alice")),
    Resident(resident_id=ResidentId("bob"), weight=2, page_cap=16),
    Resident(resident_id=ResidentId("carol"), daily_tokens=2_000, max_running=2, max_waiting=4),
    Resident(resident_id=ResidentId("dave"), rolling_tokens=900, rolling_window_s=60.0, rolling_is_hard=True),
)
CAPACITY = Capacity(num_pages=60, page_tokens=16, max_sequences=5, max_context_tokens=640, can_abort=True)
POLICIES = (
    Policy(voice_headroom_pages=6, output_slice_tokens=16, max_chunk_tokens=128, min_chunk_tokens=16),
    Policy(voice_headroom_pages=6, voice_bucket=400, due_budget=600, fairness=FairnessGoal.WAITING),
    Policy(voice_headroom_pages=2, sprint=False, background_reserve=0.3, max_prefilling=2),
    Policy(fairness=FairnessGoal.COMPLETIONS, max_preemptions=1, output_slice_tokens=8),
    Policy(fairness=FairnessGoal.CLASS_ONLY, max_skips=1),
    Policy(voice_headroom_pages=4, predict_output=True, output_slice_tokens=16, max_chunk_tokens=96),
    Policy(unit=ServiceUnit.ACCELERATOR_TIME, voice_bucket=400_000, pace_ahead_s=0.5, voice_headroom_pages=4),
)


class HouseholdMachine(RuleBasedStateMachine):
    """Arrivals, cancellations, iterations, losses and changes, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Household(policy=POLICIES[0], capacity=CAPACITY, residents=RESIDENTS)
        self.cancelled: set[str] = set()
        self.last_day = ""

    @rule(
        name=st.sampled_from(NAMES),
        class_id=st.sampled_from(list(WorkloadClass)),
        prompt=st.integers(1, 500),
        output=st.integers(1, 120),
        slack=st.integers(0, 80),
        program=st.sampled_from([None, "run1", "run2"]),
        model=st.sampled_from(["", "", "other"]),
        may_have_company=st.booleans(),
    )
    def arrive(
        self,
        name: str,
        class_id: WorkloadClass,
        prompt: int,
        output: int,
        slack: int,
        program: str | None,
        model: str,
        may_have_company: bool,
    ) -> None:
        most = output + slack
        more = {"program": program, "model": model, "may_have_company": may_have_company}
        self.home.ask(name, class_id, prompt, output, max_tokens=most, **more)

    @rule(puts_back_from=st.sampled_from([None, 1, 0]), model=st.sampled_from(["", "other"]))
    def change_model(self, puts_back_from: int | None, model: str) -> None:
        """Leave the model that serves, let it drain, and enter one."""
        self.home.leave(puts_back_from)
        if puts_back_from == 0 and self.home.flying is not None:
            self.home.step()
            assert not self.home.scheduler.state.holding, "everybody is put back"
        self.home.run_dry()
        self.home.enter(model, switch_s=0.5)
        holding = self.home.scheduler.state.holding.values()
        assert {record.model_id for record in holding} <= {model}

    @rule(prompt=st.integers(1, 150))
    def pin(self, prompt: int) -> None:
        self.home.ask("alice", WorkloadClass.CHAT, prompt, 0, keep_prefix=True)

    @precondition(lambda self: self.home.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.home.sequences)))
        if self.home.sequences[request_id].finished_at is None:
            self.cancelled.add(request_id)
        self.home.cancel(request_id)

    @rule(count=st.integers(1, 30))
    def iterate(self, count: int) -> None:
        for _ in range(count):
            if not self.home.step():
                return

    @rule(seconds=st.sampled_from([0.01, 0.5, 5.0, 100.0, 2_000.0]))
    def wait(self, seconds: float) -> None:
        self.home.now += seconds
        self.home.tell(Ticked())

    @rule()
    def lose_backend(self) -> None:
        self.home.lose_backend()

    @rule(policy=st.sampled_from(POLICIES))
    def change_policy(self, policy: Policy) -> None:
        self.home.tell(PolicyChanged(policy=policy))

    @rule(
        day=st.sampled_from(["2026-03-29", "2026-10-25", "2026-11-29", "2026-11-30"]),
        hours=st.sampled_from([23, 24, 25]),
    )
    def start_day(self, day: str, hours: int) -> None:
        """A day begins, of 23, 24 or 25 hours; a wall clock that jumps begins days in any order."""
        quota = self.home.scheduler.state.quota
        left, last = quota.left(ResidentId("carol")), self.last_day
        self.home.tell(DayStarted(day=day, ends_at=self.home.now + hours * 3600))
        self.last_day = max(day, last)
        if day <= last:
            assert quota.left(ResidentId("carol")) == left, "a day seen before resets nothing"

    @rule(elapsed_s=st.sampled_from([0.0, 30.0, 7_200.0]))
    def restart(self, elapsed_s: float) -> None:
        state = self.home.scheduler.state
        before = {r: state.counters.value(r) - self._ahead(r) for r in state.counters.resident_ids}
        told = self._totals()
        for request_id, sequence in self.home.sequences.items():
            if sequence.finished_at is None:
                self.cancelled.add(request_id)
        self.home.restart(elapsed_s=elapsed_s)
        state = self.home.scheduler.state
        after = {r: state.counters.value(r) for r in state.counters.resident_ids if r in before}
        assert all(abs(after[r] - before[r]) <= 1 for r in before), "counters survive a restart"
        if not (elapsed_s or self.home.residents != RESIDENTS):
            assert self._totals() == told

    def _totals(self) -> tuple[object, ...]:
        state, now = self.home.scheduler.state, self.home.now
        windows = (state.due_spent, state.all_service, state.lower_service)
        return (
            state.quota.left(ResidentId("carol")),
            state.rolling.left(ResidentId("dave"), now=now),
            state.recomputed_tokens,
            state.accounts,
            [window.total(now=now) for window in windows],
            {r: total for r, w in state.spoken_spent.items() if (total := w.total(now=now))},
        )

    def _ahead(self, resident_id: ResidentId) -> int:
        """Return what is charged ahead, as the counter sees it (up to rounding)."""
        state = self.home.scheduler.state
        return state.counters.ahead(resident_id) * MICRO // state.counters.weight(resident_id)

    @rule(num_pages=st.sampled_from([30, 60, 90]))
    def change_capacity(self, num_pages: int) -> None:
        # Only while none is under way: an iteration may not lose its pages half-way.
        if self.home.flying is None:
            self.home.capacity = dataclasses.replace(CAPACITY, num_pages=num_pages)
            self.home.enter(self.home.serving)

    @rule(keep=st.integers(1, 4))
    def change_residents(self, keep: int) -> None:
        self.home.residents = RESIDENTS[:keep]
        self.home.tell(ResidentsChanged(residents=self.home.residents))

    @rule(classes=st.sampled_from([(), (WorkloadClass.BACKGROUND,), (WorkloadClass.AGENT,)]))
    def pause(self, classes: tuple[WorkloadClass, ...]) -> None:
        policy = dataclasses.replace(self.home.scheduler.state.policy, paused_classes=classes)
        self.home.tell(PolicyChanged(policy=policy))
        if self.home.flying is None:
            held = {record.class_id for record in self.home.scheduler.state.holding.values()}
            assert not held & set(classes)

    @invariant()
    def works_while_there_is_work(self) -> None:
        """P9: the device idles only if nothing waits but what is paused, or who may have company.

        Refusals happen at arrival.
        """
        state = self.home.scheduler.state
        if self.home.flying is None:
            assert not state.holding
            last = self.home.log[-1][1]
            if not (isinstance(last, Arrived) and last.may_have_company):
                assert not state.total_waiting, "the device idles although somebody waits"

    @invariant()
    def everybody_goes_on_or_is_counted_as_paused(self) -> None:
        """P3: who holds pages is in the iteration under way, or paused; a paused reader is not forgotten."""
        state = self.home.scheduler.state
        if self.home.flying is None:
            return
        going = {*self.home.flying.decode_ids, *(c.request_id for c in self.home.flying.prefills)}
        for record in state.holding.values():
            assert record.request_id in going or record.request_id in state.paused or record.is_cancelled

    def teardown(self) -> None:
        self.pause(())
        for model in ("", "other"):
            self.change_model(None, model)
            self.home.run_dry()
        for request_id, sequence in self.home.sequences.items():
            if request_id not in self.cancelled and request_id not in self.home.rejected:
                assert sequence.finished_at is not None, f"{request_id} never finished"
                assert sequence.output == sequence.output_length * (sequence.request.max_tokens > 0)
        state = self.home.scheduler.state
        assert not state.records
        assert state.pages.num_held == 0
        composed = [d for _, _, decisions in self.home.log for d in decisions if isinstance(d, Compose)]
        assert all(c.decode_ids or c.prefills for c in composed)


TestHousehold = HouseholdMachine.TestCase
TestHousehold.settings = settings(
    max_examples=int(os.environ.get("FAIRHEARTH_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    # Shrinking a household of forty events takes minutes; the story in the error says what happened.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
