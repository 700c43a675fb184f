"""The KV page ledger: who holds how many pages, what is pinned, what is free.

Knows requests by id and pages by number; no tokens, no time, no policy.

Rules
* free + held + pinned = total, always. Free may be negative only after the total shrank.
* A request holds pages from `reserve` to `release` or `pin`; nothing is freed twice.
"""

from __future__ import annotations

from engine_service.scheduling.model import RequestId, ResidentId


class PageLedger:
    """Counts pages; hands out none by itself."""

    def __init__(self) -> None:
        """Own nothing until the capacity is known."""
        self.total = 0
        self._held: dict[RequestId, int] = {}
        self._owner: dict[RequestId, ResidentId] = {}
        self._by_resident: dict[ResidentId, int] = {}
        self._pinned: dict[RequestId, int] = {}
        self._num_held = 0
        self._num_pinned = 0

    @property
    def free(self) -> int:
        """Pages nobody holds; negative while a shrunken total is being drained."""
        return self.total - self._num_held - self._num_pinned

    @property
    def num_held(self) -> int:
        """Pages held by running and paused requests."""
        return self._num_held

    @property
    def num_pinned(self) -> int:
        """Pages of pinned prefixes."""
        return self._num_pinned

    @property
    def pinned(self) -> tuple[tuple[RequestId, int], ...]:
        """Pinned prefixes and their pages, oldest first."""
        return tuple(self._pinned.items())

    def held_by(self, resident_id: ResidentId) -> int:
        """Return the pages a resident's requests hold."""
        return self._by_resident.get(resident_id, 0)

    def reserve(self, request_id: RequestId, resident_id: ResidentId, num_pages: int) -> None:
        """Give num_pages (>= 0) more to the request."""
        self._held[request_id] = self._held.get(request_id, 0) + num_pages
        self._owner[request_id] = resident_id
        self._by_resident[resident_id] = self.held_by(resident_id) + num_pages
        self._num_held += num_pages

    def release(self, request_id: RequestId) -> int:
        """Take everything back from the request and return how much that was (0 for unknown ids)."""
        num_pages = self._held.pop(request_id, 0)
        resident_id = self._owner.pop(request_id, None)
        if resident_id is not None:
            self._by_resident[resident_id] -= num_pages
        self._num_held -= num_pages
        return num_pages

    def pin(self, request_id: RequestId, *, num_pages: int) -> None:
        """Turn what the request holds into a pinned prefix of num_pages; the rest is free."""
        self.release(request_id)
        self._pinned[request_id] = num_pages
        self._num_pinned += num_pages

    def unpin(self, request_id: RequestId) -> int:
        """Free a pinned prefix and return its pages (0 for unknown ids)."""
        num_pages = self._pinned.pop(request_id, 0)
        self._num_pinned -= num_pages
        return num_pages

    def forget_all(self) -> None:
        """Free everything, pinned or held (the backend lost it)."""
        total = self.total
        self.__init__()  # type: ignore[misc]
        self.total = total

    def audit(self) -> tuple[int, int, dict[ResidentId, int]]:
        """Return (held, pinned, held by resident) summed afresh, for `invariants.check`."""
        by_resident: dict[ResidentId, int] = {}
        for request_id, num_pages in self._held.items():
            owner = self._owner[request_id]
            by_resident[owner] = by_resident.get(owner, 0) + num_pages
        return sum(self._held.values()), sum(self._pinned.values()), by_resident

    def pages_of(self, request_id: RequestId) -> int:
        """Return what the request holds (0 if nothing)."""
        return self._held.get(request_id, 0)
