"""The engine: one thread that plans, carries out, steps the backend and observes; asyncio around it.

Decides nothing: every choice comes out of `Scheduler.handle`. The scheduler is guarded by one lock, so
that an arrival can be noted, and a prefill under way aborted, while the thread is inside the backend. All
calls of the backend come from the thread, except `abort`. A backend that is lost, or that hangs, is
replaced by a new one; a thread that hangs inside of a backend cannot be ended, so it is left to itself and
another takes over. Where there are several models, one backend serves at a time and is exchanged between
iterations (docs/models.md).

    event loop                         engine thread
    submit -> Arrived  ---(lock)--->   orders queue: Admit, Preempt, ..., Compose
    cancel -> Cancelled                 carry out -> step -> IterationDone ---(lock)---> more orders
    Session.push  <---(courier, ledger)---  deltas of the iterations, in batches
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, assert_never
from zoneinfo import ZoneInfo

from engine_service.backends.base import (
    Backend,
    BackendError,
    ChunkOrder,
    Constraint,
    FinishReason,
    GenerationOrder,
    InvalidConstraint,
    Language,
    ModelInfo,
    SequenceOutcome,
    StepOutcome,
    Tokenizer,
)
from engine_service.checks import shown
from engine_service.engine import memory
from engine_service.engine.courier import GATHER_S, Courier
from engine_service.engine.days import local_day
from engine_service.engine.eventlog import EventLog
from engine_service.engine.ledger import Ledger
from engine_service.engine.metrics import Observer, Snapshot, Timers
from engine_service.engine.outcomes import Asked, Misreported, judged
from engine_service.engine.residence import Models, ModelStatus
from engine_service.engine.sessions import (
    Accepted,
    Delta,
    Finished,
    Order,
    Session,
    SessionEvent,
    Timings,
    joined,
)
from engine_service.engine.tokenizing import CurrentTokenizer, being_loaded
from engine_service.engine.watchdog import Alarm, Watchdog
from engine_service.errors import (
    EngineError,
    EngineStopping,
    GenerationFailed,
    InvalidRequest,
    ModelUnavailable,
    PromptTooLong,
    QueueFull,
    QuotaExhausted,
    TooManyRequests,
    UnknownModel,
    UnknownResident,
)
from engine_service.scheduling.decisions import (
    AbortIteration,
    Admit,
    Cancel,
    Compose,
    Decision,
    Grow,
    Pause,
    Preempt,
    PrefillChunk,
    Reject,
    Resume,
)
from engine_service.scheduling.events import (
    Arrived,
    BackendLost,
    Cancelled,
    CapacityChanged,
    DayStarted,
    Event,
    IterationDone,
    PolicyChanged,
    PrefixDropped,
    ResidentsChanged,
    SequenceResult,
    ServingStopped,
    Ticked,
)
from engine_service.scheduling.model import (
    GUEST,
    HOUSE,
    THE_MODEL,
    Capacity,
    ModelId,
    Policy,
    RejectReason,
    Request,
    RequestId,
    Resident,
    ResidentId,
    WorkloadClass,
    pages_for,
)
from engine_service.scheduling.residency import Enter, Exit, Leave, Load, Residence, Unload
from engine_service.scheduling.scheduler import Scheduler
from engine_service.scheduling.snapshot import SnapshotError
from engine_service.scheduling.targets import TARGETS

_LOGGER = logging.getLogger(__name__)
_ABORT_AGAIN_S = 0.005
_ABORT_EVERY_S = 0.02
_READY_WITHIN_S = 60.0
_TICK_S = 1.0
_JOIN_S = 10.0
_KEPT_WITHIN_S = 5.0
COMPANY_S: Final = 0.002
"""How long whoever finds an idle engine waits for those who come at the same moment, in seconds.

Prompts that are computed together share what a pass costs by itself, and their classes say who is first.
"""
_LONGEST_COMPANY_S: Final = 0.01
_DAY_SLACK_S = 5.0
"""A wall clock that drifts by less is not worth a word to the core."""
_MOST_UNDELIVERED = 64
"""Iterations the event loop may be behind before the thread waits for it."""

_A_DECODE = Asked(num_tokens=0, may_speak=True)
_FIXED_NAMES = {GUEST: "Guest", HOUSE: "House"}


@dataclass(slots=True, kw_only=True)
class _Live:
    """A request the engine answers for. Times are monotonic seconds, written by the engine thread."""

    session: Session
    order: GenerationOrder
    request: Request
    timers: tuple[Timers, Timers]
    arrived_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_gaps: int = 0  #: between output tokens
    num_late: int = 0  #: of them, longer than the class's target
    was_preempted: bool = False
    is_on_backend: bool = False
    cached_tokens: int | None = None  #: found at the last admission, not yet told to the core
    prefill_tokens: int = 0
    total_cached: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    high_water: int = 0
    stored: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class _Pinned:
    """A prefix kept for everybody."""

    request_id: RequestId
    model_id: ModelId
    prompt_ids: tuple[int, ...]
    used_at: float

    @classmethod
    def of(cls, live: _Live, *, now: float) -> _Pinned:
        """Return the prefix that a request ends with."""
        request = live.request
        return cls(request.request_id, request.model_id, live.order.prompt_ids, used_at=now)


@dataclass(slots=True)
class _Batch:
    """What the thread hands to the event loop after an iteration."""

    events: list[tuple[Session, SessionEvent | EngineError]] = field(default_factory=list)
    is_paced: bool = False  #: one of the iterations that the event loop may be behind
    is_urgent: bool = True  #: something begins or ends


_Exchange = Enter | Exit | Unload
"""What is done to models between iterations, by the engine's thread."""


class _Superseded(Exception):
    """Another thread took over while this one hung inside of a backend."""


