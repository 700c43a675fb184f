"""Which models are in memory and which serves: promises of the policy, in a world of seconds."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, assume, given, settings, strategies as st

from engine_service.scheduling.model import ResidencyPolicy
from engine_service.scheduling.residency import (
    Demand,
    Enter,
    Exit,
    Leave,
    Load,
    ModelRule,
    Residence,
    Residency,
    Step,
    Unload,
)

LOAD_S = 4
LIMIT = 64


@dataclass
class Asked:
    """A request of some model: arrival, seconds of work left, whether it is speech."""

    model_id: str
    at: int
    work: int
    is_speech: bool = False
    ended_at: int | None = None
    patience: int | None = None  #: after so many seconds it waits no longer and leaves


@dataclass
class World:
    """Models that load in LOAD_S seconds and do one second of work a second for all who run (at most two)."""

    residency: Residency
    breaks: frozenset[str] = frozenset()  #: models that cannot be loaded
    now: int = 0
    waiting: list[Asked] = field(default_factory=list)
    running: list[Asked] = field(default_factory=list)
    loads_until: dict[str, int] = field(default_factory=dict)
    is_left: bool = False
    steps: list[tuple[int, Step]] = field(default_factory=list)
    refused: list[Asked] = field(default_factory=list)

    def demand(self) -> dict[str, Demand]:
        found = {}
        for model_id in {asked.model_id for asked in (*self.waiting, *self.running)}:
            waits = [a for a in self.waiting if a.model_id == model_id]
            runs = [a for a in self.running if a.model_id == model_id]
            found[model_id] = Demand(
                num_waiting=len(waits),
                oldest_at=min((a.at for a in waits), default=None),
                speech_at=min((a.at for a in waits if a.is_speech), default=None),
                num_held=len(runs),
                holds_speech=any(a.is_speech for a in runs),
            )
        return found

    def settle(self) -> None:
        """Carry out all steps there are."""
        for _ in range(LIMIT):
            step = self.residency.plan(self.demand(), now=self.now)
            if step is None:
                self.check()
                return
            self.steps.append((self.now, step))
            self.carry_out(step)
            self.check()
        raise AssertionError(f"the steps do not come to an end: {self.steps[-6:]}")

    def carry_out(self, step: Step) -> None:
        residency = self.residency
        match step:
            case Load(model_id=model_id):
                is_pinned = residency._rules[model_id].is_pinned
                assert is_pinned or any(a.model_id == model_id for a in self.waiting), "loaded for nobody"
                self.loads_until[model_id] = self.now + LOAD_S
            case Unload(model_id=model_id):
                assert residency.state(model_id) is Residence.IDLE
                residency.unloaded(model_id)
            case Leave(puts_back_from=urgency):
                self.is_left = True
                if urgency is not None:
                    back = [a for a in self.running if urgency == 0 or not a.is_speech]
                    self.running = [a for a in self.running if a not in back]
                    self.waiting += back
            case Enter(model_id=model_id):
                assert residency.state(model_id) in (Residence.IDLE, Residence.LOADED)
                assert not self.running or residency.serving == model_id, "somebody runs on another model"
                residency.entered(model_id, now=self.now)
                self.is_left = False
            case Exit():
                assert not self.running
                residency.exited()
                self.is_left = False

    def check(self) -> None:
        """What holds at every instant."""
        rules, policy = self.residency._rules, self.residency.policy
        present = [m for m in rules if self.residency.state(m) is not Residence.ABSENT]
        assert len(present) <= policy.max_loaded
        loaded = [m for m in rules if self.residency.state(m) is Residence.LOADED]
        assert loaded == ([] if self.residency.serving is None else [self.residency.serving])

    def second(self, arriving: Sequence[Asked] = ()) -> None:
        """Let a second pass."""
        self.waiting = [a for a in self.waiting if a.patience is None or a.at + a.patience > self.now]
        for asked in arriving:
            if self.residency.retry_in_s(asked.model_id, now=self.now):
                self.refused.append(asked)
            else:
                self.waiting.append(asked)
        for model_id, until in list(self.loads_until.items()):
            if until <= self.now:
                del self.loads_until[model_id]
                if model_id in self.breaks:
                    self.residency.failed(model_id, now=self.now)
                    self.refused += [a for a in self.waiting if a.model_id == model_id]
                    self.waiting = [a for a in self.waiting if a.model_id != model_id]
                else:
                    self.residency.loaded(model_id)
        self.settle()
        self.admit()
        self.settle()
        for asked in self.running:
            asked.work -= 1
            if not asked.work:
                asked.ended_at = self.now + 1
        self.running = [a for a in self.running if a.work]
        self.now += 1
        self.settle()

    def admit(self) -> None:
        serving = self.residency.serving
        if serving is None or self.is_left:
            return
        fitting = [a for a in self.waiting if a.model_id == serving]
        for asked in sorted(fitting, key=lambda a: (not a.is_speech, a.at)):
            if len(self.running) < 2 or asked.is_speech:
                self.waiting.remove(asked)
                self.running.append(asked)

    def at_which(self, kind: type[Step]) -> list[tuple[int, str]]:
        return [(at, step.model_id) for at, step in self.steps if isinstance(step, kind)]  # type: ignore[union-attr]


def world(names: str, *, pinned: str = "", breaks: str = "", **policy: float) -> World:
    rules = [ModelRule(model_id=name, is_pinned=name in pinned) for name in names]
    residency = Residency(rules, ResidencyPolicy(**policy))  # type: ignore[arg-type]
    for rule in rules:
        here = sum(residency.state(name) is not Residence.ABSENT for name in names)
        if here < residency.policy.max_loaded and (rule is rules[0] or rule.is_pinned):
            residency.loaded(rule.model_id)
    residency.entered(names[0], now=0)
    return World(residency, breaks=frozenset(breaks))


def run(home: World, asked: Sequence[Asked], *, seconds: int) -> None:
    coming = deque(sorted(asked, key=lambda a: a.at))
    for _ in range(seconds):
        now = []
        while coming and coming[0].at <= home.now:
            now.append(coming.popleft())
        home.second(now)


def test_a_model_that_nobody_uses_gives_way_at_once_and_only_where_another_is_asked_for() -> None:
    home = world("ab")
    run(home, [Asked("b", 3, 2)], seconds=20)
    assert [(at, type(step)) for at, step in home.steps] == [
        (3, Leave), (3, Exit), (3, Unload), (3, Load), (7, Enter),
    ]  # fmt: skip
    assert home.residency.serving == "b"


def test_a_model_with_work_stays_and_one_that_waits_is_served_all_the_same() -> None:
    home = world("ab", min_stay_s=30, patience_s=5, drain_s=3)
    busy = [Asked("a", at, 2) for at in range(0, 120, 1)]
    home_asked = Asked("b", 1, 2)
    run(home, [*busy, home_asked], seconds=60)
    left = next(at for at, step in home.steps if isinstance(step, Leave))
    assert left == 30
    assert home_asked.ended_at is not None
    assert home_asked.ended_at <= 30 + 3 + LOAD_S + 3


def test_a_model_with_work_is_not_left_for_who_has_only_just_come() -> None:
    home = world("ab", min_stay_s=5, patience_s=8)
    run(home, [*(Asked("a", at, 2) for at in range(60)), Asked("b", 20, 2)], seconds=50)
    assert next(at for at, step in home.steps if isinstance(step, Leave)) == 28


def test_answers_under_way_may_end_and_those_that_take_too_long_are_put_back() -> None:
    home = world("ab", min_stay_s=1, patience_s=0, drain_s=10)
    short, long, other = Asked("a", 0, 8), Asked("a", 0, 40), Asked("b", 2, 1)
    run(home, [short, long, other], seconds=100)
    assert short.ended_at == 8
    assert other.ended_at is not None
    assert other.ended_at < 20
    assert long.ended_at is not None, "it goes on afterwards"
    assert [step.puts_back_from for _, step in home.steps if isinstance(step, Leave)][:2] == [None, 1]


def test_speech_for_a_model_in_memory_interrupts_and_the_turn_goes_on_behind_it() -> None:
    home = world("va", pinned="v", max_loaded=2, min_stay_s=30)
    home.residency.loaded("a")
    chat, speech = Asked("a", 0, 30), Asked("v", 10, 3, is_speech=True)
    run(home, [chat, speech], seconds=50)
    assert speech.ended_at == 13, "it waits for nothing"
    assert chat.ended_at == 33, "it loses what speech took"
    assert home.at_which(Load) == []


def test_a_pinned_model_stays_while_others_swap_beside_it() -> None:
    home = world("vab", pinned="v", max_loaded=2, min_stay_s=5, patience_s=1, drain_s=1)
    asked = [Asked("ab"[at % 2], at, 3) for at in range(0, 100, 3)]
    run(home, asked, seconds=200)
    assert all(a.ended_at is not None for a in asked)
    assert {m for _, m in home.at_which(Unload)} == {"a", "b"}


def test_with_room_for_the_pinned_one_only_no_other_can_come_unless_it_may_give_way() -> None:
    strict = world("va", pinned="v", max_loaded=1)
    assert strict.residency.can_load("v")
    assert not strict.residency.can_load("a")
    run(strict, [Asked("a", 0, 1)], seconds=30)
    assert strict.steps == []
    lenient = world("va", pinned="v", max_loaded=1, releases_pinned=True, min_stay_s=5)
    asked = Asked("a", 0, 1)
    run(lenient, [asked], seconds=30)
    assert asked.ended_at is not None
    assert lenient.residency.serving == "v", "it comes back when nobody asks for another"


def test_a_model_that_cannot_be_loaded_is_left_alone_and_the_first_goes_on() -> None:
    home = world("ab", breaks="b", retry_s=60)
    first, broken, later = Asked("a", 0, 2), Asked("b", 3, 1), Asked("a", 10, 2)
    run(home, [first, broken, Asked("b", 20, 1), later], seconds=50)
    assert later.ended_at is not None
    assert len(home.refused) == 2
    assert [m for _, m in home.at_which(Load)] == ["b", "a"]
    run(home, [Asked("b", home.now + 40, 1)], seconds=60)
    assert [m for _, m in home.at_which(Load)] == ["b", "a", "b", "a"][: len(home.at_which(Load))]
    assert len(home.at_which(Load)) > 2, "it is tried again"


@pytest.mark.parametrize("drain_s", [20, 60])
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_switch_whose_reason_is_gone_is_called_off(names: str, drain_s: int) -> None:
    home = world(names, min_stay_s=1, patience_s=0, drain_s=drain_s)
    chat = Asked("a", 0, 30)
    run(home, [chat, Asked("b", 2, 1, patience=3)], seconds=5)
    assert home.is_left
    run(home, [], seconds=1)
    assert not home.is_left, "who comes now is admitted"
    run(home, [], seconds=40)
    assert chat.ended_at == 30
    assert home.at_which(Load) == []


def test_a_pinned_model_that_was_on_its_way_back_lets_answers_end_first() -> None:
    home = world("va", pinned="v", max_loaded=1, releases_pinned=True, min_stay_s=1, patience_s=0, drain_s=60)
    chat = Asked("a", 0, 30)
    run(home, [chat, Asked("v", 10, 1, patience=2)], seconds=80)
    assert chat.ended_at == LOAD_S + 30
    assert home.residency.serving == "v"


@pytest.mark.parametrize("name", ["max_loaded", "min_stay_s", "patience_s", "drain_s", "retry_s"])
def test_numbers_nobody_could_be_served_by_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ResidencyPolicy(**{name: -1})  # type: ignore[arg-type]


def test_models_need_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="differ"):
        Residency([ModelRule(model_id="a"), ModelRule(model_id="a")], ResidencyPolicy())


# Shrinking a world of forty requests takes minutes; the example says what happened.
PLAIN = settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
REQUESTS = st.lists(
    st.builds(
        Asked,
        model_id=st.sampled_from("abc"),
        at=st.integers(0, 150),
        work=st.integers(1, 12),
        is_speech=st.booleans() | st.just(False),
        patience=st.none() | st.integers(1, 15),
    ),
    max_size=40,
)
POLICIES = st.fixed_dictionaries(
    {
        "max_loaded": st.integers(1, 3),
        "min_stay_s": st.integers(1, 20),
        "patience_s": st.integers(0, 10),
        "drain_s": st.integers(0, 10),
        "speech_drain_s": st.integers(10, 20),
    }
)


@settings(PLAIN, max_examples=100)
@given(asked=REQUESTS, policy=POLICIES, pinned=st.sampled_from(["", "a", "b"]), lenient=st.booleans())
def test_everybody_who_can_be_served_is_and_memory_holds(
    asked: list[Asked], policy: dict[str, int], pinned: str, lenient: bool
) -> None:
    assume(lenient or pinned != "b" or policy["max_loaded"] > 1)  # else the settings are refused
    home = world("abc", pinned=pinned, releases_pinned=lenient, **policy)
    work = sum(a.work for a in asked)
    run(home, asked, seconds=150 + 20 * len(asked) + 3 * work + 100)
    for one in asked:
        if one.patience is None:
            assert (one.ended_at is not None) == home.residency.can_load(one.model_id), one
    if not lenient and home.residency.policy.max_loaded > 1:
        assert pinned not in {m for _, m in home.at_which(Unload)}


@settings(PLAIN, max_examples=60)
@given(asked=REQUESTS, policy=POLICIES, num_busy=st.integers(1, 3), pinned=st.sampled_from(["", "a"]))
def test_nobody_waits_for_longer_than_a_turn_of_every_other_model(
    asked: list[Asked], policy: dict[str, int], num_busy: int, pinned: str
) -> None:
    """Also where the other models never run out of work."""
    for one in asked:
        one.is_speech = False
    flood = [Asked(m, at, 3) for at in range(0, 600, 2) for m in "abc"[:num_busy]]
    home = world("abc", pinned=pinned, **policy)
    run(home, [*asked, *flood], seconds=500)
    limits = home.residency.policy
    turn = max(limits.min_stay_s, limits.patience_s) + limits.drain_s + LOAD_S + 3
    starts = home.at_which(Enter)
    for one in asked:
        if home.residency.can_load(one.model_id) and one.patience is None:
            bound = limits.patience_s + 3 * turn
            served = [at for at, model_id in [(0, "a"), *starts] if model_id == one.model_id]
            is_begun = one.ended_at is not None and one.ended_at <= one.at + bound
            assert is_begun or any(one.at <= at <= one.at + bound for at in served) or one.at + bound > 450


@settings(PLAIN, max_examples=60)
@given(policy=POLICIES, num_models=st.integers(2, 3))
def test_a_model_with_work_is_not_left_before_its_time(policy: dict[str, int], num_models: int) -> None:
    """Hysteresis: under load there is at most one load per stay."""
    names = "abc"[:num_models]
    home = world(names, **policy)
    run(home, [Asked(m, at, 2) for at in range(0, 400) for m in names], seconds=300)
    entered = [at for at, step in home.steps if isinstance(step, Enter)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(entered)]
    assert all(gap >= home.residency.policy.min_stay_s for gap in gaps), home.steps
