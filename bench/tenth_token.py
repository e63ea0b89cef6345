"""How soon is the tenth token there? PDD against PD over the same emulated WAN, and against PD inside one datacenter.

    python bench/tenth_token.py [--engine torch] [--repeats 5] [--prompt-tokens 1000] [--format text|json]

Brings up pd-intra, pd-cross and quickstart side by side, measures the prefill of a cold prompt, sets the link so that
its KV takes three times as long, and sends cold prompts to the three in turn, one at a time. A client's stopwatch
counts; handoff gaps are checked on the stream as well as read from the timeline. Ratios are of medians in this one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from pdd_runtime.clock import now
from pdd_runtime.experiments.client import Client
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.graph import load

ROOT = Path(__file__).resolve().parent.parent
GRAPHS = ("pd-intra", "pd-cross", "quickstart")
RTT = 0.050
TIMEOUT = 600.0


class Running:
    """A graph brought up with its own state, taken down at the end."""

    def __init__(self, graph: str, state: Path, overrides: list[str]) -> None:
        self.graph, self.env = graph, {**os.environ, "PDD_STATE_DIR": str(state)}
        self.cli = [sys.executable, "-m", "pdd_runtime.cli"]
        sets = [arg for item in [*overrides, "spec.frontend.port=0"] for arg in ("--set", item)]
        subprocess.run(
            [*self.cli, "up", str(ROOT / "graphs" / f"{graph}.yaml"), *sets, "-d", "--wait"],
            env=self.env,
            check=True,
            stdout=sys.stderr,
        )
        rows = json.loads(subprocess.check_output([*self.cli, "ps", graph, "--format", "json"], env=self.env))
        self.url = next(row["endpoint"] for row in rows if row["role"] == "frontend")

    def down(self) -> None:
        subprocess.run([*self.cli, "down", self.graph], env=self.env, check=False, stdout=sys.stderr)

    def ask(self, prompt: list[int], max_tokens: int) -> Outcome:
        return asyncio.run(self._ask(prompt, max_tokens))

    async def _ask(self, prompt: list[int], max_tokens: int) -> Outcome:
        async with Client(self.url, TIMEOUT, salt="") as client:
            outcome = Outcome(session=0, turn=0, prompt=len(prompt), due=now(), sent=0.0)
            await client.ask(client.body(prompt, max_tokens), outcome)
        if outcome.error is not None:
            raise RuntimeError(f"{self.graph}: {outcome.error}")
        return outcome


def cold_prompt(rng: random.Random, tokens: int) -> list[int]:
    """Token ids that no cache has seen."""
    return [rng.randrange(1_000, 40_000) for _ in range(tokens)]


def decode_step(outcome: Outcome, tail: int = 40) -> float:
    """The median time between two tokens of main's, at the end of the answer."""
    times = outcome.stamps[-tail:]
    return statistics.median(b - a for a, b in pairwise(times))


def engines(graph: str, engine: str | None) -> list[str]:
    """Overrides that give every pool of a graph this engine."""
    pools = load(ROOT / "graphs" / f"{graph}.yaml").graph.spec.pools if engine else ()
    return [f"spec.pools.{pool}.engine.plugin={engine}" for pool in pools]