class Engine:
    """Serves a household with one backend at a time."""

    def __init__(
        self,
        backend: Backend,
        *,
        policy: Policy | None = None,
        residents: Iterable[Resident] = (),
        names: Mapping[ResidentId, str] | None = None,
        scheduler: Scheduler | None = None,
        rebuild: Callable[[], Backend] | None = None,
        clock: Callable[[], float] = time.monotonic,
        zone: ZoneInfo | None = None,
        event_log: Path | None = None,
        ledger: Ledger | None = None,
        window_s: float = 300.0,
        policy_name: str = "fairhearth",
        patience_s: float = 120.0,
        wall_clock: Callable[[], float] = time.time,
        models: Models | None = None,
        gather_s: float = GATHER_S,
        company_s: float = COMPANY_S,
    ) -> None:
        """Take over a loaded backend; nothing runs before `start`.

        rebuild makes a new backend after the old one was lost; without it the engine stops serving. Where
        there are several models, the backend is that of the first, and models makes the new ones. An
        iteration that lasts longer than patience_s is stopped; one that cannot be stopped means that the
        backend is lost. Text that neither begins nor ends anything is delivered every gather_s seconds. An
        idle engine begins company_s seconds after the last arrival (0: at once), with speech always at once.
        """
        self._backend = backend
        self._policy = policy or Policy()
        self._scheduler = scheduler or Scheduler(self._policy)
        self._models = models
        self._rebuild = rebuild if models is None else self._reopen
        self._clock = clock
        self._zone = zone
        self._wall_clock = wall_clock
        self._day, self._day_ends_at = "", 0.0
        self._event_log = EventLog(event_log) if event_log else None
        self._ledger = ledger
        self._observer = Observer(window_s, clock())
        self.policy_name = policy_name
        self._names: dict[ResidentId, str] = {**_FIXED_NAMES, **(names or {})}
        self._initial_residents = tuple(residents)
        self._wakeup = threading.Condition(threading.Lock())
        self._orders: deque[Decision | _Exchange] = deque()
        self._live: dict[RequestId, _Live] = {}
        self._pinned: dict[RequestId, _Pinned] = {}
        self._ids = itertools.count(1)
        self._tokenizer = CurrentTokenizer(lambda: self._backend.tokenizer)
        self._is_rebuilding = False
        self._tick_s = min(_TICK_S, patience_s / 4)
        self._watchdog = Watchdog(patience_s, look_every_s=self._tick_s)
        self._turn = 0
        self._is_in_backend = False
        self._undelivered = threading.Semaphore(_MOST_UNDELIVERED)
        self._courier: Courier[_Batch] | None = None
        self._gather_s = gather_s
        self._company_s = company_s
        self._beginning: asyncio.TimerHandle | None = None  #: when those who came together are planned
        self._begins_by = 0.0
        self._thread: threading.Thread | None = None
        self._hanging: dict[threading.Thread, Backend] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._is_stopped = False
        self._failure: str | None = None
        self._is_disk_late = False
        self._has_failed = asyncio.Event()
        self._is_stepping = False
        self._abort_before_step = False
        self._last_iteration_at = self._busy_since = clock()
        self._version = 0
        self._changed = asyncio.Event()

    # ---- life

    async def start(self) -> None:
        """Start the thread; tells the core what there is."""
        self._loop = asyncio.get_running_loop()
        self._courier = Courier(
            self._loop,
            self._deliver,
            ledger=self._ledger,
            snapshot=self._to_be_kept,
            gather_s=self._gather_s,
        )
        self._courier.start()
        with self._wakeup:
            self._tell(PolicyChanged(policy=self._scheduler.state.policy))
            self._tell(ResidentsChanged(residents=self._initial_residents))
            first = THE_MODEL if self._models is None else self._models.first
            self._tell(CapacityChanged(capacity=self._backend.capacity, model_id=first))
            if self._models is not None:
                self._models.entered(first, now=self._clock())
            self._take_over_ledger()
        self._thread = self._new_thread()
        self._thread.start()
        self._see_day()
        task = self._loop.create_task(self._keep_ticking())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take_over_ledger(self) -> None:
        """Go on counting where an earlier engine stopped (lock held)."""
        if self._ledger is None or (kept := self._ledger.load()) is None:
            return
        try:
            self._scheduler.restore(kept.snapshot, now=self._clock(), elapsed_s=kept.elapsed_s)
        except SnapshotError as error:
            self._ledger.set_aside(str(error))
        self._observer.begin_from(self._scheduler)

    def _to_be_kept(self) -> dict[str, Any]:
        """Return what was served until now (any thread)."""
        with self._wakeup:
            return self._scheduler.snapshot(now=self._clock())

    def refuse_new_work(self) -> None:
        """Begin the end: what was taken goes on, nothing new is taken."""
        self._is_stopping = True

    async def stop(self, *, drain_s: float = 5.0) -> None:
        """Refuse new work, let running work end for up to drain_s seconds, cancel the rest, close."""
        self.refuse_new_work()
        deadline = self._clock() + drain_s
        while self._live and (left_s := deadline - self._clock()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
        for live in list(self._live.values()):
            live.session.push(EngineStopping("the engine is shutting down"))
            self._cancel(live.request.request_id)
        for task in list(self._tasks):
            task.cancel()
        with self._wakeup:
            self._is_stopped = True
            self._wakeup.notify()
            thread = self._thread
        self._backend.abort()
        if thread is not None:
            await asyncio.to_thread(thread.join, _JOIN_S)
        await self._close_books()
        if thread is not None and thread.is_alive():
            _LOGGER.warning("The backend does not come to an end; its memory is freed with the process")
            return
        if self._models is not None:
            await asyncio.to_thread(self._models.join, _JOIN_S)
        for backend in self._backends:
            backend.close()

    async def _close_books(self) -> None:
        """Let what was served be kept for the last time; close ledger and event log."""
        courier, self._courier = self._courier, None
        has_ended = True
        if courier is not None:
            courier.leave(has_served=True)
            has_ended = await asyncio.to_thread(courier.stop, _JOIN_S)
        with self._wakeup:
            if self._event_log is not None:
                self._event_log.close()
                self._event_log = None
            if self._ledger is not None and has_ended:  # else the disk hangs, and closing would, too
                self._ledger.close()
            self._ledger = None

    # ---- what the server asks

    @property
    def info(self) -> ModelInfo:
        """The model that answers who names none."""
        return self.language(self.default_model).info

    @property
    def default_model(self) -> ModelId:
        """The model that answers who names none."""
        return THE_MODEL if self._models is None else self._models.first

    def model_named(self, name: str | None) -> ModelId:
        """Return the model of that name (None, empty: the first); raise UnknownModel that names all."""
        if not name or name == self.info.name:
            return self.default_model
        if self._models is None:
            raise UnknownModel(
                f"the model {shown(name)} is not served here; {self.info.name!r} is", param="model"
            )
        if name not in self._models.names:
            known = ", ".join(map(repr, self._models.names))
            raise UnknownModel(
                f"the model {shown(name)} is not served here; these are: {known}", param="model"
            )
        return ModelId(name)

    def language(self, model_id: ModelId) -> Language:
        """Return what a model says without its weights; raise ModelUnavailable."""
        if self._models is not None:
            return self._models.language(model_id or self._models.first)
        backend = self._backend
        return Language(
            info=backend.info,
            tokenizer=self._tokenizer,
            capacity=backend.capacity,
            validate=lambda order: self._backend.validate(order),
            eye=backend.eye,
        )

    @property
    def serving(self) -> Language:
        """What the model says that serves (or served last, while none does)."""
        return self.language(self._scheduler.state.serving)

    def models(self) -> list[ModelStatus]:
        """Return where every model is."""
        with self._wakeup:
            state = self._scheduler.state
            if self._models is not None:
                return self._models.statuses(state)
            return [
                ModelStatus(
                    model_id=THE_MODEL,
                    info=self._backend.info,
                    place=Residence.LOADING if self._is_rebuilding else Residence.LOADED,
                    is_pinned=True,
                    progress=None,
                    num_waiting=state.total_waiting,
                    trouble=self._failure,
                )
            ]

    @property
    def _backends(self) -> list[Backend]:
        """The backends of all models in memory."""
        return [self._backend] if self._models is None else self._models.backends()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer (any thread); stays right when the backend is replaced."""
        return self._tokenizer

    @property
    def capacities(self) -> list[Capacity]:
        """What each model offers, or will when it is loaded."""
        return [self._backend.capacity] if self._models is None else self._models.capacities()

    @property
    def residents(self) -> Mapping[ResidentId, Resident]:
        """Everybody who may order, guest and house included."""
        return self._scheduler.residents

    @property
    def names(self) -> Mapping[ResidentId, str]:
        """The names people read."""
        return self._names

    @property
    def is_ready(self) -> bool:
        """Return whether new work would be served: alive, and iterations complete while work exists."""
        if self._is_stopping or self._failure is not None or self._thread is None or self._is_rebuilding:
            return False
        if self._models is not None and not self._models.is_any_coming:
            return False
        since = max(self._last_iteration_at, self._busy_since)
        with self._wakeup:
            has_work = self._scheduler.has_work
        return not has_work or self._clock() - since < _READY_WITHIN_S

    async def failed(self) -> str:
        """Wait until the engine can serve no more; return why."""
        await self._has_failed.wait()
        return self._failure or ""

    def snapshot(self) -> Snapshot:
        """Return what is going on right now."""
        with self._wakeup:
            return self._observer.snapshot(
                self._scheduler, self._names, version=self._version, now=self._clock()
            )

    async def kept(self) -> None:
        """Wait until all that was served so far is on disk: who tells of it never has to take it back.

        A disk that hangs is waited for some seconds: what goes on is to be seen all the same.
        """
        if self._courier is None or self._ledger is None:
            return
        try:
            await asyncio.wait_for(self._courier.kept(), _KEPT_WITHIN_S)
        except TimeoutError:
            if not self._is_disk_late:
                _LOGGER.warning("The disk takes very long to keep what is served; counters are shown before")
            self._is_disk_late = True
        else:
            self._is_disk_late = False

    def memory(self) -> dict[str, Any]:
        """Return how many conversations fit, who holds how many pages and what could be had back."""
        with self._wakeup:
            return memory.report(self._scheduler.state)

    def memory_of(self, model_id: ModelId) -> dict[str, Any]:
        """Return how many conversations fit into a model's memory, which need not be there."""
        return memory.offer(self.language(model_id).capacity, self._scheduler.state.policy)

    def eta_s(self, request_id: RequestId) -> float | None:
        """Return the seconds until the request probably starts, None if it does not wait or nobody knows."""
        with self._wakeup:
            return self._scheduler.eta_s(request_id, now=self._clock())

    async def changed(self, *, after: int) -> int:
        """Wait until something happened since version `after`; return the version."""
        while self._version <= after:
            self._changed.clear()
            await self._changed.wait()
        return self._version

    async def set_residents(
        self, residents: Iterable[Resident], names: Mapping[ResidentId, str] | None = None
    ) -> None:
        """Replace the residents (guest and house stay); who is missing drains."""
        self._names = {**_FIXED_NAMES, **(names if names is not None else self._names)}
        with self._wakeup:
            self._tell(ResidentsChanged(residents=tuple(residents)))
        self._bump()

    async def set_policy(self, policy: Policy) -> None:
        """Replace the policy while running."""
        with self._wakeup:
            self._tell(PolicyChanged(policy=policy))
            self._busy_since = self._clock()  # what was paused may go on, and has not hung until now
        self._bump()

    async def submit(self, order: Order) -> Session:
        """Take an order; its session starts with Accepted. Raises EngineError where it is refused."""
        if order.constraint is not None:
            await self.prepare_constraint(order.constraint, order.model_id)
        self._check_serving()
        generation, request = self._prepare(order)
        session = Session(request.request_id, cancel=self._cancel)
        now = self._clock()
        live = _Live(
            session=session,
            order=generation,
            request=request,
            timers=self._observer.timers(request.resident_id, request.class_id),
            arrived_at=now,
        )
        with self._wakeup:
            self._check_serving()  # once more: who is taken after the last was told of the end waits for ever
            if self._models is not None:
                self._models.check(request.model_id, now=now)
            if self._is_rebuilding and request.shared_prefix_tokens:
                live.request = request = replace(request, shared_prefix_tokens=0)
            if not self._live:
                self._busy_since = now
            self._live[request.request_id] = live
            num_ahead = self._scheduler.state.total_waiting
            arrived = Arrived(request=request, may_have_company=self._company_s > 0)
            refused = next((d for d in self._tell(arrived) if isinstance(d, Reject)), None)
            if refused is not None:
                del self._live[request.request_id]
                self._hand_over(_Batch(is_urgent=False))
                raise self._refusal(refused, request)
            if arrived.may_have_company and self._scheduler.state.in_flight is None:
                self._begin_soon(now=now)
            self._see_models()
        session.push(Accepted(request_id=request.request_id, num_ahead=num_ahead))
        self._bump()
        return session

    def _check_serving(self) -> None:
        """Raise EngineStopping where nobody is taken any more."""
        if self._is_stopping:
            raise EngineStopping("the engine is shutting down", retry_after_s=10)
        if self._failure is not None:
            raise EngineStopping(f"the engine stopped serving: {self._failure}", retry_after_s=30)

    def _begin_soon(self, *, now: float) -> None:
        """Plan a moment after the last arrival (lock held)."""
        loop = asyncio.get_running_loop()
        if self._beginning is None:
            self._begins_by = now + _LONGEST_COMPANY_S
        else:
            self._beginning.cancel()
        delay_s = max(0.0, min(self._company_s, self._begins_by - now))
        self._beginning = loop.call_later(delay_s, self._begin)

    def _begin(self) -> None:
        self._beginning = None
        with self._wakeup:
            if self._scheduler.state.in_flight is None and not self._is_stopped:
                self._tell(Ticked())

    async def prepare_constraint(self, constraint: Constraint, model_id: ModelId = THE_MODEL) -> None:
        """Compile a grammar off the event loop (a large one takes a second); backends keep it.

        Raises InvalidRequest for one that cannot be compiled.
        """
        probe = GenerationOrder(
            request_id=RequestId("probe"), prompt_ids=(0,), max_tokens=1, constraint=constraint
        )
        try:
            await asyncio.to_thread(self.language(model_id).validate, probe)
        except InvalidConstraint as err:
            raise InvalidRequest(str(err), param="response_format") from err
        except BackendError as err:
            raise being_loaded() from err

    async def pin_prefix(self, prompt_ids: tuple[int, ...], model_id: ModelId = THE_MODEL) -> tuple[int, int]:
        """Compute and keep a prompt's beginning; return (its tokens, tokens computed for it now).

        (0, 0) for a model that is not in memory: it is not loaded to be told a prefix.
        """
        model_id = model_id or self.default_model
        if self._models is not None and self._models.backend(model_id) is None:
            return 0, 0
        # Not asked of the backend: one that shares whole pages does not count the last, partly filled one.
        with self._wakeup:
            pins = [pin for pin in self._pinned.values() if pin.model_id == model_id]
            known = [p for p in pins if p.prompt_ids[: len(prompt_ids)] == prompt_ids]
            for pinned in known:
                pinned.used_at = self._clock()
        if known:
            return len(prompt_ids), 0
        self._make_room_for_prefix(len(prompt_ids), model_id)
        session = await self.submit(
            Order(
                resident_id=HOUSE,
                class_id=WorkloadClass.CHAT,
                prompt_ids=prompt_ids,
                max_tokens=0,
                keep_prefix=True,
                model_id=model_id,
            )
        )
        try:
            async for event in session.events():
                if isinstance(event, Finished):
                    return len(prompt_ids), event.timings.prefill_tokens
        finally:
            session.cancel()  # whoever asked may have gone; what has ended is not touched
        raise GenerationFailed("the prompt's beginning could not be computed")

    # ---- submitting

    def _prepare(self, order: Order) -> tuple[GenerationOrder, Request]:
        request_id = RequestId(f"r{next(self._ids):06d}")
        if not order.prompt_ids:
            raise InvalidRequest("the prompt is empty", param="messages")
        for param, texts in (("stop", order.stop), ("banned_strings", order.banned)):
            if "" in texts:
                raise InvalidRequest(f"{param} must not hold an empty text", param=param)
        model_id = order.model_id or self.default_model
        prompt_ids, healed = self._healed(order)
        length = len(prompt_ids)
        # A kept prefix pays for all of its pages, so that prefixes can be dropped independently.
        # An embedding needs every token computed.
        is_prompt_only = order.keep_prefix or order.wants_embedding
        shared = 0 if is_prompt_only else self._shared_tokens(prompt_ids, model_id)
        max_tokens = 0 if is_prompt_only else self._clipped(order, length, shared)
        generation = GenerationOrder(
            request_id=request_id,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            sampling=order.sampling,
            stop=order.stop,
            banned=order.banned,
            healed=healed,
            constraint=order.constraint,
            keep_prefix=order.keep_prefix,
            wants_embedding=order.wants_embedding,
            ignore_eos=order.ignore_eos,
            pictures=order.pictures,
        )
        request = Request(
            request_id=request_id,
            resident_id=order.resident_id,
            class_id=order.class_id,
            prompt_tokens=length,
            max_tokens=max_tokens,
            shared_prefix_tokens=shared,
            program_id=order.program_id,
            keep_prefix=order.keep_prefix,
            paid_by_system=order.keep_prefix,
            model_id=model_id,
        )
        return generation, request

    def _shared_tokens(self, prompt_ids: Sequence[int], model_id: ModelId) -> int:
        """Return how many leading tokens a pinned prefix holds; a backend that is lost or absent has none."""
        backend = self._backend if self._models is None else self._models.backend(model_id)
        return 0 if self._is_rebuilding or backend is None else backend.shared_prefix_tokens(prompt_ids)

    def _healed(self, order: Order) -> tuple[tuple[int, ...], str]:
        """Return the prompt without the token that is to be chosen anew, and what that token shows.

        A prompt may end in the middle of what the model would write as one token. A control token, a part of
        a character and a prompt of one token stay as they are.
        """
        prompt_ids = order.prompt_ids
        if not order.heal_prompt or len(prompt_ids) < 2:
            return prompt_ids, ""
        if order.constraint is not None:
            raise InvalidRequest("token healing and a grammar exclude each other", param="token_healing")
        text = self.language(order.model_id).tokenizer.decode(prompt_ids[-1:])
        return (prompt_ids[:-1], text) if text and "\ufffd" not in text else (prompt_ids, "")

    def _clipped(self, order: Order, length: int, shared: int) -> int:
        """Return the output tokens to allow: what was asked, cut to what fits and the class may have."""
        model_id = order.model_id or self.default_model
        with self._wakeup:
            serves = model_id == self._scheduler.state.serving
            elsewhere = None if serves else self.language(model_id).capacity
            most = self._scheduler.most_tokens(order.class_id, shared=shared, elsewhere=elsewhere)
            most_output = self._scheduler.state.policy.classes[order.class_id].max_output_tokens
        room = most - length
        if room < 1:
            raise memory.too_long(length, most)
        wanted = room if order.max_tokens is None else min(order.max_tokens, room)
        return wanted if most_output is None else min(wanted, most_output)

    def _refusal(self, refused: Reject, request: Request) -> EngineError:
        limit, retry = refused.limit, refused.retry_after_s
        match refused.reason:
            case RejectReason.UNKNOWN_RESIDENT:
                known = ", ".join(sorted(self.residents))
                return UnknownResident(
                    f"there is no resident '{request.resident_id}' on this engine; known are: {known}",
                    param="fairhearth.resident",
                )
            case RejectReason.PROMPT_TOO_LONG | RejectReason.NEVER_FITS:
                return PromptTooLong(
                    f"the prompt has {request.prompt_tokens} tokens and asks for up to {request.max_tokens} "
                    f"more; with that many, a prompt of at most {limit} fits",
                    param="messages",
                )
            case RejectReason.OUTPUT_TOO_LONG:
                return InvalidRequest(
                    f"max_tokens is {request.max_tokens}; {request.class_id.value} requests may have at "
                    f"most {limit}",
                    param="max_tokens",
                )
            case RejectReason.QUOTA_EXHAUSTED:
                return QuotaExhausted(
                    f"the tokens of '{request.resident_id}' for today are used up",
                    param="daily_tokens",
                    retry_after_s=retry,
                )
            case RejectReason.ROLLING_EXHAUSTED:
                return QuotaExhausted(
                    f"the tokens of '{request.resident_id}' are used up for now",
                    param="rolling_tokens",
                    retry_after_s=retry,
                )
            case RejectReason.TOO_MANY_REQUESTS:
                return TooManyRequests(
                    f"'{request.resident_id}' already has {limit} requests waiting", retry_after_s=retry
                )
            case RejectReason.QUEUE_FULL:
                return QueueFull(f"the engine already has {limit} requests waiting", retry_after_s=retry)
            case RejectReason.DUPLICATE_REQUEST:
                return InvalidRequest(f"request {request.request_id} exists already")
            case _:
                assert_never(refused.reason)

    def _cancel(self, request_id: RequestId) -> None:
        """Note that the caller went away (any thread)."""
        with self._wakeup:
            self._tell(Cancelled(request_id=request_id))
            live = self._live.pop(request_id, None)
            if live is not None and live.first_token_at is None:
                self._note_given_up(live)
            self._see_models()
        self._hand_over(_Batch(is_urgent=False))

    def _note_given_up(self, live: _Live) -> None:
        """Count who gave up because nothing came in time, but nobody who simply changed their mind."""
        now, target = self._clock(), TARGETS.get(live.request.class_id)
        if target is not None and now - live.arrived_at > target.first_token_s:
            self._judge(live, is_met=False, now=now)

    def _make_room_for_prefix(self, num_tokens: int, model_id: ModelId) -> None:
        """Drop the least recently used prefixes of the serving model until a new one fits its allowance."""
        with self._wakeup:
            state = self._scheduler.state
            if model_id != state.serving:
                return
            pins = [pin for pin in self._pinned.values() if pin.model_id == model_id]
            page_tokens = state.known_capacity.page_tokens
            need = pages_for(num_tokens, page_tokens)
            is_shared = any(record.shared for record in state.holding.values())
            for pinned in sorted(pins, key=lambda p: p.used_at):
                # Cells that a running request shares stay in use after the drop: wait for a quieter time.
                if is_shared or state.pages.num_pinned + need <= state.prefix_allowance():
                    break
                del self._pinned[pinned.request_id]
                self._order(Cancel(request_id=pinned.request_id))
                self._tell(PrefixDropped(request_id=pinned.request_id))

    # ---- telling the core (lock held)

    def _order(self, order: Decision | _Exchange) -> None:
        """Have the engine's thread do something. Whoever called may be any thread, so it is woken here."""
        self._orders.append(order)
        self._wakeup.notify()

    def _tell(self, event: Event) -> list[Decision]:
        now = self._clock()
        decisions = self._scheduler.handle(event, now=now)
        if self._event_log is not None:
            self._event_log.write(event, decisions, now=now)
        for decision in decisions:
            if isinstance(decision, AbortIteration):
                self._abort_iteration()
            elif not isinstance(decision, Reject):
                self._order(decision)
            elif not isinstance(event, Arrived):
                self._refuse_later(decision)
        return decisions

    def _refuse_later(self, refused: Reject) -> None:
        """Tell a caller whose waiting request no longer fits (memory shrank, the policy changed)."""
        live = self._live.pop(refused.request_id, None)
        if live is not None:
            # A preempted one still has its tokens on the backend.
            self._order(Cancel(request_id=refused.request_id))
            self._hand_over(_Batch([(live.session, self._refusal(refused, live.request))]))

    def _abort_iteration(self) -> None:
        """Stop the prefill under way, also if the thread is just about to start it."""
        self._abort_before_step = True
        if self._is_stepping:
            self._backend.abort()
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(
                    self._loop.call_later, _ABORT_AGAIN_S, self._abort_again, self._turn
                )

    def _abort_again(self, turn: int) -> None:
        # The first call may have come just before the backend began its step, or met what was nearly over.
        with self._wakeup:
            if self._is_stepping and self._turn == turn and self._loop is not None:
                self._backend.abort()
                self._loop.call_later(_ABORT_EVERY_S, self._abort_again, turn)

    # ---- the engine thread

    def _new_thread(self, hung: BackendError | None = None) -> threading.Thread:
        return threading.Thread(target=self._run, args=(hung,), name="fairhearth-engine", daemon=True)

    def _run(self, hung: BackendError | None) -> None:
        """Carry out orders until stopped; hung says why the thread before this one was left to itself."""
        try:
            if hung is not None:
                self._backend_lost(hung, is_hanging=True)
            while orders := self._next_orders():
                self._take_turn(orders)
        except _Superseded:
            _LOGGER.warning("The backend that hung has come back; it is closed")
            self._close(self._hanging.pop(threading.current_thread()))

    def _next_orders(self) -> deque[Decision | _Exchange]:
        """Wait for orders; return none when the engine stops."""
        with self._wakeup:
            self._check_current()
            self._is_in_backend = False
            while not self._orders and not self._is_stopped:
                self._wakeup.wait()
            orders, self._orders = self._orders, deque()
            if self._is_stopped:
                orders.clear()
            self._turn += 1
            self._is_in_backend = bool(orders)
            return orders

    def _take_turn(self, orders: deque[Decision | _Exchange]) -> None:
        try:
            self._carry_out_all(orders)
        except _Superseded:
            raise
        except Exception as err:
            # Nothing in here may end the thread silently: whoever waits must be told.
            self._check_current()
            if not isinstance(err, BackendError):
                _LOGGER.exception("The engine thread failed")
                err = BackendError(f"{type(err).__name__}: {err}")
            with self._wakeup:
                self._orders.extendleft(reversed(orders))  # some concern what the lost backend had no part in
            self._backend_lost(err)

    def _check_current(self) -> None:
        """Raise _Superseded in a thread that hung so long that another one took over."""
        if threading.current_thread() is not self._thread:
            raise _Superseded

    def _carry_out_all(self, orders: deque[Decision | _Exchange]) -> None:
        """Carry out and remove the orders, first to last; one that fails leaves those after it."""
        failed: dict[RequestId, Exception] = {}
        while orders:
            order = orders.popleft()
            self._check_current()
            match order:
                case Compose():
                    self._iterate(order, failed)
                case Admit() | Grow() | Preempt():
                    if order.request_id in failed:
                        continue
                    try:
                        self._carry_out(order)
                    except (BackendError, _Superseded):
                        raise
                    except Exception as err:  # the backend refused this one request
                        self._check_current()
                        _LOGGER.exception("Request %s failed", order.request_id)
                        failed[order.request_id] = err
                case Cancel():
                    self._forget(order.request_id)
                case Enter():
                    self._enter(order.model_id)
                case Exit():
                    self._exit()
                case Unload():
                    self._unload(order.model_id)
                case Pause() | Resume() | Reject() | AbortIteration():
                    continue
                case _:
                    assert_never(order)

    def _forget(self, request_id: RequestId) -> None:
        """Drop a request wherever it is kept: one that was put back may be of a model that does not serve."""
        for backend in self._backends:
            backend.release(request_id)
            backend.drop_prefix(request_id)
        if self._models is not None:
            with self._wakeup:
                self._models.forget(request_id)

    def _carry_out(self, order: Admit | Grow | Preempt) -> None:
        live = self._live.get(order.request_id)
        match order:
            case Admit():
                if live is None:
                    return  # cancelled meanwhile; the core hears of it and sends Cancel
                self._admit(live, order.reserved_tokens)
            case Grow():
                if live is not None and live.is_on_backend:
                    self._backend.grow(order.request_id, reserved_tokens=order.reserved_tokens)
            case Preempt():
                if live is not None and live.is_on_backend:
                    self._backend.preempt(order.request_id, order.mode)
                    self._check_current()
                    live.was_preempted = True
                    live.is_on_backend = False
                    live.preemptions += 1

    def _admit(self, live: _Live, reserved_tokens: int) -> None:
        request_id = live.request.request_id
        began = self._clock()
        if live.was_preempted:
            cached = self._backend.resume(request_id, reserved_tokens=reserved_tokens)
        else:
            cached = self._backend.admit(live.order, reserved_tokens=reserved_tokens)
        self._check_current()
        live.cached_tokens = cached
        live.is_on_backend = True
        live.stored = cached
        now = self._clock()
        if live.order.pictures:
            self._observer.saw(len(live.order.pictures), seconds=now - began)
        if live.admitted_at is None:
            live.admitted_at = now
            live.total_cached = live.high_water = cached
            if not live.request.paid_by_system:
                for timers in live.timers:
                    timers.queue.add(now - live.arrived_at, now=now)
                with self._wakeup:
                    self._observer.waited(live.request.resident_id, now - live.arrived_at, now=now)

    def _iterate(self, composed: Compose, failed: dict[RequestId, Exception]) -> None:
        with self._wakeup:
            is_aborted = self._abort_before_step
            self._abort_before_step = False
            self._is_stepping = not is_aborted
        decode_ids = [r for r in composed.decode_ids if self._runs(r, failed)]
        chunks = [self._chunk(c) for c in composed.prefills if self._runs(c.request_id, failed)]
        asked = dict.fromkeys(decode_ids, _A_DECODE)
        asked |= {c.request_id: self._asked(c) for c in chunks}
        try:
            if is_aborted or not asked:
                asked = {}
                outcome = StepOutcome(outcomes=(), seconds=0.0, aborted=True)
            else:
                outcome = self._step(decode_ids, chunks)
        finally:
            with self._wakeup:
                self._check_current()
                self._is_in_backend = False
                self._is_stepping = False
                self._abort_before_step = False
        outcome = judged(outcome, asked, vocab_size=self._backend.info.vocab_size)
        for one in outcome.outcomes:
            if isinstance(one.error, Misreported):
                self._backend.release(one.request_id)
        faults = tuple(SequenceOutcome(request_id=r, error=err) for r, err in failed.items())
        self._observe(outcome, faults)

    def _runs(self, request_id: RequestId, failed: Mapping[RequestId, Exception]) -> bool:
        live = self._live.get(request_id)
        return live is not None and live.is_on_backend and request_id not in failed

    def _chunk(self, planned: PrefillChunk) -> ChunkOrder:
        """Ask for no more than is left: the core planned before it knew what the prefix cache held."""
        left = self._left(self._live[planned.request_id])
        return ChunkOrder(request_id=planned.request_id, num_tokens=min(planned.num_tokens, left))

    def _asked(self, chunk: ChunkOrder) -> Asked:
        is_last = chunk.num_tokens == self._left(self._live[chunk.request_id])
        return Asked(num_tokens=chunk.num_tokens, may_speak=is_last)

    @staticmethod
    def _left(live: _Live) -> int:
        """Return the tokens still to be computed before the request can speak (again)."""
        return live.request.prompt_tokens + live.decode_tokens - live.stored

    def _step(self, decode_ids: list[RequestId], chunks: list[ChunkOrder]) -> StepOutcome:
        try:
            return self._backend.step(decode_ids, chunks)
        except BackendError:
            raise
        except Exception:
            self._check_current()
            _LOGGER.exception("An iteration failed; running its requests one by one")
            return self._step_one_by_one(decode_ids, chunks)

    def _step_one_by_one(self, decode_ids: list[RequestId], chunks: list[ChunkOrder]) -> StepOutcome:
        """Find the guilty: whoever fails alone fails; the others lose nothing."""
        outcomes: list[SequenceOutcome] = []
        seconds = 0.0
        singles: list[tuple[RequestId, list[RequestId], list[ChunkOrder]]] = [
            (r, [r], []) for r in decode_ids
        ]
        singles += [(chunk.request_id, [], [chunk]) for chunk in chunks]
        for request_id, decodes, prefills in singles:
            try:
                outcome = self._backend.step(decodes, prefills)
            except BackendError:
                raise
            except Exception as err:
                self._check_current()
                self._backend.release(request_id)
                outcomes.append(SequenceOutcome(request_id=request_id, error=err))
            else:
                outcomes.extend(outcome.outcomes)
                seconds += outcome.seconds
        # Alone they took another time than together: the cost model must not learn from it.
        return StepOutcome(outcomes=tuple(outcomes), seconds=seconds, aborted=True)

    def _observe(self, outcome: StepOutcome, faults: tuple[SequenceOutcome, ...]) -> None:
        now = self._clock()
        batch = _Batch(is_urgent=False)
        results = []
        prefixes: dict[RequestId, _Pinned | None] = {}
        for one in (*outcome.outcomes, *faults):
            live = self._live.get(one.request_id)
            if one.finish_reason is FinishReason.PREFIX:
                prefixes[one.request_id] = None if live is None else _Pinned.of(live, now=now)
            if live is None:
                # Cancelled during the iteration: what was computed is charged all the same.
                results.append(
                    SequenceResult(
                        request_id=one.request_id,
                        prefill_tokens=one.prefill_tokens,
                        decode_tokens=len(one.token_ids),
                        finished=one.finish_reason is not None,
                        failed=one.error is not None,
                    )
                )
                continue
            results.append(self._observe_one(live, one, batch, now=now))
        with self._wakeup:
            self._abort_before_step = False  # it was meant for what has just ended
            self._tell(
                IterationDone(results=tuple(results), seconds=outcome.seconds, aborted=outcome.aborted)
            )
            not_kept = self._note_pinned(prefixes)
            self._observer.iteration_done(self._scheduler, seconds=outcome.seconds, now=now)
            self._last_iteration_at = now
            self._see_models()
        for request_id in not_kept:
            self._backend.drop_prefix(request_id)
        # A slow reader is cut by its own session; this bounds what lies between thread and event loop.
        batch.is_paced = self._undelivered.acquire(timeout=_TICK_S)
        self._hand_over(batch)

    def _note_pinned(self, prefixes: Mapping[RequestId, _Pinned | None]) -> list[RequestId]:
        """Remember what the core keeps; return what the backend has pinned for nobody (lock held).

        Here and not where it was ordered: whoever ordered it may be gone, and what nobody knows of could
        never be dropped. One that was given up while it was computed has no pages.
        """
        if not prefixes:
            return []
        kept = dict(self._scheduler.state.pages.pinned)
        self._pinned |= {r: pin for r, pin in prefixes.items() if pin is not None and r in kept}
        return [request_id for request_id in prefixes if request_id not in kept]

    def _observe_one(self, live: _Live, one: SequenceOutcome, batch: _Batch, *, now: float) -> SequenceResult:
        cached, live.cached_tokens = live.cached_tokens, None
        start, live.stored = live.stored, live.stored + one.prefill_tokens
        fresh = max(0, min(live.stored, live.request.prompt_tokens) - max(start, live.high_water))
        live.prefill_tokens += fresh
        live.recomputed_tokens += one.prefill_tokens - fresh
        batch.is_urgent |= one.error is not None or one.finish_reason is not None
        if one.token_ids:
            batch.is_urgent |= live.first_token_at is None
            self._observe_tokens(live, len(one.token_ids), now=now)
        live.high_water = max(live.high_water, live.stored)
        if one.text or one.logprobs or one.token_ids:
            delta = Delta(text=one.text, token_ids=one.token_ids, logprobs=one.logprobs)
            batch.events.append((live.session, delta))
        if one.error is not None:
            self._end(live, failed=True, now=now)
            batch.events.append((live.session, self._fault(one.error)))
        elif one.finish_reason is not None:
            self._end(live, failed=False, now=now)
            if not live.request.paid_by_system:
                for timers in live.timers:
                    timers.completion.add(now - live.arrived_at, now=now)
            finished = Finished(
                reason=one.finish_reason, timings=self._timings(live, now), embedding=one.embedding
            )
            batch.events.append((live.session, finished))
        return SequenceResult(
            request_id=one.request_id,
            prefill_tokens=one.prefill_tokens,
            cached_tokens=cached or 0,
            decode_tokens=len(one.token_ids),
            finished=one.finish_reason is not None,
            failed=one.error is not None,
        )

    def _observe_tokens(self, live: _Live, count: int, *, now: float) -> None:
        live.decode_tokens += count
        live.stored = live.request.prompt_tokens + live.decode_tokens - 1
        if live.first_token_at is None:
            live.first_token_at = now
            for timers in live.timers:
                timers.first_token.add(now - live.arrived_at, now=now)
        elif live.last_token_at is not None:
            gap_s = (now - live.last_token_at) / count
            for timers in live.timers:
                timers.inter_token.add(gap_s, now=now)
            target = TARGETS.get(live.request.class_id)
            live.num_gaps += count
            live.num_late += count if target is not None and gap_s > target.inter_token_s else 0
        live.last_token_at = now

    def _end(self, live: _Live, *, failed: bool, now: float) -> None:
        target, first_at = TARGETS.get(live.request.class_id), live.first_token_at
        is_met = (
            not failed
            and target is not None
            and first_at is not None
            and target.is_met(
                first_token_s=first_at - live.arrived_at, num_gaps=live.num_gaps, num_late=live.num_late
            )
        )
        with self._wakeup:
            self._live.pop(live.request.request_id, None)
            self._judge(live, is_met=is_met, now=now)

    def _judge(self, live: _Live, *, is_met: bool, now: float) -> None:
        """Count one request of a class with targets that was to say something (lock held)."""
        request = live.request
        if request.class_id in TARGETS and request.max_tokens and not request.paid_by_system:
            self._observer.answered(request.class_id, is_met=is_met, now=now)

    @staticmethod
    def _fault(error: Exception) -> EngineError:
        if isinstance(error, EngineError):
            return error
        return GenerationFailed(f"this request failed inside the engine: {error}")

    @staticmethod
    def _timings(live: _Live, now: float) -> Timings:
        first = None if live.first_token_at is None else live.first_token_at - live.arrived_at
        return Timings(
            queue_s=(live.admitted_at or now) - live.arrived_at,
            time_to_first_token_s=first,
            completion_s=now - live.arrived_at,
            prefill_tokens=live.prefill_tokens,
            cached_tokens=live.total_cached,
            decode_tokens=live.decode_tokens,
            recomputed_tokens=live.recomputed_tokens,
            preemptions=live.preemptions,
        )

    def _backend_lost(self, err: BackendError, *, is_hanging: bool = False) -> None:
        """Rebuild the backend; requests that had shown nothing start again, the others are told."""
        _LOGGER.error("The backend was lost: %s", err)
        batch = _Batch()
        with self._wakeup:
            self._is_rebuilding = True
            self._is_in_backend = False
            if self._rebuild is None:
                self._failure = str(err)
            lost = [x for x in self._live.values() if x.request.model_id == self._scheduler.state.serving]
            for live in lost:
                if live.decode_tokens or self._rebuild is None:
                    fault = GenerationFailed("the engine lost this answer half-way; please ask again")
                    batch.events.append((live.session, fault))
                    self._drop(live)
                else:
                    live.is_on_backend = live.was_preempted = False
                    live.cached_tokens, live.stored = None, 0
            self._tell(BackendLost())
            self._drop_orders()
            self._drop_pins(self._scheduler.state.serving)
        self._hand_over(batch)
        if self._rebuild is None:
            self._fail(str(err))
            return
        # One model fits into the memory, two may not. One that hangs is in use: it is closed if it returns.
        if not is_hanging:
            self._close(self._backend)
        try:
            backend = self._rebuild()
        except Exception as failure:
            _LOGGER.exception("The backend could not be rebuilt")
            self._fail(f"the model could not be loaded again ({failure})")
            return
        with self._wakeup:
            self._backend = backend
            self._is_rebuilding = False
            self._drop_orders()
            serving = self._scheduler.state.serving
            self._tell(CapacityChanged(capacity=backend.capacity, model_id=serving))
            if self._models is not None:
                self._models.entered(serving, now=self._clock())
                self._see_models()
            self._last_iteration_at = self._clock()

    def _drop_orders(self) -> None:
        """Forget what was ordered of a lost backend, but not what concerns other models (lock held)."""
        kept = [order for order in self._orders if self._models is not None and isinstance(order, Cancel)]
        self._orders = deque(kept)

    def _drop_pins(self, model_id: ModelId) -> None:
        """Forget the prefixes of a backend that is no more (lock held)."""
        self._pinned = {r: pin for r, pin in self._pinned.items() if pin.model_id != model_id}

    def _drop(self, live: _Live) -> None:
        """Forget a request that ends with its backend (lock held)."""
        self._live.pop(live.request.request_id)
        self._judge(live, is_met=False, now=self._clock())
        self._tell(Cancelled(request_id=live.request.request_id))

    def _fail(self, reason: str) -> None:
        """Serve no more; tell whoever waits."""
        batch = _Batch()
        with self._wakeup:
            self._failure = reason
            for live in list(self._live.values()):
                batch.events.append((live.session, EngineStopping(reason)))
                self._drop(live)
            self._orders.clear()
        self._hand_over(batch)

    @staticmethod
    def _close(backend: Backend) -> None:
        try:
            backend.close()
        except Exception:
            _LOGGER.exception("The lost backend could not be closed; its memory may still be taken")

    def _leave_hanging(self, turn: int) -> None:
        """Leave the thread that hangs in this turn to itself and go on with another (event loop)."""
        with self._wakeup:
            if not self._is_in_backend or self._turn != turn or self._is_stopped or self._thread is None:
                return  # it came back at the last moment
            self._hanging[self._thread] = self._backend
            self._is_stepping = False
            self._thread = self._new_thread(BackendError("it did not come back from an iteration"))
            self._thread.start()

    # ---- several models

    def _see_models(self) -> None:
        """Do what is to be done about models, or have it done between iterations (lock held)."""
        models = self._models
        if models is None or self._is_stopped or self._is_rebuilding or self._failure is not None:
            return
        while (step := models.plan(self._scheduler.state, now=self._clock())) is not None:
            match step:
                case Load():
                    models.begin_loading(step.model_id, loaded=self._model_loaded, failed=self._model_failed)
                case Leave():
                    self._tell(ServingStopped(puts_back_from=step.puts_back_from))
                case Enter() | Exit() | Unload():
                    self._order(step)
                case _:
                    assert_never(step)

    @property
    def _several(self) -> Models:
        """The models, for what only happens where there are several."""
        if self._models is None:
            raise RuntimeError("there is one model only")
        return self._models

    def _model_loaded(self, model_id: ModelId, backend: Backend) -> None:
        """Take over a model that was loaded beside another (the loader's thread)."""
        models = self._several
        with self._wakeup:
            is_late = self._is_stopped
            if not is_late:
                models.loaded(model_id, backend)
                self._see_models()
        if is_late:
            self._close(backend)
        self._hand_over(_Batch())

    def _model_failed(self, model_id: ModelId, error: Exception) -> None:
        """Tell whoever waits for a model that could not be loaded; the others go on (the loader's thread)."""
        models = self._several
        batch = _Batch()
        with self._wakeup:
            now = self._clock()
            models.failed(model_id, error, now=now)
            told = ModelUnavailable(
                f"the model {model_id!r} could not be loaded: {error}",
                retry_after_s=models.policy.retry_s,
            )
            for live in [x for x in self._live.values() if x.request.model_id == model_id]:
                batch.events.append((live.session, told))
                self._drop(live)
            self._see_models()
        self._hand_over(batch)

    def _enter(self, model_id: ModelId) -> None:
        """Let another model serve (the engine's thread, between iterations)."""
        models = self._several
        backend = models.loaded_backend(model_id)
        with self._wakeup:
            handed = models.take_handed(model_id)
        backend.adopt(handed)
        with self._wakeup:
            self._check_current()
            state, now = self._scheduler.state, self._clock()
            pinned = state.pages.pinned
            if model_id != state.serving:
                models.put_aside(state.serving, pinned)
                pinned = models.take_pins(model_id)
            self._backend = backend
            switch_s = models.entered(model_id, now=now)
            self._tell(
                CapacityChanged(
                    capacity=backend.capacity, model_id=model_id, pinned=pinned, switch_s=switch_s
                )
            )
            self._last_iteration_at = self._busy_since = now
            self._see_models()
        self._hand_over(_Batch())

    def _exit(self) -> None:
        """Let no model serve until the next one is loaded (the engine's thread)."""
        with self._wakeup:
            self._several.exited()
            self._see_models()

    def _unload(self, model_id: ModelId) -> None:
        """Free a model's memory; what its answers need to go on later is kept (the engine's thread)."""
        models = self._several
        backend = models.loaded_backend(model_id)
        handed = backend.hand_over()
        with self._wakeup:
            self._check_current()
            models.unloading(model_id, handed)
            if model_id == self._scheduler.state.serving:
                for request_id, _ in self._scheduler.state.pages.pinned:
                    self._tell(PrefixDropped(request_id=request_id))
            self._drop_pins(model_id)
        self._close(backend)
        with self._wakeup:
            models.unloaded(model_id)
            self._see_models()
        self._hand_over(_Batch())

    def _reopen(self) -> Backend:
        """Load the model that serves again (the engine's thread)."""
        return self._several.reopen(self._scheduler.state.serving)

    # ---- back in the event loop

    def _hand_over(self, batch: _Batch) -> None:
        """Have everybody told what changed, once it is kept (any thread)."""
        if self._courier is not None:
            self._courier.leave(batch, has_served=True, is_urgent=batch.is_urgent)

    def _deliver(self, batches: Sequence[_Batch]) -> None:
        for batch in batches:
            if batch.is_paced:
                self._undelivered.release()
        for session, event in joined(event for batch in batches for event in batch.events):
            session.push(event)
        if self._failure is not None:
            self._has_failed.set()
        self._bump()

    def _bump(self) -> None:
        self._version += 1
        self._changed.set()

    async def _keep_ticking(self) -> None:
        """Let windows roll and the due tier fill; see whether the backend hangs and what day it is."""
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                self._tick()
            except Exception:  # else nobody would look after the engine any more, and nobody would know
                _LOGGER.exception("Looking after the engine failed; it is tried again")

    def _tick(self) -> None:
        self._watch()
        self._see_day()
        with self._wakeup:
            state = self._scheduler.state
            if state.in_flight is None and state.total_waiting:
                self._tell(Ticked())
                self._bump()  # whoever waits has waited longer
            self._see_models()

    def _watch(self) -> None:
        turn = self._turn if self._is_in_backend else None
        match self._watchdog.look(turn, now=self._clock()):
            case Alarm.ABORT:
                _LOGGER.warning("An iteration takes very long; the backend is told to stop it")
                self._backend.abort()
            case Alarm.GIVE_UP if turn is not None:
                self._leave_hanging(turn)

    def _see_day(self) -> None:
        """Tell the core when a local day begins, or when the wall clock was set."""
        day, left_s = local_day(self._wall_clock(), self._zone)
        ends_at = self._clock() + left_s
        if day == self._day and abs(ends_at - self._day_ends_at) < _DAY_SLACK_S:
            return
        self._day, self._day_ends_at = day, ends_at
        with self._wakeup:
            self._tell(DayStarted(day=day, ends_at=ends_at))
        self._bump()  # what is left today has changed
