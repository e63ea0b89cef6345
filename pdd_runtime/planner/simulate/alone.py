"""Requests on routes without a handoff: one aggregated worker alone, or the relay to the end."""

from __future__ import annotations

from pdd_runtime.planner.content import extended
from pdd_runtime.planner.simulate.decode import DecodeWorker
from pdd_runtime.planner.simulate.fetch import Fetch
from pdd_runtime.planner.simulate.flight import Flight
from pdd_runtime.planner.simulate.prefill import PrefillWorker


class Alone(Flight):
    """A: one worker does everything."""

    kind = "A"
    __slots__ = ()

    def start_alone(self, main: DecodeWorker) -> None:
        """Its session begins."""
        self.main = main
        main.requests += 1
        self._reach(main, self.main_decodes)

    def main_decodes(self) -> None:
        hit = min(self.main.cache.hit(self.spans), self.prompt - 1)
        self.main_cached = hit
        self.main.decode(self, self.prompt, self.prompt - hit, self.max_tokens)

    def begun(self, first: float, step: float) -> None:
        self.first_at = first + self.main.pool.delay
        if self.max_tokens > 1:
            self.longest, self.second_at = step, self.first_at + step
        if self.max_tokens >= 10:
            self.tenth_at = self.first_at + 9 * step

    def ended(self) -> None:
        self.main_tokens = self.max_tokens
        self._reach(self.main, self.answered)


class Finishing(Flight):
    """P-RLD: the relay makes all tokens behind the first, and main never gets the KV."""

    kind = "P-RLD"
    __slots__ = ("_there",)

    def start_finishing(self, prefill: PrefillWorker, relay: DecodeWorker, main: DecodeWorker) -> None:
        """Its session begins. `main` would have taken over."""
        self.main_cached = min(main.cache.hit(self.spans), self.prompt)
        self.prefill, self.main = prefill, relay
        self._there = False
        prefill.requests += 1
        relay.requests += 1
        world = self.world
        way = world.ways.between(prefill.pool.name, relay.pool.name)
        hit = min(relay.cache.hit(self.spans), self.prompt)
        self.main_fetch = Fetch(world.events, prefill, relay, way, self.prompt, hit, self.arrived)
        self._reach(prefill, prefill.add, self)

    def ended(self) -> None:
        self.relay_tokens = self.max_tokens - 1
        self._reach(self.main, self.answered)

    def settled(self) -> None:
        self.main.cache.take(extended(self.spans, self.max_tokens))
        self.main.requests -= 1
        self.world.ended(self)
