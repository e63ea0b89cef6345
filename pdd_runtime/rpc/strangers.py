"""Peers that have connected and not said who they are."""

from __future__ import annotations

import resource
from typing import Generic, TypeVar

T = TypeVar("T")


def within_files(wanted: int, share: int) -> int:
    """So many connections, or fewer: no more than one in `share` of the files that this process may open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files // share))


class Strangers(Generic[T]):
    """At most `most` at once. Who comes then is let in, and who has waited longest gives way: one that means well says
    who it is at once, so that those who never do keep nobody out. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._waiting: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, one: T) -> bool:
        return one in self._waiting

    def come(self, one: T) -> T | None:
        """Somebody has connected. Returns who has to give way."""
        oldest = next(iter(self._waiting)) if len(self._waiting) >= self.most else None
        if oldest is not None:
            del self._waiting[oldest]
        self._waiting[one] = None
        return oldest

    def know(self, one: T) -> bool:
        """It has greeted, or left; False where it was none, or has given way."""
        return self._waiting.pop(one, self) is None
