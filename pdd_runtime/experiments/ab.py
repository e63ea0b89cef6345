"""Measures graphs in turn, block by block, so that whatever changes meanwhile changes for all of them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from pdd_runtime.errors import PddError
from pdd_runtime.experiments.aiperf import require_aiperf
from pdd_runtime.experiments.report import Measured
from pdd_runtime.experiments.station import Run, Station
from pdd_runtime.experiments.target import Target, Watcher, brought_up
from pdd_runtime.experiments.trial import Rules, Trial
from pdd_runtime.planner import Session, Workload
from pdd_runtime.plugins import PluginManager

_FEW, _FEWEST = 4, 5
"""Requests of a block, where several run at once: of each user, and in an open loop."""
_RUNS = 8
"""Blocks of an `aiperf` test: each is a run of the command."""


class AbWatcher(Watcher, Protocol):
    """Hears how an A/B test goes on."""

    def looked(self, trial: Trial) -> None: ...


@dataclass(frozen=True)
class Design:
    """How graphs are compared."""

    workload: Workload
    requests: int
    """The most, of each graph."""
    seed: int
    rules: Rules
    together: bool = True
    """All graphs are up at once; else one at a time, in rounds."""
    rounds: int = 8
    """How often each graph is brought up, where they are not up together."""
    block: int | None = None
    """Requests of one graph until it is another's turn; None: as few as do."""
    driver: str = "own"
    """Or `aiperf`."""

    def blocks(self, sessions: Sequence[Session]) -> list[tuple[Session, ...]]:
        """Whole sessions, in their order. A block of an open loop begins with its first arrival."""
        blocks: list[tuple[Session, ...]] = []
        size, wanted = 0, self._block_size(len(sessions))
        for session in sessions:
            if not blocks or size >= wanted:
                blocks.append(())
                size = 0
            blocks[-1] += (session,)
            size += len(session.turns)
        return [_from_zero(block) for block in blocks]

    def _block_size(self, sessions: int) -> int:
        if self.block is not None:
            return self.block
        users = self.workload.users
        least = 1 if users == 1 else _FEW * users if users else _FEWEST
        return max(least, -(-sessions // _RUNS)) if self.driver == "aiperf" else least


@dataclass
class Result:
    """What an A/B test has measured."""

    trial: Trial
    measured: list[Measured]
    """Of each graph, in their order."""
    seconds: dict[str, float]
    """That each graph had requests under way."""
    failure: str = ""
    """Why it ended before its time."""


class AbTest:
    """One test. `run` may be cancelled; what was measured until then is `result` all the same."""

    def __init__(
        self,
        targets: Sequence[Target],
        design: Design,
        plugins: PluginManager,
        watcher: AbWatcher,
        wait_timeout: float | None = None,
    ) -> None:
        """`wait_timeout`: seconds that each graph gets to be ready. Raises `WorkloadError`, and `AiperfError` where
        that cannot send the workload."""
        self._targets, self._design, self._plugins = tuple(targets), design, plugins
        self._watcher, self._wait_timeout = watcher, wait_timeout
        sessions = design.workload.sessions(design.requests, design.seed)
        self._aiperf = require_aiperf(sessions) if design.driver == "aiperf" else None
        self._blocks = design.blocks(sessions)
        self._order = random.Random(f"{design.seed}/order")
        self._cpu, self._wall, self._seconds = ({target.name: 0.0 for target in targets} for _ in range(3))
        self._failure = ""
        self.trial = Trial(
            [target.name for target in targets], design.rules, sum(len(session.turns) for session in sessions)
        )

    async def run(self) -> Result:
        """Raises `LaunchError` and `RemoteError` where nothing was measured yet; later they end the test early."""
        try:
            await (self._together() if self._design.together else self._in_turn())
        except PddError as error:
            if not self.trial.asked:
                raise
            self._failure = str(error)
        return self.result()

    def result(self) -> Result:
        """After a last look at what is there."""
        if self.trial.asked:
            self.trial.look()
        measured = [
            Measured(name, target.graph, self.trial.outcomes[name], self._cpu[name] / (self._wall[name] or 1.0))
            for name, target in zip(self.trial.names, self._targets, strict=True)
        ]
        return Result(self.trial, measured, self._seconds, self._failure)

    async def _together(self) -> None:
        async with AsyncExitStack() as stack:
            stations = {target.name: await stack.enter_async_context(self._station(target)) for target in self._targets}
            for number, block in enumerate(self._blocks):
                self._add(number, {name: [await _ask(stations[name], block)] for name in self._shuffled()})
                if self._enough():
                    return

    async def _in_turn(self) -> None:
        rounds = min(self._design.rounds, len(self._blocks))
        by_name = {target.name: target for target in self._targets}
        for number in range(rounds):
            blocks = self._blocks[number * len(self._blocks) // rounds : (number + 1) * len(self._blocks) // rounds]
            runs = {}
            for name in self._shuffled():
                async with self._station(by_name[name]) as station:
                    runs[name] = [await _ask(station, block) for block in blocks]
            # All of a round met the same machine and the same start: they count as one block.
            self._add(number, runs)
            if self._enough():
                return

    @asynccontextmanager
    async def _station(self, target: Target) -> AsyncIterator[Station]:
        design = self._design
        async with brought_up(target, self._plugins, self._watcher, self._wait_timeout) as url:
            station = Station(
                url,
                design.workload,
                design.seed,
                lambda outcome: self._watcher.ended(target.name, outcome),
                self._aiperf,
            )
            async with station:
                self._watcher.warming(target.name)
                await station.warm_up(design.requests)
                yield station

    def _add(self, number: int, runs: Mapping[str, Sequence[Run]]) -> None:
        for name, some in runs.items():
            for run in some:
                self._cpu[name] += run.cpu
                self._wall[name] += run.seconds
                self._seconds[name] += max(one.ended for one in run.outcomes) - min(one.due for one in run.outcomes)
        self.trial.add(number, {name: [one for run in some for one in run.outcomes] for name, some in runs.items()})

    def _shuffled(self) -> list[str]:
        names = [target.name for target in self._targets]
        self._order.shuffle(names)
        return names

    def _enough(self) -> bool:
        if not self.trial.due:
            return False
        stop = self.trial.look()
        self._watcher.looked(self.trial)
        return stop


async def _ask(station: Station, block: Sequence[Session]) -> Run:
    run = await station.run(block)
    # What one graph has left to do would be in the next one's numbers.
    await station.settled()
    return run


def _from_zero(block: tuple[Session, ...]) -> tuple[Session, ...]:
    begun = block[0].start
    if begun is None:
        return block
    return tuple(replace(session, start=(session.start or begun) - begun) for session in block)
