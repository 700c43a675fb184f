"""What of a device may set off an automation: the engine's moments, or those that concern one resident."""

from __future__ import annotations

from typing import Final

import probatio

from homeassistant.components.device_automation import (
    DEVICE_TRIGGER_BASE_SCHEMA,
    InvalidDeviceAutomationConfig,
)
from homeassistant.const import CONF_DEVICE_ID, CONF_DOMAIN, CONF_PLATFORM, CONF_TYPE
from homeassistant.core import CALLBACK_TYPE, HassJob, HomeAssistant, callback
from homeassistant.helpers.trigger import TriggerActionType, TriggerInfo
from homeassistant.helpers.typing import ConfigType

from .const import DOMAIN
from .devices import DeviceOwner, async_owner_of_device
from .moments import Moment, MomentKind, async_on_moment

ENGINE_TRIGGERS: Final = tuple(MomentKind)
RESIDENT_TRIGGERS: Final = tuple(
    kind for kind in MomentKind if kind not in (MomentKind.POLICY_MET, MomentKind.POLICY_VIOLATED)
)

TRIGGER_SCHEMA: Final = DEVICE_TRIGGER_BASE_SCHEMA.extend(
    {probatio.Required(CONF_TYPE): probatio.In([str(kind) for kind in ENGINE_TRIGGERS])}
)


async def async_get_triggers(hass: HomeAssistant, device_id: str) -> list[dict[str, str]]:
    """Return the triggers of a device; those of agents and AI tasks have none."""
    owner = async_owner_of_device(hass, device_id)
    return [
        {CONF_PLATFORM: "device", CONF_DOMAIN: DOMAIN, CONF_DEVICE_ID: device_id, CONF_TYPE: str(kind)}
        for kind in _kinds_of(owner)
    ]


async def async_validate_trigger_config(hass: HomeAssistant, config: ConfigType) -> ConfigType:
    """Return a trigger's configuration; raise where the device tells no such thing."""
    checked: ConfigType = TRIGGER_SCHEMA(config)
    _owner(hass, checked)
    return checked


async def async_attach_trigger(
    hass: HomeAssistant, config: ConfigType, action: TriggerActionType, trigger_info: TriggerInfo
) -> CALLBACK_TYPE:
    """Run the action whenever it happens; return what ends that."""
    owner = _owner(hass, config)
    job = HassJob(action, f"Fairhearth device trigger {trigger_info}")
    told = {key: config[key] for key in (CONF_PLATFORM, CONF_DOMAIN, CONF_DEVICE_ID, CONF_TYPE)}

    @callback
    def run(moment: Moment) -> None:
        """Run the action for a moment of this kind that concerns the device."""
        is_theirs = owner.resident_id is None or owner.resident_id in moment.residents
        if moment.kind == config[CONF_TYPE] and is_theirs:
            trigger = {**trigger_info["trigger_data"], **moment.details, **told}
            hass.async_run_hass_job(job, {"trigger": {**trigger, "description": config[CONF_TYPE]}})

    return async_on_moment(hass, owner.entry_id, run)


def _kinds_of(owner: DeviceOwner | None) -> tuple[MomentKind, ...]:
    if owner is None:
        return ()
    return ENGINE_TRIGGERS if owner.resident_id is None else RESIDENT_TRIGGERS


def _owner(hass: HomeAssistant, config: ConfigType) -> DeviceOwner:
    """Return whose moments a trigger waits for; raise where the device has none of this kind."""
    owner = async_owner_of_device(hass, config[CONF_DEVICE_ID])
    if owner is None or config[CONF_TYPE] not in _kinds_of(owner):
        raise InvalidDeviceAutomationConfig(
            translation_domain=DOMAIN,
            translation_key="no_such_trigger",
            translation_placeholders={"trigger": config[CONF_TYPE]},
        )
    return owner
