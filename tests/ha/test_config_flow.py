"""Connecting an engine: what is asked, what is refused and why, and that every refusal can be mended."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pytest_homeassistant_custom_component.common import MockConfigEntry

from custom_components.fairhearth.config_flow import normalized_url
from custom_components.fairhearth.const import DOMAIN
from custom_components.fairhearth.errors import Refused
from homeassistant.config_entries import SOURCE_USER, SOURCE_ZEROCONF, ConfigEntryState
from homeassistant.const import CONF_CODE, CONF_LLM_HASS_API, CONF_TOKEN, CONF_URL
from homeassistant.core import HomeAssistant
from homeassistant.data_entry_flow import FlowResultType
from homeassistant.helpers.service_info.zeroconf import ZeroconfServiceInfo
from tests.ha.conftest import until
from tests.ha.fake_engine import ENGINE_ID, TOKEN, FakeEngine, refusal

pytestmark = pytest.mark.usefixtures("core")


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    """What an engine with a certificate of its own making serves with."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    own = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(own.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(own, hashes.SHA256())
    )
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        own.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


async def begin(hass: HomeAssistant) -> Any:
    result = await hass.config_entries.flow.async_init(DOMAIN, context={"source": SOURCE_USER})
    assert (result["type"], result["step_id"], result["errors"]) == (FlowResultType.FORM, "user", {})
    return result["flow_id"]


async def enter(hass: HomeAssistant, flow_id: str, url: str, token: str = TOKEN) -> Any:
    return await hass.config_entries.flow.async_configure(flow_id, {CONF_URL: url, CONF_TOKEN: token})


async def test_an_engine_is_connected_with_an_agent_and_an_ai_task(
    hass: HomeAssistant, engine: FakeEngine
) -> None:
    result = await enter(hass, await begin(hass), f" {engine.url}/ ")
    assert result["type"] is FlowResultType.CREATE_ENTRY
    assert result["title"] == "Kitchen engine"
    assert result["data"] == {CONF_URL: engine.url, CONF_TOKEN: TOKEN}
    entry = result["result"]
    assert entry.unique_id == ENGINE_ID
    kinds = {subentry.subentry_type: subentry for subentry in entry.subentries.values()}
    assert kinds.keys() == {"conversation", "ai_task_data"}
    assert kinds["conversation"].data == {CONF_LLM_HASS_API: ["assist"]}
    await hass.async_block_till_done()
    assert entry.state is ConfigEntryState.LOADED
    assert hass.states.get("conversation.fairhearth") is not None
    assert hass.states.get("ai_task.fairhearth_ai_task") is not None


async def test_each_refusal_names_its_cause_and_can_be_mended(
    hass: HomeAssistant, engine: FakeEngine
) -> None:
    """One dialog goes through every refusal and still ends well."""
    flow_id = await begin(hass)
    assert (await enter(hass, flow_id, "ftp://engine"))["errors"] == {CONF_URL: "invalid_url"}
    assert (await enter(hass, flow_id, "http://127.0.0.1:1"))["errors"] == {"base": "cannot_connect"}
    assert (await enter(hass, flow_id, engine.url, "wrong"))["errors"] == {CONF_TOKEN: "invalid_token"}
    engine.tokens["half"] = ("generate",)
    assert (await enter(hass, flow_id, engine.url, "half"))["errors"] == {CONF_TOKEN: "token_not_enough"}
    engine.schema_version = 0
    assert (await enter(hass, flow_id, engine.url))["errors"] == {"base": "update_engine"}
    engine.schema_version = 2
    assert (await enter(hass, flow_id, engine.url))["errors"] == {"base": "update_integration"}
    engine.schema_version = 1
    result = await enter(hass, flow_id, engine.url)
    assert result["type"] is FlowResultType.CREATE_ENTRY
    await hass.async_block_till_done()


