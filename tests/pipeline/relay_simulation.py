"""Conversations through prefill, relay and main under a routing policy: the caches and the relay's places, second by
second. Prefill and main have room for all; only what they have cached counts."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from pdd_runtime.pipeline.finishing_guard import FinishingGuard
from pdd_runtime.pipeline.hit_rates import HitRates
from pdd_runtime.plugins.routing import (
    ClusterView,
    EdgeView,
    Finishing,
    LinkView,
    RequestFacts,
    Role,
    Route,
    RoutingPolicy,
    WorkerKey,
    WorkerView,
)

PREFILL, RELAY, MAIN = (WorkerKey(name, 0, "epoch") for name in ("prefill", "relay", "main"))
EDGES = (
    EdgeView(source="prefill", target="relay", carries="kv", link=None),
    EdgeView(source="prefill", target="main", carries="kv", link="wan"),
    EdgeView(source="relay", target="main", carries="tokens", link="wan"),
)
WAN = LinkView(name="wan", source="dc-a", target="dc-b", bandwidth=1e9, rtt=0.05)


@dataclass(order=True)
class Turn:
    """A user's next question, at `at`."""

    at: float
    conversation: int
    number: int = field(compare=False)
    tokens: int = field(compare=False)
    """Of all that was said before, and the question."""


@dataclass
class Seen:
    """What came of it."""

    kinds: list[str] = field(default_factory=list)
    """Of the routes, in order."""
    relay_tokens: int = 0
    tokens: int = 0
    waiting: list[int] = field(default_factory=list)
    """For a place in the relay, at each request."""


class Simulation:
    """Conversations begin at random, `rate` a second; each has some turns, a pause apart, and adds a little to a long
    first prompt. The relay serves so many at once: those that are handed off leave it when their KV has crossed the
    link, those that end there stay to their end."""

    TURNS, PAUSE, FIRST, MORE = 6, 30.0, 4000, 150
    TOKEN_TIME, TOKEN_BYTES = 0.025, 100_000

    def __init__(self, policy: RoutingPolicy, *, guarded: bool = True, places: int = 8, rate: float = 2.0) -> None:
        """`guarded`: the policy sees how many ended on the relay, and the hit rates."""
        self.rates = HitRates(None)
        self.seen = Seen()
        self._policy, self._guarded, self._places, self._rate = policy, guarded, places, rate
        self._guard = FinishingGuard(self.rates, frontends=1)
        self._cached: dict[WorkerKey, dict[int, int]] = {PREFILL: {}, MAIN: {}}
        self._leaving: list[tuple[float, int, Route]] = []
        """Who is in the relay, or will be, by when they leave it."""
        self._free = [0.0] * places
        """When each place is free for the next."""
        self._random = random.Random(5)

    def run(self, seconds: float) -> Seen:
        turns: list[Turn] = []
        at, conversation = 0.0, 0
        while (at := at + self._random.expovariate(self._rate)) < seconds:
            conversation += 1
            turns.append(Turn(at, conversation, 1, self.FIRST))
        while turns:
            turn = heapq.heappop(turns)
            answer = self._random.randrange(20, 200)
            self._ask(turn, answer)
            after = turn.at + self.PAUSE + answer * self.TOKEN_TIME
            if turn.number < self.TURNS and after < seconds:
                tokens = turn.tokens + answer + self.MORE
                heapq.heappush(turns, Turn(after, turn.conversation, turn.number + 1, tokens))
        return self.seen

    def _ask(self, turn: Turn, answer: int) -> None:
        while self._leaving and self._leaving[0][0] <= turn.at:
            self._guard.ended(heapq.heappop(self._leaving)[2])
        facts = RequestFacts(prompt_tokens=turn.tokens, max_tokens=answer)
        cached = {key: min(turn.tokens, had.get(turn.conversation, 0)) for key, had in self._cached.items()}
        route = self._policy.plan(facts, self._view(cached))
        self.rates.saw("main", turn.tokens, cached[PREFILL], cached[MAIN])
        self._guard.begun(route)
        self._cached[PREFILL][turn.conversation] = turn.tokens
        if route.kind != "P-RLD":
            self._cached[MAIN][turn.conversation] = turn.tokens + answer
        crossing = (turn.tokens - cached[MAIN]) * self.TOKEN_BYTES / WAN.bandwidth
        made = {"P-MD": 0, "P-RLD": answer, "P-RLD-MD": min(answer, int(crossing / self.TOKEN_TIME))}[route.kind]
        if route.kind != "P-MD":
            self._relay(turn, route, crossing if route.kind == "P-RLD-MD" else answer * self.TOKEN_TIME)
        self.seen.kinds.append(route.kind)
        self.seen.relay_tokens += made
        self.seen.tokens += answer
        self.seen.waiting.append(max(0, len(self._leaving) - self._places))

    def _relay(self, turn: Turn, route: Route, seconds: float) -> None:
        begins = max(turn.at, heapq.heappop(self._free))
        heapq.heappush(self._free, begins + seconds)
        heapq.heappush(self._leaving, (begins + seconds, turn.conversation, route))

    def _view(self, cached: dict[WorkerKey, int]) -> ClusterView:
        there = len(self._leaving)
        running = min(there, self._places)
        return ClusterView(
            workers=(
                self._worker(PREFILL, "prefill", "dc-a", cached[PREFILL]),
                self._worker(RELAY, "relay", "dc-a", 0, running, there - running),
                self._worker(MAIN, "main", "dc-b", cached[MAIN]),
            ),
            edges=EDGES,
            links=(WAN,),
            finishing=self._guard.view if self._guarded else Finishing(),
        )

    def _worker(
        self, key: WorkerKey, role: Role, cluster: str, cached: int, running: int = 0, waiting: int = 0
    ) -> WorkerView:
        return WorkerView(
            key=key, role=role, cluster=cluster, cached_tokens=cached, running=running, waiting=waiting,
            batch_limit=self._places, token_bytes=self.TOKEN_BYTES,
        )  # fmt: skip
