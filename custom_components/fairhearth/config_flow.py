"""The dialogs for an engine: connect it, find it again, give it another address or token.

An engine is known by its own id, not by its address, so it may move. Nobody needs to copy a token: the six
digits that the engine shows are traded for one. A dialog asks the engine before it saves anything, and names
what was wrong: the address, the code, the token, what the token may do, or which side to update.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, override

import aiohttp
import probatio
from yarl import URL

from homeassistant.config_entries import (
    ConfigFlow,
    ConfigFlowResult,
    ConfigSubentryData,
    ConfigSubentryFlow,
    OptionsFlow,
)
from homeassistant.const import CONF_CODE, CONF_LLM_HASS_API, CONF_TOKEN, CONF_URL
from homeassistant.core import HomeAssistant, callback
from homeassistant.data_entry_flow import AbortFlow
from homeassistant.helpers import llm
from homeassistant.helpers.aiohttp_client import async_get_clientsession
from homeassistant.helpers.selector import (
    EntitySelector,
    EntitySelectorConfig,
    TextSelector,
    TextSelectorConfig,
    TextSelectorType,
)
from homeassistant.helpers.service_info.zeroconf import ZeroconfServiceInfo

from .const import (
    CONF_ACCESSIBILITY_SATELLITES,
    DEFAULT_AI_TASK_NAME,
    DEFAULT_CONVERSATION_NAME,
    DEFAULT_PORT,
    DEFAULT_URL,
    DOMAIN,
    LOGGER,
    MAX_TOKEN_NAME_CHARACTERS,
    REQUIRED_SCOPES,
    SUBENTRY_AI_TASK,
    SUBENTRY_CONVERSATION,
    SUBENTRY_RESIDENT,
)
from .coordinator import FairhearthConfigEntry
from .engine_client import (
    SCHEMA_VERSION,
    CannotConnect,
    EngineClient,
    EngineError,
    EngineInfo,
    Health,
    InvalidToken,
    MethodNotAllowed,
    NotAllowed,
    NotFound,
    PairingClosed,
    TooManyFailures,
    WrongCode,
)
from .errors import Refused
from .subentry_flow import AgentSubentryFlow, ResidentSubentryFlow

_TOKEN_SELECTOR: Final = TextSelector(
    TextSelectorConfig(type=TextSelectorType.PASSWORD, autocomplete="current-password")
)
_URL_SELECTOR: Final = TextSelector(TextSelectorConfig(type=TextSelectorType.URL))

_KEY_FIELDS: Final = {
    probatio.Optional(CONF_CODE): TextSelector(TextSelectorConfig(autocomplete="one-time-code")),
    probatio.Optional(CONF_TOKEN): _TOKEN_SELECTOR,
}

ENGINE_SCHEMA: Final = probatio.Schema(
    {probatio.Required(CONF_URL, default=DEFAULT_URL): _URL_SELECTOR, **_KEY_FIELDS}
)
KEY_SCHEMA: Final = probatio.Schema(_KEY_FIELDS)
OPTIONS_SCHEMA: Final = probatio.Schema(
    {
        probatio.Optional(CONF_ACCESSIBILITY_SATELLITES): EntitySelector(
            EntitySelectorConfig(domain="assist_satellite", multiple=True)
        )
    }
)


def normalized_url(text: str) -> str:
    """Return the address as it is stored; a bare host gets the engine's own port. Raises Refused."""
    text = text.strip()
    has_scheme = "://" in text
    try:
        url = URL(text if has_scheme else f"http://{text}")
        port = url.explicit_port
    except ValueError as err:
        raise Refused("invalid_url", CONF_URL) from err
    if url.scheme not in ("http", "https") or not url.host or url.query_string or url.fragment or url.user:
        raise Refused("invalid_url", CONF_URL)
    if port is None and not has_scheme:
        url = url.with_port(DEFAULT_PORT)
    return str(url).rstrip("/")


