"""Owns the engine client and the live picture of one engine: who is served, how fast, how fairly.

The picture is pushed: a background task follows the engine's fairness stream, connects again after a loss
with growing pauses, and tells the engine its residents each time, because an engine may have been set up anew
meanwhile. Entities never ask the engine; they read `data`, and are unavailable while the stream is lost.
Knows no entity.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, override

from homeassistant.config_entries import ConfigEntry
from homeassistant.const import EVENT_CALL_SERVICE
from homeassistant.core import Event, HomeAssistant, callback
from homeassistant.exceptions import ConfigEntryAuthFailed
from homeassistant.helpers import device_registry as dr
from homeassistant.helpers.update_coordinator import DataUpdateCoordinator, UpdateFailed

from .attribution import ContextUsers
from .const import DOMAIN, LOGGER, MANUFACTURER, POLICY_SCOPE
from .engine_client import (
    CannotConnect,
    ChatEvent,
    ChatRequest,
    EngineClient,
    EngineError,
    EngineInfo,
    FairnessSnapshot,
    InvalidToken,
    Job,
    JobOrder,
    JsonObject,
    MethodNotAllowed,
    NotAllowed,
    NotFound,
    Policy,
    ProtocolError,
    UnknownResident,
    check_schema_version,
)
from .errors import as_home_assistant_error
from .issues import IssueKeeper
from .jobs import JobWatcher
from .moments import MomentTeller
from .pace import Pace
from .residents import ResidentRegistrar, structure_of

RECONNECT_FIRST_S: Final = 1.0
RECONNECT_MOST_S: Final = 30.0

LISTENERS_AT_ONCE: Final = 100
"""Entities written before others have their turn on the event loop."""

type FairhearthConfigEntry = ConfigEntry[FairhearthCoordinator]


class FairhearthCoordinator(DataUpdateCoordinator[FairnessSnapshot]):
    """The live picture of one engine."""

    config_entry: FairhearthConfigEntry
    engine: EngineInfo
    engine_device_id: str

    def __init__(self, hass: HomeAssistant, entry: FairhearthConfigEntry, client: EngineClient) -> None:
        """Follow one engine through its client."""
        super().__init__(
            hass, LOGGER, config_entry=entry, name=entry.title, update_interval=None, always_update=False
        )
        self.client = client
        self.context_users = ContextUsers()
        self.policy: Policy | None = None
        self._models: dict[str, bool] = {}
        self.prompt_tokens: dict[str, int] = {}
        """How long the prompt of each agent is, by subentry, where the engine has counted it."""
        self._structure = structure_of(entry)
        self._registrar = ResidentRegistrar(hass, entry, client)
        self.issues = IssueKeeper(hass, self)
        self.jobs = JobWatcher(hass, entry, client)
        self._moments = MomentTeller(hass, self)
        self._pace = Pace(hass, self._async_publish)
        self._unwritten: deque[int] = deque()
        self._next_slice: asyncio.Handle | None = None
        self._latest: FairnessSnapshot | None = None

    @property
    def max_context_tokens(self) -> int:
        """Return how many tokens, prompt and answer together, the model takes at present.

        The engine's policy or a restart of its backend may change that while the connection lasts.
        """
        told = self.data.engine.max_context_tokens
        return self.engine.max_context_tokens if told is None else told

    def can_see(self, model: str | None) -> bool:
        """Return whether a model (None: the engine's first) can be shown pictures."""
        return self.engine.can_see if model is None else self._models.get(model, False)

    @override
    async def _async_update_data(self) -> FairnessSnapshot:
        """Connect for the first time; afterwards data is pushed."""
        try:
            await self._async_connect()
            return await self.client.fairness()
        except InvalidToken as err:
            raise as_home_assistant_error(err, ConfigEntryAuthFailed) from err
        except EngineError as err:
            raise as_home_assistant_error(err, UpdateFailed) from err

    @callback
    def async_start(self) -> None:
        """Begin to follow the engine and to remember who calls actions; ends when the entry is unloaded."""
        entry = self.config_entry
        entry.async_on_unload(self.hass.bus.async_listen(EVENT_CALL_SERVICE, self._async_note_user))
        entry.async_on_unload(self._pace.async_drop)
        entry.async_on_unload(self._async_stop_writing)
        entry.async_create_background_task(
            self.hass, self._async_follow(), f"{DOMAIN}_follow_{entry.entry_id}"
        )
        self.jobs.async_start()
        self._moments.async_start()
        self.issues.async_start()

    async def async_take_over(self) -> bool:
        """Return whether a change of the entry asks no more than to tell the engine, and tell it then."""
        before, self._structure = self._structure, structure_of(self.config_entry)
        if before != self._structure or not self.last_update_success:
            return False
        try:
            await self.async_register_residents()
        except EngineError as err:
            LOGGER.warning("%s could not be told its residents: %s", self.name, err)
        return True

    async def async_register_residents(self) -> None:
        """Tell the engine the household's residents; raise EngineError where it refuses."""
        await self._registrar.async_sync()

    async def async_chat(self, request: ChatRequest) -> AsyncGenerator[ChatEvent]:
        """Yield what happens to a request; an engine that forgot the residents is told and asked once more.

        Raises EngineError; a refused token also starts the dialog for a new one.
        """
        try:
            try:
                async with aclosing(self.client.chat(request)) as events:
                    async for event in events:
                        yield event
                return
            except UnknownResident:
                # Refused before anything was generated, so asking again cannot repeat anything.
                await self.async_register_residents()
            async with aclosing(self.client.chat(request)) as events:
                async for event in events:
                    yield event
        except InvalidToken:
            self.config_entry.async_start_reauth(self.hass)
            raise

    async def async_submit_job(self, order: JobOrder) -> Job:
        """Order a durable job; an engine that forgot the residents is told and asked once more."""
        try:
            job = await self.client.submit_job(order)
        except UnknownResident:
            await self.async_register_residents()
            job = await self.client.submit_job(order)
        self.jobs.async_expect(job)
        return job

    async def async_change_policy(
        self, changes: JsonObject, *, note: str | None = None, from_defaults: bool = False
    ) -> Policy:
        """Change the engine's policy and show it; raise EngineError where the engine refuses."""
        return self._async_take_policy(
            await self.client.change_policy(changes, note=note, from_defaults=from_defaults)
        )

    async def async_roll_back_policy(self, revision: int) -> Policy:
        """Have an earlier policy hold again and show it; raise EngineError where the engine refuses."""
        return self._async_take_policy(await self.client.roll_back_policy(revision))

    @callback
    def _async_take_policy(self, policy: Policy) -> Policy:
        self.policy = policy
        self.async_update_listeners()
        return policy

    async def _async_read_policy(self) -> Policy | None:
        """Return what holds, None where the engine's policy cannot be read or changed."""
        if not self.engine.may(POLICY_SCOPE):
            return None
        try:
            return await self.client.policy()
        except NotFound, MethodNotAllowed, NotAllowed:
            return None

    async def _async_connect(self) -> None:
        """Ask who answers, check that it is this entry's engine, and tell it the residents."""
        self.engine = await self.client.engine()
        self.issues.async_check_version(self.engine.schema_version)
        check_schema_version(self.engine.schema_version)
        self._check_identity(self.engine.engine_id)
        self.engine_device_id = self._async_register_device()
        await self.async_register_residents()
        self.policy = await self._async_read_policy()
        self._models = await self.client.models()
        self.issues.async_check_models(self._models)

    def _check_identity(self, engine_id: str) -> None:
        expected = self.config_entry.unique_id
        if expected is not None and engine_id != expected:
            raise ProtocolError(
                f"another engine answers at {self.client.url}: expected {expected}, found {engine_id}. "
                "Reconfigure the integration with the right address"
            )

    @callback
    def _async_register_device(self) -> str:
        """Return the registry id of the engine's device, brought up to date with those below it."""
        registry = dr.async_get(self.hass)
        device = registry.async_get_or_create(
            config_entry_id=self.config_entry.entry_id,
            identifiers={(DOMAIN, self.config_entry.entry_id)},
            name=self.config_entry.title,
            manufacturer=MANUFACTURER,
            model=self.engine.model,
            sw_version=self.engine.version,
            entry_type=dr.DeviceEntryType.SERVICE,
        )
        for below in dr.async_entries_for_config_entry(registry, self.config_entry.entry_id):
            registry.async_update_device(below.id, model=self.engine.model)
        return device.id

    async def _async_follow(self) -> None:
        """Follow the stream for ever; the first connection was made by the first refresh."""
        delay_s = RECONNECT_FIRST_S
        is_connected = True
        while True:
            try:
                if not is_connected:
                    await self._async_connect()
                async with aclosing(self.client.fairness_stream()) as stream:
                    async for snapshot in stream:
                        self._check_identity(snapshot.engine_id)
                        delay_s = RECONNECT_FIRST_S
                        self._async_receive(snapshot)
                raise CannotConnect("the engine ended the stream")
            except InvalidToken as err:
                self._async_lose(err)
                self.config_entry.async_start_reauth(self.hass)
                return  # a new token reloads the entry
            except EngineError as err:
                self._async_lose(err)
            is_connected = False
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, RECONNECT_MOST_S)

    @callback
    def _async_receive(self, snapshot: FairnessSnapshot) -> None:
        """Publish a snapshot now, or when the last one is old enough; only the latest is kept."""
        self._latest = snapshot
        self._pace.async_ask(at_once=not self.last_update_success)

    @callback
    def _async_publish(self) -> None:
        if not self.last_update_success:
            LOGGER.info("%s is back", self.name)
        if self._latest is not None:
            self.async_set_updated_data(self._latest)

    @callback
    @override
    def async_update_listeners(self) -> None:
        """Write the entities; many of them in slices, so that a large household holds nothing up."""
        self._unwritten = deque(self._listeners)
        if self._next_slice is None:
            self._async_write_slice()

    @callback
    def _async_write_slice(self) -> None:
        self._next_slice = None
        for _ in range(min(LISTENERS_AT_ONCE, len(self._unwritten))):
            if listener := self._listeners.get(self._unwritten.popleft()):
                listener[0]()
        if self._unwritten:
            self._next_slice = self.hass.loop.call_soon(self._async_write_slice)

    @callback
    def _async_stop_writing(self) -> None:
        if self._next_slice is not None:
            self._next_slice.cancel()

    @callback
    def _async_lose(self, err: EngineError) -> None:
        """Make the entities unavailable; log the first time only."""
        self._pace.async_drop()
        self.last_exception = err
        if not self.last_update_success:
            LOGGER.debug("%s is still not available: %s", self.name, err)
            return
        LOGGER.warning("%s is not available: %s", self.name, err)
        self.last_update_success = False
        self.async_update_listeners()

    @callback
    def _async_note_user(self, event: Event) -> None:
        """Remember who called an action, and who stands behind an automation that calls one."""
        context = event.context
        user_id = context.user_id or self.context_users.user_of(context.parent_id)
        if user_id is not None:
            self.context_users.remember(context.id, user_id)
