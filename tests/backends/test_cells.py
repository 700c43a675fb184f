"""The cell accounts against a model that names every single cell."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from engine_service.backends.llama_cpp.cells import CellAccounts

IDS = st.integers(0, 4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), IDS, st.integers(1, 6)),
        st.tuples(st.just("cut"), IDS, st.integers(0, 12)),
        st.tuples(st.just("share"), IDS, IDS, st.integers(0, 12)),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(steps=STEPS)
def test_shared_cells_count_once_and_are_free_when_nobody_holds_them(
    steps: list[tuple[str, int, int]],
) -> None:
    accounts = CellAccounts()
    cells: dict[int, list[int]] = {i: [] for i in range(5)}
    next_cell = 0
    for kind, *rest in steps:
        if kind == "append":
            accounts.append(rest[0], rest[1])
            cells[rest[0]] += range(next_cell, next_cell + rest[1])
            next_cell += rest[1]
        elif kind == "cut":
            accounts.cut(rest[0], rest[1])
            cells[rest[0]] = cells[rest[0]][: rest[1]]
        else:
            source, target, end = rest
            start = len(cells[target])
            if source == target or not start < end <= len(cells[source]):
                continue
            accounts.share(source, target, start, end)
            cells[target] += cells[source][start:end]
        assert accounts.num_used == len(set().union(*cells.values()))
        assert [accounts.length(i) for i in cells] == [len(held) for held in cells.values()]
        assert accounts.num_held([0, 2]) == len({*cells[0], *cells[2]})


def test_sharing_what_is_not_stored_is_a_bug_of_the_caller() -> None:
    accounts = CellAccounts()
    accounts.append(0, 5)
    with pytest.raises(AssertionError, match=r"cannot share \[0, 6\) of 0 with 1"):
        accounts.share(0, 1, 0, 6)
    accounts.append(1, 2)
    with pytest.raises(AssertionError, match="cannot share"):
        accounts.share(0, 1, 3, 5)