async def test_an_administrators_token_may_do_all(hass: HomeAssistant, engine: FakeEngine) -> None:
    engine.tokens["admin"] = ("admin", "generate", "residents")
    result = await enter(hass, await begin(hass), engine.url, "admin")
    assert result["type"] is FlowResultType.CREATE_ENTRY
    await hass.async_block_till_done()


async def test_an_engine_is_connected_by_the_digits_it_shows(hass: HomeAssistant, engine: FakeEngine) -> None:
    """Each wrong way says what to do, and none uses the code up."""
    flow_id = await begin(hass)
    engine.code = None

    async def pair(code: str) -> Any:
        answers = {CONF_URL: engine.url, CONF_CODE: code}
        return await hass.config_entries.flow.async_configure(flow_id, answers)

    assert (await pair(""))["errors"] == {CONF_CODE: "code_or_token"}
    assert (await pair("12345"))["errors"] == {CONF_CODE: "code_not_six_digits"}
    assert (await pair("１２３４５６"))["errors"] == {CONF_CODE: "code_not_six_digits"}
    assert (await pair("123456"))["errors"] == {CONF_CODE: "pairing_closed"}
    engine.code = "424242"
    assert (await pair("123456"))["errors"] == {CONF_CODE: "wrong_code"}
    result = await pair("424 242")
    assert result["type"] is FlowResultType.CREATE_ENTRY
    assert result["data"] == {CONF_URL: engine.url, CONF_TOKEN: "paired-Home Assistant test home"}
    await hass.async_block_till_done()
    assert result["result"].state is ConfigEntryState.LOADED


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("too_many_failures", 429, {"base": "too_many_failures"}),
        ("not_found", 404, {"base": "update_engine"}),
        ("engine_error", 500, {"base": "cannot_connect"}),
    ],
)
async def test_an_engine_that_cannot_pair_says_why(
    hass: HomeAssistant, engine: FakeEngine, code: str, status: int, error: dict[str, str]
) -> None:
    engine.pair_refusal = refusal(code, "no", status)
    answers = {CONF_URL: engine.url, CONF_CODE: "123456"}
    result = await hass.config_entries.flow.async_configure(await begin(hass), answers)
    assert result["errors"] == error


async def test_too_many_wrong_tokens_are_said_to_be_too_many(hass: HomeAssistant, engine: FakeEngine) -> None:
    engine.token_refusal = refusal("too_many_failures", "wait", 429)
    assert (await enter(hass, await begin(hass), engine.url))["errors"] == {"base": "too_many_failures"}


async def test_encryption_where_there_is_none_and_none_where_there_is_are_told_apart(
    hass: HomeAssistant, engine: FakeEngine, tls: ssl.SSLContext
) -> None:
    flow_id = await begin(hass)
    https = engine.url.replace("http:", "https:")
    assert (await enter(hass, flow_id, https))["errors"] == {CONF_URL: "use_http"}
    await engine.stop()
    # The fake engine is in this process: that it refuses a handshake is no error of the test.
    hass.loop.set_exception_handler(lambda _, context: None)
    await engine.start(tls)
    assert (await enter(hass, flow_id, engine.url))["errors"] == {CONF_URL: "use_https"}
    assert (await enter(hass, flow_id, https))["errors"] == {CONF_URL: "certificate"}


@pytest.mark.parametrize(
    ("answers", "errors"),
    [
        ({"/health": (200, "<html>router</html>")}, {CONF_URL: "not_an_engine"}),
        ({"/health": (404, "{}")}, {CONF_URL: "not_an_engine"}),
        ({"/health": None, "/v1/engine": (500, "oops")}, {"base": "cannot_connect"}),
        (
            {"/health": None, "/v1/engine": (403, '{"error": {"code": "not_allowed", "message": "no"}}')},
            {CONF_TOKEN: "token_not_enough"},
        ),
    ],
)
async def test_what_is_not_a_working_engine_is_refused(
    hass: HomeAssistant,
    socket_enabled: None,
    answers: dict[str, tuple[int, str] | None],
    errors: dict[str, str],
) -> None:
    good = '{"status": "ok", "engine_id": "e", "version": "1", "schema_version": 1, "model": "m"}'

    async def answer(request: web.Request) -> web.Response:
        status, text = answers[request.path] or (200, good)
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        assert (await enter(hass, await begin(hass), url))["errors"] == errors
    finally:
        await runner.cleanup()