def measure_line(prompt_tokens: int, rng: random.Random, state: Path, engine: str | None) -> tuple[float, float]:
    """(seconds of a cold prefill, bits/s at which its KV takes three times that)."""
    graph = Running("pd-intra", state, engines("pd-intra", engine))
    try:
        graph.ask(cold_prompt(rng, 64), 2)
        runs = [graph.ask(cold_prompt(rng, prompt_tokens), 2) for _ in range(3)]
    finally:
        graph.down()
    prefill = statistics.median(run.metric("ttft") for run in runs)
    kv_bytes = runs[-1].timeline["kv"][0]["bytes"]
    return prefill, kv_bytes * 8 / (3 * prefill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="of all pools, instead of the graphs'")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    results: dict[str, list[Outcome]] = {name: [] for name in GRAPHS}
    with tempfile.TemporaryDirectory(prefix="pdd-bench-") as scratch:
        prefill, bits = measure_line(args.prompt_tokens, rng, Path(scratch) / "line", args.engine)
        line = [f"spec.links.wan.bandwidth={bits / 1e6:.3f}Mbit/s", f"spec.links.wan.rtt={RTT * 1e3:.0f}ms"]
        graphs: list[Running] = []
        try:
            for name in GRAPHS:
                overrides = [*engines(name, args.engine), *([] if name == "pd-intra" else line)]
                graphs.append(Running(name, Path(scratch) / name, overrides))
                graphs[-1].ask(cold_prompt(rng, 64), 4)
            for repeat in range(args.repeats):
                for graph in graphs:
                    run = graph.ask(cold_prompt(rng, args.prompt_tokens), args.max_tokens)
                    results[graph.graph].append(run)
                    print(
                        f"{repeat} {graph.graph:<11} first {run.metric('ttft'):6.2f}  tenth {run.metric('tt10'):6.2f}"
                        f"  longest gap {run.metric('longest_gap'):6.3f}  handoff {run.timeline['handoff']}",
                        file=sys.stderr,
                    )
        finally:
            for graph in graphs:
                graph.down()
    report(results, prefill, bits, args.format)


def report(results: dict[str, list[Outcome]], prefill: float, bits: float, form: str) -> None:
    median = statistics.median
    rows = {
        name: {
            "first": median(run.metric("ttft") for run in runs),
            "tenth": median(run.metric("tt10") for run in runs),
            "longest_gap": median(run.metric("longest_gap") for run in runs),
            "decode_step": median(decode_step(run) for run in runs),
        }
        for name, runs in results.items()
    }
    gaps = [gap for run in results["quickstart"] if (gap := run.metric("handoff_gap")) is not None]
    bound = RTT + 2 * rows["quickstart"]["decode_step"]
    summary = {
        "prefill_s": prefill,
        "link_mbit_s": bits / 1e6,
        "rtt_s": RTT,
        "graphs": rows,
        "tenth_vs_pd_cross": rows["quickstart"]["tenth"] / rows["pd-cross"]["tenth"],
        "tenth_vs_pd_intra": rows["quickstart"]["tenth"] / rows["pd-intra"]["tenth"],
        "handoff_gap_median_s": median(gaps) if gaps else None,
        "handoff_gap_max_s": max(gaps) if gaps else None,
        "rtt_plus_two_steps_s": bound,
        "handed_off": f"{len(gaps)} of {len(results['quickstart'])}",
    }
    if form == "json":
        print(json.dumps(summary, indent=2))
        return
    print(f"cold prefill {prefill:.2f} s; link {bits / 1e6:.1f} Mbit/s, RTT {RTT * 1e3:.0f} ms; medians, seconds")
    print(f"{'graph':<12}{'first':>8}{'tenth':>8}{'longest gap':>13}{'decode step':>13}")
    for name, row in rows.items():
        print(f"{name:<12}{row['first']:8.2f}{row['tenth']:8.2f}{row['longest_gap']:13.3f}{row['decode_step']:13.3f}")
    print(f"tenth token, PDD / PD over the WAN:        {summary['tenth_vs_pd_cross']:.3f}   (to reach: 0.5 or less)")
    print(f"tenth token, PDD / PD in one datacenter:   {summary['tenth_vs_pd_intra']:.3f}   (to reach: 1.1 or less)")
    if gaps:
        print(
            f"gap at the handoff: median {median(gaps):.3f}, longest {max(gaps):.3f} of {summary['handed_off']}"
            f"   (to reach: RTT + 2 decode steps = {bound:.3f})"
        )


if __name__ == "__main__":
    main()
