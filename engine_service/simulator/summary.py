"""The figures of one run, by the names that criteria, tables and files use.

Decides nothing. Everything is a number of the run itself; what compares runs is a criterion's business.
Times are seconds, service is units (w_p per computed prompt token, w_q per output token), shares fractions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_service.simulator.quantiles import Quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """What one class, resident or stream experienced.

    Requests that were still waiting or running when the run ended count with the time they had waited by
    then, so that what never came is not mistaken for what came fast.
    """

    name: str
    kind: str  #: class, resident or stream
    requests: int
    finished: int
    unfinished: int
    rejected: int
    cancelled: int
    queue: Quantiles  #: arrival to first admission
    requeue: Quantiles  #: all waiting after preemptions, of the requests that were preempted
    ttft: Quantiles  #: arrival to first output token
    itl: Quantiles  #: between output tokens
    e2e: Quantiles  #: arrival to the end
    starvation: float  #: the longest wait for an admission
    due: int  #: requests that waited longer than their class allows
    tokens: int  #: computed once: prompt and output
    tokens_per_s: float
    finished_per_s: float
    service: int
    share: float  #: of all service
    entitlement: float | None  #: max-min fair share of all service; None for classes and streams
    gain: float | None  #: share / entitlement
    attained: float | None  #: fraction of requests within the class's targets; None where there is none
    goodput: float | None  #: such requests per second
    preemptions: int
    recomputed: int  #: tokens computed again after a preemption


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSummary:
    """A stretch of the run."""

    name: str
    shares: dict[str, float]  #: by resident, of the service in it
    groups: dict[str, GroupSummary]  #: classes and residents: the requests that arrived in it


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionSummary:
    """Who gave way to whom."""

    victim_class: str
    beneficiary_class: str  #: "growth" where a request made room for its own
    count: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What charts are drawn from: one value per step."""

    step_s: int
    served: dict[str, list[int]]  #: by resident: units of service computed in the step
    waiting: dict[str, list[int]]  #: by class: requests waiting at the step's start
    gap: list[tuple[float, float | None]]  #: (second, most minus least served of those who wait)
    lives: list[Life]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """When a request arrived, was admitted, spoke first and ended; None where that never happened."""

    resident: str
    class_id: str
    arrived: float
    admitted: float | None
    first_token: float | None
    ended: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Everything that is said about one run."""

    scenario: str
    policy: str
    seed: int
    profile: str
    only: str | None  #: the group that had the machine to itself
    duration: float
    ended_at: float

    iterations: int
    utilisation: float  #: fraction of the duration in which the device computed
    idle_waiting: float  #: seconds without an iteration although somebody waited
    longest_iteration: float
    longest_stall: float  #: the longest iteration in which somebody waited for the next token
    iteration_bound: float  #: T_prefill(chunk) + T_decode(all sequences, full cache)
    over_bound: int  #: iterations with decodes longer than T_prefill(chunk) + T_decode of what they held
    decode_iteration: Quantiles  #: iterations without prompts
    chunk: int  #: most prompt tokens per iteration of the policy
    max_sequences: int

    tokens: int  #: computed once, within the duration
    completed_tokens: int  #: prompt and output of requests that ended well within the duration
    throughput: float  #: tokens per second
    service: int
    recomputed: int
    recompute_share: float  #: recomputed / all computed tokens
    preemptions: int
    reclaim_excess: int  #: most pages a preemption freed beyond what was missing and one victim
    over_cap: float  #: longest time somebody waited for pages that another held beyond its cap
    aborts: int

    jain: Quantiles
    service_difference: float  #: D
    bound: float  #: 2 U
    bound_used: float  #: D / 2U
    window_difference: Quantiles
    counter_spread: float  #: most S seen, in units of a weight-1 resident
    spread_used: float  #: S / (U + V + A)
    gap_half: float | None  #: most minus least served of those who waited at half time
    gap_end: float | None
    background_share: float | None  #: least share of lower classes in any 10 minutes
    goodput: float  #: requests within their targets per second

    leaked_pages: int
    stuck: int
    replay_differs: int  #: decisions that a replay of the event log would change; 0 also where not asked
    losses: int
    disconnects: int

    groups: dict[str, GroupSummary] = field(repr=False)
    cells: list[GroupSummary] = field(repr=False)  #: one per class and resident
    phases: dict[str, PhaseSummary] = field(repr=False)
    preempted: list[PreemptionSummary] = field(repr=False)
    timeline: Timeline | None = field(default=None, repr=False)
