"""A request on the route P-RLD-MD: the relay decodes while the KV crosses to main, then main takes over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdd_runtime.planner.simulate.decode import DecodeWorker, Sequence
from pdd_runtime.planner.simulate.fetch import Fetch
from pdd_runtime.planner.simulate.flight import Flight
from pdd_runtime.planner.simulate.pool import Worker
from pdd_runtime.planner.simulate.prefill import PrefillWorker
from pdd_runtime.plugins.handoff import HandoffView
from pdd_runtime.plugins.routing import Route

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

    def ended(self, longest: float) -> None:
        self._flight.relay_ended(longest)


class Relayed(Flight):
    """The strategy is asked where the driver would be told of a change that can matter to it: main is ready, an extend
    has ended, the relay has stopped, and, while the strategy waits with nothing else under way, at each of the relay's
    tokens. Before main is ready no strategy may do anything."""

    __slots__ = (
        "bound", "committed", "extending", "last_outstanding", "main_known", "mains", "relay", "relay_fetch",
        "relay_need", "relay_there", "relaying", "rounds", "sealed", "stopped",
    )  # fmt: skip

    def __init__(self, world: World, visit: Visit, route: Route, lost: Flight | None = None) -> None:
        super().__init__(world, visit, route, lost)
        self.relaying: Sequence | None = None
        self.stopped = self.relay_there = self.extending = self.committed = False
        self.sealed: int | None = None
        self.main_known = self.rounds = 0
        self.last_outstanding: int | None = None
        self.bound = self.max_tokens
        self.mains = 0
        """Mains that were lost."""

    def start_relayed(self, prefill: PrefillWorker, relay: DecodeWorker, main: DecodeWorker) -> None:
        """Its session begins."""
        self.prefill = prefill
        self._take_relay(prefill, relay)
        self.start(prefill, main)

    def _take_relay(self, prefill: PrefillWorker, relay: DecodeWorker) -> None:
        self.relay = relay
        world = self.world
        hit = relay.hit
        need = self.prompt - hit + int(min(self.max_tokens, world.admission.answer))
        relay.take(need)
        self.relay_need = need
        way = world.ways.between(prefill.pool.name, relay.pool.name)
        self.relay_fetch = Fetch(world.events, prefill, relay, way, self.prompt, hit, self.relay_arrived)

    # What prefill says

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

    def go_on(self) -> None:
        """As far as it can: the first token is known, or main is ready."""
        if not self.known:
            return
        if self.max_tokens == 1:
            self.stopped = True
        if self.relay_there and self.relaying is None:
            self._relay_begins()
        if self.ready:
            self.ask()

    def _main_has_kv(self) -> None:
        self._reach(self.main, self.main_ready)

    # The relay

    def relay_arrived(self) -> None:
        """Its KV is at the relay."""
        if not self.over:
            self.cache_prompt(self.relay.cache)
            self._reach(self.relay, self._relay_ready)

    def _relay_ready(self) -> None:
        self.relay_there = True
        if self.known and self.relaying is None:
            self._relay_begins()

    def _relay_begins(self) -> None:
        if self.stopped or self.over:
            return
        limit = self.world.strategy.relay_bound(self._load)
        if limit is not None:
            self.bound = min(self.max_tokens, 1 + limit)
        if self.sealed is not None:
            self.bound = min(self.bound, self.sealed)
        if self.bound > self.known:
            self._reach_engine(self.relay, self._relay_decodes)
        else:
            self._relay_stops()

    def _relay_decodes(self) -> None:
        if not self.stopped and not self.over:
            known = self.known
            relaying = self.relaying = Sequence(Relaying(self), self.prompt + known, known, self.bound - known)
            self.relay.enqueue(relaying)

    def relay_begun(self, first: float, step: float) -> None:
        at = first + self.relay.pool.delay
        self._user_gets(at, step, self.bound - self.known)
        if self.ready and self.sealed is None:
            self.world.events.push(at, self.ask)

    def relay_ended(self, longest: float) -> None:
        """It has made its last token."""
        assert self.relaying is not None
        if self.relaying.tokens > 1:
            self._waited(longest)
        self._reach(self.relay, self._relay_stops)

    def _relay_stops(self) -> None:
        if self.stopped or self.over:
            return
        relaying = self.relaying
        if relaying is not None:
            self._count_relay(relaying.tokens)
            self.last_at = self.world.events.now
        self.stopped = True
        if self.known >= self.max_tokens:
            self.finish()
            if self.ready and not self.extending:
                self._settle()
        elif self.sealed is not None:
            self._drained()
        elif self.ready:
            self.ask()

    def _count_relay(self, made: int) -> None:
        """It has made so many since it began."""
        assert self.relaying is not None
        known = self.relaying.context - self.prompt + made
        self.relay_tokens += known - self.known
        self.known = known

    # The handoff

    def ask(self) -> None:
        """What the strategy makes of things as they are."""
        if self.sealed is not None or self.over or not self.ready:
            return
        if not self.stopped and self.relaying is not None:
            self._count_relay(self.relay.made(self.relaying))
        if self.known >= self.max_tokens:
            if self.stopped and not self.extending:
                self._settle()
            return
        step = self.world.strategy.step(
            HandoffView(
                known=self.known,
                relay_tokens=self.relay_tokens,
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
                self._reach_engine(self.main, self._extend, tokens, self.known - self.main_known, self.mains)
        elif step.kind == "seal":
            self._seal(max(step.tokens, self.known))
        elif step.kind == "wait" and not self.extending and not self.stopped:
            self._ask_at_next_token()

    def _ask_at_next_token(self) -> None:
        relaying = self.relaying
        if relaying is not None and relaying.joined:
            at = self.relay.when(relaying, self.known + 1 - (relaying.context - self.prompt))
            self.world.events.push(max(self.world.events.now, at) + self.relay.pool.delay, self.ask)

    def _extend(self, tokens: int, outstanding: int, mains: int) -> None:
        if mains == self.mains and not self.over:
            done = self.main.extend(self.prompt + tokens, self.missing + tokens - self.main_known)
            self.world.events.push(done + self.main.pool.delay, self._extended, tokens, outstanding, mains)

    def _extended(self, tokens: int, outstanding: int, mains: int) -> None:
        if mains == self.mains:
            self.main_known, self.last_outstanding, self.missing = tokens, outstanding, 0
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
        relaying = self.relaying
        if self.stopped:
            self._drained()
        elif relaying is None:
            self._relay_stops()
        elif tokens > self.known:
            self.relay.stop_at(relaying, tokens - (relaying.context - self.prompt))
        else:
            self.relay.remove(relaying)
            relaying.tokens = tokens - (relaying.context - self.prompt)
            self._relay_stops()

    def _drained(self) -> None:
        """All that main must know is known."""
        world = self.world
        if world.strategy.carries == "kv" and self.known > 1:
            source, target = self.relay.pool.name, self.main.pool.name
            # The last token's own KV is not there: nobody has read that token yet.
            pool = self.relay.pool
            size = pool.kv_constant + pool.kv_token * (self.known - 1)
            way, delay = world.ways.between(source, target)
            transfer = way.open(size, self._relay_kv_arrived)
            world.events.push(world.events.now + self.main.pool.delay + delay, transfer.add, size)
        else:
            self._reach_engine(self.main, self._goes_on_behind, self.mains)

    def _relay_kv_arrived(self) -> None:
        self.main_known = self.known - 1
        self._reach(self.main, self._reach_engine, self.main, self._goes_on_behind, self.mains)

    def _goes_on_behind(self, mains: int) -> None:
        """Main decodes behind what the relay has made."""
        if self.over or mains != self.mains:
            return
        known = self.known
        self.way_time = self.world.events.now - self.asked_at
        extend = self.missing + known - self.main_known
        self.decoding = self.main.decode(self, self.prompt + known, extend, self.max_tokens - known)

    def begun(self, first: float, step: float) -> None:
        super().begun(first, step)
        self.gap = self.main_at - self.last_at
        self.world.events.push(self.main_at, self._commits, self.mains)

    def answered(self) -> None:
        if self.committed:
            super().answered()

    def _commits(self, mains: int) -> None:
        """Main has taken over: the relay is let go."""
        if mains == self.mains and not self.over:
            self.committed = True
            if self.relay_need >= 0:
                self._leave_relay()
            self.world.admission.less()

    def _leave_relay(self) -> None:
        self.relay.leave(self.relay_need)
        self.relay_need = -1

    def _settle(self) -> None:
        """The answer ended without main; main gets its KV all the same."""
        if self.relay_need >= 0:
            self._leave_relay()
        self._reach_engine(self.main, self._settles)

    def _settles(self) -> None:
        if not self.over:
            done = self.main.extend(self.prompt + self.known, max(1, self.missing + self.known - self.main_known))
            self.world.events.push(done + self.main.pool.delay, self.settled)

    @property
    def _load(self) -> float:
        return self.relay.requests / self.relay.pool.batch_limit

    # When a worker is lost

    def lost(self, worker: Worker) -> None:
        if self.committed or (worker is self.prefill and not self.known):
            super().lost(worker)
        elif worker is self.relay:
            if self.relay_need >= 0:
                self._lose_relay()
        elif worker is self.main:
            if self.main_need < 0:
                return  # Another is looked for already.
            if self.known < self.max_tokens:
                self._lose_main()
            else:  # The user has all; main would only have got the KV.
                self.give_up(worker)
                self.world.ended(self)
        elif worker is self.prefill and self.promised:
            self._fetch_again()

    def let_go(self) -> None:
        super().let_go()
        self.relay_fetch.let_go()
        self.relaying = None

    def give_up(self, worker: Worker) -> None:
        super().give_up(worker)
        if self.relay_need >= 0:
            self.relay_fetch.cancel()
            if self.relay is not worker:
                if self.relaying is not None:
                    self.relay.remove(self.relaying)
                self._leave_relay()

    def _lose_main(self) -> None:
        """The relay goes on, and another main begins anew."""
        self.main_fetch.cancel()
        self._keep_promise()
        self.mains += 1
        self.main_need = -1
        self.decoding = None
        self.ready = self.extending = self.pinned = False
        self.main_known = self.rounds = self.missing = 0
        self.last_outstanding = None
        relaying = self.relaying
        if self.sealed is not None:
            self.sealed = None
            if relaying is not None and not self.stopped:
                self.relay.stop_at(relaying, self.bound - (relaying.context - self.prompt))
            elif self.known < self.bound:
                self.stopped, self.relaying = False, None
                self._relay_begins()
        self._another_main(self.mains)

    def _another_main(self, mains: int) -> None:
        if self.over or mains != self.mains:
            return
        world = self.world
        main = world.spare("main", self.prefill.pool.name)
        if main is None:
            world.events.push(world.events.now + world.LOOK, self._another_main, mains)
            return
        assert isinstance(main, DecodeWorker)
        main.hit = min(self.prompt, main.cache.hit(self.spans))
        self.main = main
        self._take_main(main)
        if self.prefill.alive and (self.known or self.prefill_need >= 0):
            self._fetch_to_main(self.prefill, main)
            if self.known:
                self.main_fetch.whole(self.prompt)
        else:
            self._fetch_again()

    def _lose_relay(self) -> None:
        """Main takes over at once where it is ready; else another relay goes on until it is."""
        self.relay_need = -1
        self.relay_fetch.cancel()
        if not self.stopped and self.relaying is not None:
            before = self.known
            self._count_relay(self.relay.made(self.relaying))
            if self.known > before:
                self.last_at = self.world.events.now
        self.relaying, self.relay_there = None, False
        if self.stopped:
            return
        world = self.world
        if self.sealed is None and not self.ready:
            relay = world.spare("relay", self.prefill.pool.name)
            if relay is not None and self.prefill.alive:
                assert isinstance(relay, DecodeWorker)
                relay.hit = min(self.prompt, relay.cache.hit(self.spans))
                self._take_relay(self.prefill, relay)
                if self.known:
                    self.relay_fetch.whole(self.prompt)
                return
        if self.known:
            self._relay_stops()
        else:
            self.stopped = True
