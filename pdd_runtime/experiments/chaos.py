"""A game day: live traffic over a graph, faults in it, and a verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import httpx

from pdd_runtime.clock import now
from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, PddError
from pdd_runtime.experiments.chaos_report import ChaosReport, Seen
from pdd_runtime.experiments.client import Front
from pdd_runtime.experiments.holdings import Holdings, Leak, settled
from pdd_runtime.experiments.storm import Made, Script, Storm, Stream, Strikes, asked, following
from pdd_runtime.launch import GraphStatus, ps
from pdd_runtime.planner.workload import Workload
from pdd_runtime.testing.faults import Fault, Faults, RunningGraph, schedule

T = TypeVar("T")

_LOOK_EVERY = 0.2
SPARE = 8
"""Files and tasks of a process that may be more afterwards: connections that came when they were first needed."""


_BUSY = 60.0
"""Seconds for a launcher to answer while everything starts at once."""


class ChaosError(PddError):
    """Nothing can be learned from this game day."""

    code = "chaos"


@dataclass(frozen=True)
class ChaosPlan:
    """What is to happen. Times are seconds."""

    span: float
    """How long there are faults."""
    every: float
    """From fault to fault, about."""
    kinds: Sequence[str] = ("kill",)
    """Of `pdd_runtime.testing.faults.KINDS`."""
    lasting: float = 5.0
    """How long those faults last that do."""
    streams: int = 8
    seed: int = 0
    longest_gap: float = 2.0
    """Between two tokens of a stream: more is no pass."""
    recovery: float = 120.0
    """For all processes to be ready again after the last fault, and nothing to be held."""


class ChaosWatcher(Protocol):
    """Hears how it goes on."""

    def phase(self, what: str) -> None: ...

    def raging(self, span: float) -> None: ...

    def ended(self, stream: Stream, same: bool) -> None: ...

    def making(self, fault: Fault) -> None: ...


class Chaos:
    """One game day in `running`, which is ready for requests."""

    def __init__(
        self,
        running: RunningGraph,
        front: Front,
        faults: Faults,
        workload: Workload,
        plan: ChaosPlan,
        script: Script | None = None,
    ) -> None:
        """`script` makes the faults instead of the plan, and the day ends with it. Raises `FaultError` where the graph
        has nothing for one of the plan's faults to strike."""
        self._running, self._front, self._faults = running, front, faults
        self._workload, self.plan = workload, plan
        planned = schedule(running.graph, plan.kinds, plan.span, plan.every, plan.lasting, plan.seed)
        self._script = following(planned) if script is None else self._until_the_end(script)
        self.seen: Seen | None = None
        """What `run` has judged."""
        self.stop = asyncio.Event()
        """Set it to end the faults and the traffic now; what they were up to then is judged."""

    async def run(self, watcher: ChaosWatcher) -> ChaosReport:
        """Raises `ChaosError` where the graph does not answer as it should while nothing is done to it."""
        requests = asked(self._workload, self.plan.streams, self.plan.seed)
        url, streams = self._running.url, self.plan.streams
        async with Storm(url, self._front, requests, streams, self._workload.timeout) as storm:
            self.seen = await self._see(storm, watcher)
            watcher.phase("waiting for timelines")
        return self.seen.report(self._running.graph, self.plan)

    async def _see(self, storm: Storm, watcher: ChaosWatcher) -> Seen:
        plan = self.plan
        watcher.phase("asking undisturbed")
        wanted, steady, calm = await self._undisturbed(storm)
        watcher.phase("looking what is held")
        before, held = await settled(self._running, self._front)
        if held:
            raise ChaosError(
                "something is held before anything is done",
                why="; ".join(map(str, held)),
                fix="let its users end first",
            )
        restarts = await self._restarts()
        watcher.raging(plan.span)
        storm.on_end = lambda stream: watcher.ended(stream, stream.deviation(wanted[stream.asked.number]) is None)

        async def make(fault: Fault) -> Sequence[object]:
            watcher.making(fault)
            return await self._faults.make(fault)

        begun = now()
        made = await storm.rage(self._script, make, begun + plan.span, self.stop)
        watcher.phase("waiting for what was struck to come back")
        back = await self._back(made)
        watcher.phase("looking what is held")
        after, leaks = await self._settled(before)
        restarted = {name: count - restarts.get(name, 0) for name, count in (await self._restarts()).items()}
        return Seen(storm.ended, wanted, steady, calm, begun, made, before, after, leaks, restarted, back)

    def _until_the_end(self, script: Script) -> Script:
        async def whole(strikes: Strikes) -> None:
            await script(strikes)
            self.stop.set()

        return whole

    async def _undisturbed(self, storm: Storm) -> tuple[dict[int, tuple[int, ...]], frozenset[int], list[Stream]]:
        """What each request is answered with, which are so twice, and the second time itself."""
        first, second = await storm.each_once(), await storm.each_once()
        for stream in (*first, *second):
            if stream.outcome.error is not None:
                raise ChaosError("the graph does not answer undisturbed", why=stream.outcome.error)
        wanted = {stream.asked.number: tuple(stream.outcome.tokens) for stream in first}
        steady = frozenset(one.asked.number for one in second if tuple(one.outcome.tokens) == wanted[one.asked.number])
        if not steady:
            raise ChaosError(
                "no request is answered alike twice",
                why="so nothing can be compared",
                fix="spec.model.mode: exact makes answers the same in any batch",
            )
        return wanted, steady, second

    async def _restarts(self) -> dict[str, int]:
        counts = {}
        for status in await self._statuses():
            counts.update({f"{one.pool}/{one.index}": one.restarts for one in status.processes})
        return counts

    async def _statuses(self) -> list[GraphStatus]:
        return [await patiently(lambda: ps(state)) for state in self._running.states]  # noqa: B023 - awaited here

    async def _back(self, made: Sequence[Made]) -> float | None:
        """Seconds from the end of the last fault until every process was ready; None: it took too long."""
        last = max((one.ended or one.at for one in made), default=now())
        until = now() + self.plan.recovery
        while now() < until:
            if all(one.state == "ready" for status in await self._statuses() for one in status.processes):
                return now() - last
            await asyncio.sleep(_LOOK_EVERY)
        return None

    async def _settled(self, before: Holdings) -> tuple[Holdings, tuple[Leak, ...]]:
        try:
            return await settled(self._running, self._front, before, spare=SPARE, patience=self.plan.recovery)
        except httpx.HTTPError as error:
            raise ChaosError("no frontend is there to be asked what is held", why=str(error)) from error


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """What a launcher answers, who is asked again where it is too busy to answer in time. Raises what it answers, and
    `DeadlineExceeded` at last."""
    until = now() + _BUSY
    while True:
        try:
            return await ask()
        except (DeadlineExceeded, ConnectionLost):
            if now() > until:
                raise
            await asyncio.sleep(_LOOK_EVERY)
