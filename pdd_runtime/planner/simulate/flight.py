"""A request in flight, on the route P-MD, and what all routes have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pdd_runtime.planner.content import extended
from pdd_runtime.planner.simulate.decode import DecodeWorker
from pdd_runtime.planner.simulate.fetch import Fetch
from pdd_runtime.planner.simulate.pool import Worker
from pdd_runtime.planner.simulate.prefill import PrefillWorker

if TYPE_CHECKING:
    from pdd_runtime.planner.simulate.visit import Visit
    from pdd_runtime.planner.simulate.world import World


class Flight:
    """P-MD: prefill gives the first token, main the others when it has the prompt's KV."""

    kind = "P-MD"

    __slots__ = (
        "due", "first_at", "gap", "known", "last_at", "longest", "main", "main_cached", "main_fetch", "main_tokens",
        "max_tokens", "number", "prefill", "prefill_cached", "prompt", "ready", "relay_tokens", "second_at", "spans",
        "tenth_at", "turn", "visit", "world",
    )  # fmt: skip

    def __init__(self, world: World, visit: Visit) -> None:
        self.world, self.visit, self.number, self.turn, self.due = world, visit, visit.number, visit.turn, visit.due
        turn = visit.turn
        self.prompt, self.max_tokens, self.spans = turn.prompt, turn.output, turn.spans
        self.known = 0
        """Output tokens that the user has, as far as they are counted one by one."""
        self.ready = False
        """Main has the prompt's KV, and the driver knows."""
        self.relay_tokens = self.main_tokens = 0
        self.prefill_cached = 0
        self.first_at = self.last_at = 0.0
        self.second_at: float | None = None
        self.tenth_at: float | None = None
        self.gap: float | None = None
        self.longest: float | None = None

    # Where it goes

    def start(self, prefill: PrefillWorker, main: DecodeWorker) -> None:
        """Its session begins."""
        self.prefill, self.main = prefill, main
        prefill.requests += 1
        main.requests += 1
        world = self.world
        way = world.ways.between(prefill.pool.name, main.pool.name)
        hit = self.main_cached = min(main.cache.hit(self.spans), self.prompt)
        self.main_fetch = Fetch(world.events, prefill, main, way, self.prompt, hit, self.arrived)
        self._reach(prefill, prefill.add, self)

    def _reach(self, worker: Worker, call: Callable[..., object], *args: object) -> None:
        """The driver tells a worker, or the other way round."""
        delay = worker.pool.delay
        if delay:
            self.world.events.push(self.world.events.now + delay, call, *args)
        else:
            call(*args)

    # What prefill says

    def begins(self, cached: int) -> None:
        self.prefill_cached = cached
        if self.world.overlap:
            self.main_fetch.upto(cached)

    def computed(self, position: int) -> None:
        if self.world.overlap:
            self.main_fetch.upto(position)

    def prefilled(self) -> None:
        self.main_fetch.whole(self.prompt)
        pool = self.prefill.pool
        delay = pool.delay + pool.model.overhead
        if delay:
            self.world.events.push(self.world.events.now + delay, self.first_token)
        else:
            self.first_token()

    def first_token(self) -> None:
        """It is there."""
        self.first_at = self.last_at = self.world.events.now
        self.known = 1
        self.prefill.requests -= 1
        self.world.less()
        self.first_token_known()

    def first_token_known(self) -> None:
        if self.max_tokens == 1:
            self.finish()
        if self.ready:
            self._go_on()

    # What main says

    def arrived(self) -> None:
        """Its KV is at main."""
        self.main.cache.take(self.spans)
        self._reach(self.main, self.main_ready)

    def main_ready(self) -> None:
        self.ready = True
        if self.known:
            self._go_on()

    def _go_on(self) -> None:
        if self.max_tokens == 1:
            self.settled()
        else:
            self._reach(self.main, self.main_decodes)

    def main_decodes(self) -> None:
        self.main.decode(self, self.prompt + 1, 1, self.max_tokens - 1)

    def begun(self, first: float, step: float) -> None:
        at = first + self.main.pool.delay
        self.second_at = at
        gap = at - self.last_at
        self.longest = gap if gap > step else step
        if self.max_tokens >= 10:
            self.tenth_at = at + 8 * step

    def ended(self) -> None:
        """Main has made its last token."""
        self.main_tokens = self.max_tokens - 1 - self.relay_tokens
        self._reach(self.main, self.answered)

    def answered(self) -> None:
        self.last_at = self.world.events.now
        self.finish()
        self.settled()

    # The end

    def finish(self) -> None:
        """The user has the whole answer."""
        self.world.finished(self)

    def settled(self) -> None:
        """Main has the KV of all, and the session needs it no more."""
        self.main.cache.take(extended(self.spans, self.max_tokens))
        self.main.requests -= 1
        self.world.ended(self)
