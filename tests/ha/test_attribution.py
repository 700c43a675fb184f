"""Who is charged and as what: the identity table of Home Assistant's paths, row by row."""

from __future__ import annotations

import pytest

from custom_components.fairhearth.attribution import (
    AGENT_AFTER_CALLS,
    Attribution,
    ClassRule,
    ContextUsers,
    Origin,
    ResidentRule,
    WorkloadClass,
    after_calls,
    attribute,
    least_urgent,
)
from engine_service.scheduling import model

ALICE = ResidentRule(
    resident_id="alice",
    user_ids=frozenset({"user-alice", "tablet-alice"}),
    satellite_ids=frozenset({"assist_satellite.alice"}),
    area_ids=frozenset({"office"}),
    agent_ids=frozenset({"conversation.alice"}),
)
BOB = ResidentRule(
    resident_id="bob", user_ids=frozenset({"user-bob"}), area_ids=frozenset({"garage", "office"})
)
NOBODY = ResidentRule(resident_id="nobody")
RULES = (NOBODY, ALICE, BOB)

ROWS = [
    ("typed by a resident", Origin(user_id="user-alice"), "alice", "chat"),
    ("typed on a resident's tablet", Origin(user_id="tablet-alice"), "alice", "chat"),
    ("typed by another resident", Origin(user_id="user-bob", area_id="office"), "bob", "chat"),
    ("typed by a user who is no resident", Origin(user_id="stranger"), "guest", "chat"),
    ("typed by nobody, by an integration", Origin(), "guest", "chat"),
    ("typed with a device in an area", Origin(area_id="garage"), "guest", "chat"),
    ("spoken to a resident's satellite", Origin(satellite_id="assist_satellite.alice"), "alice", "voice"),
    (
        "spoken to a satellite in a resident's area",
        Origin(satellite_id="assist_satellite.g", area_id="garage"),
        "bob",
        "voice",
    ),
    (
        "spoken to a resident's satellite in another's area",
        Origin(satellite_id="assist_satellite.alice", area_id="garage"),
        "alice",
        "voice",
    ),
    (
        "spoken in an area that two share",
        Origin(satellite_id="assist_satellite.o", area_id="office"),
        "alice",
        "voice",
    ),
    (
        "spoken to a resident's own agent through any satellite",
        Origin(satellite_id="assist_satellite.hall", area_id="garage", agent_id="conversation.alice"),
        "alice",
        "voice",
    ),
    (
        "spoken by a resident to another's agent",
        Origin(satellite_id="assist_satellite.hall", user_id="user-bob", agent_id="conversation.alice"),
        "bob",
        "voice",
    ),
    ("typed by nobody to a resident's agent", Origin(agent_id="conversation.alice"), "alice", "chat"),
    (
        "typed by a stranger to a resident's agent",
        Origin(user_id="stranger", agent_id="conversation.alice"),
        "guest",
        "chat",
    ),
    (
        "automation that asks a resident's agent",
        Origin(agent_id="conversation.alice", is_traced=True),
        "house",
        "background",
    ),
    ("spoken to any other satellite", Origin(satellite_id="assist_satellite.hall"), "guest", "voice"),
    (
        "spoken through a pipeline that acts as a user",
        Origin(satellite_id="assist_satellite.alice", user_id="user-bob"),
        "bob",
        "voice",
    ),
    (
        "phoned: the phone integration's own user",
        Origin(satellite_id="assist_satellite.phone", user_id="system-voip"),
        "guest",
        "voice",
    ),
    (
        "spoken to a satellite inside a script",
        Origin(satellite_id="assist_satellite.alice", is_traced=True),
        "alice",
        "voice",
    ),
    ("script called by a resident", Origin(user_id="user-alice", is_traced=True), "alice", "background"),
    ("script called by a stranger", Origin(user_id="stranger", is_traced=True), "guest", "background"),
    (
        "automation set off by a resident",
        Origin(parent_user_id="user-bob", is_traced=True),
        "bob",
        "background",
    ),
    (
        "automation set off by a stranger",
        Origin(parent_user_id="stranger", is_traced=True),
        "guest",
        "background",
    ),
    ("automation set off by the clock", Origin(is_traced=True), "house", "background"),
    (
        "automation that sits in an area",
        Origin(is_traced=True, area_id="office"),
        "house",
        "background",
    ),
    ("task ordered by a resident", Origin(user_id="user-alice", is_task=True), "alice", "background"),
    ("task ordered by a stranger", Origin(user_id="stranger", is_task=True), "guest", "background"),
    ("task ordered by an integration", Origin(is_task=True), "house", "background"),
    (
        "task of an automation set off by a resident",
        Origin(parent_user_id="user-alice", is_task=True, is_traced=True),
        "alice",
        "background",
    ),
    ("task of an automation by the clock", Origin(is_task=True, is_traced=True), "house", "background"),
]


