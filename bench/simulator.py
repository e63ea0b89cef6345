"""Is what the simulator says true? Graphs that are up on this machine, against the same graphs simulated.

    python bench/simulator.py                        # both graphs, about ten minutes
    python bench/simulator.py --only two-by-two
    python bench/simulator.py --format json

Each graph is brought up, profiled as `pdd-runtime profile` does it, and then sent a workload. The simulator gets the
same graph, that profile and the same requests. Compared are P50 and P90 of the time to the first token, the relay's
share of tokens, and the bytes of KV over links. Exits with 0 only where all of them agree within 15 %.

`two-by-two` has scripted engines, whose computing takes no processor: what differs there is the simulator's, or the
runtime's. `quickstart` has llama.cpp, of which three engines share this machine's cores: there requests come one by
one, because what two engines take from each other is not in a profile. Both want an idle machine: a profile that was
measured beside other work is not true an instant later.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from pdd_runtime.experiments import GraphReport, Outcome, Target, bench, report
from pdd_runtime.experiments.pool_times import Extent
from pdd_runtime.experiments.profile import Profiling
from pdd_runtime.experiments.running import running
from pdd_runtime.graph import Graph, load
from pdd_runtime.launch import GraphState, GraphStatus
from pdd_runtime.planner import Workload
from pdd_runtime.planner.pool_model import pool_models
from pdd_runtime.planner.profile import Profile
from pdd_runtime.planner.simulate import LinkModel, Scenario, Simulated, simulate
from pdd_runtime.plugins import load_plugins
from pdd_runtime.testing.running_graph import RunningGraph

HERE = Path(__file__).parent
WITHIN = 0.15
OWN_FRONTEND = ("spec.frontend.host=127.0.0.1", "spec.frontend.port=0")


@dataclass(frozen=True)
class Case:
    """One graph and what it is asked."""

    graph: Path
    workload: Workload
    requests: int
    extent: Extent
    """Of its profile: no further than the workload goes."""


CASES = {
    "two-by-two": Case(
        HERE / "simulator.yaml",
        Workload.model_validate(
            {
                "prompt": "lognormal(900, 0.6)",
                "output": "uniform(20, 120)",
                "turns": "choice(1:0.4, 3:0.4, 6:0.2)",
                "new": 250,
                "think": "exponential(8)",
                "rate": 0.65,
            }
        ),
        requests=250,
        extent=Extent(),
    ),
    "quickstart": Case(
        HERE.parent / "graphs" / "quickstart.yaml",
        Workload.model_validate(
            {
                "prompt": "lognormal(700, 0.5)",
                "output": "uniform(20, 80)",
                "turns": "choice(1:0.5, 3:0.5)",
                "new": 100,
                "concurrency": 1,
                "warmup": 4,
            }
        ),
        requests=60,
        extent=Extent(longest=2048, batch=2),
    ),
}


@dataclass(frozen=True)
class Figures:
    """Of one run, real or not. Seconds, bytes, of 1."""

    ttft_p50: float
    ttft_p90: float
    relay_share: float
    link_bytes: float
    beside: dict[str, float] = field(default_factory=dict)
    """What is shown and not judged."""


@dataclass(frozen=True)
class Compared:
    """One graph."""

    runtime: Figures
    simulated: Figures

    def differences(self) -> dict[str, float]:
        """By how much of the runtime's the simulator's is above it."""
        names = ("ttft_p50", "ttft_p90", "relay_share", "link_bytes")
        return {name: getattr(self.simulated, name) / getattr(self.runtime, name) - 1.0 for name in names}

    @property
    def good(self) -> bool:
        return all(abs(difference) <= WITHIN for difference in self.differences().values())


class Watching:
    """What goes on, on stderr."""

    def __init__(self, name: str, requests: int) -> None:
        self._name, self._requests, self._ended = name, requests, 0

    def starting(self, name: str, status: GraphStatus) -> None:
        pass

    def warming(self, name: str) -> None:
        self.told(self._name, "warms up")

    def ended(self, name: str, outcome: Outcome) -> None:
        self._ended += 1
        if self._ended % max(1, self._requests // 6) == 0:
            self.told(self._name, f"{self._ended} of {self._requests} requests")

    def told(self, subject: str, what: str) -> None:
        print(f"{subject}: {what}", file=sys.stderr)


async def measure(name: str, case: Case, graph: Graph, seed: int) -> tuple[Profile, GraphReport]:
    """The graph's profile, and what became of the workload. Brought up for each: routing goes by what workers have
    measured of late, which after a profile is no workload's."""
    plugins, watching = load_plugins(), Watching(name, case.requests)
    source = str(case.graph)
    with TemporaryDirectory(prefix="pdd-simulator-", ignore_cleanup_errors=True) as directory:
        base = Path(directory)
        async with (
            running(graph, source, plugins, base, lambda status: watching.starting(name, status)) as url,
            RunningGraph(GraphState(graph.name, base)) as connected,
        ):
            profile = await Profiling(connected, url, case.extent, watching.told).run()
    measured = await bench([Target(name, graph, source)], case.workload, case.requests, seed, plugins, watching)
    return profile, report(case.workload, case.requests, seed, measured).graphs[name]


