"""Who holds which cache cells: llama.cpp shares them between sequences but does not count them.

Decides nothing. A cell is one token slot; a sequence is a chain of spans of cells; a span may belong to
several sequences after `share`. Mirrors exactly the seq_rm and seq_cp calls made on the library.

Rules: a cell is free only when no chain holds its span; `num_used` is the sum of the lengths of all spans.
"""

from __future__ import annotations

from collections.abc import Iterable


class _Span:
    __slots__ = ("length", "num_owners")

    def __init__(self, length: int, num_owners: int) -> None:
        self.length = length
        self.num_owners = num_owners


class CellAccounts:
    """The chains of all sequences of one cache."""

    def __init__(self) -> None:
        """Start with nothing stored."""
        self._chains: dict[int, list[_Span]] = {}
        self._lengths: dict[int, int] = {}
        self.num_used = 0  #: cells held by at least one sequence

    def length(self, sequence_id: int) -> int:
        """Return how many tokens the sequence stores."""
        return self._lengths.get(sequence_id, 0)

    def append(self, sequence_id: int, num_cells: int) -> None:
        """The sequence stored num_cells more tokens in cells of its own."""
        chain = self._chains.setdefault(sequence_id, [])
        if chain and chain[-1].num_owners == 1:
            chain[-1].length += num_cells
        else:
            chain.append(_Span(num_cells, 1))
        self._lengths[sequence_id] = self.length(sequence_id) + num_cells
        self.num_used += num_cells

    def cut(self, sequence_id: int, length: int) -> None:
        """Forget the sequence's tokens from position length on."""
        index = self._split(sequence_id, length)
        chain = self._chains.get(sequence_id, [])
        for span in chain[index:]:
            span.num_owners -= 1
            if not span.num_owners:
                self.num_used -= span.length
        del chain[index:]
        self._lengths[sequence_id] = min(length, self.length(sequence_id))
        if not chain:
            self._chains.pop(sequence_id, None)
            self._lengths.pop(sequence_id, None)

    def share(self, source_id: int, target_id: int, start: int, end: int) -> None:
        """The target, which stores exactly start tokens, shares the source's cells [start, end)."""
        if self.length(target_id) != start or self.length(source_id) < end:
            raise AssertionError(f"cannot share [{start}, {end}) of {source_id} with {target_id}")
        first = self._split(source_id, start)
        last = self._split(source_id, end)  # after start, so `first` stays valid
        spans = self._chains[source_id][first:last]
        for span in spans:
            span.num_owners += 1
        self._chains.setdefault(target_id, []).extend(spans)
        self._lengths[target_id] = end

    def num_held(self, sequence_ids: Iterable[int]) -> int:
        """Return how many different cells these sequences hold together."""
        spans = {id(span): span.length for i in sequence_ids for span in self._chains.get(i, ())}
        return sum(spans.values())

    def _split(self, sequence_id: int, position: int) -> int:
        """Make a span begin at the position in every chain that has it; return its index in this one."""
        offset = 0
        for index, span in enumerate(self._chains.get(sequence_id, ())):
            if position <= offset:
                return index
            if position < offset + span.length:
                self._divide(span, position - offset)
                return index + 1
            offset += span.length
        return len(self._chains.get(sequence_id, ()))

    def _divide(self, span: _Span, head_length: int) -> None:
        tail = _Span(span.length - head_length, span.num_owners)
        span.length = head_length
        for chain in self._chains.values():
            for index, other in enumerate(chain):
                if other is span:
                    chain.insert(index + 1, tail)
                    break
