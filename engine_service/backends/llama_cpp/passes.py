"""How the rows of an iteration that decodes are divided over passes of the model.

Decides by what passes took when they were measured, on this machine with this model and these threads. On a
processor a pass of two rows can take longer than two passes of one: a single row is multiplied by code of
its own, and only from four rows on is a weight that was read once used for all of them. What attention costs
is the same either way, because every row passes over its own cache, so passes over an empty one tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST_MEASURED: Final = 4  #: rows; larger passes are never worth dividing
_WORTH_DIVIDING: Final = 0.9
"""Of the time of one pass. Passes in turn cost the server some more than was measured: two rows that took the
same either way were a tenth slower apart."""


class PassSizes:
    """Into which passes a number of rows is divided."""

    def __init__(self, seconds: Sequence[float] = ()) -> None:
        """Take what passes of 1, 2, ... rows were measured to take, in seconds (> 0); none: never divide."""
        self._sizes: list[tuple[int, ...]] = [()]
        best = [0.0]
        for num_rows, whole in enumerate(seconds, start=1):
            first = min(
                range(1, num_rows), key=lambda n: seconds[n - 1] + best[num_rows - n], default=num_rows
            )
            divided = seconds[first - 1] + best[num_rows - first]
            is_divided = divided < _WORTH_DIVIDING * whole
            self._sizes.append((first, *self._sizes[num_rows - first]) if is_divided else (num_rows,))
            best.append(divided if is_divided else whole)

    def of(self, num_rows: int) -> tuple[int, ...]:
        """Return the rows of each pass; together num_rows (none: no pass)."""
        return self._sizes[num_rows] if num_rows < len(self._sizes) else (num_rows,)