def links(graph: Graph, profile: Profile) -> dict[str, LinkModel]:
    """As fast as they were measured. A process that emulates a link has it for itself: in these graphs one sends."""
    declared = graph.spec.links
    return {
        name: LinkModel((measured.goodput or declared[name].bandwidth) / 8, declared[name].rtt)
        for name, measured in profile.links.items()
    }


def simulated(case: Case, graph: Graph, profile: Profile, seed: int) -> Simulated:
    """The same requests."""
    plugins = load_plugins()
    scenario = Scenario(graph, pool_models(graph, plugins, profile), plugins, links(graph, profile))
    return simulate(scenario, case.workload, requests=case.requests, seed=seed, warmup=0)


def of_runtime(found: GraphReport) -> Figures:
    if found.errors or found.ttft.p50 is None or found.ttft.p90 is None:
        raise SystemExit(f"{found.errors} requests failed: {found.first_error}")
    relay, main = found.tokens["relay"], found.tokens["main"]
    beside = {
        "ttft_mean": found.ttft.mean,
        "tt10_p50": found.tt10.p50,
        "tpot_p50": found.tpot.p50,
        "e2e_p50": found.e2e.p50,
        "handoff_gap_p50": found.handoff_gap.p50,
        "prefill_hit": found.cached_tokens["prefill"] / found.prompt_tokens,
        "main_hit": found.cached_tokens["main"] / found.prompt_tokens,
        "relayed": found.routes.get("P-RLD-MD", 0) / found.requests,
    }
    return Figures(
        found.ttft.p50,
        found.ttft.p90,
        relay / (relay + main),
        float(sum(found.link_bytes.values())),
        {name: value for name, value in beside.items() if value is not None},
    )


def of_simulation(found: Simulated) -> Figures:
    assert found.ttft.p50 is not None
    assert found.ttft.p90 is not None
    beside = {
        "ttft_mean": found.ttft.mean,
        "tt10_p50": found.tt10.p50,
        "tpot_p50": found.tpot.p50,
        "e2e_p50": found.e2e.p50,
        "handoff_gap_p50": found.handoff_gap.p50,
        "prefill_hit": found.hit_rates["prefill"],
        "main_hit": found.hit_rates["main"],
        "relayed": found.routes.get("P-RLD-MD", 0) / found.requests,
    }
    return Figures(
        found.ttft.p50,
        found.ttft.p90,
        found.relay_share,
        sum(found.link_bytes.values()),
        {name: value for name, value in beside.items() if value is not None},
    )


def table(name: str, compared: Compared) -> Table:
    rows = Table(title=name, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(("", "runtime", "simulated", "differs by", "")):
        rows.add_column(column, justify="right" if 0 < number < 4 else "left")
    runtime, guessed = asdict(compared.runtime), asdict(compared.simulated)
    for figure, difference in compared.differences().items():
        good = "ok" if abs(difference) <= WITHIN else f"more than {WITHIN:.0%}"
        rows.add_row(figure, f"{runtime[figure]:.4g}", f"{guessed[figure]:.4g}", f"{difference:+.1%}", good)
    for figure, value in runtime["beside"].items():
        other = guessed["beside"].get(figure)
        rows.add_row(figure, f"{value:.4g}", "–" if other is None else f"{other:.4g}", "", "", style="dim")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=[*CASES], action="append", help="this graph; may be given more than once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, help="so many, instead of 250 and 60")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--profiles", type=Path, help="write the profiles into this directory")
    options = parser.parse_args(arguments)
    found: dict[str, Compared] = {}
    console = Console()
    for name in options.only or CASES:
        case = replace(CASES[name], requests=options.requests or CASES[name].requests)
        graph = load(case.graph, OWN_FRONTEND).graph
        profile, measured = asyncio.run(measure(name, case, graph, options.seed))
        if options.profiles is not None:
            (options.profiles / f"{name}.profile.yaml").write_text(profile.to_yaml())
        found[name] = Compared(of_runtime(measured), of_simulation(simulated(case, graph, profile, options.seed)))
        if options.format == "table":
            console.print(table(name, found[name]))
            console.print()
    load_average = os.getloadavg()[1]
    if options.format == "json":
        graphs = {name: {**asdict(one), "differences": one.differences()} for name, one in found.items()}
        print(json.dumps({"load_average": load_average, "graphs": graphs}, indent=1))
    else:
        console.print(f"Load average over 5 minutes: {load_average:.1f} on {os.cpu_count()} processors.", style="dim")
    return 0 if all(compared.good for compared in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
