"""How long a request will probably wait: the work ahead of it at the rate of the last window.

Reads the state; changes nothing; never looks at single requests, so that asking costs the same however long
the queue is. An estimate for people: it assumes that the future is like the last minute.

Source: QLM's waiting-time estimator (Patke et al., SoCC 2024): requests ahead times their mean service,
divided by the service rate (here of the seconds in which the device computed). Differs: ahead of a request
are the more urgent classes and, in its own class, as many of each other resident as of its own, since
residents take turns.
"""

from __future__ import annotations

import math

from engine_service.scheduling.flows import Flow
from engine_service.scheduling.model import WorkloadClass
from engine_service.scheduling.state import State


def eta_s(state: State, flow: Flow, *, position: int, now: float) -> float | None:
    """Return the seconds (>= 0) until the flow's request with `position` ahead of it in the flow starts.

    None while nothing was measured: no request has finished. None also for a class that is paused: that is up
    to whoever paused it.
    """
    if flow.is_paused:
        return None
    rate, usual = state.pace.per_second(now=now), _mean_service(state, list(WorkloadClass))
    if rate is None or usual is None:
        return None
    work = 0.0
    for urgency, waiting in enumerate(state.waiting_by_urgency[: flow.urgency]):
        work += waiting * _mean_at(state, urgency, usual)
    rivals = sum(1 for other in state.waiting_flows if other.urgency == flow.urgency and other is not flow)
    in_turn = position + rivals * (position + 1)
    own_mean = _mean_at(state, flow.urgency, usual)
    work += min(in_turn, state.waiting_by_urgency[flow.urgency] + 1) * own_mean
    # Half of what runs and does not give way is still to be done before a place is free.
    for urgency, held in enumerate(state.held_by_urgency[: flow.urgency + 1]):
        work += held * _mean_at(state, urgency, usual) / 2
    return work / rate


def _mean_at(state: State, urgency: int, usual: float) -> float:
    mean = _mean_service(state, [c for c in WorkloadClass if c.urgency == urgency])
    return usual if mean is None else mean


def drained_s(state: State, num_waiting: int, *, now: float) -> float:
    """Return a coarse time (whole s, 1 to 3600) until a full queue is worth another try.

    Half of the queue's work at the rate of the last window; before anything was measured, one second per
    waiting request.
    """
    rate, usual = state.pace.per_second(now=now), _mean_service(state, list(WorkloadClass))
    seconds = float(num_waiting) if rate is None or usual is None else num_waiting * usual / rate / 2
    return float(math.ceil(min(3600.0, max(1.0, seconds))))


def _mean_service(state: State, classes: list[WorkloadClass]) -> float | None:
    return state.pace.mean_service(state.class_accounts, classes)
