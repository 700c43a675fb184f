"""What people say and are answered, in the log: nothing, unless the settings ask for it (`log.texts`).

Decides nothing else. A logger of its own, so that no level of the others lets a word slip out.
"""

from __future__ import annotations

import logging
from typing import Final

_LOGGER = logging.getLogger(__name__)
_OFF: Final = logging.CRITICAL + 1
_LOGGER.setLevel(_OFF)


def log_texts(wanted: bool) -> None:
    """Begin or end to log what is said, at level info."""
    _LOGGER.setLevel(logging.INFO if wanted else _OFF)


def are_logged() -> bool:
    """Return whether anything is logged, for whoever would have to gather it first."""
    return _LOGGER.isEnabledFor(logging.INFO)


def log(request_id: str, what: str, text: str) -> None:
    """Log a text of a request; what says which ("prompt", "answer")."""
    _LOGGER.info("Request %s, %s: %s", request_id, what, text, extra={"request_id": request_id})
