"""Measures a graph that is up: how each of its pools and links behaves, as a profile that the simulator takes."""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pdd_runtime
from pdd_runtime.clock import now
from pdd_runtime.errors import NoRoute, PddError
from pdd_runtime.experiments.client import Client, Front
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.pool_times import Extent, PoolTimes
from pdd_runtime.experiments.probe import Probe, same_engine
from pdd_runtime.graph import Edge, Graph, Link, PluginRef, link_between
from pdd_runtime.graph.units import write_bandwidth, write_duration
from pdd_runtime.planner.latency import Table, TableConfig
from pdd_runtime.planner.profile import LinkProfile, PoolProfile, Profile
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.testing.running_graph import RunningGraph

_VOCABULARY = (35, 93)
"""As a workload's, where it says nothing else."""
_SHORT = 64
"""Tokens of the prompts by which frontend and driver are timed, at most."""
_ASKED = 9
_FETCHES = 6
_LINE_TIME = 2.0
"""Seconds for which a link is loaded, about."""
_SETTLING = 30.0
_MEETING = 10.0
"""Seconds in which discovery tells who is there."""
_LOOK_EVERY = 0.05

Told = Callable[[str, str], None]
"""Hears of which pool, or link, what is measured next."""


@dataclass(frozen=True)
class _Measured:
    """One pool whose engine was timed."""

    probe: Probe
    said: PoolProfile