@pytest.mark.parametrize(
    ("origin", "resident_id", "workload_class"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_each_path_is_charged_as_the_table_says(
    origin: Origin, resident_id: str, workload_class: str
) -> None:
    expected = Attribution(resident_id=resident_id, workload_class=WorkloadClass(workload_class))
    assert attribute(origin, RULES) == expected


MARKED = ClassRule(
    voice=WorkloadClass.ACCESSIBILITY,
    chat=WorkloadClass.AGENT,
    task=WorkloadClass.AGENT,
)
BED = ClassRule(accessibility_satellite_ids=frozenset({"assist_satellite.bed"}))


@pytest.mark.parametrize(
    ("origin", "classes", "workload_class"),
    [
        (Origin(satellite_id="assist_satellite.bed"), BED, "accessibility"),
        (Origin(satellite_id="assist_satellite.hall"), BED, "voice"),
        (Origin(satellite_id="assist_satellite.hall"), MARKED, "accessibility"),
        (Origin(user_id="user-alice"), MARKED, "agent"),
        (Origin(is_task=True, is_traced=True), MARKED, "agent"),
        (Origin(is_traced=True), MARKED, "background"),
        (Origin(satellite_id="assist_satellite.bed", is_traced=True), BED, "accessibility"),
    ],
    ids=[
        "a marked satellite",
        "another satellite",
        "a marked agent",
        "typed to an agent that is set so",
        "a task that is set so",
        "an automation keeps to the background",
        "a marked satellite inside a script",
    ],
)
def test_the_household_decides_what_work_counts_as(
    origin: Origin, classes: ClassRule, workload_class: str
) -> None:
    assert attribute(origin, RULES, classes).workload_class == workload_class


@pytest.mark.parametrize("began_as", list(WorkloadClass))
def test_a_turn_stays_what_it_began_as_but_a_chat_of_many_calls_is_an_agent_at_work(
    began_as: WorkloadClass,
) -> None:
    began = Attribution(resident_id="alice", workload_class=began_as)
    for num_rounds in range(AGENT_AFTER_CALLS):
        assert after_calls(began, num_rounds) == began
    later = after_calls(began, AGENT_AFTER_CALLS)
    assert later.resident_id == "alice"
    assert later.workload_class == ("agent" if began_as == "chat" else began_as)


def test_of_two_classes_the_one_that_waits_longer() -> None:
    assert least_urgent(WorkloadClass.CHAT, WorkloadClass.BACKGROUND) == "background"
    assert least_urgent(WorkloadClass.AGENT, WorkloadClass.CHAT) == "agent"
    assert least_urgent(WorkloadClass.VOICE, WorkloadClass.VOICE) == "voice"


def test_a_rule_without_hints_claims_nobody() -> None:
    assert attribute(Origin(satellite_id="assist_satellite.hall"), (NOBODY,)).resident_id == "guest"


def test_without_residents_everyone_is_a_guest_and_the_house_works_for_itself() -> None:
    assert attribute(Origin(user_id="user-alice"), ()).resident_id == "guest"
    assert attribute(Origin(is_traced=True), ()).resident_id == "house"


def test_the_words_are_the_engines_words() -> None:
    assert {item.value for item in WorkloadClass} == {item.value for item in model.WorkloadClass}


def test_a_user_is_remembered_by_context() -> None:
    users = ContextUsers()
    users.remember("c1", "user-alice")
    assert users.user_of("c1") == "user-alice"
    assert users.user_of("c2") is None
    assert users.user_of(None) is None


def test_only_the_latest_contexts_are_remembered() -> None:
    users = ContextUsers(capacity=3)
    for number in range(3):
        users.remember(f"c{number}", "user")
    users.remember("c0", "user")
    users.remember("c3", "user")
    assert [users.user_of(f"c{number}") for number in range(4)] == ["user", None, "user", "user"]
