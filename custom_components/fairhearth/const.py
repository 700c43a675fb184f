"""Names that several modules of the integration share."""

from __future__ import annotations

import logging
from typing import Final

DOMAIN: Final = "fairhearth"
LOGGER: Final = logging.getLogger(__package__)
MANUFACTURER: Final = "Fairhearth"

DEFAULT_PORT: Final = 8321
DEFAULT_URL: Final = f"http://127.0.0.1:{DEFAULT_PORT}"
DEFAULT_CONVERSATION_NAME: Final = "Fairhearth"
DEFAULT_AI_TASK_NAME: Final = "Fairhearth AI task"

SUBENTRY_CONVERSATION: Final = "conversation"
SUBENTRY_AI_TASK: Final = "ai_task_data"
SUBENTRY_RESIDENT: Final = "resident"

CONF_MAX_TOKENS: Final = "max_tokens"
CONF_TEMPERATURE: Final = "temperature"

CONF_TOP_P: Final = "top_p"
CONF_VOICE_CLASS: Final = "voice_class"
CONF_CHAT_CLASS: Final = "chat_class"
CONF_TASK_CLASS: Final = "workload_class"
CONF_CONTEXT_TOKENS: Final = "context_tokens"
CONF_ANNOUNCE_WAIT: Final = "announce_wait"
CONF_THINKING: Final = "thinking"

CONF_ACCESSIBILITY_SATELLITES: Final = "accessibility_satellites"

CONF_RESIDENT_ID: Final = "resident_id"
CONF_PERSON: Final = "person"
CONF_USERS: Final = "users"
CONF_SATELLITES: Final = "satellites"
CONF_AREAS: Final = "areas"
CONF_AGENTS: Final = "agents"
CONF_PAGE_CAP: Final = "page_cap"
CONF_WEIGHT: Final = "weight"
CONF_DAILY_TOKENS: Final = "daily_tokens"
CONF_DAILY_IS_HARD: Final = "daily_is_hard"

DEFAULT_MAX_TOKENS: Final = 512
DEFAULT_TASK_MAX_TOKENS: Final = 1024
DEFAULT_WEIGHT: Final = 1

MAX_TOKEN_NAME_CHARACTERS: Final = 64
"""The engine takes no longer name for a token."""

UNIT_TOKENS: Final = "tokens"

MAX_WEIGHT: Final = 100
MAX_DAILY_TOKENS: Final = 1_000_000_000

EVENT_JOB_ENDED: Final = "fairhearth_job_ended"
"""Fired for each durable job that ends, for triggers and the logbook."""

POLICY_SCOPE: Final = "policy"
"""What a token must be allowed for the policy to be shown and changed; the rest works without."""

REQUIRED_SCOPES: Final = ("generate", "residents")
"""What a token must be allowed for the integration to work."""
