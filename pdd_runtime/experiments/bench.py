"""Measures graphs in turn, each with the same requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from pdd_runtime.clock import now
from pdd_runtime.errors import PddError
from pdd_runtime.experiments.client import Client
from pdd_runtime.experiments.load import Load
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.prompts import Prompts
from pdd_runtime.experiments.report import Measured
from pdd_runtime.experiments.running import running
from pdd_runtime.graph import Graph
from pdd_runtime.ids import new_id
from pdd_runtime.launch import GraphStatus
from pdd_runtime.planner import Distribution, Session, Turn, Workload
from pdd_runtime.planner.content import prefix_chain, session_chain
from pdd_runtime.plugins import PluginManager

_WARM_OUTPUT = 8
"""Tokens behind a shared prefix that is made known: enough for a handoff."""


class Watcher(Protocol):
    """Hears how a bench goes on."""

    def starting(self, name: str, status: GraphStatus) -> None: ...

    def warming(self, name: str) -> None: ...

    def ended(self, name: str, outcome: Outcome) -> None: ...


@dataclass(frozen=True)
class Target:
    """A graph to be brought up, or one that runs at `url` already."""

    name: str
    graph: Graph | None
    source: str = ""
    url: str = ""


async def bench(
    targets: Sequence[Target],
    workload: Workload,
    requests: int,
    seed: int,
    plugins: PluginManager,
    watcher: Watcher,
    wait_timeout: float | None = None,
) -> list[Measured]:
    """One after the other. A graph that cannot be brought up, in `wait_timeout` seconds where that is given, counts as
    errors, and the others are measured still."""
    measured = []
    for target in targets:
        try:
            measured.append(await _measure(target, workload, requests, seed, plugins, watcher, wait_timeout))
        except PddError as error:
            measured.append(Measured(target.name, target.graph, (), failure=str(error)))
    return measured


async def _measure(
    target: Target,
    workload: Workload,
    requests: int,
    seed: int,
    plugins: PluginManager,
    watcher: Watcher,
    wait_timeout: float | None,
) -> Measured:
    if target.url:
        return await _measure_at(target.url, target, workload, requests, seed, watcher)
    assert target.graph is not None
    with TemporaryDirectory(prefix="pdd-bench-", ignore_cleanup_errors=True) as directory:
        up = running(
            target.graph,
            target.source,
            plugins,
            Path(directory),
            lambda status: watcher.starting(target.name, status),
            wait_timeout,
        )
        async with up as url:
            return await _measure_at(url, target, workload, requests, seed, watcher)


async def _measure_at(
    url: str, target: Target, workload: Workload, requests: int, seed: int, watcher: Watcher
) -> Measured:
    # A new salt each time: nothing that an earlier run left in the caches is a hit.
    salt = new_id("bench")
    watcher.warming(target.name)
    await _warm_up(Client(url, workload.timeout, salt), workload, requests, seed)
    async with Client(url, workload.timeout, salt) as client:
        load = Load(workload, Prompts(workload, seed), client, lambda outcome: watcher.ended(target.name, outcome))
        cpu, begun = time.process_time(), now()
        await load.run(workload.sessions(requests, seed))
        used = (time.process_time() - cpu) / (now() - begun)
    return Measured(target.name, target.graph, load.outcomes, used)


async def _warm_up(client: Client, workload: Workload, requests: int, seed: int) -> None:
    """The shared prefixes, as long as the workload needs them, until main has them as well; then other requests."""
    longest: dict[int, int] = {}
    for session in workload.sessions(requests, seed):
        chain, length = session.turns[0].spans[0]
        if chain == prefix_chain(session.prefix):
            longest[session.prefix] = max(longest.get(session.prefix, 0), length)
    known = tuple(
        Session(number, None, prefix, (_known(number, prefix, length),))
        for number, (prefix, length) in enumerate(sorted(longest.items()))
    )
    trace = workload.trace and workload.trace.model_copy(update={"longest_think": 0.0})
    changes = {"rate": None, "concurrency": 1, "think": Distribution.fixed(0), "trace": trace}
    one_by_one = workload.model_copy(update=changes)
    others = one_by_one.sessions(workload.warmup, seed, "warm-up")
    async with client:
        for name, sessions in (("prefixes", known), ("warm-up", others)):
            load = Load(one_by_one, Prompts(workload, seed, name), client, lambda outcome: None)
            await load.run(sessions)


def _known(number: int, prefix: int, length: int) -> Turn:
    spans = ((prefix_chain(prefix), length), (session_chain(number, 0), 1))
    return Turn(length, 1, _WARM_OUTPUT, 0.0, spans)
