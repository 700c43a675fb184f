"""The integration's dashboard in a real browser, over a real Home Assistant and a real engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from household import dashboard, workload
from household.browser import Report, Step, Visit, visit
from household.homeassistant import sign_in_tokens
from household.places import BROWSER_PYTHON
from household.residence import ALICE, BOB, KITCHEN, Household
from household.stage import Stage

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # a browser on a busy machine
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not BROWSER_PYTHON.exists(), reason="there is no browser: scripts/setup browser"),
]

PHONE = {"width": 412, "height": 915}


async def look(stage: Stage, *visits: Visit) -> list[Report]:
    tokens = await sign_in_tokens(stage.session, stage.home.url, BOB)
    return await visit(stage.home.url, tokens, visits)


def shows(*selectors: str) -> tuple[Step, ...]:
    return tuple(("wait", selector) for selector in selectors)


async def test_the_dashboard_shows_the_household_on_every_screen_without_an_error(
    stage: Stage, home: Household
) -> None:
    await workload.speak(home, KITCHEN, "What colour is amber?")
    everything = shows(
        "role=status >> text=Everyone is served as agreed",
        "role=heading[name='Right now']",
        "role=button[name=/^A?\\s*Alice/]",
        "role=button[name=/^Alice: received \\d+%, fair share \\d+%$/]",
        "role=button[name=/^House: /]",
        "role=rowheader[name=/Spoken/]",
        "role=heading[name='Engine']",
    )
    reports = await look(
        stage,
        Visit(path=dashboard.PATH, steps=everything),
        Visit(path=dashboard.PATH, steps=everything, scheme="dark", **PHONE),
        Visit(path=f"/{dashboard.URL_PATH}/details", steps=shows("text=Guests", "text=Time to first word")),
    )
    assert [report.errors for report in reports] == [()] * 3


async def test_the_dashboard_can_be_used_with_the_keyboard_alone(stage: Stage, home: Household) -> None:
    steps: tuple[Step, ...] = (
        ("focus", "fairhearth-card .policy button"),
        ("press", "Tab"),
        ("focused", "fairhearth-card .person"),
        ("press", "Enter"),
        ("wait", "ha-more-info-dialog >> text=Requests running"),
    )
    (report,) = await look(stage, Visit(path=dashboard.PATH, steps=steps))
    assert report.errors == ()


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("sv", "Alla får svar som överenskommet"),
        ("ja", "全員が取り決めどおりに応答を受けています"),
        ("de", "Alle werden wie vereinbart bedient"),
    ],
)
async def test_the_dashboard_speaks_the_readers_language(
    stage: Stage, home: Household, language: str, words: str
) -> None:
    visited = Visit(path=dashboard.PATH, steps=shows(f"role=status >> text={words}"), language=language)
    (report,) = await look(stage, visited)
    assert report.errors == ()


async def test_reasons_jobs_and_a_lost_engine_are_told(stage: Stage, home: Household) -> None:
    policy = home.engine_entity("binary_sensor", "policy_met")
    job = {"job_id": "job-1", "title": "Minutes", "state": "running", "progress": 40, "eta_s": 12.3}
    reasons = [
        "voice requests waited 16.6 s; the policy allows 2.0 s",
        "Bob Smith was served 900 tokens more than Bo while both waited; the policy allows 358",
        "something new",
    ]
    swedish = shows(
        "role=status >> text=Alla får inte svar som överenskommet",
        "role=listitem >> text=Talat: väntade 16,6 s, policyn tillåter 2 s.",
        "role=listitem >> text=Bob Smith fick 900 fler token än Bo medan båda väntade; policyn tillåter 358.",
        "role=listitem >> text=something new",
        "role=progressbar[name='Minutes']",
        "text=40 % klart, ungefär 12 s kvar",
    )
    async with (
        shown(home, policy, "off", notes=reasons),
        shown(home, home.engine_entity("sensor", "jobs"), "1", jobs=[job]),
    ):
        (not_met,) = await look(stage, Visit(path=dashboard.PATH, steps=swedish, language="sv"))
    async with shown(home, policy, "unavailable"):
        lost = shows("role=status >> text=The engine cannot be reached.")
        (gone,) = await look(stage, Visit(path=dashboard.PATH, steps=lost))
    assert (not_met.errors, gone.errors) == ((), ())


async def test_the_margin_answers_in_time_and_a_pause_are_told_on_a_phone(
    stage: Stage, home: Household
) -> None:
    switch = {"entity_id": home.engine_entity("switch", "background_paused")}
    job = {
        "job_id": "job-1",
        "title": "Minutes",
        "state": "submitted",
        "workload_class": "background",
        "progress": 0,
    }
    swedish = shows(
        "text=/Största skillnad: 12\\s%/",
        "text=Bakgrunden är pausad.",
        "role=columnheader[name='I tid']",
        "role=row[name=/Skrivet .*97\\s?%/]",
        "role=row[name=/I bakgrunden.*pausat/]",
        "role=progressbar[name='Minutes']",
        "role=listitem >> text=pausat",
    )
    await home.socket.act("switch.turn_on", switch)
    try:
        async with (
            shown(home, home.engine_entity("sensor", "bound_used"), "12"),
            shown(home, home.engine_entity("sensor", "slo_attainment_chat"), "97"),
            shown(home, home.engine_entity("sensor", "jobs"), "1", jobs=[job]),
        ):
            (report,) = await look(stage, Visit(path=dashboard.PATH, steps=swedish, language="sv", **PHONE))
    finally:
        await home.socket.act("switch.turn_off", switch)
    assert report.errors == ()


@asynccontextmanager
async def shown(home: Household, entity_id: str, state: str, **attributes: Any) -> AsyncIterator[None]:
    """Have Home Assistant show another state of an entity; its integration writes only what changes."""
    path = f"/api/states/{entity_id}"
    before = await home.rest.get(path)
    await home.rest.post(path, {"state": state, "attributes": {**before["attributes"], **attributes}})
    try:
        yield
    finally:
        await home.rest.post(path, {"state": before["state"], "attributes": before["attributes"]})


async def test_dashboard_and_card_are_offered_without_a_line_of_yaml(stage: Stage, home: Household) -> None:
    await home.socket.call(
        "lovelace/dashboards/create", url_path="own-dashboard", title="Own", mode="storage"
    )
    config = {"views": [{"type": "sections", "path": "home", "sections": [{"type": "grid", "cards": []}]}]}
    await home.socket.call("lovelace/config/save", url_path="own-dashboard", config=config)
    tokens = await sign_in_tokens(stage.session, stage.home.url, ALICE)
    dialog: tuple[Step, ...] = (
        ("click", "role=button[name='Add dashboard']"),
        ("wait", "dashboard-card >> text=Fair share"),
    )
    picker: tuple[Step, ...] = (
        ("click", "role=button[name='Add card']"),
        ("click", "role=tab[name='By card']"),
        ("fill", "hui-card-picker input", "Fairhearth"),
        ("wait", "hui-card-picker >> fairhearth-card >> role=heading[name='Right now']"),
    )
    reports = await visit(
        stage.home.url,
        tokens,
        [
            Visit(path="/config/lovelace/dashboards", steps=dialog),
            Visit(path="/own-dashboard/home?edit=1", steps=picker),
        ],
    )
    errors = [error for report in reports for error in report.errors]
    # The picker's previews of Home Assistant's own cards fetch pictures from the internet.
    assert [error for error in errors if stage.home.url in error or "Failed to load" not in error] == []