async def async_health(hass: HomeAssistant, url: str) -> Health:
    """Return what answers at the address without a token; raise Refused with which side to mend."""
    try:
        health = await _client(hass, url).health()
    except EngineError as err:
        LOGGER.debug("No engine of ours at %s: %s", url, err)
        raise await _async_why_not_there(hass, url, err) from err
    if health.schema_version < SCHEMA_VERSION:
        raise Refused("update_engine")
    if health.schema_version > SCHEMA_VERSION:
        raise Refused("update_integration")
    return health


async def _async_why_not_there(hass: HomeAssistant, url: str, err: EngineError) -> Refused:
    """Return the refusal that names the cause: a certificate, http instead of https, or nobody there."""
    if isinstance(err.__cause__, aiohttp.ClientConnectorCertificateError):
        return Refused("certificate", CONF_URL)
    is_nobody_there = isinstance(err.__cause__, aiohttp.ClientConnectorError) and not isinstance(
        err.__cause__, aiohttp.ClientSSLError
    )
    if not is_nobody_there and await _async_speaks(hass, other := _other_scheme(URL(url))):
        return Refused("use_https", CONF_URL) if other.scheme == "https" else Refused("use_http", CONF_URL)
    return Refused("cannot_connect") if isinstance(err, CannotConnect) else Refused("not_an_engine", CONF_URL)


def _other_scheme(url: URL) -> URL:
    """Return the address with http and https changed places, on the same port."""
    return url.with_scheme("https" if url.scheme == "http" else "http").with_port(url.port)


async def _async_speaks(hass: HomeAssistant, url: URL) -> bool:
    """Return whether an engine is at the address, be it behind a certificate that is not trusted."""
    try:
        await _client(hass, str(url)).health()
    except EngineError as err:
        return isinstance(err.__cause__, aiohttp.ClientConnectorCertificateError)
    return True


async def async_probe(hass: HomeAssistant, url: str, token: str) -> EngineInfo:
    """Return what the engine is; raise Refused where the token does not do or there is no engine."""
    await async_health(hass, url)
    try:
        info = await _client(hass, url, token).engine()
    except InvalidToken as err:
        raise Refused("invalid_token", CONF_TOKEN) from err
    except NotAllowed as err:
        raise Refused("token_not_enough", CONF_TOKEN) from err
    except TooManyFailures as err:
        raise Refused("too_many_failures") from err
    except EngineError as err:
        LOGGER.debug("The engine at %s does not say what it is: %s", url, err)
        raise Refused("cannot_connect") from err
    if not all(info.may(scope) for scope in REQUIRED_SCOPES):
        raise Refused("token_not_enough", CONF_TOKEN)
    return info


async def async_pair(hass: HomeAssistant, url: str, code: str) -> str:
    """Return the token that the engine gives for the code it shows; raise Refused with what to do."""
    digits = re.sub(r"[\s-]", "", code)
    if not re.fullmatch(r"[0-9]{6}", digits):
        raise Refused("code_not_six_digits", CONF_CODE)
    name = f"Home Assistant {hass.config.location_name}"[:MAX_TOKEN_NAME_CHARACTERS].strip()
    try:
        return (await _client(hass, url).pair(digits, name)).token
    except WrongCode as err:
        raise Refused("wrong_code", CONF_CODE) from err
    except PairingClosed as err:
        raise Refused("pairing_closed", CONF_CODE) from err
    except TooManyFailures as err:
        raise Refused("too_many_failures") from err
    except (NotFound, MethodNotAllowed) as err:
        raise Refused("update_engine") from err
    except EngineError as err:
        LOGGER.debug("The engine at %s does not pair: %s", url, err)
        raise Refused("cannot_connect") from err


def _client(hass: HomeAssistant, url: str, token: str | None = None) -> EngineClient:
    return EngineClient(async_get_clientsession(hass), url, token)


