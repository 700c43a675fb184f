"""The dialogs for what belongs to an engine: its conversation agents, AI tasks and residents."""

from __future__ import annotations

from typing import Any, Final

import probatio

from homeassistant.config_entries import SOURCE_USER, ConfigEntryState, ConfigSubentryFlow, SubentryFlowResult
from homeassistant.const import CONF_LLM_HASS_API, CONF_MODEL, CONF_NAME, CONF_PROMPT
from homeassistant.helpers import llm
from homeassistant.helpers.selector import (
    AreaSelector,
    AreaSelectorConfig,
    BooleanSelector,
    EntitySelector,
    EntitySelectorConfig,
    NumberSelector,
    NumberSelectorConfig,
    NumberSelectorMode,
    SelectOptionDict,
    SelectSelector,
    SelectSelectorConfig,
    SelectSelectorMode,
    TemplateSelector,
    TextSelector,
)
from homeassistant.util import slugify

from .attribution import RESERVED_RESIDENT_IDS, WorkloadClass
from .const import (
    CONF_AGENTS,
    CONF_ANNOUNCE_WAIT,
    CONF_AREAS,
    CONF_CHAT_CLASS,
    CONF_CONTEXT_TOKENS,
    CONF_DAILY_IS_HARD,
    CONF_DAILY_TOKENS,
    CONF_MAX_TOKENS,
    CONF_PAGE_CAP,
    CONF_PERSON,
    CONF_RESIDENT_ID,
    CONF_SATELLITES,
    CONF_TASK_CLASS,
    CONF_TEMPERATURE,
    CONF_THINKING,
    CONF_TOP_P,
    CONF_USERS,
    CONF_VOICE_CLASS,
    CONF_WEIGHT,
    DEFAULT_AI_TASK_NAME,
    DEFAULT_CONVERSATION_NAME,
    DEFAULT_MAX_TOKENS,
    DEFAULT_TASK_MAX_TOKENS,
    DEFAULT_WEIGHT,
    DOMAIN,
    LOGGER,
    MAX_DAILY_TOKENS,
    MAX_WEIGHT,
    SUBENTRY_CONVERSATION,
    SUBENTRY_RESIDENT,
    UNIT_TOKENS,
)
from .engine_client import EngineError
from .errors import Refused

VOICE_CLASSES: Final = (WorkloadClass.VOICE, WorkloadClass.ACCESSIBILITY)
CHAT_CLASSES: Final = (WorkloadClass.CHAT, WorkloadClass.AGENT, WorkloadClass.BACKGROUND)
TASK_CLASSES: Final = (WorkloadClass.BACKGROUND, WorkloadClass.AGENT, WorkloadClass.CHAT)
"""What an agent or a task may count as, the usual first."""

MAX_PAGE_CAP: Final = 1_000_000

MAX_RESIDENT_ID_CHARACTERS: Final = 64
MAX_RESIDENT_NAME_CHARACTERS: Final = 128
"""The engine takes no longer ones."""


def _whole_number(least: int, most: int, unit: str | None = None) -> NumberSelector:
    config = NumberSelectorConfig(min=least, max=most, step=1, mode=NumberSelectorMode.BOX)
    if unit is not None:
        config["unit_of_measurement"] = unit
    return NumberSelector(config)


def _fraction(most: float) -> NumberSelector:
    return NumberSelector(NumberSelectorConfig(min=0, max=most, step=0.05, mode=NumberSelectorMode.SLIDER))


def _classes(classes: tuple[WorkloadClass, ...]) -> SelectSelector:
    return SelectSelector(
        SelectSelectorConfig(options=[str(item) for item in classes], translation_key="workload_class")
    )


