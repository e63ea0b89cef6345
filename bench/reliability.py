"""What a graph does when something fails: each promise of docs/reliability.md as a command.

    python bench/reliability.py kills [--kills 20]        each role, in each state of a session
    python bench/reliability.py etcd [--away 60]          etcd is killed under load, and comes back empty
    python bench/reliability.py cut [--away 10]           a WAN is cut in mid-transfer and in mid-handoff
    python bench/reliability.py two-by-two                a whole cluster is killed under load
    python bench/reliability.py soak [--requests 10000] [--aborts 1000]
    python bench/reliability.py strangers                 who is refused at a worker's door, and what is logged

Each brings a graph up, with a state directory of its own, and takes it down again. `--engine tiny` (the default) serves
a Llama of two layers with random weights on PyTorch, bit-exact in any batch; `--engine scripted` needs no model, and
starts at once (the default of soak and strangers). Exit code 0 where all is well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reliability_hunt import STATES, Hunt, meetings
from reliability_soak import soak
from reliability_strangers import strangers_at
from rich.console import Console

from pdd_runtime.cli.chaos import Screen, verdict
from pdd_runtime.cli.front import Front, front_of
from pdd_runtime.clock import now
from pdd_runtime.experiments.chaos import Chaos, ChaosPlan, patiently
from pdd_runtime.experiments.chaos_report import ChaosReport, Seen
from pdd_runtime.experiments.storm import Strikes
from pdd_runtime.graph import Graph, load
from pdd_runtime.launch import GraphState, Part, down, start_detached, watch
from pdd_runtime.planner import read_workload
from pdd_runtime.testing.etcd_server import EtcdServer
from pdd_runtime.testing.faults import Fault, Faults, RunningGraph

HERE = Path(__file__).resolve().parent
GRAPH = HERE / "reliability.yaml"
TWO_BY_TWO = HERE.parent / "graphs" / "two-by-two.yaml"
WORKLOAD = "prompt=uniform(150, 400),output=uniform(60, 160),timeout=180"
SHORT = "prompt=uniform(20, 200),output=uniform(10, 60),timeout=120"
_ENDLESS = 1e6
ROLES = ("prefill", "relay", "main")


@dataclass(frozen=True)
class Stage:
    """A graph that is up."""

    running: RunningGraph
    front: Front
    state: GraphState
    etcd: EtcdServer | None


@asynccontextmanager
async def stage(options: argparse.Namespace, file: Path, *overrides: str, etcd: bool = False) -> AsyncIterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="pdd-reliability-", ignore_cleanup_errors=True) as directory:
        scratch = Path(directory)
        os.environ["PDD_STATE_DIR"] = str(scratch / "state")
        server = EtcdServer(scratch / "etcd") if etcd else None
        sets = [*overrides, *engine(options.engine, file, scratch), "spec.frontend.port=0"]
        if server is not None:
            await server.up()
            sets += ["spec.discovery.plugin=etcd", f"spec.discovery.config.endpoints=[{server.endpoint}]"]
        loaded = load(file, [*sets, *options.set])
        state = GraphState(loaded.graph.name)
        try:
            await start_detached(loaded.graph, str(file), state, Part())
            async for status in watch(state):
                if status.ready and all(process.state == "ready" for process in status.processes):
                    break
            async with RunningGraph(state) as running:
                yield Stage(running, await patiently(lambda: front_of(state)), state, server)
        finally:
            if state.launcher() is not None:
                await down(state, patience=0.0)
            if server is not None:
                await server.down()


def engine(name: str, file: Path, scratch: Path) -> list[str]:
    """Overrides that give every pool this engine."""
    pools = list(load(file).graph.spec.pools)
    if name == "scripted":
        config = "{plugin: scripted, config: {token_time: 0.02, prefill_rate: 800, token_bytes: 1024}}"
        return ["spec.model.source=toy", *(f"spec.pools.{pool}.engine={config}" for pool in pools)]
    from pdd_torch.testing import build_tiny_model

    model = build_tiny_model(scratch / "tiny", seed=7, context=2048)
    return [
        f"spec.model.source={model}",
        "spec.model.mode=exact",
        *(f"spec.pools.{pool}.engine={{plugin: torch}}" for pool in pools),
    ]


async def day(
    on: Stage, options: argparse.Namespace, script: Callable[[Strikes], Coroutine[Any, Any, None]]
) -> tuple[ChaosReport, Seen]:
    """A game day that ends with its script."""
    plan = ChaosPlan(
        span=_ENDLESS,
        every=_ENDLESS,
        streams=options.streams,
        seed=options.seed,
        longest_gap=options.longest_gap,
    )
    faults, workload = Faults(on.running, on.etcd), read_workload(options.workload)
    chaos = Chaos(on.running, on.front, faults, workload, plan, script)
    with Screen(Console(stderr=True, highlight=False)) as screen:
        made = await chaos.run(screen)
    assert chaos.seen is not None
    return made, chaos.seen


def tell(options: argparse.Namespace, made: ChaosReport, more: dict[str, Any] | None = None) -> None:
    if options.format == "json":
        print(json.dumps({**made.model_dump(mode="json"), **(more or {})}, indent=2))
    else:
        Console(highlight=False, width=140).print(verdict(made))


async def kills(options: argparse.Namespace) -> bool:
    """Until each role was killed so often while a session was in each state, or the time is over."""
    # Few enough at once that some wait.
    fewer = (
        [f"spec.admission.pools.main.requests={max(1, options.streams * 3 // 8)}"] if "queued" in options.states else []
    )
    async with stage(options, GRAPH, *fewer) as on:
        graph = on.running.graph
        chance = random.Random(f"{options.seed}/kills")
        aims = [(role, state) for role in options.roles for state in options.states] * options.kills
        chance.shuffle(aims)

        async def script(strikes: Strikes) -> None:
            hunt = Hunt(on.front, graph)
            until = now() + options.limit
            while aims and now() < until:
                role, state = aims.pop()
                # Another one of its kind is there: what has no other is another command's matter.
                if not await all_ready(on, strikes, role):
                    return
                caught = await hunt.find(role, state, chance, within=10.0)
                await strikes.begin(Fault("kill", caught or some(graph, role, chance), now() - strikes.begun, 0.0))
            await strikes.pause(3.0)

        made, seen = await day(on, options, script)
        rows = [one for one in meetings(seen, graph) if one.role in options.roles and one.state in options.states]
        tell(options, made, {"met": [asdict(row) for row in rows]})
        if options.format == "text":
            print(f"\n{'role':<9}{'state':<14}{'kills':>6}{'streams':>9}{'same':>7}{'longest gap':>13}")
            for row in rows:
                print(f"{row.role:<9}{row.state:<14}{row.kills:>6}{row.streams:>9}{row.same:>7}{row.gap:>11.2f} s")
        short = [row for row in rows if row.kills < options.kills]
        for row in short:
            print(f"only {row.kills} kills of a {row.role} met a session that was {row.state}", file=sys.stderr)
        return made.ok and not short


def some(graph: Graph, role: str, chance: random.Random) -> str:
    """Any worker of a role."""
    pools = {name: pool.replicas for name, pool in graph.spec.pools.items() if pool.role == role}
    return chance.choice([f"{name}/{index}" for name, replicas in pools.items() for index in range(replicas)])


async def all_ready(on: Stage, strikes: Strikes, role: str = "") -> bool:
    """Wait until every worker is, or every one of a role; False: the day is to end meanwhile."""
    pools = [pool for pool in on.running.graph.spec.pools.values() if role in ("", pool.role)]
    count = sum(pool.replicas for pool in pools)
    roles = {pool.role for pool in pools}
    while sum(member.role in roles and member.state == "ready" for member in on.running.members) < count:
        if not await strikes.pause(0.05):
            return False
    # A moment for the frontend to know it as well.
    return await strikes.pause(0.5)


async def etcd(options: argparse.Namespace) -> bool:
    async with stage(options, GRAPH, etcd=True) as on:
        assert on.etcd is not None

        async def script(strikes: Strikes) -> None:
            if await strikes.pause(2.0):
                await strikes.begin(Fault("etcd", "", 2.0, options.away))
                await strikes.pause(5.0)

        made, _ = await day(on, options, script)
        known = len(on.running.members)
        there = on.etcd.ctl("get", "/", "--prefix", "--keys-only").split()
        tell(options, made, {"keys": there, "members": known})
        print(
            f"in etcd again: {len(there)} keys, {known} members of {len(on.running.processes)} processes",
            file=sys.stderr,
        )
        return made.ok and known == len(on.running.processes) and bool(there)


async def cut(options: argparse.Namespace) -> bool:
    async with stage(options, GRAPH) as on:
        chance = random.Random(f"{options.seed}/cut")

        async def script(strikes: Strikes) -> None:
            hunt = Hunt(on.front, on.running.graph)
            for _ in range(options.times):
                for state in ("transferring", "sealing", "draining"):
                    await hunt.find("main", state, chance, within=20.0)
                    await strikes.begin(Fault("cut", "wan", now() - strikes.begun, options.away))
                    if not await all_ready(on, strikes) or not await strikes.pause(3.0):
                        return

        made, _ = await day(on, options, script)
        tell(options, made)
        return made.ok


async def two_by_two(options: argparse.Namespace) -> bool:
    async with stage(options, TWO_BY_TWO) as on:

        async def script(strikes: Strikes) -> None:
            for cluster in ("b1", "b2") * options.times:
                if not await strikes.pause(3.0):
                    return
                await strikes.begin(Fault("cluster", cluster, now() - strikes.begun, 0.0))
                if not await all_ready(on, strikes):
                    return
            await strikes.pause(3.0)

        made, _ = await day(on, options, script)
        tell(options, made)
        return made.ok


async def soaked(options: argparse.Namespace) -> bool:
    async with stage(options, GRAPH, "spec.links.wan.bandwidth=200Mbit/s") as on:
        return await soak(on.running, on.front, options)


async def strangers(options: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory(prefix="pdd-certs-") as directory:
        return await strangers_at(options, Path(directory), stage, GRAPH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str, run: Any, engine: str = "tiny", streams: int = 8, workload: str = WORKLOAD, gap: float = 2.0
    ) -> Any:
        one = commands.add_parser(name)
        one.add_argument("--engine", choices=("tiny", "scripted"), default=engine)
        one.add_argument("--streams", type=int, default=streams)
        one.add_argument("--seed", type=int, default=0)
        one.add_argument("--longest-gap", type=float, default=gap, help="seconds between two tokens; more is no pass")
        one.add_argument("--workload", default=workload)
        one.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="as for `pdd-runtime up`")
        one.add_argument("--format", choices=("text", "json"), default="text")
        one.set_defaults(run=run)
        return one

    one = command("kills", kills)
    one.add_argument("--kills", type=int, default=20, help="of each role in each state")
    one.add_argument("--roles", default=",".join(ROLES), type=lambda text: text.split(","))
    one.add_argument("--states", default=",".join(STATES), type=lambda text: text.split(","))
    one.add_argument("--limit", type=float, default=3600.0, help="seconds after which no more are made")
    command("etcd", etcd).add_argument("--away", type=float, default=60.0, help="seconds")
    # Silence is noticed within 2 s; who goes on needs an extend behind that.
    one = command("cut", cut, gap=3.0)
    one.add_argument("--away", type=float, default=10.0, help="seconds")
    one.add_argument("--times", type=int, default=2, help="in each state")
    command("two-by-two", two_by_two).add_argument("--times", type=int, default=2, help="each cluster so often")
    one = command("soak", soaked, engine="scripted", streams=32, workload=SHORT)
    one.add_argument("--requests", type=int, default=10_000)
    one.add_argument("--aborts", type=int, default=1_000)
    one = command("strangers", strangers, engine="scripted")
    one.add_argument("--crowd", type=int, default=1_000, help="idle connections at once")

    options = parser.parse_args()
    logging.getLogger("pdd_runtime").addHandler(logging.NullHandler())
    # What was brought up goes down however this ends.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(0 if asyncio.run(options.run(options)) else 1)


if __name__ == "__main__":
    main()
