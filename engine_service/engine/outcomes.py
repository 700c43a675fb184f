"""Whether what a backend says it did can be. Decides who is at fault where it cannot.

A backend is other people's code around a device. One wrong number of it would put the household's accounts
wrong for good, so it is caught here and costs the one request it was said about.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from engine_service.backends.base import SequenceOutcome, StepOutcome
from engine_service.scheduling.model import RequestId

_LOGGER = logging.getLogger(__name__)


class Misreported(Exception):
    """The backend said something about a request that cannot be; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request was to do in the iteration."""

    num_tokens: int  #: prompt tokens to compute; 0 for a decode
    may_speak: bool  #: whether a new token can come of it


def judged(outcome: StepOutcome, asked: Mapping[RequestId, Asked], *, vocab_size: int) -> StepOutcome:
    """Return the outcome with an error in place of every report that cannot be.

    Reports about requests that had no part are dropped; a measured time that is no time makes the outcome
    count as aborted, which nothing is learnt from.
    """
    seen: dict[RequestId, SequenceOutcome] = {}
    for one in outcome.outcomes:
        order = asked.get(one.request_id)
        if order is None:
            _LOGGER.error("The backend reported on request %s, which had no part", one.request_id)
            continue
        wrong = _what_is_wrong(one, order, vocab_size)
        if one.request_id in seen:
            wrong = "two reports"
        seen[one.request_id] = one if wrong is None else _guilty(one.request_id, wrong)
    for request_id in asked.keys() - seen.keys():
        seen[request_id] = _guilty(request_id, "nothing")
    is_time = math.isfinite(outcome.seconds) and outcome.seconds >= 0
    return StepOutcome(
        outcomes=tuple(seen.values()),
        seconds=outcome.seconds if is_time else 0.0,
        aborted=outcome.aborted or not is_time,
    )


def _what_is_wrong(one: SequenceOutcome, order: Asked, vocab_size: int) -> str | None:
    if not 0 <= one.prefill_tokens <= order.num_tokens:
        return f"{one.prefill_tokens} prompt tokens of {order.num_tokens}"
    if one.token_ids and not (order.may_speak and one.prefill_tokens == order.num_tokens):
        return "a new token before its prompt was computed"
    if any(not 0 <= token_id < vocab_size for token_id in one.token_ids):
        return f"token ids outside of 0 to {vocab_size - 1}"
    return None


def _guilty(request_id: RequestId, what: str) -> SequenceOutcome:
    _LOGGER.error("The backend reported %s for request %s", what, request_id)
    return SequenceOutcome(request_id=request_id, error=Misreported(f"the backend reported {what}"))
