"""Requests on routes without a handoff: one aggregated worker alone, or the relay to the end."""

from __future__ import annotations

from pdd_runtime.planner.simulate.decode import DecodeWorker
from pdd_runtime.planner.simulate.flight import Flight
from pdd_runtime.planner.simulate.pool import Worker
from pdd_runtime.planner.simulate.prefill import PrefillWorker


class Alone(Flight):
    """A: one worker does everything."""

    __slots__ = ()

    def start_alone(self, main: DecodeWorker) -> None:
        """Its session begins."""
        self.main = main
        self._take_main(main)
        self._reach_engine(main, self.main_decodes)

    def main_decodes(self) -> None:
        if not self.over:
            new = self.prompt - min(self.main.cache.hit(self.spans), self.prompt - 1)
            self.decoding = self.main.decode(self, self.prompt, new, self.max_tokens)

    def begun(self, first: float, step: float) -> None:
        self.main_at = first + self.main.pool.delay
        self._user_gets_first(self.main_at)
        self.known = 1
        if self.max_tokens > 1:
            self._user_gets(self.main_at + step, step, self.max_tokens - 1)
        self.known = 0

    def let_go(self) -> None:
        self.decoding = None

    def lost(self, worker: Worker) -> None:
        self._count_main()
        self.give_up(worker)
        self.world.resume(self)

    def give_up(self, worker: Worker) -> None:
        self.over = True


class Finishing(Flight):
    """P-RLD: the relay makes all tokens behind the first, and main never gets the KV. To the rest of it the relay is
    its main."""

    __slots__ = ()

    def start_finishing(self, prefill: PrefillWorker, relay: DecodeWorker, main: DecodeWorker) -> None:
        """Its session begins. `main` would have taken over."""
        self.start(prefill, relay)
        self.main_cached = main.hit

    def answered(self) -> None:
        self.relay_tokens, self.main_tokens = self.relay_tokens + self.main_tokens, 0
        super().answered()
