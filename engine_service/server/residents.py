"""The residents as the API changes them: kept on disk, told to the engine, one change at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine_service.engine.loop import Engine
from engine_service.errors import InvalidRequest, StorageUnavailable, UnknownResident
from engine_service.protocol import ResidentRequest
from engine_service.scheduling.model import GUEST, HOUSE, ResidentId
from engine_service.settings import NamedResident, named
from engine_service.state import StateFolder


def merged(configured: Iterable[NamedResident], kept: Iterable[NamedResident]) -> tuple[NamedResident, ...]:
    """Return the residents to start with: those of the settings, replaced and joined by those of the API."""
    residents = {entry.resident_id: entry for entry in configured}
    residents |= {entry.resident_id: entry for entry in kept}
    return tuple(residents.values())


class ResidentBook:
    """Who lives here. guest and house always do."""

    def __init__(
        self,
        engine: Engine,
        configured: Iterable[NamedResident],
        state: StateFolder,
        kept: Iterable[NamedResident],
    ):
        """Start with the residents the engine was built with (`merged(configured, kept)`)."""
        self._engine = engine
        self._configured = {entry.resident_id: entry for entry in configured}
        self._kept = {entry.resident_id: entry for entry in kept}
        self._all = {entry.resident_id: entry for entry in merged(configured, kept)}
        for resident_id in (GUEST, HOUSE):
            request = ResidentRequest(name=resident_id.capitalize())
            self._all.setdefault(resident_id, named(resident_id, request))
        self._state = state
        self._lock = asyncio.Lock()

    def all(self) -> list[NamedResident]:
        """Return everybody, by id."""
        return sorted(self._all.values(), key=lambda entry: entry.resident_id)

    def check(self, resident_id: ResidentId, *, param: str) -> None:
        """Raise UnknownResident naming those who are known."""
        if resident_id not in self._all:
            known = ", ".join(sorted(self._all))
            raise UnknownResident(f"there is no resident {resident_id!r}; known are {known}", param=param)

    async def put(self, entry: NamedResident) -> None:
        """Add or replace a resident; raise StorageUnavailable where that cannot be kept."""
        async with self._lock:
            one = {entry.resident_id: entry}
            await self._change(self._all | one, kept=self._kept | one)

    async def remove(self, resident_id: ResidentId) -> None:
        """Remove a resident; its requests drain.

        Raises UnknownResident, InvalidRequest for fixed ones, StorageUnavailable as `put`.
        """
        async with self._lock:
            self.check(resident_id, param="resident")
            if resident_id in (GUEST, HOUSE):
                raise InvalidRequest(f"{resident_id} always exists and cannot be removed", param="resident")
            others, kept = self._all.copy(), self._kept.copy()
            del others[resident_id]
            kept.pop(resident_id, None)
            await self._change(others, kept=kept)

    async def reconfigure(self, configured: Iterable[NamedResident]) -> None:
        """Take over the settings' residents anew; those set through the API go on winning over them."""
        async with self._lock:
            kept = self._kept.values()
            self._all = {entry.resident_id: entry for entry in merged(configured, kept)}
            await self._tell_engine()

    async def _change(
        self, residents: dict[ResidentId, NamedResident], *, kept: dict[ResidentId, NamedResident]
    ) -> None:
        """Keep what changed, then tell the engine: who is told of a failure must find all as it was."""
        try:
            await asyncio.to_thread(self._state.keep_residents, list(kept.values()))
        except OSError as error:
            raise StorageUnavailable(
                f"the residents cannot be kept ({error.strerror}), and were not changed"
            ) from None
        self._all, self._kept = residents, kept
        await self._tell_engine()

    async def _tell_engine(self) -> None:
        entries = list(self._all.values())
        names = {entry.resident_id: entry.name for entry in entries}
        await self._engine.set_residents([entry.resident for entry in entries], names)
