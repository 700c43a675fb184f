"""The conversation agent: answers a sentence word by word, and lets the model use Home Assistant's tools."""

from __future__ import annotations

from typing import Literal, override

from homeassistant.components import conversation
from homeassistant.config_entries import ConfigSubentry
from homeassistant.const import CONF_LLM_HASS_API, CONF_MODEL, CONF_PROMPT, MATCH_ALL
from homeassistant.core import Context, HomeAssistant, callback
from homeassistant.exceptions import HomeAssistantError
from homeassistant.helpers import intent, llm
from homeassistant.helpers.entity_platform import AddConfigEntryEntitiesCallback
from homeassistant.helpers.start import async_at_started
from homeassistant.util.ulid import ulid_now

from .chat import messages_of, tools_of
from .const import CONF_ANNOUNCE_WAIT, DEFAULT_MAX_TOKENS, DOMAIN, LOGGER, SUBENTRY_CONVERSATION
from .coordinator import FairhearthConfigEntry
from .engine_client import EngineError
from .entity import FairhearthLLMEntity
from .errors import async_localized, async_text
from .origin import async_origin_of_conversation

PARALLEL_UPDATES = 0


async def async_setup_entry(
    hass: HomeAssistant, entry: FairhearthConfigEntry, async_add_entities: AddConfigEntryEntitiesCallback
) -> None:
    """Add one agent per conversation subentry."""
    for subentry in entry.get_subentries_of_type(SUBENTRY_CONVERSATION):
        async_add_entities([FairhearthAgent(entry, subentry)], config_subentry_id=subentry.subentry_id)


class FairhearthAgent(
    conversation.ConversationEntity, conversation.AbstractConversationAgent, FairhearthLLMEntity
):
    """A conversation agent whose answers the engine schedules."""

    _attr_supports_streaming = True

    def __init__(self, entry: FairhearthConfigEntry, subentry: ConfigSubentry) -> None:
        """Answer with the options of a subentry; with an API it can control the home."""
        super().__init__(entry, subentry)
        if subentry.data.get(CONF_LLM_HASS_API):
            self._attr_supported_features = conversation.ConversationEntityFeature.CONTROL

    @property
    @override
    def supported_languages(self) -> list[str] | Literal["*"]:
        """Return that every language is passed on to the model."""
        return MATCH_ALL

    @override
    async def async_added_to_hass(self) -> None:
        """Have the prompt ready before the first sentence is spoken."""
        await super().async_added_to_hass()
        self.async_on_remove(async_at_started(self.hass, self._async_pin_in_background))

    @callback
    @override
    def _async_write_availability(self) -> None:
        """Pin again when the engine is back: a restarted one holds no prompt."""
        is_back = self.available and not self._was_available
        super()._async_write_availability()
        if is_back:
            self._async_pin_in_background(self.hass)

    @callback
    def _async_pin_in_background(self, hass: HomeAssistant) -> None:
        self.entry.async_create_background_task(hass, self.async_prepare(), f"{DOMAIN}_pin_{self.entity_id}")

    @override
    async def async_prepare(self, language: str | None = None) -> None:
        """Have the engine compute and keep the prompt's beginning; called when someone starts to speak.

        Best effort: without it the first answer only starts later.
        """
        try:
            chat_log = await self._async_empty_chat_log(language)
            pin = await self.coordinator.client.pin_prefix(
                messages_of(chat_log.content[:1]),
                tools_of(chat_log.llm_api),
                thinking=self._thinking,
                model=self.subentry.data.get(CONF_MODEL),
            )
        except (EngineError, HomeAssistantError) as err:
            LOGGER.debug("%s: the prompt could not be pinned: %s", self.entity_id, err)
        else:
            LOGGER.debug("%s: %s tokens pinned", self.entity_id, pin.prefix_tokens)
            if pin.prefix_tokens:  # none of a model that is not in the engine's memory now
                self.coordinator.prompt_tokens[self.subentry.subentry_id] = pin.prefix_tokens

    async def _async_empty_chat_log(self, language: str | None) -> conversation.ChatLog:
        """Return a chat log with the system prompt and the tools, as for a speaker who is not known yet."""
        chat_log = conversation.ChatLog(self.hass, ulid_now())
        llm_context = llm.LLMContext(
            platform=DOMAIN,
            context=Context(),
            language=language,
            assistant=conversation.DOMAIN,
            device_id=None,
            agent_id=self.entity_id,
        )
        options = self.subentry.data
        await chat_log.async_provide_llm_data(
            llm_context, options.get(CONF_LLM_HASS_API), options.get(CONF_PROMPT)
        )
        return chat_log

    @override
    async def _async_handle_message(
        self, user_input: conversation.ConversationInput, chat_log: conversation.ChatLog
    ) -> conversation.ConversationResult:
        """Answer one sentence."""
        options = self.subentry.data
        try:
            await chat_log.async_provide_llm_data(
                user_input.as_llm_context(DOMAIN),
                options.get(CONF_LLM_HASS_API),
                options.get(CONF_PROMPT),
                user_input.extra_system_prompt,
            )
        except conversation.ConverseError as err:
            return err.as_conversation_result()
        try:
            await self._async_answer_sentence(user_input, chat_log)
        except HomeAssistantError as err:
            chat_log.async_add_error(self.entity_id, err)
            return await self._async_spoken_error(user_input, chat_log, err)
        return conversation.async_get_result_from_chat_log(user_input, chat_log)

    async def _async_answer_sentence(
        self, user_input: conversation.ConversationInput, chat_log: conversation.ChatLog
    ) -> None:
        if not user_input.text.strip():
            raise HomeAssistantError(translation_domain=DOMAIN, translation_key="nothing_said")
        origin = async_origin_of_conversation(self.hass, user_input, self.coordinator.context_users)
        await self._async_answer(
            chat_log,
            self._attribute(origin),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            wait_notice=await self._async_wait_notice(user_input.language),
        )

    async def _async_wait_notice(self, language: str) -> str | None:
        """Return what is said to someone whose turn is long in coming, None where silence is wanted."""
        if not self.subentry.data.get(CONF_ANNOUNCE_WAIT):
            return None
        return await async_text(self.hass, "please_wait", language)

    async def _async_spoken_error(
        self,
        user_input: conversation.ConversationInput,
        chat_log: conversation.ChatLog,
        err: HomeAssistantError,
    ) -> conversation.ConversationResult:
        """Return an error as an answer in the speaker's language."""
        response = intent.IntentResponse(language=user_input.language)
        response.async_set_error(
            intent.IntentResponseErrorCode.UNKNOWN, await async_localized(self.hass, err, user_input.language)
        )
        return conversation.ConversationResult(response=response, conversation_id=chat_log.conversation_id)
