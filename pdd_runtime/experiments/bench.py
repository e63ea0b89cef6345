"""Measures graphs in turn, each with the same requests."""

from __future__ import annotations

from collections.abc import Sequence

from pdd_runtime.errors import PddError
from pdd_runtime.experiments.report import Measured
from pdd_runtime.experiments.station import Station
from pdd_runtime.experiments.target import Target, Watcher, brought_up
from pdd_runtime.planner import Workload
from pdd_runtime.plugins import PluginManager


async def bench(
    targets: Sequence[Target],
    workload: Workload,
    requests: int,
    seed: int,
    plugins: PluginManager,
    watcher: Watcher,
    wait_timeout: float | None = None,
    aiperf: str | None = None,
) -> list[Measured]:
    """One after the other. A graph that cannot be brought up, in `wait_timeout` seconds where that is given, counts as
    errors, and the others are measured still. `aiperf`: the command that sends them; None: this process does."""
    measured = []
    for target in targets:
        try:
            async with brought_up(target, plugins, watcher, wait_timeout) as url:
                measured.append(await _measure(target, url, workload, requests, seed, watcher, aiperf))
        except PddError as error:
            measured.append(Measured(target.name, target.graph, (), failure=str(error)))
    return measured


async def _measure(
    target: Target, url: str, workload: Workload, requests: int, seed: int, watcher: Watcher, aiperf: str | None
) -> Measured:
    watcher.warming(target.name)
    station = Station(url, workload, seed, lambda outcome: watcher.ended(target.name, outcome), aiperf)
    async with station:
        await station.warm_up(requests)
        run = await station.run(workload.sessions(requests, seed))
    return Measured(target.name, target.graph, run.outcomes, run.cpu / run.seconds)
