"""Pictures that someone attached: read from disk, checked, and made fit to be sent.

Decides which attachments can be shown to a model. Whether the model sees at all is the engine's to say.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from homeassistant.components import conversation
from homeassistant.core import HomeAssistant
from homeassistant.exceptions import HomeAssistantError, ServiceValidationError

from .const import DOMAIN
from .engine_client import MAX_PICTURE_BYTES, PICTURE_TYPES, Picture

_MIB: Final = 2**20


async def async_pictures_of(
    hass: HomeAssistant, attachments: Iterable[conversation.Attachment]
) -> tuple[Picture, ...]:
    """Return the attachments as pictures, in their order; raise a translated error for one that is none."""
    wanted = list(attachments)
    for attachment in wanted:
        if attachment.mime_type not in PICTURE_TYPES:
            raise ServiceValidationError(
                translation_domain=DOMAIN,
                translation_key="attachment_not_a_picture",
                translation_placeholders={
                    "attachment": attachment.media_content_id,
                    "type": attachment.mime_type,
                    "types": ", ".join(PICTURE_TYPES),
                },
            )
    return tuple([await hass.async_add_executor_job(_read, attachment) for attachment in wanted])


def _read(attachment: conversation.Attachment) -> Picture:
    """Read one file (blocking)."""
    path = Path(attachment.path)
    try:
        is_too_large = path.stat().st_size > MAX_PICTURE_BYTES
        file = b"" if is_too_large else path.read_bytes()
    except OSError as err:
        raise HomeAssistantError(
            translation_domain=DOMAIN,
            translation_key="attachment_unreadable",
            translation_placeholders={
                "attachment": attachment.media_content_id,
                "message": err.strerror or str(err),
            },
        ) from err
    if is_too_large:
        raise ServiceValidationError(
            translation_domain=DOMAIN,
            translation_key="attachment_too_large",
            translation_placeholders={
                "attachment": attachment.media_content_id,
                "most": str(MAX_PICTURE_BYTES // _MIB),
            },
        )
    return Picture(media_type=attachment.mime_type, data=base64.b64encode(file).decode("ascii"))