class FairhearthConfigFlow(ConfigFlow, domain=DOMAIN):
    """Connects an engine."""

    VERSION = 1
    MINOR_VERSION = 1

    _discovered_url: str

    @override
    async def async_step_user(self, user_input: dict[str, Any] | None = None) -> ConfigFlowResult:
        """Ask for the address, and for the code that the engine shows or for a token."""
        errors: dict[str, str] = {}
        if user_input is not None:
            try:
                return await self._async_create(normalized_url(user_input[CONF_URL]), user_input)
            except Refused as refused:
                errors = refused.errors
        return self.async_show_form(
            step_id="user",
            data_schema=self.add_suggested_values_to_schema(ENGINE_SCHEMA, user_input),
            errors=errors,
        )

    @override
    async def async_step_zeroconf(self, discovery_info: ZeroconfServiceInfo) -> ConfigFlowResult:
        """Take up an engine that announced itself; it says who it is, the code is still asked for."""
        address = discovery_info.ip_address
        host = f"[{address}]" if address.version == 6 else str(address)
        is_encrypted = discovery_info.properties.get("scheme") == "https"
        self._discovered_url = f"{'https' if is_encrypted else 'http'}://{host}:{discovery_info.port}"
        engine_id = discovery_info.properties.get("engine_id")
        if not engine_id:
            return self.async_abort(reason="not_an_engine")
        await self.async_set_unique_id(engine_id)
        # A certificate is for the name that was entered, as a rule; what is announced is a number.
        updates = None if is_encrypted else {CONF_URL: self._discovered_url}
        self._abort_if_unique_id_configured(updates=updates, reload_on_update=False)
        self.context["title_placeholders"] = {"name": discovery_info.name.partition(".")[0]}
        return await self.async_step_zeroconf_confirm()

    async def async_step_zeroconf_confirm(self, user_input: dict[str, Any] | None = None) -> ConfigFlowResult:
        """Ask for the code that a discovered engine shows, or for a token."""
        errors: dict[str, str] = {}
        if user_input is not None:
            try:
                return await self._async_create(self._discovered_url, user_input)
            except Refused as refused:
                errors = _without_url_field(refused.errors)
        return self.async_show_form(
            step_id="zeroconf_confirm",
            data_schema=KEY_SCHEMA,
            errors=errors,
            description_placeholders={"url": self._discovered_url},
        )

    async def _async_token(self, url: str, user_input: dict[str, Any], engine_id: str | None = None) -> str:
        """Return the token that was entered or that the code is good for; raise Refused without either.

        With engine_id no code is used up at another engine.
        """
        if token := user_input.get(CONF_TOKEN, "").strip():
            return str(token)
        if not (code := user_input.get(CONF_CODE, "").strip()):
            raise Refused("code_or_token", CONF_CODE)
        health = await async_health(self.hass, url)
        if engine_id not in (None, health.engine_id):
            raise AbortFlow("unique_id_mismatch")
        return await async_pair(self.hass, url, code)

    async def _async_create(self, url: str, user_input: dict[str, Any]) -> ConfigFlowResult:
        token = await self._async_token(url, user_input)
        info = await async_probe(self.hass, url, token)
        await self.async_set_unique_id(info.engine_id, raise_on_progress=False)
        self._abort_if_unique_id_configured(
            updates={CONF_URL: url, CONF_TOKEN: token}, reload_on_update=False
        )
        return self.async_create_entry(
            title=info.name, data={CONF_URL: url, CONF_TOKEN: token}, subentries=_default_subentries()
        )

    async def async_step_reauth(self, entry_data: Mapping[str, Any]) -> ConfigFlowResult:
        """Begin after the engine refused the token."""
        return await self.async_step_reauth_confirm()

    async def async_step_reauth_confirm(self, user_input: dict[str, Any] | None = None) -> ConfigFlowResult:
        """Ask for a token that works."""
        errors: dict[str, str] = {}
        entry = self._get_reauth_entry()
        if user_input is not None:
            try:
                return await self._async_update(entry, entry.data[CONF_URL], user_input)
            except Refused as refused:
                errors = _without_url_field(refused.errors)
        return self.async_show_form(
            step_id="reauth_confirm",
            data_schema=KEY_SCHEMA,
            errors=errors,
            description_placeholders={"url": entry.data[CONF_URL]},
        )

    async def async_step_reconfigure(self, user_input: dict[str, Any] | None = None) -> ConfigFlowResult:
        """Ask for another address or token of the same engine; the token stays where none is given."""
        errors: dict[str, str] = {}
        entry = self._get_reconfigure_entry()
        if user_input is not None:
            try:
                if not (user_input.get(CONF_CODE) or user_input.get(CONF_TOKEN)):
                    user_input = {**user_input, CONF_TOKEN: entry.data[CONF_TOKEN]}
                return await self._async_update(entry, normalized_url(user_input[CONF_URL]), user_input)
            except Refused as refused:
                errors = refused.errors
        return self.async_show_form(
            step_id="reconfigure",
            data_schema=self.add_suggested_values_to_schema(
                ENGINE_SCHEMA, user_input or {CONF_URL: entry.data[CONF_URL]}
            ),
            errors=errors,
        )

    async def _async_update(
        self, entry: FairhearthConfigEntry, url: str, user_input: dict[str, Any]
    ) -> ConfigFlowResult:
        """Save address and token once they lead to the entry's own engine."""
        token = await self._async_token(url, user_input, entry.unique_id)
        info = await async_probe(self.hass, url, token)
        await self.async_set_unique_id(info.engine_id, raise_on_progress=False)
        self._abort_if_unique_id_mismatch()
        data = {CONF_URL: url, CONF_TOKEN: token}
        # The update listener reloads a loaded entry whose data changed; an entry that failed to set up has no
        # listener, and one whose data stayed the same does not hear of it.
        needs_reload = not entry.update_listeners or {**entry.data, **data} == entry.data
        result = self.async_update_and_abort(entry, data_updates=data)
        if needs_reload:
            self.hass.config_entries.async_schedule_reload(entry.entry_id)
        return result

    @staticmethod
    @callback
    @override
    def async_get_options_flow(config_entry: FairhearthConfigEntry) -> FairhearthOptionsFlow:
        """Return the dialog for what holds for the whole engine."""
        return FairhearthOptionsFlow()

    @classmethod
    @callback
    @override
    def async_get_supported_subentry_types(
        cls, config_entry: FairhearthConfigEntry
    ) -> dict[str, type[ConfigSubentryFlow]]:
        """Return what can be added to an engine."""
        return {
            SUBENTRY_CONVERSATION: AgentSubentryFlow,
            SUBENTRY_AI_TASK: AgentSubentryFlow,
            SUBENTRY_RESIDENT: ResidentSubentryFlow,
        }


