"""Who finds an idle device may wait for those who come at the same moment; nobody else waits for that."""

from __future__ import annotations

from engine_service.scheduling.events import Ticked
from engine_service.scheduling.model import Policy, Resident, ResidentId, WorkloadClass
from tests.scheduling.household import Household

RESIDENTS = tuple(Resident(resident_id=ResidentId(name)) for name in ("alice", "bob"))


def test_those_who_come_together_are_planned_together() -> None:
    home = Household(residents=RESIDENTS)
    document = home.ask("bob", WorkloadClass.BACKGROUND, 400, 8, may_have_company=True)
    assert home.flying is None
    chats = [home.ask("alice", WorkloadClass.CHAT, 20, 8, may_have_company=True) for _ in range(2)]
    assert home.flying is None
    home.tell(Ticked())
    assert home.flying is not None
    first = [chunk.request_id for chunk in home.flying.prefills]
    assert first[:2] == chats, "the class decides, not who was first by a hair"
    home.run_dry()
    assert all(home.sequences[request_id].finished_at for request_id in (document, *chats))


def test_an_arrival_without_company_takes_those_along_who_wait_for_it() -> None:
    home = Household(residents=RESIDENTS)
    chat = home.ask("alice", WorkloadClass.CHAT, 20, 8, may_have_company=True)
    spoken = home.ask("bob", WorkloadClass.VOICE, 20, 8)
    assert home.flying is not None
    assert spoken in [chunk.request_id for chunk in home.flying.prefills]
    home.run_dry()
    assert home.sequences[chat].finished_at is not None


def test_a_busy_device_plans_as_ever() -> None:
    home = Household(residents=RESIDENTS)
    home.ask("alice", WorkloadClass.CHAT, 20, 8)
    flying = home.flying
    late = home.ask("bob", WorkloadClass.CHAT, 20, 8, may_have_company=True)
    assert home.flying is flying
    home.step()
    assert home.flying is not None
    assert late in [chunk.request_id for chunk in home.flying.prefills]


def test_speech_waits_for_no_company_whatever_the_shell_says() -> None:
    home = Household(residents=RESIDENTS)
    home.ask("alice", WorkloadClass.VOICE, 20, 8, may_have_company=True)
    assert home.flying is not None


def test_who_waits_for_company_keeps_nobody_out_of_a_full_queue() -> None:
    home = Household(policy=Policy(max_waiting=1), residents=RESIDENTS)
    asked = [home.ask("alice", WorkloadClass.CHAT, 20, 8, may_have_company=True) for _ in range(2)]
    assert not home.rejected
    home.run_dry()
    assert all(home.sequences[request_id].finished_at for request_id in asked)
