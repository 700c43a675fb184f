"""When a request was answered well: the first token and the pace that its class is measured by.

Decides nothing; no choice of the scheduler depends on it. The engine and the simulator count by it alike: the
share of requests within their targets (SLO attainment).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from engine_service.scheduling.model import WorkloadClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is good enough for a class."""

    first_token_s: float  #: from arrival to the first token
    inter_token_s: float  #: between two tokens

    def is_met(self, *, first_token_s: float, num_gaps: int, num_late: int) -> bool:
        """Return whether an answer kept the target; num_late of its num_gaps gaps were longer than that."""
        return first_token_s <= self.first_token_s and num_late <= LATE_GAPS * num_gaps


LATE_GAPS: Final = 0.05
"""Fraction of an answer's gaps that may be longer: its 95th percentile keeps the target."""

TARGETS: Final[Mapping[WorkloadClass, Target]] = MappingProxyType(
    {
        WorkloadClass.VOICE: Target(first_token_s=0.8, inter_token_s=0.12),
        WorkloadClass.ACCESSIBILITY: Target(first_token_s=0.8, inter_token_s=0.12),
        WorkloadClass.CHAT: Target(first_token_s=2.5, inter_token_s=0.2),
        WorkloadClass.AGENT: Target(first_token_s=15.0, inter_token_s=0.3),
    }
)
"""The classes that somebody waits for; of the others nobody reads along."""