class FairhearthOptionsFlow(OptionsFlow):
    """Changes what holds for the whole engine; the entry's listener applies it."""

    async def async_step_init(self, user_input: dict[str, Any] | None = None) -> ConfigFlowResult:
        """Ask which satellites someone depends on."""
        if user_input is not None:
            return self.async_create_entry(data=user_input)
        return self.async_show_form(
            step_id="init",
            data_schema=self.add_suggested_values_to_schema(OPTIONS_SCHEMA, self.config_entry.options),
        )


def _without_url_field(errors: dict[str, str]) -> dict[str, str]:
    """Return errors for a form that does not ask for the address."""
    return {"base" if field == CONF_URL else field: key for field, key in errors.items()}


def _default_subentries() -> list[ConfigSubentryData]:
    """Return what a new engine starts with, so that it can be talked to at once."""
    return [
        ConfigSubentryData(
            subentry_type=SUBENTRY_CONVERSATION,
            title=DEFAULT_CONVERSATION_NAME,
            unique_id=None,
            data={CONF_LLM_HASS_API: [llm.LLM_API_ASSIST]},
        ),
        ConfigSubentryData(
            subentry_type=SUBENTRY_AI_TASK, title=DEFAULT_AI_TASK_NAME, unique_id=None, data={}
        ),
    ]
