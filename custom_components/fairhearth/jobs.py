"""Follows an engine's durable jobs: which are under way, and which have just ended.

A job goes on while Home Assistant is not listening, so after each connection those that were under way are
asked after once. An engine without jobs is left in peace. Knows no entity.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from homeassistant.const import ATTR_DEVICE_ID
from homeassistant.core import CALLBACK_TYPE, HomeAssistant, callback

from .const import DOMAIN, EVENT_JOB_ENDED, LOGGER
from .devices import async_name_of_resident
from .engine_client import (
    EngineClient,
    EngineError,
    InvalidToken,
    Job,
    JsonObject,
    MethodNotAllowed,
    NotAllowed,
    NotFound,
    UnknownJob,
)
from .pace import Pace

if TYPE_CHECKING:
    from .coordinator import FairhearthConfigEntry

RECONNECT_S: Final = 10.0
_MOST_TOLD: Final = 100


class JobWatcher:
    """The live picture of one engine's jobs."""

    def __init__(self, hass: HomeAssistant, entry: FairhearthConfigEntry, client: EngineClient) -> None:
        """Watch one engine through its client."""
        self.active: dict[str, Job] = {}
        """Jobs that have not ended, by id, oldest first."""
        self._hass = hass
        self._entry = entry
        self._client = client
        self._pace = Pace(hass, self._async_tell_changed)
        self._on_changed: list[CALLBACK_TYPE] = []
        self._on_ended: list[Callable[[Job], None]] = []
        self._told: deque[str] = deque(maxlen=_MOST_TOLD)
        """Jobs whose end was told last: the stream may be ahead of the answer to an order."""

    @callback
    def async_start(self) -> None:
        """Begin to watch; ends when the entry is unloaded."""
        self._entry.async_on_unload(self._pace.async_drop)
        self._entry.async_create_background_task(
            self._hass, self._async_follow(), f"{DOMAIN}_jobs_{self._entry.entry_id}"
        )

    @callback
    def async_on_changed(self, action: CALLBACK_TYPE) -> CALLBACK_TYPE:
        """Call when the jobs under way changed, at most once a second; return what ends that."""
        self._on_changed.append(action)
        return lambda: self._on_changed.remove(action)

    @callback
    def async_on_ended(self, action: Callable[[Job], None]) -> CALLBACK_TYPE:
        """Call for each job that ends; return what ends that."""
        self._on_ended.append(action)
        return lambda: self._on_ended.remove(action)

    @callback
    def async_expect(self, job: Job) -> None:
        """Know a job that was just ordered: it may end while the engine's stream is not heard."""
        if not job.has_ended and job.job_id not in self._told:
            self._async_receive(job)

    async def _async_follow(self) -> None:
        while True:
            try:
                await self._async_ask_after_known()
                async with aclosing(self._client.job_stream()) as jobs:
                    async for job in jobs:
                        self._async_receive(job)
            except (NotFound, MethodNotAllowed, NotAllowed, InvalidToken) as err:
                LOGGER.debug("%s: its jobs cannot be followed: %s", self._entry.title, err)
                return  # a new token reloads the entry, a newer engine is set up again
            except EngineError as err:
                LOGGER.debug("%s: its jobs are not told at the moment: %s", self._entry.title, err)
            await asyncio.sleep(RECONNECT_S)

    async def _async_ask_after_known(self) -> None:
        """Hear of jobs that ended while nobody listened."""
        for job_id in list(self.active):
            try:
                self._async_receive(await self._client.job(job_id))
            except UnknownJob:
                del self.active[job_id]
                self._pace.async_ask()

    @callback
    def _async_receive(self, job: Job) -> None:
        """Take over how a job stands; tell of its end once, and only if it was seen under way."""
        if not job.has_ended:
            self.active[job.job_id] = job
        elif self.active.pop(job.job_id, None) is None:
            return
        else:
            self._told.append(job.job_id)
            whose = {
                "engine": self._entry.title,
                ATTR_DEVICE_ID: self._entry.runtime_data.engine_device_id,
                "resident_name": async_name_of_resident(self._hass, self._entry, job.resident),
            }
            self._hass.bus.async_fire(EVENT_JOB_ENDED, {**whose, **job_fields(job)})
            for action in list(self._on_ended):
                action(job)
        self._pace.async_ask()

    @callback
    def _async_tell_changed(self) -> None:
        for action in list(self._on_changed):
            action()


def job_fields(job: Job) -> JsonObject:
    """Return a job without its text, as actions, events and entities tell it."""
    return {
        "job_id": job.job_id,
        "title": job.title,
        "state": job.state,
        "resident": job.resident,
        "workload_class": job.workload_class,
        "progress": None if job.progress is None else round(100 * job.progress),
        "output_tokens": job.output_tokens,
        "eta_s": job.eta_s,
        "error": job.error,
    }
