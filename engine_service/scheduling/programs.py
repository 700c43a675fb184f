"""What each agent run has been served, so that a short run is not held up by a long one.

Knows programs by resident and name; no requests, no time. A call's place in its flow is fixed when it
arrives, from what the earlier calls of its program got: a key that changed while the call waits could not
be kept in a heap.

Source: PLAS of Autellix (Luo et al., 2025): least attained service of the program first. Differs: only
among the calls of one class and resident, and a call that is due goes first whatever its program got.
"""

from __future__ import annotations

from engine_service.scheduling.model import ResidentId

_REMEMBERED = 1024

ProgramId = tuple[ResidentId, str]


class Programs:
    """Attained service by program, of the programs that were served last."""

    def __init__(self) -> None:
        """Know no program."""
        self._attained: dict[ProgramId, int] = {}

    def attained(self, program_id: ProgramId) -> int:
        """Return the service units its calls got (0 for a new program, or one long forgotten)."""
        return self._attained.get(program_id, 0)

    def add(self, program_id: ProgramId, units: int) -> None:
        """Add what one of its calls got (>= 0)."""
        self._attained[program_id] = self._attained.pop(program_id, 0) + units
        if len(self._attained) > _REMEMBERED:
            del self._attained[next(iter(self._attained))]
