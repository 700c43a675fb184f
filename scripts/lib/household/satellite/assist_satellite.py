"""The satellite entity, and the action `demo_satellite.say` that lends it a voice."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

import probatio

from homeassistant.components.assist_pipeline import (
    PipelineEvent,
    PipelineEventType,
    PipelineStage,
    async_get_pipeline,
)
from homeassistant.components.assist_pipeline.pipeline import PipelineInput, PipelineRun
from homeassistant.components.assist_satellite import (
    AssistSatelliteAnnouncement,
    AssistSatelliteConfiguration,
    AssistSatelliteEntity,
    AssistSatelliteEntityFeature,
)
from homeassistant.config_entries import ConfigEntry
from homeassistant.core import Context, HomeAssistant, SupportsResponse, callback
from homeassistant.exceptions import HomeAssistantError
from homeassistant.helpers import chat_session, config_validation as cv, device_registry as dr
from homeassistant.helpers.entity_platform import AddConfigEntryEntitiesCallback, async_get_current_platform

from . import DOMAIN

PARALLEL_UPDATES = 0

ANSWER_TIMEOUT_S: Final = 280.0
"""Longer than anybody would wait for an answer, so that bad waits are measured, not cut off."""


async def async_setup_entry(
    hass: HomeAssistant, entry: ConfigEntry[None], async_add_entities: AddConfigEntryEntitiesCallback
) -> None:
    """Add the satellite and its action."""
    async_add_entities([DemoSatellite(entry)])
    async_get_current_platform().async_register_entity_service(
        "say",
        {probatio.Required("text"): cv.string},
        "async_say",
        supports_response=SupportsResponse.ONLY,
    )


@dataclass(slots=True)
class Answer:
    """What came back for one sentence, and when. Times are seconds of the event loop's clock."""

    heard_at: float
    first_word_at: float | None = None
    words: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    final_text: str = ""
    fault: dict[str, str] | None = None

    def take(self, event: PipelineEvent, now: float) -> None:
        """Note one event of the pipeline."""
        data = event.data or {}
        if event.type is PipelineEventType.INTENT_PROGRESS:
            self._take_delta(data.get("chat_log_delta") or {}, now)
        elif event.type is PipelineEventType.INTENT_END:
            response = data["intent_output"]["response"]
            self.final_text = response["speech"].get("plain", {}).get("speech", "")
            if response["response_type"] == "error":
                self.fault = {"code": response["data"]["code"], "message": self.final_text}
        elif event.type is PipelineEventType.ERROR:
            self.fault = {"code": data["code"], "message": data["message"]}

    def _take_delta(self, delta: dict[str, Any], now: float) -> None:
        if word := delta.get("content"):
            self.words.append(word)
        self.tools += [call["tool_name"] for call in delta.get("tool_calls") or ()]
        if (word or delta.get("tool_calls")) and self.first_word_at is None:
            self.first_word_at = now


class DemoSatellite(AssistSatelliteEntity):
    """A satellite that several people may talk to at once: each sentence has a session of its own.

    Only what is said first after `assist_satellite.start_conversation` belongs to the conversation begun
    there.
    """

    _attr_has_entity_name = True
    _attr_name = None
    _attr_supported_features = AssistSatelliteEntityFeature.START_CONVERSATION

    def __init__(self, entry: ConfigEntry[None]) -> None:
        """Stand for one device."""
        self._attr_unique_id = entry.entry_id
        self._attr_device_info = dr.DeviceInfo(
            identifiers={(DOMAIN, entry.entry_id)}, name=entry.title, manufacturer="Demo", model="Satellite"
        )
        self._under_way = 0

    @callback
    def async_get_configuration(self) -> AssistSatelliteConfiguration:
        """Return that there is no wake word."""
        return AssistSatelliteConfiguration(
            available_wake_words=[], active_wake_words=[], max_active_wake_words=0
        )

    async def async_set_configuration(self, config: AssistSatelliteConfiguration) -> None:
        """Refuse: there is nothing to configure."""
        raise HomeAssistantError("The simulated satellite has no wake words to choose from")

    @callback
    def on_pipeline_event(self, event: PipelineEvent) -> None:
        """Play nothing: there is no loudspeaker."""

    async def async_start_conversation(self, start_announcement: AssistSatelliteAnnouncement) -> None:
        """Play nothing and listen: what is said next is the reply."""

    async def async_say(self, text: str) -> dict[str, Any]:
        """Answer a sentence; return text, tools used, and seconds until the first word and the end."""
        loop = self.hass.loop
        answer = Answer(heard_at=loop.time())

        @callback
        def on_event(event: PipelineEvent) -> None:
            answer.take(event, loop.time())
            # The state belongs to all sentences under way: only the last one's end makes it idle.
            if event.type is not PipelineEventType.RUN_END or self._under_way == 1:
                self._internal_on_pipeline_event(event)

        self._under_way += 1
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._async_run(text, on_event)
        finally:
            self._under_way -= 1
        if answer.fault is not None:
            raise HomeAssistantError(
                translation_domain=DOMAIN,
                translation_key="not_answered",
                translation_placeholders=answer.fault,
            )
        first = answer.first_word_at
        return {
            "text": answer.final_text,
            "tools": answer.tools,
            "num_pieces": len(answer.words),
            "first_word_s": None if first is None else round(first - answer.heard_at, 4),
            "answered_s": round(loop.time() - answer.heard_at, 4),
        }

    async def _async_run(self, text: str, on_event: Any) -> None:
        """Run the pipeline as `async_accept_pipeline_from_satellite` does, from the text on."""
        context = Context()
        self.async_set_context(context)
        conversation_id, self._conversation_id = self._conversation_id, None
        extra_system_prompt, self._extra_system_prompt = self._extra_system_prompt, None
        with chat_session.async_get_chat_session(self.hass, conversation_id, context=None) as session:
            pipeline_input = PipelineInput(
                session=session,
                intent_input=text,
                device_id=self.registry_entry.device_id if self.registry_entry else None,
                satellite_id=self.entity_id,
                conversation_extra_system_prompt=extra_system_prompt,
                run=PipelineRun(
                    self.hass,
                    context=context,
                    pipeline=async_get_pipeline(self.hass, pipeline_id=self._resolve_pipeline()),
                    start_stage=PipelineStage.INTENT,
                    end_stage=PipelineStage.INTENT,
                    event_callback=on_event,
                ),
            )
            await pipeline_input.execute(validate=True)
