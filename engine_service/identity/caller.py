"""What a token allows, and what becomes of a request that is made with it.

Decides to whom a request is charged and how urgent it is: the token says, the request may only lower. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine_service.errors import NotAllowed
from engine_service.protocol import Asked, Extension
from engine_service.scheduling.model import GUEST, ResidentId, WorkloadClass
from engine_service.settings import Scope

_PARAM: Final = "fairhearth"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A request that showed a known token."""

    name: str
    scopes: frozenset[Scope]
    resident_id: ResidentId | None = None  #: None: may act for every resident
    most_urgent: WorkloadClass | None = None  #: None: any class

    def may(self, scope: Scope) -> bool:
        """Return whether the caller has the scope or all of them."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    @property
    def only_for(self) -> ResidentId | None:
        """Return the one resident whose affairs the caller may see and order, None for everybody's."""
        return None if self.may(Scope.ADMIN) else self.resident_id

    def attribute(
        self,
        asked: Asked | None,
        *,
        default: WorkloadClass = WorkloadClass.CHAT,
        resident_id: ResidentId | None = None,
    ) -> Extension:
        """Return who is charged and how urgent it is; raise NotAllowed for more than the token allows.

        default is the class of a request that names none; resident_id is whom the server takes the caller
        for where the request names nobody.
        """
        asked = asked or Asked()
        return Extension(
            resident_id=self._resident(asked.resident_id, resident_id),
            class_id=self._class(asked.class_id, default),
            program_id=asked.program_id,
        )

    def _resident(self, asked: ResidentId | None, mapped: ResidentId | None) -> ResidentId:
        bound = self.only_for
        if bound is not None and asked not in (None, bound):
            raise NotAllowed(
                f"the token {self.name!r} acts for {bound!r} only, not for {asked!r}; leave resident out",
                param=f"{_PARAM}.resident",
            )
        return bound or asked or mapped or self.resident_id or GUEST

    def _class(self, asked: WorkloadClass | None, default: WorkloadClass) -> WorkloadClass:
        ceiling = None if self.may(Scope.ADMIN) else self.most_urgent
        if ceiling is None:
            return asked or default
        if asked is None:
            return default if _is_within(default, ceiling) else ceiling
        if not _is_within(asked, ceiling):
            allowed = ", ".join(c.value for c in WorkloadClass if _is_within(c, ceiling))
            raise NotAllowed(
                f"the token {self.name!r} may ask for {allowed}, not for {asked.value}",
                param=f"{_PARAM}.workload_class",
            )
        return asked


def _is_within(class_id: WorkloadClass, ceiling: WorkloadClass) -> bool:
    return class_id.urgency >= ceiling.urgency
