"""Each action says whose fault it was: the caller's is refused without a line in the log, the rest fails."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import pytest
from pytest_homeassistant_custom_component.common import MockConfigEntry
from pytest_homeassistant_custom_component.typing import ClientSessionGenerator

from custom_components.fairhearth.const import DOMAIN
from custom_components.fairhearth.engine_client import CannotConnect, EngineError, ProtocolError
from custom_components.fairhearth.engine_client.errors import error_from_wire
from custom_components.fairhearth.errors import as_home_assistant_error
from engine_service import errors as sent
from homeassistant.core import HomeAssistant
from homeassistant.exceptions import HomeAssistantError, ServiceValidationError
from homeassistant.setup import async_setup_component
from tests.ha.fake_engine import FakeEngine, error_body
from tests.ha.test_translations import TEXTS

ACTION_DATA: dict[str, dict[str, Any]] = {
    "generate": {"prompt": "Hi"},
    "submit_summary": {"text": "A long day."},
    "get_job": {"job_id": "job-1"},
    "cancel_job": {"job_id": "job-1"},
    "list_jobs": {},
    "set_policy": {"policy": {"fairness": "waiting"}},
    "rehearse": {"scenario": "kitchen_light"},
}
EACH_ACTION = pytest.mark.parametrize(("action", "data"), ACTION_DATA.items(), ids=ACTION_DATA)

CALLERS_STATUS = {400, 404, 405, 409, 413, 422}
REFUSALS = sorted(sent.EngineError.__subclasses__(), key=lambda cls: cls.code)


async def call(hass: HomeAssistant, action: str, **data: Any) -> Any:
    return await hass.services.async_call(DOMAIN, action, data, blocking=True, return_response=True)


def test_every_action_is_tried() -> None:
    assert ACTION_DATA.keys() == TEXTS["services"].keys()


@pytest.mark.parametrize("refusal", REFUSALS, ids=[cls.code for cls in REFUSALS])
def test_the_status_tells_whose_fault_it_is(refusal: type[sent.EngineError]) -> None:
    err = error_from_wire(error_body(refusal("no")), status=refusal.http_status)
    is_callers = isinstance(as_home_assistant_error(err), ServiceValidationError)
    assert is_callers == (refusal.http_status in CALLERS_STATUS)


@pytest.mark.parametrize("err", [CannotConnect("away"), ProtocolError("odd"), EngineError("new")])
def test_what_no_caller_can_mend_is_a_failure(err: EngineError) -> None:
    assert type(as_home_assistant_error(err)) is HomeAssistantError


@EACH_ACTION
@pytest.mark.usefixtures("loaded")
async def test_what_the_engine_refuses_is_the_callers_mistake(
    hass: HomeAssistant, engine: FakeEngine, action: str, data: dict[str, Any]
) -> None:
    for refusal, key in (
        (sent.InvalidRequest("no"), "invalid_request"),
        (sent.UnknownJob("no"), "unknown_job"),
        (sent.UnknownResident("no"), "unknown_resident"),
        (sent.IdempotencyConflict("no"), "idempotency_conflict"),
        (sent.PromptTooLong("no"), "prompt_too_long"),
        (sent.NotSupported("no"), "not_supported"),
    ):
        engine.token_refusal = refusal
        with pytest.raises(ServiceValidationError) as caught:
            await call(hass, action, **data)
        assert (caught.value.translation_domain, caught.value.translation_key) == (DOMAIN, key)


@EACH_ACTION
@pytest.mark.usefixtures("loaded")
async def test_what_fails_at_the_engine_or_on_the_way_is_no_mistake_of_the_caller(
    hass: HomeAssistant, engine: FakeEngine, action: str, data: dict[str, Any]
) -> None:
    for refusal, key in (
        (sent.GenerationFailed("no"), "generation_failed"),
        (sent.StorageUnavailable("no"), "storage_unavailable"),
        (sent.QueueFull("no"), "queue_full"),
        (sent.NotAllowed("no"), "not_allowed"),
    ):
        engine.token_refusal = refusal
        with pytest.raises(HomeAssistantError) as caught:
            await call(hass, action, **data)
        assert type(caught.value) is HomeAssistantError
        assert (caught.value.translation_domain, caught.value.translation_key) == (DOMAIN, key)
    await engine.stop()
    with pytest.raises(HomeAssistantError, match="cannot be reached") as caught:
        await call(hass, action, **data)
    assert type(caught.value) is HomeAssistantError


@EACH_ACTION
@pytest.mark.usefixtures("loaded")
async def test_over_rest_a_mistake_is_a_bad_request_and_not_logged(
    hass: HomeAssistant,
    engine: FakeEngine,
    hass_client: ClientSessionGenerator,
    caplog: pytest.LogCaptureFixture,
    action: str,
    data: dict[str, Any],
) -> None:
    assert await async_setup_component(hass, "api", {})
    client = await hass_client()
    engine.token_refusal = sent.InvalidRequest("fairnes is not a known key")
    path = f"/api/services/{DOMAIN}/{action}?return_response"
    response = await client.post(path, json=data)
    assert response.status == HTTPStatus.BAD_REQUEST
    assert "fairnes is not a known key" in (await response.json())["message"]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    engine.token_refusal = sent.GenerationFailed("out of memory")
    response = await client.post(path, json=data)
    assert response.status == HTTPStatus.INTERNAL_SERVER_ERROR


@EACH_ACTION
async def test_an_engine_that_there_is_not_is_the_callers_mistake(
    hass: HomeAssistant, loaded: MockConfigEntry, action: str, data: dict[str, Any]
) -> None:
    MockConfigEntry(domain="sun", entry_id="sun").add_to_hass(hass)
    for entry_id in ("other", "sun"):
        with pytest.raises(ServiceValidationError, match=f"no engine with the entry {entry_id}"):
            await call(hass, action, config_entry_id=entry_id, **data)
    await hass.config_entries.async_unload(loaded.entry_id)
    with pytest.raises(ServiceValidationError, match="No engine is connected"):
        await call(hass, action, config_entry_id=loaded.entry_id, **data)
    with pytest.raises(ServiceValidationError, match="No engine is connected"):
        await call(hass, action, **data)