@dataclass
class Profiling:
    """Of a graph that is up and has nothing else to do."""

    running: RunningGraph
    url: str
    extent: Extent
    told: Told
    front: Front | None = None
    seed: int = 0
    _measured: list[_Measured] = field(default_factory=list)

    async def run(self) -> Profile:
        """Raises what workers raise, `PddError` where something cannot be measured."""
        graph = self.running.graph
        async with self._probes() as probes:
            pools = {name: await self._pool(graph, name, probes) for name in graph.spec.pools}
            links = await self._links(graph, probes)
        pools = await self._with_front(graph, pools)
        return Profile(graph=graph.name, measured=_circumstances(graph), pools=pools, links=links)

    @asynccontextmanager
    async def _probes(self) -> AsyncIterator[dict[str, Probe]]:
        """Of the first worker of each pool."""
        members = await self._members()
        probes: dict[str, Probe] = {}
        try:
            for number, (name, member) in enumerate(members.items()):
                connection = await self.running.connect(member)
                probes[name] = Probe(member, connection, _VOCABULARY, self.seed + number)
            yield probes
        finally:
            for probe in probes.values():
                await probe.connection.close()

    async def _members(self) -> dict[str, Member]:
        """The first worker of each pool. Raises `NoRoute` where one has none that is ready."""
        until = now() + _MEETING
        while True:
            found: dict[str, Member] = {}
            for member in sorted(self.running.members, key=lambda member: member.key):
                if member.info is not None and member.state == "ready":
                    found.setdefault(member.key.pool, member)
            missing = [name for name in self.running.graph.spec.pools if name not in found]
            if not missing:
                return {name: found[name] for name in self.running.graph.spec.pools}
            if now() > until:
                raise NoRoute(f"no worker of {', '.join(missing)} is ready", fix="see `pdd-runtime ps`")
            await asyncio.sleep(_LOOK_EVERY)

    async def _pool(self, graph: Graph, name: str, probes: Mapping[str, Probe]) -> PoolProfile:
        probe, pool = probes[name], graph.spec.pools[name]
        for done in self._measured:
            if _alike(graph, probe, done.probe):
                self.told(name, f"as {done.probe.pool}, whose engine is the same")
                return done.said
        if probe.info.capabilities.extend != "local" and pool.role != "prefill":
            raise PddError(
                f"the workers of pool {name} cannot be measured alone",
                why="they compute no known tokens themselves: each decode needs KV that prefill keeps for it",
                fix="measure the engine with a graph in which it extends, and copy what the profile says of that pool",
            )
        await probe.time_calls()
        times = PoolTimes(probe, self.extent, lambda what: self.told(name, what))
        prefill = await times.passes()
        # Nobody decodes there; who simulates a graph in which somebody does measures that one.
        decode = prefill.model_copy(update={"tokens": [1], "seconds": prefill.seconds[:1]})
        if pool.role != "prefill":
            decode = await times.steps()
        origin = f"measured on {_machine()}, graph {graph.name}, pool {name}"
        config = TableConfig(prefill=prefill, decode=decode, origin=origin)
        layout = probe.info.layout
        said = PoolProfile(
            latency=PluginRef(plugin=Table.name, config=config.model_dump(mode="json")),
            batch_limit=probe.info.batch_limit,
            chunk=times.chunk,
            block=probe.block,
            capacity=probe.capacity,
            context_length=probe.info.context_length,
            # Blocks travel whole: state that is kept behind each is paid for with its tokens.
            kv_constant=0.0,
            kv_token=layout.block_bytes / layout.block_size,
            overhead=write_duration(round(probe.call, 6)),
        )
        self._measured.append(_Measured(probe, said))
        return said

    async def _links(self, graph: Graph, probes: Mapping[str, Probe]) -> dict[str, LinkProfile]:
        """Each by the first edge that sends KV over it, block by block."""
        found: dict[str, LinkProfile] = {}
        for edge in graph.spec.edges:
            source, target = graph.spec.pools[edge.source].cluster, graph.spec.pools[edge.target].cluster
            between = link_between(graph, source, target)
            if between and between[0] not in found and edge.carries == "kv" and edge.transport is not None:
                found[between[0]] = await self._link(between, edge, probes)
        for name, link in graph.spec.links.items():
            found.setdefault(name, LinkProfile(rtt=write_duration(link.rtt)))
        return found

    async def _link(self, between: tuple[str, Link], edge: Edge, probes: Mapping[str, Probe]) -> LinkProfile:
        (name, link), giver, taker = between, probes[edge.source], probes[edge.target]
        assert edge.transport is not None
        times = PoolTimes(giver, self.extent, lambda what: None)
        size = giver.info.layout.token_bytes
        many = int(min(times.longest, taker.capacity / 2, max(4 * giver.block, _LINE_TIME * link.bandwidth / 8 / size)))
        self.told(name, f"{giver.block} and {many} tokens from {giver.pool} to {taker.pool}")
        seconds, bytes_ = [], []
        # The first fetch connects; then a block, several times, then many.
        for count in (giver.block,) * _FETCHES + (many,):
            tokens = giver.draw(count)
            await giver.compute(tokens)
            report = await taker.fetch(giver, edge.transport.plugin, tokens)
            seconds.append(report.seconds)
            bytes_.append(report.bytes)
        little, much = min(seconds[1:-1]), seconds[-1]
        goodput = (bytes_[-1] - bytes_[1]) / (much - little) if much > little else bytes_[-1] / much
        rtt = max(0.0, little - bytes_[1] / goodput)
        return LinkProfile(rtt=write_duration(round(rtt, 5)), goodput=write_bandwidth(round(8 * goodput)))

    async def _with_front(self, graph: Graph, pools: dict[str, PoolProfile]) -> dict[str, PoolProfile]:
        """What frontend and driver add to a first token, added to the pools that make it."""
        first = [name for name in pools if graph.spec.pools[name].role in ("prefill", "aggregated")]
        tables = {name: Table(TableConfig.model_validate(pools[name].latency.config)) for name in first}
        count = min(_SHORT, *(pools[name].chunk for name in first))
        self.told("frontend", f"{_ASKED} prompts of {count} tokens")
        probe = self._measured[0].probe
        times = []
        for number in range(_ASKED):
            outcome = Outcome(number, 0, count, 0.0, 0.0)
            # Leaving the client waits until the request is over everywhere: none is in the next one's way.
            async with Client(self.url, _SETTLING, probe.salt, self.front, _SETTLING) as client:
                await client.ask(client.body(probe.draw(count), 2), outcome)
            if outcome.error is not None:
                raise PddError("a request failed while the frontend was timed", why=outcome.error)
            times.append(outcome.stamps[0] - outcome.sent)
        passing = min(table.prefill(count, 0) for table in tables.values())
        added = max(0.0, statistics.median(times) - passing)
        return {
            name: said.model_copy(update={"overhead": round(added, 6)}) if name in first else said
            for name, said in pools.items()
        }


def _alike(graph: Graph, one: Probe, other: Probe) -> bool:
    """What was measured of one holds for the other."""
    prefills = [probe.member.role == "prefill" for probe in (one, other)]
    same = same_engine(one.info, other.info) and prefills[0] == prefills[1]
    return same and _settings(graph, one.pool) == _settings(graph, other.pool)


def _settings(graph: Graph, pool: str) -> tuple[object, ...]:
    """What a pool's engine is told."""
    said = graph.spec.pools[pool]
    return said.engine, graph.model_of(pool), said.env, said.hardware


def _machine() -> str:
    return f"{os.cpu_count()} CPUs of {platform.machine()}"


def _circumstances(graph: Graph) -> dict[str, str]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "model": graph.spec.model.source,
        "version": pdd_runtime.__version__,
    }
