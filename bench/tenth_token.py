"""How soon is the tenth token there? PDD against PD over the same emulated WAN, and against PD inside one datacenter.

    python bench/tenth_token.py [--repeats 5] [--prompt-tokens 1000] [--format text|json]

Brings up pd-intra, pd-cross and quickstart side by side, measures the prefill of a cold prompt, sets the link so that
its KV takes three times as long, and sends cold prompts to the three in turn, one at a time. A client's stopwatch
counts; handoff gaps are checked on the stream as well as read from the timeline. Ratios are of medians in this one run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
GRAPHS = ("pd-intra", "pd-cross", "quickstart")
RTT = 0.050


@dataclass
class Stream:
    """One request as its client saw it: seconds from sending."""

    times: list[float] = field(default_factory=list)
    """When each output token was there."""
    timeline: dict = field(default_factory=dict)

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def tenth(self) -> float:
        return self.times[9]

    @property
    def longest_gap(self) -> float:
        return max(b - a for a, b in pairwise(self.times))


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

    def ask(self, prompt: list[int], max_tokens: int) -> Stream:
        out = Stream()
        body = {
            "model": httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"],
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 0,
            "stream": True,
        }
        start = time.perf_counter()
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=600) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(f"{self.graph}: {chunk['error']['message']}")
                for choice in chunk["choices"]:
                    tokens = (choice.get("logprobs") or {}).get("tokens") or []
                    out.times += [time.perf_counter() - start] * len(tokens)
            request_id = response.headers["x-pdd-request-id"]
        out.timeline = httpx.get(f"{self.url}/pdd/requests/{request_id}").json()
        return out


def cold_prompt(rng: random.Random, tokens: int) -> list[int]:
    """Token ids that no cache has seen."""
    return [rng.randrange(1_000, 40_000) for _ in range(tokens)]


def decode_step(stream: Stream, tail: int = 40) -> float:
    """The median time between two tokens of main's, at the end of the stream."""
    times = stream.times[-tail:]
    return statistics.median(b - a for a, b in pairwise(times))


def measure_line(prompt_tokens: int, rng: random.Random, state: Path) -> tuple[float, float]:
    """(seconds of a cold prefill, bits/s at which its KV takes three times that)."""
    graph = Running("pd-intra", state, [])
    try:
        graph.ask(cold_prompt(rng, 64), 2)
        runs = [graph.ask(cold_prompt(rng, prompt_tokens), 2) for _ in range(3)]
    finally:
        graph.down()
    prefill = statistics.median(run.first for run in runs)
    kv_bytes = runs[-1].timeline["kv"][0]["bytes"]
    return prefill, kv_bytes * 8 / (3 * prefill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    results: dict[str, list[Stream]] = {name: [] for name in GRAPHS}
    with tempfile.TemporaryDirectory(prefix="pdd-bench-") as scratch:
        prefill, bits = measure_line(args.prompt_tokens, rng, Path(scratch) / "line")
        line = [f"spec.links.wan.bandwidth={bits / 1e6:.3f}Mbit/s", f"spec.links.wan.rtt={RTT * 1e3:.0f}ms"]
        graphs: list[Running] = []
        try:
            for name in GRAPHS:
                graphs.append(Running(name, Path(scratch) / name, [] if name == "pd-intra" else line))
                graphs[-1].ask(cold_prompt(rng, 64), 4)
            for repeat in range(args.repeats):
                for graph in graphs:
                    stream = graph.ask(cold_prompt(rng, args.prompt_tokens), args.max_tokens)
                    results[graph.graph].append(stream)
                    print(
                        f"{repeat} {graph.graph:<11} first {stream.first:6.2f}  tenth {stream.tenth:6.2f}"
                        f"  longest gap {stream.longest_gap:6.3f}  handoff {stream.timeline['handoff']}",
                        file=sys.stderr,
                    )
        finally:
            for graph in graphs:
                graph.down()
    report(results, prefill, bits, args.format)


def report(results: dict[str, list[Stream]], prefill: float, bits: float, form: str) -> None:
    median = statistics.median
    rows = {
        name: {
            "first": median(s.first for s in streams),
            "tenth": median(s.tenth for s in streams),
            "longest_gap": median(s.longest_gap for s in streams),
            "decode_step": median(decode_step(s) for s in streams),
        }
        for name, streams in results.items()
    }
    gaps = [s.timeline["handoff"]["gap"] for s in results["quickstart"] if s.timeline["handoff"]]
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
