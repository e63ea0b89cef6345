"""A request on the route P-RLD-MD: the relay decodes while the KV crosses to main, then main takes over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdd_runtime.planner.simulate.decode import DecodeWorker, Sequence
from pdd_runtime.planner.simulate.fetch import Fetch
from pdd_runtime.planner.simulate.flight import Flight
from pdd_runtime.planner.simulate.prefill import PrefillWorker
from pdd_runtime.plugins.handoff import HandoffView

if TYPE_CHECKING:
    from pdd_runtime.planner.simulate.visit import Visit
    from pdd_runtime.planner.simulate.world import World


class Relaying:
    """The relay's side, as its worker sees it."""

    __slots__ = ("_flight",)

    def __init__(self, flight: Relayed) -> None:
        self._flight = flight

    def begun(self, first: float, step: float) -> None:
        self._flight.relay_begun(first, step)

    def ended(self) -> None:
        self._flight.relay_ended()


class Relayed(Flight):
    """The strategy is asked where the driver would be told of a change that can matter to it: main is ready, an extend
    has ended, the relay has stopped, and, while the strategy waits with nothing else under way, at each of the relay's
    tokens. Before main is ready no strategy may do anything."""

    kind = "P-RLD-MD"

    __slots__ = (
        "bound", "extending", "last_outstanding", "main_known", "relay", "relay_fetch", "relay_first", "relay_there",
        "relaying", "rounds", "sealed", "step", "stopped",
    )  # fmt: skip

    def __init__(self, world: World, visit: Visit) -> None:
        super().__init__(world, visit)
        self.relaying: Sequence | None = None
        self.stopped = self.relay_there = self.extending = False
        self.sealed: int | None = None
        self.main_known = self.rounds = 0
        self.last_outstanding: int | None = None
        self.bound = self.max_tokens
        self.step = 0.0

    def start_relayed(self, prefill: PrefillWorker, relay: DecodeWorker, main: DecodeWorker) -> None:
        self.relay = relay
        relay.requests += 1
        world = self.world
        way = world.ways.between(prefill.pool.name, relay.pool.name)
        hit = min(relay.cache.hit(self.spans), self.prompt)
        self.relay_fetch = Fetch(world.events, prefill, relay, way, self.prompt, hit, self.relay_arrived)
        self.start(prefill, main)

    def begins(self, cached: int) -> None:
        if self.world.overlap:
            self.relay_fetch.upto(cached)
        super().begins(cached)

    def computed(self, position: int) -> None:
        if self.world.overlap:
            self.relay_fetch.upto(position)
        super().computed(position)

    def prefilled(self) -> None:
        self.relay_fetch.whole(self.prompt)
        super().prefilled()

    def relay_arrived(self) -> None:
        """Its KV is at the relay."""
        self.relay.cache.take(self.spans)
        self._reach(self.relay, self._relay_ready)

    def _relay_ready(self) -> None:
        self.relay_there = True
        if self.known:
            self._relay_begins()

    def first_token_known(self) -> None:
        if self.max_tokens == 1:
            self.stopped = True
            self.finish()
        if self.relay_there:
            self._relay_begins()
        if self.ready:
            self.ask()

    def _relay_begins(self) -> None:
        if self.stopped:
            return
        limit = self.world.strategy.relay_bound(self._load)
        if limit is not None:
            self.bound = min(self.max_tokens, 1 + limit)
        if self.sealed is not None:
            self.bound = min(self.bound, self.sealed)
        if self.bound > 1:
            self._reach(self.relay, self._relay_decodes)
        else:
            self._relay_stops()

    def _relay_decodes(self) -> None:
        if not self.stopped:
            self.relaying = self.relay.decode(Relaying(self), self.prompt + 1, 1, self.bound - 1)

    # What the relay says

    def relay_begun(self, first: float, step: float) -> None:
        at = first + self.relay.pool.delay
        self.second_at = at
        gap = at - self.first_at
        self.longest = gap if gap > step else step
        self.step = step
        self.relay_first = at
        if self.bound >= 10:
            self.tenth_at = at + 8 * step
        if self.ready and self.sealed is None:
            self.world.events.push(at, self.ask)

    def relay_ended(self) -> None:
        """It has made its last token."""
        self._reach(self.relay, self._relay_stops)

    def _relay_stops(self) -> None:
        self.stopped = True
        if self.relaying is not None:
            self.relay_tokens = self.relaying.tokens
            self.known = 1 + self.relay_tokens
            self.last_at = self.world.events.now
        if self.known >= self.max_tokens:
            self.finish()
            if self.ready and not self.extending:
                self._settle()
        elif self.sealed is not None:
            self._drained()
        elif self.ready:
            self.ask()

    # What main says

    def main_ready(self) -> None:
        self.ready = True
        if self.known:
            self.ask()

    def ask(self) -> None:
        """What the strategy makes of things as they are."""
        if self.sealed is not None:
            return
        self._count()
        if self.known >= self.max_tokens:
            if self.stopped and not self.extending:
                self._settle()
            return
        step = self.world.strategy.step(
            HandoffView(
                known=self.known,
                relay_tokens=self.known - 1,
                main_ready=True,
                main_known=self.main_known,
                extending=self.extending,
                rounds=self.rounds,
                last_outstanding=self.last_outstanding,
                relay_stopped=self.stopped,
                relay_load=self._load,
            )
        )
        if step.kind == "extend":
            tokens = min(step.tokens, self.known)
            if not self.extending and tokens > self.main_known:
                self.extending = True
                self._reach(self.main, self._extend, tokens, self.known - self.main_known)
        elif step.kind == "seal":
            self._seal(max(step.tokens, self.known))
        elif step.kind == "wait" and not self.extending and not self.stopped and self._makes_tokens:
            at = self._next_token + self.relay.pool.delay
            events = self.world.events
            events.push(max(at, events.now + self.step * 0.01), self.ask)

    def _extend(self, tokens: int, outstanding: int) -> None:
        done = self.main.extend(self.prompt + tokens, tokens - self.main_known)
        self.world.events.push(done + self.main.pool.delay, self._extended, tokens, outstanding)

    def _extended(self, tokens: int, outstanding: int) -> None:
        self.main_known, self.last_outstanding = tokens, outstanding
        self.rounds += 1
        self.extending = False
        self.ask()

    def _seal(self, tokens: int) -> None:
        if self.stopped:
            tokens = self.known
        tokens = min(tokens, self.bound)
        if not 0 < tokens < self.max_tokens:
            return
        self.sealed = tokens
        if self.stopped:
            self._drained()
        elif self.relaying is not None:
            if tokens > self.known:
                self.relay.stop_at(self.relaying, tokens - 1)
            else:
                self.relay.remove(self.relaying)
                self.relaying.tokens = self.known - 1
                self._relay_stops()
        elif tokens <= self.known:
            self._relay_stops()

    def _drained(self) -> None:
        """All that main must know is known."""
        self._reach(self.main, self.main_decodes)

    def main_decodes(self) -> None:
        known = self.known
        self.main.decode(self, self.prompt + known, known - self.main_known, self.max_tokens - known)

    def begun(self, first: float, step: float) -> None:
        at = first + self.main.pool.delay
        gap = at - self.last_at
        self.gap = gap
        if self.longest is None or gap > self.longest:
            self.longest = gap
        if step > self.longest:
            self.longest = step
        if self.known < 2:
            self.second_at = at
        if self.known < 10 <= self.max_tokens:
            self.tenth_at = at + (9 - self.known) * step
        self.world.events.push(at, self._committed)

    def _committed(self) -> None:
        """Main has taken over: the relay is let go."""
        self.relay.requests -= 1
        self.world.less()

    def _settle(self) -> None:
        """The answer ended without main; main gets its KV all the same."""
        self.relay.requests -= 1
        self._reach(self.main, self._settles)

    def _settles(self) -> None:
        done = self.main.extend(self.prompt + self.known, self.known - self.main_known)
        self.world.events.push(done + self.main.pool.delay, self.settled)

    def _count(self) -> None:
        """The relay's tokens so far."""
        if self.relaying is not None and not self.stopped:
            self.known = 1 + self.relay.made(self.relaying)

    @property
    def _makes_tokens(self) -> bool:
        return self.relaying is not None and self.relaying.joined

    @property
    def _next_token(self) -> float:
        assert self.relaying is not None
        return self.relay.when(self.relaying, self.known)

    @property
    def _load(self) -> float:
        return self.relay.requests / self.relay.pool.model.batch_limit
