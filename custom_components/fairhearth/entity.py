"""What the entities share: their device, when they are available, and the loop that answers a chat log.

The loop asks the engine, lets Home Assistant run the tools that the model calls, and asks again until the
answer is complete. It decides neither who is charged (`attribution`) nor in what order anyone is served (the
engine).
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, override

from homeassistant.components import conversation
from homeassistant.config_entries import ConfigSubentry
from homeassistant.const import CONF_MODEL
from homeassistant.core import callback
from homeassistant.exceptions import HomeAssistantError
from homeassistant.helpers import device_registry as dr
from homeassistant.helpers.entity import Entity
from homeassistant.helpers.update_coordinator import CoordinatorEntity

from .attribution import Attribution, Origin, after_calls, attribute
from .chat import Shown, deltas, is_notice, messages_of, tools_of
from .const import (
    CONF_CONTEXT_TOKENS,
    CONF_MAX_TOKENS,
    CONF_TEMPERATURE,
    CONF_THINKING,
    CONF_TOP_P,
    DOMAIN,
    LOGGER,
    MANUFACTURER,
)
from .context import Fitted, TokenScale, fit, length_of
from .coordinator import FairhearthConfigEntry, FairhearthCoordinator
from .devices import account_key
from .engine_client import ChatRequest, EngineError, Finished, JsonObject, PromptTooLong
from .errors import as_home_assistant_error
from .pictures import async_pictures_of
from .residents import classes_of, rules_of

MAX_TOOL_ITERATIONS: Final = 10
"""Most times the model may answer with tool calls before it must come to an end."""

MAX_PROGRAM_CHARACTERS: Final = 256
"""The engine takes no longer id; a conversation's may be chosen by its caller."""


class FairhearthEntity(CoordinatorEntity[FairhearthCoordinator]):
    """An entity that shows a part of the live picture and writes only what changed."""

    _attr_has_entity_name = True

    def __init__(
        self, coordinator: FairhearthCoordinator, unique_id: str, device_info: dr.DeviceInfo
    ) -> None:
        """Belong to a device; unique_id is unique among the integration's entities of one platform."""
        super().__init__(coordinator)
        self._attr_unique_id = unique_id
        self._attr_device_info = device_info
        self._written: object = None

    def _shown(self) -> object:
        """Return what the state is made of; an equal value is not written again."""
        raise NotImplementedError

    @callback
    @override
    def _handle_coordinator_update(self) -> None:
        shown = (self.available, self._shown())
        if shown != self._written:
            self._written = shown
            super()._handle_coordinator_update()


def engine_device(coordinator: FairhearthCoordinator) -> dr.DeviceInfo:
    """Return the device of the engine itself."""
    return dr.DeviceInfo(identifiers={(DOMAIN, coordinator.config_entry.entry_id)})


def subentry_device(coordinator: FairhearthCoordinator, subentry: ConfigSubentry) -> dr.DeviceInfo:
    """Return the device of a subentry, hanging below the engine's."""
    return dr.DeviceInfo(
        identifiers={(DOMAIN, subentry.subentry_id)},
        name=subentry.title,
        manufacturer=MANUFACTURER,
        model=coordinator.engine.model,
        entry_type=dr.DeviceEntryType.SERVICE,
        via_device_id=coordinator.engine_device_id,
    )


