"""The engine beside the accelerator: schedules one household's language model fairly."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
