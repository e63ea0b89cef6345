"""The workers of a pool, and what they have measured together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate.cache import SimCache
from pdd_runtime.plugins.routing import Role, WorkerKey

if TYPE_CHECKING:
    from pdd_runtime.planner.simulate.events import Events

WINDOW: Final = 32
"""Requests after which what was measured before counts for half, as `pdd_runtime.worker.work` has it."""


DEAD: Final = 1 << 60
"""More sessions than any worker has."""


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
        self.events, self.name, self.role, self.cluster, self.delay = events, name, role, cluster, delay
        self.latency = model.latency
        self.batch_limit, self.chunk, self.capacity, self.block = (
            model.batch_limit, model.chunk, model.capacity, model.block,
        )  # fmt: skip
        self.kv_constant, self.kv_token = model.kv_constant, model.kv_token
        self.workers: list[Worker] = []
        self.loads: list[int] = []
        """Sessions that need each of them; `DEAD` for one that is not there."""
        self.holders: dict[int, set[int]] = {}
        """By chain, the indices of workers that have something of it cached."""
        self.way = delay + model.overhead
        """Seconds until an engine begins with what the frontend asks for."""
        self.token_bytes = int(model.kv_token)
        self.token_time, self.request_time = Spent(), Spent()
        self.busy = 0.0
        """Seconds in which its workers computed, all together."""
        self.least = self.most_waiting = self.most_tokens = 0
        """What each worker takes at once, for admission: requests at least, those in its own queue, tokens."""


class Worker:
    """What all workers have. Its engine computes `running` requests, and `waiting` ones are in its own queue."""

    __slots__ = ("alive", "cache", "epoch", "events", "hit", "index", "key", "pool", "running", "tokens", "waiting")

    def __init__(self, pool: Pool, index: int) -> None:
        self.pool, self.index, self.events = pool, index, pool.events
        self.epoch = 1
        self.key = WorkerKey(pool.name, index, "1")
        self.cache = SimCache(pool.capacity, pool.block, pool.holders, index)
        self.tokens = 0
        """That those that need it will need there, as admission reckons."""
        self.alive = True
        self.hit = 0
        """Leading tokens that are cached there, of the prompt that a policy was last shown it for."""
        self.running = self.waiting = 0
        pool.workers.append(self)
        pool.loads.append(0)

    @property
    def requests(self) -> int:
        """Sessions that need it: what the driver knows of its load."""
        return self.pool.loads[self.index] if self.alive else 0

    def take(self, tokens: int) -> None:
        """A session needs it, and so many tokens there."""
        self.pool.loads[self.index] += 1
        self.tokens += tokens

    def leave(self, tokens: int) -> None:
        """It needs it no more."""
        self.pool.loads[self.index] -= 1
        self.tokens -= tokens

    @property
    def owed(self) -> float:
        """Seconds that it has computed and that are not in the pool's `busy` yet; below 0: that are, and it has not."""
        return 0.0

    def vanish(self) -> None:
        """It is dead, and gets no requests; what it was doing can still be looked at, until `fail`."""
        self.alive = False
        self.pool.loads[self.index] = DEAD

    def fail(self) -> None:
        """What comes back in its place has nothing."""
        self.epoch += 1
        self.key = WorkerKey(self.pool.name, self.index, str(self.epoch))
        self.tokens = self.running = self.waiting = 0
        self.cache.clear()

    def come_back(self) -> None:
        """It takes requests again."""
        self.alive = True
        self.pool.loads[self.index] = 0