def account_device(coordinator: FairhearthCoordinator, account: str) -> dr.DeviceInfo:
    """Return the device of one of the engine's own residents (guest, house), hanging below the engine's."""
    return dr.DeviceInfo(
        identifiers={(DOMAIN, account_key(coordinator.config_entry.entry_id, account))},
        translation_key=account,
        manufacturer=MANUFACTURER,
        model=coordinator.engine.model,
        entry_type=dr.DeviceEntryType.SERVICE,
        via_device_id=coordinator.engine_device_id,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What an answer must look like; text if nothing is said."""

    name: str | None = None
    schema: JsonObject | None = None


class FairhearthLLMEntity(Entity):
    """An entity that answers: one per conversation or AI task subentry."""

    _attr_has_entity_name = True
    _attr_name = None

    def __init__(self, entry: FairhearthConfigEntry, subentry: ConfigSubentry) -> None:
        """Answer with the options of a subentry."""
        self.entry = entry
        self.subentry = subentry
        self.coordinator = entry.runtime_data
        self._attr_unique_id = subentry.subentry_id
        self._attr_device_info = subentry_device(self.coordinator, subentry)
        self._scale = TokenScale()
        self._classes = classes_of(entry, subentry)

    @property
    def _thinking(self) -> bool | None:
        """Return False where the model shall not think first; else that is left to the model."""
        return None if self.subentry.data.get(CONF_THINKING, True) else False

    @property
    @override
    def available(self) -> bool:
        """Return whether the engine is there."""
        return self.coordinator.last_update_success

    @override
    async def async_added_to_hass(self) -> None:
        """Show when the engine comes and goes."""
        await super().async_added_to_hass()
        self._was_available = self.available
        self.async_on_remove(self.coordinator.async_add_listener(self._async_write_availability))

    @callback
    def _async_write_availability(self) -> None:
        if self.available != self._was_available:
            self._was_available = self.available
            self.async_write_ha_state()

    def _attribute(self, origin: Origin) -> Attribution:
        """Return who is charged and as what."""
        attribution = attribute(origin, rules_of(self.hass, self.entry), self._classes)
        LOGGER.debug("%s: %s is charged as %s", self.entity_id, origin, attribution)
        return attribution

    async def _async_answer(
        self,
        chat_log: conversation.ChatLog,
        attribution: Attribution,
        *,
        default_max_tokens: int,
        answer_format: AnswerFormat = AnswerFormat(),
        wait_notice: str | None = None,
    ) -> tuple[str, Finished | None]:
        """Complete the chat log; return the last answer and how it ended. Raises a translated error."""
        last: Finished | None = None
        shown = {
            place: await async_pictures_of(self.hass, content.attachments)
            for place, content in enumerate(chat_log.content)
            if isinstance(content, conversation.UserContent) and content.attachments
        }
        for num_rounds in range(MAX_TOOL_ITERATIONS):
            num_before = len(chat_log.content)
            order = ChatRequest(
                messages=(),
                tools=tools_of(chat_log.llm_api),
                resident=attribution.resident_id,
                workload_class=after_calls(attribution, num_rounds).workload_class,
                program=chat_log.conversation_id[:MAX_PROGRAM_CHARACTERS] or None,
                model=self.subentry.data.get(CONF_MODEL),
                max_tokens=int(self.subentry.data.get(CONF_MAX_TOKENS, default_max_tokens)),
                temperature=self.subentry.data.get(CONF_TEMPERATURE),
                top_p=self.subentry.data.get(CONF_TOP_P),
                json_schema_name=answer_format.name,
                json_schema=answer_format.schema,
                thinking=self._thinking,
            )
            last = await self._async_ask(chat_log, order, shown, wait_notice)
            is_empty = len(chat_log.content) == num_before
            if is_empty or not chat_log.unresponded_tool_results:
                return _text_of(chat_log.content[-1], last), last
            wait_notice = None  # once is enough
        raise HomeAssistantError(
            translation_domain=DOMAIN,
            translation_key="too_many_tool_calls",
            translation_placeholders={"count": str(MAX_TOOL_ITERATIONS)},
        )

    async def _async_ask(
        self, chat_log: conversation.ChatLog, order: ChatRequest, shown: Shown, wait_notice: str | None
    ) -> Finished | None:
        """Ask once and add the answer to the chat log; with fewer turns where it is too much to read."""
        most_turns: int | None = None
        while True:
            fitted = self._fit(chat_log, order, shown, most_turns)
            request = replace(order, messages=fitted.messages)
            finished: list[Finished] = []
            try:
                async with (
                    aclosing(self.coordinator.async_chat(request)) as events,
                    aclosing(deltas(events, finished.append, wait_notice=wait_notice)) as stream,
                ):
                    async for _content in chat_log.async_add_delta_content_stream(self.entity_id, stream):
                        pass
            except PromptTooLong as err:
                # Refused before anything was said, so asking again cannot repeat anything.
                if fitted.num_kept <= 1:
                    raise as_home_assistant_error(err) from err
                most_turns = fitted.num_kept // 2
                continue
            except EngineError as err:
                raise as_home_assistant_error(err) from err
            last = finished[-1] if finished else None
            if last is not None and last.tokens is not None and not shown:
                tokens = last.tokens.prefill + last.tokens.cached
                self._scale.learn(length_of(request.messages, request.tools), tokens)
            return last

    def _fit(
        self, chat_log: conversation.ChatLog, order: ChatRequest, shown: Shown, most_turns: int | None
    ) -> Fitted:
        """Return what the model is given to read: what fits beside the tools and the longest answer."""
        reads = self.coordinator.max_context_tokens
        budget = int(self.subentry.data.get(CONF_CONTEXT_TOKENS, reads))
        left = min(budget, reads - (order.max_tokens or 0))
        taken = self._scale.tokens_of(length_of((), order.tools))
        fitted = fit(
            messages_of(chat_log.content, shown),
            most_characters=self._scale.characters_of(max(0, left - taken)),
            most_turns=most_turns,
        )
        if fitted.num_left_out:
            LOGGER.info(
                "%s: the oldest %s turns of a conversation are left out, the model reads at most %s tokens",
                self.entity_id,
                fitted.num_left_out,
                left,
            )
        return fitted


def _text_of(content: conversation.Content, finished: Finished | None) -> str:
    """Return the text of an answer; raise a translated error where it holds none to speak or to use.

    A call that is cut off is never sent, so what remains of it is an empty answer or only thoughts.
    """
    if isinstance(content, conversation.AssistantContent) and content.content and not is_notice(content):
        return content.content
    if finished is not None and finished.reason == "length":
        raise HomeAssistantError(translation_domain=DOMAIN, translation_key="answer_cut_off")
    raise HomeAssistantError(translation_domain=DOMAIN, translation_key="no_answer")
