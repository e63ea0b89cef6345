"""Times that were measured at some points, asked anywhere."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdd_runtime.planner.latency.table import Grid

_LEAST: Final = 1e-6
"""Seconds: no pass is quicker."""


class Surface:
    """A grid made whole, monotone in both directions, and asked anywhere."""

    def __init__(self, grid: Grid) -> None:
        # One more row and column: what lies beyond them goes on as between them and the last measured ones.
        columns = _transposed(_monotone(_filled(grid)))
        rows = _transposed(_longer(columns))
        self._cells = _longer(rows)
        self._rows, self._columns = _longer_axis(grid.tokens), _longer_axis(grid.context)

    def __call__(self, tokens: int, context: float) -> float:
        rows, columns = self._rows, self._columns
        row = bisect_right(rows, tokens, 1, len(rows) - 1) - 1
        column = bisect_right(columns, context, 1, len(columns) - 1) - 1
        low, high = self._cells[row], self._cells[row + 1]
        share = max(0.0, (context - columns[column]) / (columns[column + 1] - columns[column]))
        below = low[column] + (low[column + 1] - low[column]) * share
        above = high[column] + (high[column + 1] - high[column]) * share
        share = max(0.0, (tokens - rows[row]) / (rows[row + 1] - rows[row]))
        return max(_LEAST, below + (above - below) * share)


def _longer_axis(axis: Sequence[int]) -> list[int]:
    last = axis[-1]
    return [*axis, last + (last - axis[-2] if len(axis) > 1 else last + 1)]


def _longer(lines: list[list[float]]) -> list[list[float]]:
    """With one more line, which is above the last by what that is above the line before it, but nowhere by less than
    further left: else more would take less somewhere beyond."""
    if len(lines) == 1:
        return [lines[0], lines[0]]
    more = _running_maximum([high - low for low, high in zip(lines[-2], lines[-1], strict=True)])
    return [*lines, [value + added for value, added in zip(lines[-1], more, strict=True)]]


def _transposed(lines: list[list[float]]) -> list[list[float]]:
    return [list(line) for line in zip(*lines, strict=True)]


def _filled(grid: Grid) -> list[list[float]]:
    """What was not measured, from the nearest row above that was: context costs each of the tokens, so what it adds
    grows with the row's number."""
    cells: list[list[float]] = []
    for number, (tokens, row) in enumerate(zip(grid.tokens, grid.seconds, strict=True)):
        whole: list[float] = []
        for column, value in enumerate(row):
            if value is not None:
                whole.append(value)
                continue
            above = cells[number - 1]
            added = (above[column] - above[column - 1]) * tokens / grid.tokens[number - 1]
            whole.append(whole[-1] + added)
        cells.append(whole)
    return cells


def _monotone(cells: list[list[float]]) -> list[list[float]]:
    """The nearest table, in the sense of least squares along each row and then each column, in which nothing falls
    (pool adjacent violators: Ayer et al. 1955)."""
    for _ in range(len(cells) + len(cells[0])):
        before = cells
        cells = [_rising(row) for row in cells]
        cells = _transposed([_rising(column) for column in _transposed(cells)])
        if cells == before:
            break
    # Averages of averages can fall short by rounding.
    for row, above in zip(cells[1:], cells, strict=False):
        row[:] = map(max, row, above)
    return [_running_maximum(row) for row in cells]


def _rising(values: Sequence[float]) -> list[float]:
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            last, number = pools.pop()
            mean, count = (mean * count + last * number) / (count + number), count + number
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _running_maximum(values: Sequence[float]) -> list[float]:
    highest, rising = 0.0, []
    for value in values:
        highest = max(highest, value)
        rising.append(highest)
    return rising