class AgentSubentryFlow(ConfigSubentryFlow):
    """Adds or changes a conversation agent or an AI task."""

    async def async_step_user(self, user_input: dict[str, Any] | None = None) -> SubentryFlowResult:
        """Add one."""
        return await self.async_step_init(user_input)

    async def async_step_reconfigure(self, user_input: dict[str, Any] | None = None) -> SubentryFlowResult:
        """Change one."""
        return await self.async_step_init(user_input)

    async def async_step_init(self, user_input: dict[str, Any] | None = None) -> SubentryFlowResult:
        """Ask for name and options."""
        if self._get_entry().state is not ConfigEntryState.LOADED:
            return self.async_abort(reason="entry_not_loaded")
        if user_input is not None:
            return self._save(user_input)
        return self.async_show_form(
            step_id="init",
            data_schema=self.add_suggested_values_to_schema(await self._async_schema(), self._suggested()),
            description_placeholders=self._lengths(),
        )

    def _save(self, user_input: dict[str, Any]) -> SubentryFlowResult:
        data = dict(user_input)
        title = data.pop(CONF_NAME)
        for key in (CONF_MAX_TOKENS, CONF_CONTEXT_TOKENS):
            if key in data:
                data[key] = int(data[key])
        if self.source == SOURCE_USER:
            return self.async_create_entry(title=title, data=data)
        return self.async_update_and_abort(
            self._get_entry(), self._get_reconfigure_subentry(), title=title, data=data
        )

    def _is_conversation(self) -> bool:
        return self._subentry_type == SUBENTRY_CONVERSATION

    def _suggested(self) -> dict[str, Any]:
        if self.source == SOURCE_USER:
            if self._is_conversation():
                return {
                    CONF_NAME: DEFAULT_CONVERSATION_NAME,
                    CONF_PROMPT: llm.DEFAULT_INSTRUCTIONS_PROMPT,
                    CONF_LLM_HASS_API: [llm.LLM_API_ASSIST],
                }
            return {CONF_NAME: DEFAULT_AI_TASK_NAME}
        subentry = self._get_reconfigure_subentry()
        return {CONF_NAME: subentry.title, **subentry.data}

    def _lengths(self) -> dict[str, str]:
        """Return how much the model can read, and how much of it the agent's prompt takes."""
        coordinator = self._get_entry().runtime_data
        taken = None
        if self.source != SOURCE_USER:
            taken = coordinator.prompt_tokens.get(self._get_reconfigure_subentry().subentry_id)
        return {
            "context_tokens": str(coordinator.max_context_tokens),
            "prompt_tokens": "?" if taken is None else str(taken),
        }

    async def _async_models(self) -> list[str]:
        """Return the models to choose from; the one that is chosen stays even where it is gone."""
        chosen = [] if self.source == SOURCE_USER else [self._get_reconfigure_subentry().data.get(CONF_MODEL)]
        try:
            served = list(await self._get_entry().runtime_data.client.models())
        except EngineError as err:
            LOGGER.debug("The engine does not say which models it has: %s", err)
            served = []
        return list(dict.fromkeys(model for model in (*served, *chosen) if model))

    async def _async_schema(self) -> probatio.Schema:
        schema: dict[Any, Any] = {probatio.Required(CONF_NAME): TextSelector()}
        if self._is_conversation():
            apis = [SelectOptionDict(label=api.name, value=api.id) for api in llm.async_get_apis(self.hass)]
            schema[probatio.Optional(CONF_PROMPT)] = TemplateSelector()
            schema[probatio.Optional(CONF_LLM_HASS_API)] = SelectSelector(
                SelectSelectorConfig(options=apis, multiple=True, mode=SelectSelectorMode.LIST)
            )
        default_max_tokens = DEFAULT_MAX_TOKENS if self._is_conversation() else DEFAULT_TASK_MAX_TOKENS
        schema[probatio.Required(CONF_MAX_TOKENS, default=default_max_tokens)] = _whole_number(1, 32768)
        schema[probatio.Optional(CONF_TEMPERATURE)] = _fraction(2)
        schema[probatio.Optional(CONF_TOP_P)] = _fraction(1)
        schema[probatio.Optional(CONF_MODEL)] = SelectSelector(
            SelectSelectorConfig(options=await self._async_models(), mode=SelectSelectorMode.DROPDOWN)
        )
        if self._is_conversation():
            schema[probatio.Required(CONF_VOICE_CLASS, default=str(VOICE_CLASSES[0]))] = _classes(
                VOICE_CLASSES
            )
            schema[probatio.Required(CONF_CHAT_CLASS, default=str(CHAT_CLASSES[0]))] = _classes(CHAT_CLASSES)
            schema[probatio.Optional(CONF_CONTEXT_TOKENS)] = _whole_number(256, 10_000_000, UNIT_TOKENS)
            schema[probatio.Required(CONF_THINKING, default=True)] = BooleanSelector()
            schema[probatio.Required(CONF_ANNOUNCE_WAIT, default=False)] = BooleanSelector()
        else:
            schema[probatio.Required(CONF_TASK_CLASS, default=str(TASK_CLASSES[0]))] = _classes(TASK_CLASSES)
        return probatio.Schema(schema)


