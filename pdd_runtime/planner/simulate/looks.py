"""What requests find when they come: how many are with a pool, how much waits for a link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pdd_runtime.planner.simulate.pool import DEAD, Pool
from pdd_runtime.planner.simulate.ways import Ways

EVERY: Final = 16
"""One of so many requests looks."""


class Looks:
    """Means over requests that were measured. Where they come at random, they are means over time."""

    def __init__(self, pools: Mapping[str, Pool], ways: Ways) -> None:
        self._pools, self._ways = pools, ways
        self._count = self._skipped = 0
        self._requests = dict.fromkeys(pools, 0)
        self._queues = dict.fromkeys(ways.links, 0.0)

    def look(self) -> None:
        """A measured request comes."""
        self._skipped += 1
        if self._skipped < EVERY:
            return
        self._skipped = 0
        self._count += 1
        for name, pool in self._pools.items():
            self._requests[name] += sum([load for load in pool.loads if load < DEAD])
        for key, link in self._ways.links.items():
            self._queues[key] += link.queue

    def requests(self, pool: str) -> float:
        """On each of its workers."""
        return self._requests[pool] / max(1, self._count) / len(self._pools[pool].workers)

    def queue(self, link: str, source: str) -> float:
        """Bytes that waited for that direction of it."""
        return self._queues[link, source] / max(1, self._count)
