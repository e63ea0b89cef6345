"""The workers of a pool, and what they have measured together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate.cache import SimCache
from pdd_runtime.plugins.routing import Role, WorkerKey

if TYPE_CHECKING:
    from pdd_runtime.planner.simulate.events import Events

WINDOW = 32
"""Requests after which what was measured before counts for half, as `pdd_runtime.worker.work` has it."""


class Spent:
    """Seconds, and how much was done in them."""

    __slots__ = ("_done", "_ends", "_seconds", "each")

    def __init__(self) -> None:
        self._seconds = self._done = 0.0
        self._ends = 0
        self.each: float | None = None
        """Seconds of one; None: nothing was done."""

    def add(self, seconds: float, done: float) -> None:
        """One request more has ended."""
        self._seconds += seconds
        self._done += done
        self._ends += 1
        if self._done:
            self.each = self._seconds / self._done
        if self._ends == WINDOW:
            self._ends = 0
            self._seconds /= 2
            self._done /= 2


class Pool:
    """What its workers have in common."""

    def __init__(self, events: Events, name: str, role: Role, cluster: str, model: PoolModel, delay: float) -> None:
        """`delay`: seconds of a message between the frontend and its workers, one way."""
        self.events, self.name, self.role, self.cluster, self.model, self.delay = (
            events, name, role, cluster, model, delay,
        )  # fmt: skip
        self.workers: list[Worker] = []
        self.token_time, self.request_time = Spent(), Spent()
        self.busy = 0.0
        """Seconds in which its workers computed, all together."""
        self.most = self.most_waiting = self.most_tokens = 0
        """What each worker takes at once: requests, requests in its engine's own queue, tokens. Admission's."""


class Worker:
    """What all workers have."""

    __slots__ = ("alive", "cache", "epoch", "events", "index", "key", "pool", "requests", "tokens")

    def __init__(self, pool: Pool, index: int) -> None:
        self.pool, self.index, self.events = pool, index, pool.events
        self.epoch = 1
        self.key = WorkerKey(pool.name, index, "1")
        self.cache = SimCache(pool.model.capacity, pool.model.block)
        self.requests = 0
        """Sessions that need it: what the driver knows of its load."""
        self.tokens = 0
        """That those will need there, as admission reckons."""
        self.alive = True

    def fail(self) -> None:
        """It is dead. What comes back in its place has nothing."""
        self.epoch += 1
        self.key = WorkerKey(self.pool.name, self.index, str(self.epoch))
        self.requests = self.tokens = 0
        self.cache.clear()

    @property
    def running(self) -> int:
        """Requests that its engine computes."""
        raise NotImplementedError

    @property
    def waiting(self) -> int:
        """Requests in its engine's own queue."""
        raise NotImplementedError
