"""How many requests a second the simulator does on one core: the PDD report's deployment (10 prefill workers, 1 relay,
16 mains, a link) under its workload, by three routing policies; as sources, and compiled (a wheel is built for it, with
a C compiler, in a minute). Both in turn, so that their ratio holds on a machine whose speed varies.

    .venv/bin/python bench/simulate.py [--requests N] [--rounds R] [--sources]

The CPU time of a request is told as the least and the median over runs: on a computer that others use as well, the
least is nearest to what it takes. It is told in turns of an empty loop as well, by which figures of different machines
can be compared. The peak of memory is told for a tenth of the requests and for all.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GRAPH = ROOT / "examples/report/graphs/pdd.yaml"
SHORT = 10
"""Runs that have one of so many of the requests each, before one that has all of them."""
LOOP = 1_000_000
ROUTINGS = ("hit-threshold", "predictive", "never-relay")


def one(routing: str, requests: int, seed: int) -> dict[str, Any]:
    """CPU seconds of a request: of short runs, then of one with all the requests. Of an empty loop's turn beside them;
    megabytes behind a short run, and at the end."""
    from pdd_runtime.graph import load
    from pdd_runtime.planner import read_workload
    from pdd_runtime.planner.pool_model import pool_models
    from pdd_runtime.planner.simulate import Scenario, simulate
    from pdd_runtime.plugins import load_plugins

    plugins = load_plugins()
    graph = load(GRAPH, [f"spec.routing={{plugin: {routing}}}"]).graph
    scenario = Scenario(graph, pool_models(graph, plugins), plugins)

    def took(many: int, seed: int) -> float:
        began = time.process_time()
        simulate(scenario, read_workload("report"), requests=many, seed=seed)
        return (time.process_time() - began) / many

    short = requests // SHORT
    took(short, seed)
    little, loop = megabytes(), empty_loop()
    runs = [took(short, seed * SHORT + number) for number in range(SHORT)]
    loop = min(loop, empty_loop())
    return {"runs": [*runs, took(requests, seed)], "loop": loop, "little": little, "most": megabytes()}


def empty_loop() -> float:
    """CPU seconds of one turn."""
    began = time.process_time()
    for _ in range(LOOP):
        pass
    return (time.process_time() - began) / LOOP


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compiled(into: Path) -> Path:
    """Build a wheel whose simulator is compiled, and unpack it."""
    command = [
        "make",
        "--silent",
        "--assume-old=install",
        "wheel",
        f"BIN={Path(sys.executable).parent}",
        f"DIST={into}",
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    (wheel,) = into.glob("*.whl")
    unpacked = into / "unpacked"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(unpacked)
    return unpacked


def asked_of(tree: Path, *arguments: object) -> dict[str, Any]:
    """One run, in a process of its own that takes the package from `tree`."""
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    made = subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(tree)}, stdout=subprocess.PIPE)
    answer: dict[str, Any] = json.loads(made.stdout)
    return answer


def table(found: Mapping[tuple[str, str], list[dict[str, Any]]]) -> None:
    print(
        f"{'routing':>14} {'':>9} {'least us':>9} {'median us':>9} {'requests/s':>11} {'empty loops':>12} "
        f"{'MB, a tenth':>12} {'MB':>6}"
    )
    leasts = {}
    for (routing, form), runs in found.items():
        each = [seconds for run in runs for seconds in run["runs"]]
        least, median = min(each), statistics.median(each)
        leasts[routing, form] = least
        print(
            f"{routing:>14} {form:>9} {least * 1e6:>9.1f} {median * 1e6:>9.1f} {1 / least:>11,.0f} "
            f"{least / min(run['loop'] for run in runs):>12,.0f} "
            f"{max(run['little'] for run in runs):>12.0f} {max(run['most'] for run in runs):>6.0f}"
        )
    for routing in ROUTINGS:
        if (routing, "compiled") in leasts:
            ratio = leasts[routing, "sources"] / leasts[routing, "compiled"]
            print(f"{routing}: compiled, {ratio:.2f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sources", action="store_true", help="the sources alone: nothing is built")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        routing, requests, seed = asked.one
        print(json.dumps(one(routing, int(requests), int(seed))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        trees = {"sources": ROOT}
        if not asked.sources and shutil.which(os.environ.get("CC", "cc")) is None:
            print("no C compiler is there: the sources alone")
        elif not asked.sources:
            trees["compiled"] = compiled(Path(scratch))
        found: dict[tuple[str, str], list[dict[str, Any]]] = {
            (routing, form): [] for routing in ROUTINGS for form in trees
        }
        for seed in range(asked.rounds):
            for (routing, form), runs in found.items():
                runs.append(asked_of(trees[form], routing, asked.requests, seed))
        table(found)


if __name__ == "__main__":
    main()
