"""Where a graph that is up gets its requests from, and is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from pdd_runtime.clock import now
from pdd_runtime.experiments.aiperf import Aiperf
from pdd_runtime.experiments.client import Client
from pdd_runtime.experiments.load import Load
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.prompts import Prompts
from pdd_runtime.ids import new_id
from pdd_runtime.planner import Session, Turn, Workload
from pdd_runtime.planner.content import prefix_chain, session_chain
from pdd_runtime.planner.distribution import Distribution

_WARM_OUTPUT = 8
"""Tokens behind a shared prefix that is made known: enough for a handoff."""


class Run(NamedTuple):
    """Sessions that were sent."""

    outcomes: list[Outcome]
    cpu: float
    """CPU seconds of this process."""
    seconds: float
    """Until the last of them had ended."""


class Station:
    """Use it as a context manager: leaving it waits for the timelines that are still to come."""

    def __init__(
        self,
        url: str,
        workload: Workload,
        seed: int,
        on_end: Callable[[Outcome], None] = lambda outcome: None,
        aiperf: str | None = None,
    ) -> None:
        """`aiperf`: the command that sends the requests; None: they are sent from here. Warm-ups always are."""
        # A new salt each time: nothing that an earlier run left in the caches is a hit.
        self._salt = new_id("bench")
        self._url, self._workload, self._seed, self._on_end = url, workload, seed, on_end
        self._client = Client(url, workload.timeout, self._salt)
        self._prompts = Prompts(workload, seed)
        self._aiperf = None if aiperf is None else Aiperf(aiperf, url, workload, self._prompts, self._client, on_end)

    async def __aenter__(self) -> Self:
        """Raises `RemoteError` where nobody answers at the URL."""
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def warm_up(self, requests: int) -> None:
        """For so many of the workload: the prefixes they share, as long as they need them, until main has them as well;
        then other requests."""
        longest: dict[int, int] = {}
        for session in self._workload.sessions(requests, self._seed):
            chain, length = session.turns[0].spans[0]
            if chain == prefix_chain(session.prefix):
                longest[session.prefix] = max(longest.get(session.prefix, 0), length)
        known = tuple(
            Session(number, None, prefix, (_known(number, prefix, length),))
            for number, (prefix, length) in enumerate(sorted(longest.items()))
        )
        trace = self._workload.trace and self._workload.trace.model_copy(update={"longest_think": 0.0})
        changes = {"rate": None, "concurrency": 1, "think": Distribution.fixed(0), "trace": trace}
        one_by_one = self._workload.model_copy(update=changes)
        others = one_by_one.sessions(self._workload.warmup, self._seed, "warm-up")
        for name, sessions in (("prefixes", known), ("warm-up", others)):
            load = Load(one_by_one, Prompts(self._workload, self._seed, name), self._client, lambda outcome: None)
            await load.run(sessions)
        await self._client.settled()

    async def run(self, sessions: Sequence[Session]) -> Run:
        """What becomes of them, failures among it."""
        cpu, begun = time.process_time(), now()
        if self._aiperf is not None:
            outcomes = await self._aiperf.run(sessions)
        else:
            load = Load(self._workload, self._prompts, self._client, self._on_end)
            await load.run(sessions)
            outcomes = load.outcomes
        return Run(outcomes, time.process_time() - cpu, now() - begun)

    async def settled(self) -> None:
        """Until the graph has nothing more to do for what it was asked: KV may go on after a short answer."""
        await self._client.settled()


def _known(number: int, prefix: int, length: int) -> Turn:
    spans = ((prefix_chain(prefix), length), (session_chain(number, 0), 1))
    return Turn(length, 1, _WARM_OUTPUT, 0.0, spans)
