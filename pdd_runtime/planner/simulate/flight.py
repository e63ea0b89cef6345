"""A request in flight, on the route P-MD, and what all routes have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdd_runtime.planner.content import extended
from pdd_runtime.planner.session import Turn
from pdd_runtime.planner.simulate.cache import SimCache
from pdd_runtime.planner.simulate.decode import DecodeWorker, Sequence
from pdd_runtime.planner.simulate.fetch import Fetch
from pdd_runtime.planner.simulate.pool import Worker
from pdd_runtime.planner.simulate.prefill import PrefillWorker
from pdd_runtime.plugins.routing import Route

if TYPE_CHECKING:
    from pdd_runtime.planner.simulate.visit import Visit
    from pdd_runtime.planner.simulate.world import World


class Flight:
    """P-MD: prefill gives the first token, main the others when it has the prompt's KV.

    One that has lost a worker may be followed by another, which goes on behind the tokens that the user has: to it
    those are part of the prompt. What is measured goes with it."""

    __slots__ = (
        "asked_at", "before", "decoding", "due", "edge", "first_at", "gap", "known", "last_at", "longest", "main",
        "main_at", "main_cached", "main_fetch", "main_need", "main_time", "main_tokens", "max_tokens", "missing",
        "number", "over", "pinned", "prefill", "prefill_cached", "prefill_need", "prefill_tokens", "promised",
        "prompt", "ready", "relay_tokens", "route", "second_at", "single", "spans", "tenth_at", "turn", "visit",
        "way_time", "world",
    )  # fmt: skip

    def __init__(self, world: World, visit: Visit, route: Route, lost: Flight | None = None) -> None:
        """`lost`: the one that it follows."""
        turn = visit.turn
        self.world, self.visit, self.number, self.turn, self.due = world, visit, visit.number, turn, visit.due
        self.asked_at = world.events.now
        self.single = visit.single
        self.known = 0
        """Output tokens that the user has, as far as they are counted one by one."""
        self.ready = self.over = self.pinned = False
        self.missing = 0
        """Tokens of the prompt that main has to compute, since nobody could send their KV."""
        self.promised = 0.0
        self.main_time = self.way_time = 0.0
        """Seconds in main, and from its admission until main was asked."""
        self.decoding: Sequence | None = None
        self.gap: float | None
        self.longest: float | None
        self.second_at: float | None
        self.tenth_at: float | None
        if lost is None:
            self.prompt, self.max_tokens, self.spans = turn.prompt, turn.output, turn.spans
            self.before = self.relay_tokens = self.main_tokens = self.prefill_tokens = self.prefill_cached = 0
            self.first_at = self.last_at = 0.0
            self.second_at = self.tenth_at = self.gap = self.longest = None
            self.route = route
            """As it was admitted."""
            return
        left = lost.left
        self.before = turn.output - left.output
        self.prompt, self.max_tokens, self.spans = left.prompt, left.output, left.spans
        self.relay_tokens, self.main_tokens = lost.relay_tokens, lost.main_tokens
        self.prefill_tokens, self.prefill_cached = lost.prefill_tokens, lost.prefill_cached
        self.first_at, self.second_at, self.tenth_at = lost.first_at, lost.second_at, lost.tenth_at
        self.last_at, self.gap, self.longest, self.route = lost.last_at, lost.gap, lost.longest, lost.route

    @property
    def left(self) -> Turn:
        """What is left to do, as a request of its own."""
        before = self.before + self.known
        spans = extended(self.turn.spans, before)
        return replace(self.turn, fresh=self.turn.fresh + before, output=self.turn.output - before, spans=spans)

    # Where it goes

    def start(self, prefill: PrefillWorker, main: DecodeWorker) -> None:
        """Its session begins."""
        self.prefill, self.main = prefill, main
        self._take_prefill(prefill)
        self._take_main(main)
        self._fetch_to_main(prefill, main)
        self._reach_engine(prefill, self._prefill_begins)

    def _take_prefill(self, prefill: PrefillWorker) -> None:
        need = self.prompt - prefill.hit
        prefill.take(need)
        self.prefill_need = need

    def _take_main(self, main: DecodeWorker) -> None:
        world = self.world
        self.main_cached = hit = main.hit
        need = self.prompt - hit + int(min(self.max_tokens, world.admission.answer))
        main.take(need)
        self.main_need = need

    def _fetch_to_main(self, prefill: PrefillWorker, main: DecodeWorker) -> None:
        world = self.world
        source, target = prefill.pool.name, main.pool.name
        fetch = self.main_fetch = Fetch(
            world.events, prefill, main, world.ways.between(source, target), self.prompt, self.main_cached, self.arrived
        )
        self.edge = edge = world.ways.edge(source, target)
        if edge is not None and fetch.size:
            self.promised = fetch.size
            world.admission.promised[edge] += fetch.size

    def _reach(self, worker: Worker, call: Callable[..., object], *args: object) -> None:
        """The driver tells a worker, or the other way round."""
        delay = worker.pool.delay
        if delay:
            events = self.world.events
            events.push(events.now + delay, call, *args)
        else:
            call(*args)

    def _reach_engine(self, worker: Worker, call: Callable[..., object], *args: object) -> None:
        """The driver tells a worker, and its engine begins with it."""
        delay = worker.pool.way
        if delay:
            events = self.world.events
            events.push(events.now + delay, call, *args)
        else:
            call(*args)

    def _prefill_begins(self) -> None:
        if not self.over:
            self.prefill.add(self)

    # What prefill says

    def begins(self, cached: int) -> None:
        if not self.before:
            self.prefill_cached = cached
        if self.world.overlap:
            self.main_fetch.upto(cached)

    def computed(self, position: int) -> None:
        if self.world.overlap:
            self.main_fetch.upto(position)

    def cache_prompt(self, cache: SimCache) -> None:
        """Its prompt is there from now on."""
        if self.single:
            # Of a session's only request, nobody asks for what is its own.
            spans = self.spans
            if len(spans) > 1:
                cache.take(spans[:-1])
            cache.fill(spans[-1][1])
        else:
            cache.take(self.spans)

    def prefilled(self) -> None:
        self.main_fetch.whole(self.prompt)
        self._reach(self.prefill, self.first_token)

    def first_token(self) -> None:
        """It is there."""
        if self.over:
            return
        self._user_gets_first(self.world.events.now)
        self.prefill_tokens += 1
        self.known = 1
        self._leave_prefill()
        self.world.admission.less()
        if self.max_tokens == 1:
            self.finish()
        self.go_on()

    def _user_gets_first(self, at: float) -> None:
        """Of this worker's; the user has had some before where a worker was lost."""
        if self.before:
            self._user_gets(at, 0.0, 1)
        else:
            self.first_at = at
        self.last_at = at

    def _user_gets(self, at: float, step: float, tokens: int) -> None:
        """The next `tokens`, the first of them at `at`, if nothing changes."""
        self._waited(at - self.last_at)
        have = self.before + self.known
        if have == 1:
            self.second_at = at
        if have < 10 <= have + tokens:
            self.tenth_at = at + (9 - have) * step

    def _waited(self, seconds: float) -> None:
        """Between two tokens."""
        if self.longest is None or seconds > self.longest:
            self.longest = seconds

    def _leave_prefill(self) -> None:
        self.prefill.leave(self.prefill_need)
        self.prefill_need = -1

    # What main says

    def arrived(self) -> None:
        """Its KV is at main."""
        if self.over:
            return
        self._keep_promise()
        cache = self.main.cache
        # Where there is plenty of room, nothing that is in use will have to go.
        if not self.single:
            self.pinned = 2 * cache.used > cache.capacity
            cache.take(self.spans, self.pinned)
        self._main_has_kv()

    def _main_has_kv(self) -> None:
        if self.known and self.max_tokens > 1:
            # The driver is told, and asks main at once.
            self.ready = True
            pool, events = self.main.pool, self.world.events
            events.push(events.now + pool.delay + pool.way, self.main_decodes)
        else:
            self._reach(self.main, self.main_ready)

    def _keep_promise(self) -> None:
        if self.promised:
            assert self.edge is not None
            self.world.admission.promised[self.edge] -= self.promised
            self.promised = 0.0

    def main_ready(self) -> None:
        """The driver knows."""
        if not self.over:
            self.ready = True
            self.go_on()

    def go_on(self) -> None:
        """With main, when it has the KV and the first token is known."""
        if self.known and self.ready:
            if self.max_tokens > 1:
                self._reach_engine(self.main, self.main_decodes)
            else:
                self.settled()

    def main_decodes(self) -> None:
        if self.over:
            return
        self.way_time = self.world.events.now - self.asked_at
        context = self.prompt + self.known
        self.decoding = self.main.decode(self, context, self.missing + 1, self.max_tokens - self.known)

    def begun(self, first: float, step: float) -> None:
        self.main_at = first + self.main.pool.delay
        self._user_gets(self.main_at, step, self.max_tokens - self.known)

    def ended(self, longest: float) -> None:
        """Main has made its last token."""
        if self.max_tokens - self.known > 1:
            self._waited(longest)
        self.main_tokens += self.max_tokens - self.known
        self._reach(self.main, self.answered)

    def answered(self) -> None:
        if not self.over:
            now = self.world.events.now
            self.last_at = now
            self.main_time = now - self.main_at
            self.finish()
            self.settled()

    # The end

    def finish(self) -> None:
        """The user has the whole answer."""
        self.world.finished(self)

    def settled(self) -> None:
        """Main has the KV of all, and the session needs it no more."""
        if self.over:
            return
        self.over = True
        main = self.main
        cache = main.cache
        if self.single:
            if len(self.spans) > 1:
                cache.take(self.spans[:-1])
            cache.fill(self.spans[-1][1] + self.max_tokens)
        else:
            if self.pinned:
                cache.release(self.spans)
            cache.take(extended(self.spans, self.max_tokens))
        self._leave_main()
        self.let_go()
        self.world.ended(self)

    def let_go(self) -> None:
        """What knows it is not known to it any more, so that both go at once."""
        self.main_fetch.let_go()
        self.decoding = None

    def _leave_main(self) -> None:
        self.main.leave(self.main_need)
        self.main_need = -1

    # When a worker is lost

    def lost(self, worker: Worker) -> None:
        """It has lost that worker, if it needs it still."""
        if worker is self.main or (worker is self.prefill and not self.known):
            self._count_main()
            self.give_up(worker)
            self.world.resume(self)
        elif worker is self.prefill and self.promised:
            self._fetch_again()

    def _count_main(self) -> None:
        if self.decoding is not None:
            made = self.main.made(self.decoding)
            self.main_tokens += made
            self.known += made
            if made:
                self.last_at = self.world.events.now

    def give_up(self, worker: Worker) -> None:
        """Leave all workers but `worker`, which is dead and knows nothing any more."""
        self.over = True
        self.main_fetch.cancel()
        self._keep_promise()
        if self.prefill is not worker and self.prefill_need >= 0:
            self.prefill.remove(self)
            self._leave_prefill()
        if self.main is not worker and self.main_need >= 0:
            if self.pinned:
                self.main.cache.release(self.spans)
            self._leave_main()

    def _fetch_again(self) -> None:
        """The KV of its prompt has not crossed, and who sent it is lost: somebody else may have it, or main computes
        it."""
        self.main_fetch.cancel()
        self._keep_promise()
        holder = self.world.holder(self.spans, self.main)
        there = holder.cache.hit(self.spans) if holder is not None else 0
        if holder is None or there <= self.main_cached:
            self.missing = self.prompt - self.main_cached
            self.arrived()
            return
        self.missing = max(0, self.prompt - there)
        self._fetch_to_main(holder, self.main)
        self.main_fetch.whole(self.prompt)
