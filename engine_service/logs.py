"""Log lines of the engine process: plain text or one JSON object per line, on standard error.

Decides only the form. What is logged names requests, residents and times, and what anybody said only where
the settings ask for it.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final

from engine_service import texts
from engine_service.settings import LogFormat, LogSettings

_DETAILS: Final = ("request_id", "resident", "workload_class")
"""What a JSON line may say beside its sentence (`extra=` of a log call), to be searched by."""


class _JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in _DETAILS:
            if (value := getattr(record, name, None)) is not None:
                entry[name] = value
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logging(settings: LogSettings) -> None:
    """Send log lines of the chosen level and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.format is LogFormat.JSON:
        handler.setFormatter(_JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    texts.log_texts(settings.texts)