async def test_an_engine_is_not_connected_twice_but_found_again_at_its_new_address(
    hass: HomeAssistant, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    entry.add_to_hass(hass)
    hass.config_entries.async_update_entry(entry, data={CONF_URL: "http://old:8321", CONF_TOKEN: "old"})
    result = await enter(hass, await begin(hass), engine.url)
    assert (result["type"], result["reason"]) == (FlowResultType.ABORT, "already_configured")
    assert entry.data == {CONF_URL: engine.url, CONF_TOKEN: TOKEN}


@pytest.mark.parametrize(
    ("entered", "stored"),
    [
        ("192.168.1.5", "http://192.168.1.5:8321"),
        ("engine.local", "http://engine.local:8321"),
        ("engine.local:9000", "http://engine.local:9000"),
        ("[fd00::5]", "http://[fd00::5]:8321"),
        ("http://engine.local", "http://engine.local"),
        ("https://example.org/engine/", "https://example.org/engine"),
        ("  http://engine:8321//  ", "http://engine:8321"),
    ],
)
def test_an_address_is_stored_in_one_form(entered: str, stored: str) -> None:
    assert normalized_url(entered) == stored


@pytest.mark.parametrize(
    "entered",
    [
        "",
        "   ",
        "ftp://engine",
        "http://",
        "http://a:b@engine",
        "http://engine?x=1",
        "http://engine:99999",
        "[::1",
    ],
)
def test_what_is_no_address_is_refused(entered: str) -> None:
    with pytest.raises(Refused) as raised:
        normalized_url(entered)
    assert raised.value.errors == {CONF_URL: "invalid_url"}


# --- a token that stopped working, an engine that moved ---


async def test_a_new_token_is_asked_for_and_brings_the_entry_back(
    hass: HomeAssistant, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    engine.tokens = {"new-token": engine.tokens[TOKEN]}
    entry.add_to_hass(hass)
    assert not await hass.config_entries.async_setup(entry.entry_id)
    assert entry.state is ConfigEntryState.SETUP_ERROR
    (flow,) = hass.config_entries.flow.async_progress()
    assert (flow["step_id"], flow["context"]["source"]) == ("reauth_confirm", "reauth")

    result = await hass.config_entries.flow.async_configure(flow["flow_id"], {CONF_TOKEN: "still wrong"})
    assert result["errors"] == {CONF_TOKEN: "invalid_token"}
    result = await hass.config_entries.flow.async_configure(flow["flow_id"], {})
    assert result["errors"] == {CONF_CODE: "code_or_token"}
    result = await hass.config_entries.flow.async_configure(flow["flow_id"], {CONF_TOKEN: "new-token"})
    assert (result["type"], result["reason"]) == (FlowResultType.ABORT, "reauth_successful")
    await hass.async_block_till_done()
    assert entry.data[CONF_TOKEN] == "new-token"
    assert entry.state is ConfigEntryState.LOADED


async def test_a_token_refused_while_running_asks_for_a_new_one(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    engine.tokens = {"new-token": engine.tokens[TOKEN]}
    await engine.stop()
    await engine.start()
    await until(lambda: bool(hass.config_entries.flow.async_progress()))
    (flow,) = hass.config_entries.flow.async_progress()
    assert flow["context"]["source"] == "reauth"
    assert hass.states.get("sensor.alice_tokens_used").state == "unavailable"
    result = await hass.config_entries.flow.async_configure(flow["flow_id"], {CONF_TOKEN: "new-token"})
    assert result["reason"] == "reauth_successful"
    await hass.async_block_till_done()
    assert loaded.state is ConfigEntryState.LOADED
    assert hass.states.get("sensor.alice_tokens_used").state == "0"


async def test_a_token_that_works_again_brings_the_entry_back_too(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    """The same token entered again changes nothing in the entry, but must still reload it."""
    tokens = engine.tokens
    engine.tokens = {}
    await engine.stop()
    await engine.start()
    await until(lambda: bool(hass.config_entries.flow.async_progress()))
    engine.tokens = tokens
    (flow,) = hass.config_entries.flow.async_progress()
    await hass.config_entries.flow.async_configure(flow["flow_id"], {CONF_TOKEN: TOKEN})
    await hass.async_block_till_done()
    assert hass.states.get("sensor.alice_tokens_used").state == "0"


async def test_a_reauthentication_does_not_take_another_engine(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    result = await loaded.start_reauth_flow(hass)
    engine.engine_id = "another"
    result = await hass.config_entries.flow.async_configure(result["flow_id"], {CONF_TOKEN: TOKEN})
    assert (result["type"], result["reason"]) == (FlowResultType.ABORT, "unique_id_mismatch")


async def test_a_new_code_brings_the_entry_back(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    result = await loaded.start_reauth_flow(hass)
    engine.engine_id = "another"
    result = await hass.config_entries.flow.async_configure(result["flow_id"], {CONF_CODE: "123456"})
    assert (result["type"], result["reason"]) == (FlowResultType.ABORT, "unique_id_mismatch")
    assert engine.code == "123456"  # not used up at the wrong engine
    engine.engine_id = ENGINE_ID
    result = await loaded.start_reauth_flow(hass)
    result = await hass.config_entries.flow.async_configure(result["flow_id"], {CONF_CODE: "123456"})
    assert result["reason"] == "reauth_successful"
    await hass.async_block_till_done()
    assert loaded.data[CONF_TOKEN].startswith("paired-")


async def test_the_token_stays_where_only_the_address_is_changed(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    result = await loaded.start_reconfigure_flow(hass)
    result = await hass.config_entries.flow.async_configure(result["flow_id"], {CONF_URL: engine.url})
    assert result["reason"] == "reconfigure_successful"
    await hass.async_block_till_done()
    assert loaded.data[CONF_TOKEN] == TOKEN


async def test_satellites_that_someone_depends_on_are_an_option(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    result = await hass.config_entries.options.async_init(loaded.entry_id)
    assert result["step_id"] == "init"
    options = {"accessibility_satellites": ["assist_satellite.bed"]}
    result = await hass.config_entries.options.async_configure(result["flow_id"], options)
    assert result["type"] is FlowResultType.CREATE_ENTRY
    await until(lambda: engine.num_streams == 2)
    assert loaded.options == options


async def test_address_and_token_can_be_changed(
    hass: HomeAssistant, engine: FakeEngine, loaded: MockConfigEntry
) -> None:
    engine.tokens["second"] = engine.tokens[TOKEN]
    result = await loaded.start_reconfigure_flow(hass)
    assert result["step_id"] == "reconfigure"
    result = await enter(hass, result["flow_id"], "http://127.0.0.1:1", "second")
    assert result["errors"] == {"base": "cannot_connect"}
    await engine.stop()
    engine.port = 0
    await engine.start()
    result = await enter(hass, result["flow_id"], engine.url.removeprefix("http://"), "second")
    assert (result["type"], result["reason"]) == (FlowResultType.ABORT, "reconfigure_successful")
    await hass.async_block_till_done()
    assert loaded.data == {CONF_URL: engine.url, CONF_TOKEN: "second"}
    assert loaded.state is ConfigEntryState.LOADED


async def test_an_entry_that_never_connected_can_be_reconfigured(
    hass: HomeAssistant, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    entry.add_to_hass(hass)
    hass.config_entries.async_update_entry(entry, data={**entry.data, CONF_URL: "http://127.0.0.1:1"})
    assert not await hass.config_entries.async_setup(entry.entry_id)
    assert entry.state is ConfigEntryState.SETUP_RETRY
    result = await entry.start_reconfigure_flow(hass)
    result = await enter(hass, result["flow_id"], engine.url)
    assert result["reason"] == "reconfigure_successful"
    await hass.async_block_till_done()
    assert entry.state is ConfigEntryState.LOADED


# --- an engine that announces itself ---


def announcement(engine: FakeEngine, host: str = "127.0.0.1", **properties: str) -> ZeroconfServiceInfo:
    return ZeroconfServiceInfo(
        ip_address=ip_address(host),
        ip_addresses=[ip_address(host)],
        port=engine.port,
        hostname="engine.local.",
        type="_fairhearth._tcp.local.",
        name="Kitchen engine._fairhearth._tcp.local.",
        properties=properties,
    )


async def found(hass: HomeAssistant, info: ZeroconfServiceInfo) -> Any:
    return await hass.config_entries.flow.async_init(DOMAIN, context={"source": SOURCE_ZEROCONF}, data=info)


async def test_an_announced_engine_needs_only_its_token(hass: HomeAssistant, engine: FakeEngine) -> None:
    result = await found(hass, announcement(engine, engine_id=ENGINE_ID))
    assert (result["type"], result["step_id"]) == (FlowResultType.FORM, "zeroconf_confirm")
    assert result["description_placeholders"] == {"url": engine.url}
    result = await hass.config_entries.flow.async_configure(result["flow_id"], {CONF_TOKEN: "wrong"})
    assert result["errors"] == {CONF_TOKEN: "invalid_token"}
    result = await hass.config_entries.flow.async_configure(result["flow_id"], {CONF_CODE: "123456"})
    assert result["type"] is FlowResultType.CREATE_ENTRY
    assert result["data"][CONF_URL] == engine.url
    await hass.async_block_till_done()


async def test_a_known_engine_is_found_at_its_new_address(
    hass: HomeAssistant, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    entry.add_to_hass(hass)
    result = await found(hass, announcement(engine, host="192.168.1.9", engine_id=ENGINE_ID))
    assert (result["type"], result["reason"]) == (FlowResultType.ABORT, "already_configured")
    assert entry.data[CONF_URL] == f"http://192.168.1.9:{engine.port}"


async def test_a_known_engine_with_a_certificate_keeps_the_name_it_was_entered_by(
    hass: HomeAssistant, engine: FakeEngine, entry: MockConfigEntry
) -> None:
    entry.add_to_hass(hass)
    before = entry.data[CONF_URL]
    info = announcement(engine, host="192.168.1.9", engine_id=ENGINE_ID, scheme="https")
    result = await found(hass, info)
    assert (result["type"], result["reason"]) == (FlowResultType.ABORT, "already_configured")
    assert entry.data[CONF_URL] == before


async def test_an_engine_announced_with_https_is_asked_by_https(
    hass: HomeAssistant, engine: FakeEngine
) -> None:
    result = await found(hass, announcement(engine, engine_id=ENGINE_ID, scheme="https"))
    https = engine.url.replace("http:", "https:")
    assert result["description_placeholders"] == {"url": https}


async def test_an_announcement_without_an_id_is_not_taken_up(hass: HomeAssistant, engine: FakeEngine) -> None:
    result = await found(hass, announcement(engine))
    assert (result["type"], result["reason"]) == (FlowResultType.ABORT, "not_an_engine")


async def test_an_engine_announced_on_ipv6_has_a_bracketed_address(
    hass: HomeAssistant, engine: FakeEngine
) -> None:
    result = await found(hass, announcement(engine, host="fd00::5", engine_id="other"))
    assert result["description_placeholders"] == {"url": f"http://[fd00::5]:{engine.port}"}
