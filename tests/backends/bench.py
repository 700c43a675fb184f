"""A backend of ExLlamaV2 or ExLlamaV3 under test, whose outputs are compared with the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from engine_service.backends.base import GenerationOrder
from engine_service.scheduling.model import RequestId
from tests.backends.conftest import AnyBackend, Library
from tests.backends.driver import Driver
from tests.backends.echo import PAGE, Echo


def rid(name: str) -> RequestId:
    return RequestId(name)


def prompt(length: int, *, kind: int = 0) -> tuple[int, ...]:
    return tuple((n * 7 + kind * 31) % 250 for n in range(length))


class Bench:
    """A backend, its model and a driver; compares every output with the model's own."""

    def __init__(self, library: Library, directory: Path, **options: object) -> None:
        self.backend: AnyBackend = library.make_backend(directory, **options)
        self.stops_within_a_pass: bool = library.STOPS_WITHIN_A_PASS
        self.model: Echo = self.backend._loaded.model
        self.driver = Driver(self.backend)
        self.orders: dict[str, GenerationOrder] = {}

    @property
    def table(self) -> Any:
        """The library's own page table."""
        return self.backend._pages._table

    def admit(self, name: str, ids: Iterable[int], max_tokens: int, **options: object) -> int:
        reserved = options.pop("reserved_tokens", None)
        options.setdefault("ignore_eos", True)
        self.orders[name] = self.driver.order(name, tuple(ids), max_tokens, **options)
        return self.driver.admit(self.orders[name], reserved_tokens=reserved)  # type: ignore[arg-type]

    def run(self, name: str, ids: Iterable[int], max_tokens: int, **options: object) -> int:
        cached = self.admit(name, ids, max_tokens, **options)
        self.driver.finish(name)
        return cached

    def is_exact(self, *names: str) -> bool:
        """Return whether these gave, so far, what the model gives without a cache.

        Every page that claims to begin a sequence must begin one of those that were run.
        """
        self.backend.check()
        known = [
            (*order.prompt_ids, *self.driver.outputs[order.request_id].token_ids)
            for order in self.orders.values()
        ]
        for page in self.table.all_pages:
            if page.kv_position and page.prev_hash is None:
                stored = tuple(page.sequence[0, : page.kv_position].tolist())
                assert any(ids[: len(stored)] == stored for ids in known), f"{stored} begins nothing"
        for name in names:
            ids = self.driver.outputs[rid(name)].token_ids
            if ids != self.model.continuation(self.orders[name].prompt_ids, len(ids)):
                return False
        return True

    def names_of(self, ids: tuple[int, ...]) -> list[bytes]:
        """Return the names of the pages that these tokens fill."""
        names: list[bytes] = []
        for start in range(0, len(ids) - PAGE, PAGE):
            page = torch.tensor([ids[start : start + PAGE]])
            names.append(self.backend._pages.name_of(page, names[-1] if names else None))
        return names

    def num_computed(self, kind: str) -> int:
        """Return the tokens computed by passes of that kind since the last call."""
        total = sum(rows * length for call, rows, length in self.model.calls if call == kind)
        self.model.calls.clear()
        return total


MakeBench = Callable[..., Bench]
