"""How many requests a second the simulator does on one core, in CPU time of the process: the PDD report's deployment
(10 prefill workers, 1 relay, 16 mains, a link) under its workload, and the same without relays.

    .venv/bin/python bench/simulate.py [--requests N] [--rounds R]

The CPU time of a request is told as the least and the median over slices of a run: on a computer that others use as
well, the least is nearest to what it takes. The peak of memory is told for a tenth of the requests and for all.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from itertools import pairwise
from pathlib import Path

from pdd_runtime.graph import load
from pdd_runtime.planner import read_workload
from pdd_runtime.planner.pool_model import pool_models
from pdd_runtime.planner.simulate import Outcome, Scenario, simulate
from pdd_runtime.plugins import load_plugins

GRAPH = Path(__file__).parents[1] / "examples/report/graphs/pdd.yaml"
SLICE = 500
"""Requests of which the time is taken together."""


def slices(scenario: Scenario, requests: int, seed: int) -> list[float]:
    """CPU seconds of a request, in each slice of a run."""
    marks: list[float] = []
    count = 0

    def observe(_: Outcome) -> None:
        nonlocal count
        count += 1
        if count % SLICE == 0:
            marks.append(time.process_time())

    simulate(scenario, read_workload("report"), requests=requests, seed=seed, observe=observe)
    return [(later - before) / SLICE for before, later in pairwise(marks)]


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    plugins = load_plugins()
    print(f"{'routing':>14} {'least us':>9} {'median us':>9} {'requests/s':>11} {'MB, a tenth':>12} {'MB':>6}")
    for routing in ("hit-threshold", "predictive", "never-relay"):
        graph = load(GRAPH, [f"spec.routing={{plugin: {routing}}}"]).graph
        scenario = Scenario(graph, pool_models(graph, plugins), plugins)
        slices(scenario, asked.requests // 10, 0)
        little = megabytes()
        took = [each for seed in range(asked.rounds) for each in slices(scenario, asked.requests, seed)]
        least, median = min(took), statistics.median(took)
        print(
            f"{routing:>14} {least * 1e6:>9.1f} {median * 1e6:>9.1f} {1 / least:>11,.0f} {little:>12.0f} "
            f"{megabytes():>6.0f}"
        )


if __name__ == "__main__":
    main()