class ResidentSubentryFlow(ConfigSubentryFlow):
    """Adds or changes a resident: who it is, how they are recognised, and what they are entitled to."""

    async def async_step_user(self, user_input: dict[str, Any] | None = None) -> SubentryFlowResult:
        """Add a resident."""
        return await self._async_step("user", user_input)

    async def async_step_reconfigure(self, user_input: dict[str, Any] | None = None) -> SubentryFlowResult:
        """Change a resident."""
        return await self._async_step("reconfigure", user_input)

    async def _async_step(self, step_id: str, user_input: dict[str, Any] | None) -> SubentryFlowResult:
        errors: dict[str, str] = {}
        if user_input is not None:
            try:
                return self._save(user_input)
            except Refused as refused:
                errors = refused.errors
        suggested = user_input if user_input is not None else self._suggested()
        return self.async_show_form(
            step_id=step_id,
            data_schema=self.add_suggested_values_to_schema(await self._async_schema(), suggested),
            errors=errors,
        )

    def _save(self, user_input: dict[str, Any]) -> SubentryFlowResult:
        """Save a resident; its id on the engine is made once from its name and stays when it is renamed."""
        data = dict(user_input)
        name = data.pop(CONF_NAME).strip()
        if not name:
            raise Refused("name_missing", CONF_NAME)
        if len(name) > MAX_RESIDENT_NAME_CHARACTERS:
            raise Refused("name_too_long", CONF_NAME)
        for key in (CONF_WEIGHT, CONF_DAILY_TOKENS, CONF_PAGE_CAP):
            if key in data:
                data[key] = int(data[key])
        if self.source == SOURCE_USER:
            resident_id = self._new_resident_id(name)
            return self.async_create_entry(
                title=name, data={CONF_RESIDENT_ID: resident_id, **data}, unique_id=resident_id
            )
        subentry = self._get_reconfigure_subentry()
        return self.async_update_and_abort(
            self._get_entry(),
            subentry,
            title=name,
            data={CONF_RESIDENT_ID: subentry.data[CONF_RESIDENT_ID], **data},
        )

    def _new_resident_id(self, name: str) -> str:
        resident_id = slugify(name)[:MAX_RESIDENT_ID_CHARACTERS]
        if resident_id == "unknown":  # what slugify makes of a name without a letter or digit
            raise Refused("name_missing", CONF_NAME)
        if resident_id in RESERVED_RESIDENT_IDS:
            raise Refused("name_reserved", CONF_NAME)
        taken = {
            subentry.data[CONF_RESIDENT_ID]
            for subentry in self._get_entry().get_subentries_of_type(SUBENTRY_RESIDENT)
        }
        if resident_id in taken:
            raise Refused("name_taken", CONF_NAME)
        return resident_id

    def _suggested(self) -> dict[str, Any]:
        if self.source == SOURCE_USER:
            return {}
        subentry = self._get_reconfigure_subentry()
        return {CONF_NAME: subentry.title, **subentry.data}

    async def _async_schema(self) -> probatio.Schema:
        users = [
            SelectOptionDict(label=user.name or user.id, value=user.id)
            for user in await self.hass.auth.async_get_users()
            if not user.system_generated and user.is_active
        ]
        return probatio.Schema(
            {
                probatio.Required(CONF_NAME): TextSelector(),
                probatio.Optional(CONF_PERSON): EntitySelector(EntitySelectorConfig(domain="person")),
                probatio.Optional(CONF_USERS): SelectSelector(
                    SelectSelectorConfig(options=users, multiple=True, mode=SelectSelectorMode.DROPDOWN)
                ),
                probatio.Optional(CONF_SATELLITES): EntitySelector(
                    EntitySelectorConfig(domain="assist_satellite", multiple=True)
                ),
                probatio.Optional(CONF_AREAS): AreaSelector(AreaSelectorConfig(multiple=True)),
                probatio.Optional(CONF_AGENTS): EntitySelector(
                    EntitySelectorConfig(domain="conversation", integration=DOMAIN, multiple=True)
                ),
                probatio.Required(CONF_WEIGHT, default=DEFAULT_WEIGHT): _whole_number(1, MAX_WEIGHT),
                probatio.Optional(CONF_DAILY_TOKENS): _whole_number(1, MAX_DAILY_TOKENS, UNIT_TOKENS),
                probatio.Required(CONF_DAILY_IS_HARD, default=False): BooleanSelector(),
                probatio.Optional(CONF_PAGE_CAP): _whole_number(1, MAX_PAGE_CAP),
            }
        )
