"""Which of several transfers over one link sends next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeVar

STEEPEST = 16
"""Priorities beyond this count as this."""


@dataclasses.dataclass(slots=True, eq=False)
class Transfer:
    """As the scheduler sees it."""

    size: int
    """Bytes in all, made or not."""
    since: float
    """When it was asked for; of two that are asked for at once, either may be the older."""
    priority: int = 0
    left: int = dataclasses.field(init=False)
    """Bytes not sent yet."""
    weight: float = dataclasses.field(init=False)
    owed: float = 0.0
    """Bytes, by its age."""

    def __post_init__(self) -> None:
        self.left = self.size
        self.weight = 2.0 ** max(-STEEPEST, min(STEEPEST, self.priority))


T = TypeVar("T", bound=Transfer)


class Scheduler:
    """Shortest remaining transfer first, and a share of the link for the oldest.

    Among the transfers that have something to send, the next to send is

    1. the oldest, where it is owed something (ageing, below), else
    2. of those of at most `small` bytes in all, or else of all others,
       the one with the smallest `left / 2 ** priority`; of equals the oldest.

    Ageing: each n bytes that are sent while a transfer is the oldest owe it `ageing * n`, less what it sends itself,
    and it is served when it is owed more than nothing. So the oldest always moves at `ageing` of the link's rate at
    least, whatever else there is; a transfer of R bytes that comes when all older ones have O bytes left is through
    when (R + O) / ageing bytes more have been sent over the link, and a short one waits for it no more than the share
    `ageing` of the time. With `order="fifo"` the oldest always comes first.

    Not thread-safe; it knows no time and no sockets.
    """

    def __init__(self, order: Literal["shortest", "fifo"] = "shortest", *, small: int = 0, ageing: float = 0.1) -> None:
        self._fifo, self._small, self._ageing = order == "fifo", small, ageing
        self._oldest: Transfer | None = None

    def pick(self, waiting: Sequence[T]) -> T | None:
        """Of the transfers that have something to send, the one to send next."""
        if len(waiting) == 1:
            self._oldest = waiting[0]
            return waiting[0]
        best: T | None = None
        oldest: T | None = None
        best_key = (False, 0.0, 0.0)
        for each in waiting:
            key = (each.size > self._small, each.left / each.weight, each.since)
            if best is None or key < best_key:
                best, best_key = each, key
            if oldest is None or each.since < oldest.since:
                oldest = each
        self._oldest = oldest
        return oldest if oldest is not None and (self._fifo or oldest.owed > 0.0) else best

    def sent(self, transfer: Transfer, nbytes: int) -> None:
        """`transfer`, which was picked last, sends so many bytes."""
        transfer.left -= nbytes
        if self._oldest is not None:
            self._oldest.owed += self._ageing * nbytes
            if transfer is self._oldest:
                # What it got on its merits is not held against it for longer than one turn.
                transfer.owed = max(transfer.owed - nbytes, -float(nbytes))
