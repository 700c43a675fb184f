"""The AI task: background work that an automation or a person orders, answered in a wanted structure."""

from __future__ import annotations

from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace
from typing import Final, override

import probatio

from homeassistant.components import ai_task, conversation
from homeassistant.components.ai_task.evaluation import EvaluationAnswer
from homeassistant.config_entries import ConfigSubentry
from homeassistant.const import CONF_MODEL
from homeassistant.core import Context, HomeAssistant, callback
from homeassistant.exceptions import HomeAssistantError, ServiceValidationError
from homeassistant.helpers.entity_platform import AddConfigEntryEntitiesCallback
from homeassistant.util import slugify
from homeassistant.util.json import JsonValueType, json_loads

from .attribution import Attribution
from .chat import schema_of
from .const import DEFAULT_TASK_MAX_TOKENS, DOMAIN, SUBENTRY_AI_TASK
from .coordinator import FairhearthConfigEntry
from .engine_client import ChatRequest, EngineError, Finished, Message, WordOdds
from .entity import AnswerFormat, FairhearthLLMEntity
from .errors import as_home_assistant_error
from .evaluation import MOST_ALTERNATIVES, alternatives_of, answer_to, messages_for, odds_of
from .origin import async_origin_of_task
from .pictures import async_pictures_of

PARALLEL_UPDATES = 0

_caller: Final[ContextVar[Context | None]] = ContextVar("fairhearth_ai_task_caller", default=None)
"""The context of the call under way in this asyncio task; the entity's own is shared by all calls."""


async def async_setup_entry(
    hass: HomeAssistant, entry: FairhearthConfigEntry, async_add_entities: AddConfigEntryEntitiesCallback
) -> None:
    """Add one entity per AI task subentry."""
    for subentry in entry.get_subentries_of_type(SUBENTRY_AI_TASK):
        async_add_entities([FairhearthAITask(entry, subentry)], config_subentry_id=subentry.subentry_id)


class FairhearthAITask(ai_task.AITaskEntity, FairhearthLLMEntity):
    """Generates data in the background of everyone who waits."""

    def __init__(self, entry: FairhearthConfigEntry, subentry: ConfigSubentry) -> None:
        """Offer what the chosen model can do."""
        super().__init__(entry, subentry)
        self._attr_supported_features = self._offered()

    def _offered(self) -> ai_task.AITaskEntityFeature:
        """Return what can be asked; attachments only of a model that sees."""
        offered = ai_task.AITaskEntityFeature.GENERATE_DATA | ai_task.AITaskEntityFeature.EVALUATE
        if self.coordinator.can_see(self.subentry.data.get(CONF_MODEL)):
            offered |= ai_task.AITaskEntityFeature.SUPPORT_ATTACHMENTS
        return offered

    @override
    async def async_added_to_hass(self) -> None:
        """Offer what an engine that comes back can do."""
        await super().async_added_to_hass()
        self.async_on_remove(self.coordinator.async_add_listener(self._async_write_offered))

    @callback
    def _async_write_offered(self) -> None:
        offered = self._offered()
        if offered != self._attr_supported_features:
            self._attr_supported_features = offered
            self.async_write_ha_state()

    @callback
    @override
    def async_set_context(self, context: Context) -> None:
        """Note who calls, for this call only."""
        super().async_set_context(context)
        _caller.set(context)

    @override
    async def _async_generate_data(
        self, task: ai_task.GenDataTask, chat_log: conversation.ChatLog
    ) -> ai_task.GenDataTaskResult:
        """Answer one task; with a structure the answer is data that fits it."""
        origin = async_origin_of_task(_caller.get(), self.coordinator.context_users)
        serializer = chat_log.llm_api.custom_serializer if chat_log.llm_api else None
        text, finished = await self._async_answer(
            chat_log,
            self._attribute(origin),
            default_max_tokens=DEFAULT_TASK_MAX_TOKENS,
            answer_format=AnswerFormat(name=slugify(task.name), schema=schema_of(task.structure, serializer))
            if task.structure
            else AnswerFormat(),
        )
        return ai_task.GenDataTaskResult(
            conversation_id=chat_log.conversation_id,
            data=_structured(text, task.structure, finished) if task.structure else text,
        )

    @override
    async def _async_evaluate(self, task: ai_task.EvaluationTask) -> ai_task.EvaluationTaskResult:
        """Answer each question with the odds of its alternatives."""
        attribution = self._attribute(async_origin_of_task(_caller.get(), self.coordinator.context_users))
        pictures = await async_pictures_of(self.hass, task.attachments or ())
        answers: dict[str, EvaluationAnswer] = {}
        for key, question in task.questions.items():
            num_alternatives = len(alternatives_of(question))
            if num_alternatives > MOST_ALTERNATIVES:
                raise ServiceValidationError(
                    translation_domain=DOMAIN,
                    translation_key="too_many_alternatives",
                    translation_placeholders={"question": key, "most": str(MOST_ALTERNATIVES)},
                )
            *before, asked = messages_for(question, task.state)
            messages = (*before, replace(asked, pictures=pictures))
            words = await self._async_odds(messages, attribution)
            odds = odds_of(num_alternatives, words)
            if odds is None:
                raise HomeAssistantError(translation_domain=DOMAIN, translation_key="no_answer")
            answers[key] = answer_to(question, odds)
        return ai_task.EvaluationTaskResult(answers=answers)

    async def _async_odds(
        self, messages: tuple[Message, ...], attribution: Attribution
    ) -> tuple[tuple[str, float], ...]:
        """Return how likely the model finds the words that could come next; raise a translated error."""
        request = ChatRequest(
            messages=messages,
            resident=attribution.resident_id,
            workload_class=attribution.workload_class,
            model=self.subentry.data.get(CONF_MODEL),
            max_tokens=1,
            temperature=0,
            num_odds=MOST_ALTERNATIVES,
        )
        words: tuple[tuple[str, float], ...] = ()
        try:
            async with aclosing(self.coordinator.async_chat(request)) as events:
                async for event in events:
                    if isinstance(event, WordOdds) and not words:
                        words = event.words
        except EngineError as err:
            raise as_home_assistant_error(err) from err
        return words


def _structured(text: str, structure: probatio.Schema, finished: Finished | None) -> JsonValueType:
    """Return the data in the answer; raise a translated error that says why there is none."""
    if finished is not None and finished.reason == "length":
        raise HomeAssistantError(translation_domain=DOMAIN, translation_key="answer_cut_off")
    try:
        data = json_loads(text)
        structure(data)
    except (ValueError, probatio.Invalid) as err:
        raise HomeAssistantError(
            translation_domain=DOMAIN,
            translation_key="answer_not_as_asked",
            translation_placeholders={"message": str(err)},
        ) from err
    return data
