"""Reads from Home Assistant where a request comes from. Decides nothing: `attribution` does.

What Home Assistant passes differs by path (a satellite has no user, an automation only a parent, an AI task
no context at all), so each fact is taken from the one place that has it right under concurrency.
"""

from __future__ import annotations

from homeassistant.components.conversation import ConversationInput
from homeassistant.core import Context, HomeAssistant, callback
from homeassistant.helpers import device_registry as dr, entity_registry as er
from homeassistant.helpers.chat_session import current_session
from homeassistant.helpers.trace import trace_id_get
from homeassistant.helpers.typing import UNDEFINED

from .attribution import ContextUsers, Origin


@callback
def async_origin_of_conversation(
    hass: HomeAssistant, user_input: ConversationInput, context_users: ContextUsers
) -> Origin:
    """Return where a sentence comes from."""
    context = user_input.context
    return Origin(
        user_id=context.user_id,
        parent_user_id=context_users.user_of(context.parent_id),
        satellite_id=user_input.satellite_id,
        agent_id=user_input.agent_id,
        area_id=_area_id(hass, user_input.satellite_id, user_input.device_id),
        is_traced=trace_id_get() is not None,
    )


@callback
def async_origin_of_task(caller: Context | None, context_users: ContextUsers) -> Origin:
    """Return where an AI task comes from.

    `caller` is the context last seen in this asyncio task. It may be that of an earlier call, so it counts
    only when the chat session of this call was opened with a context. The entity's own context is shared by
    all callers and goes stale.
    """
    session = current_session.get()
    if session is None or session.user_id is UNDEFINED or caller is None:
        return Origin(is_traced=trace_id_get() is not None, is_task=True)
    return Origin(
        user_id=caller.user_id,
        parent_user_id=context_users.user_of(caller.parent_id),
        is_traced=trace_id_get() is not None,
        is_task=True,
    )


def _area_id(hass: HomeAssistant, satellite_id: str | None, device_id: str | None) -> str | None:
    """Return the area of the satellite, else of the device it belongs to or that was named."""
    entry = er.async_get(hass).async_get(satellite_id) if satellite_id else None
    if entry is not None and entry.area_id:
        return entry.area_id
    device_id = (entry.device_id if entry else None) or device_id
    registry = dr.async_get(hass)
    device = registry.async_get(device_id) if device_id else None
    return dr.async_get_effective_area_id(hass, device) if device else None
