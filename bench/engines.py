"""One workload on four engines: PyTorch, llama.cpp, vLLM and SGLang, with one graph, one model and the same prompts.

    PDD_VLLM_PYTHON=… PDD_SGLANG_PYTHON=… python bench/engines.py [-n 6] [--prompt 400] [--output 120]
        [--engines torch,llamacpp,vllm,sglang] [--model DIR] [--bandwidth 20Mbit/s] [--out FILE]

Brings the graph up once for each engine, one after the other: prefill and relay in one datacenter, main in another, an
emulated line between. SmolLM2-135M with its weights as float32: a directory for torch and the servers, a GGUF file of
the same weights for llama.cpp; KV as float32. Each worker computes on one thread. The line is slow enough that a
prompt's KV takes twice as long as torch takes to prefill it here and now, so that each relay has something to do. What
is measured is docs/bench.md's; besides, how many answers are the first engine's, token for token, and how busy the
machine was while each was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from pdd_runtime.cli.bars import Bars
from pdd_runtime.cli.bench import tables
from pdd_runtime.cli.console import FAILED, OK, USAGE, Consoles
from pdd_runtime.cli.validate import load_checked
from pdd_runtime.clock import now
from pdd_runtime.errors import PddError
from pdd_runtime.experiments import Measured, Outcome, Target, bench, read_workload, report
from pdd_runtime.models.source import find_model
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.engine import ModelSpec

GRAPH = Path(__file__).resolve().parent.parent / "graphs" / "quickstart-torch.yaml"
POOLS = ("prefill", "relay", "main")
MODEL = "smollm2"
CONTEXT = 2048
SLOWER = 2
PYTHON = {"vllm": "PDD_VLLM_PYTHON", "sglang": "PDD_SGLANG_PYTHON"}
"""The environment variable with the interpreter of an environment that has this server."""
SERVER = {
    "kv_memory": "512MiB",
    "engine_kv_memory": "256MiB",
    "context_length": CONTEXT,
    "batch_limit": 8,
    "start_timeout": "30min",
    "health_timeout": "1min",
}
CONFIG: dict[str, dict[str, Any]] = {
    "torch": {"context_length": CONTEXT},
    "llamacpp": {"context_length": CONTEXT, "kv_dtype": "float32"},
    # Some small functions would be compiled by the first request that needs them, which takes minutes.
    "vllm": {**SERVER, "threads": 1, "args": ["--enforce-eager"], "env": {"TORCHDYNAMO_DISABLE": "1"}},
    "sglang": {**SERVER, "device": "cpu"},
}


class Load(NamedTuple):
    """The machine's load averages of one minute while an engine was measured."""

    first: float
    last: float


class Watching(Bars):
    """Notes the load as well."""

    def __init__(self, consoles: Consoles, requests: int) -> None:
        super().__init__(consoles.err, requests)
        self.load: dict[str, Load] = {}

    def warming(self, name: str) -> None:
        super().warming(name)
        self.load[name] = Load(os.getloadavg()[0], 0.0)

    def ended(self, name: str, outcome: Outcome) -> None:
        super().ended(name, outcome)
        self.load[name] = self.load[name]._replace(last=os.getloadavg()[0])


def write_model(directory: Path) -> dict[str, Path]:
    """Where each engine finds the weights; what is there already is taken. Raises `EngineError`."""
    from pdd_llamacpp.testing import dequantise
    from pdd_torch.export import write_directory

    whole, file = directory / MODEL, directory / f"{MODEL}.gguf"
    if not whole.exists():
        write_directory(MODEL, whole)
    if not file.exists():
        scratch = file.with_suffix(".part")
        dequantise(find_model(MODEL).path, scratch).rename(file)
    return {"torch": whole, "llamacpp": file, "vllm": whole, "sglang": whole}


async def line(model: Path, prompt: int) -> str:
    """The bandwidth at which the KV of so many tokens takes `SLOWER` times their prefill, by torch and alone."""
    from pdd_torch.engine import TorchEngine

    from pdd_runtime.testing.engine_harness import EngineHarness

    random = Random(prompt)
    engine = TorchEngine(TorchEngine.Config(), ModelSpec(source=str(model), dtype="float32"))
    async with EngineHarness.started(engine) as harness:
        seconds = []
        for length in (32, prompt):  # what happens only once happens in the first
            begun = now()
            await harness.prefill([random.randrange(1_000, 40_000) for _ in range(length)])
            seconds.append(now() - begun)
        bits = 8 * prompt * harness.info.layout.token_bytes
    return f"{bits / (SLOWER * seconds[-1]) / 1e6:.1f}Mbit/s"


def target(engine: str, model: Path, bandwidth: str, consoles: Consoles) -> Target:
    """The graph with this engine in every pool. Raises `GraphError` and `PluginError`."""
    config = CONFIG[engine]
    if engine in PYTHON:
        # A server runs in a directory of its own.
        config = {**config, "python": str(Path(os.environ[PYTHON[engine]]).absolute())}
    reference = json.dumps({"plugin": engine, "config": config})
    overrides = [
        f"metadata.name={engine}",
        f"spec.model.source={model}",
        f"spec.links.wan.bandwidth={bandwidth}",
        "spec.frontend.port=0",
        *(f"spec.pools.{pool}.engine={reference}" for pool in POOLS),
    ]
    loaded, _ = load_checked(GRAPH, overrides, consoles)
    return Target(engine, loaded.graph, str(GRAPH))


def agreement(first: Measured, other: Measured) -> dict[str, int]:
    """Answers that are the same, and how many tokens are before the first difference."""
    expected = {outcome.key: outcome.tokens for outcome in first.outcomes if outcome.error is None}
    pairs = [
        (expected[outcome.key], outcome.tokens)
        for outcome in other.outcomes
        if outcome.error is None and outcome.key in expected
    ]
    alike = [_alike(*pair) for pair in pairs]
    return {
        "answers": len(pairs),
        "same": sum(one == other for one, other in pairs),
        "tokens": sum(len(one) for one, _ in pairs),
        "tokens_before_a_difference": sum(alike),
    }


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def chosen(names: Sequence[str]) -> list[str]:
    """Those that can be run here; the others are told of."""
    there = []
    for name in names:
        variable = PYTHON.get(name)
        if variable is None or Path(os.environ.get(variable, "/")).is_file():
            there.append(name)
        else:
            print(
                f"{name} is left out: {variable} names no interpreter of an environment that has it"
                f" (`make test-{name}` makes one: .venv-{name}/bin/python)",
                file=sys.stderr,
            )
    return there


def words(agreements: Mapping[str, Mapping[str, int]], load: Mapping[str, Load], first: str) -> str:
    lines = [
        f"{name}: {found['same']} of {found['answers']} answers are those of {first}; "
        f"{found['tokens_before_a_difference']} of {found['tokens']} tokens come before a difference"
        for name, found in agreements.items()
    ]
    lines += [f"{name}: the machine's load was {load.first:.1f} to {load.last:.1f}" for name, load in load.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(CONFIG), help="the first is what others are compared with")
    parser.add_argument("--prompt", type=int, default=400, help="tokens")
    parser.add_argument("--output", type=int, default=120, help="tokens")
    parser.add_argument("-n", "--requests", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bandwidth", help="of the line between the datacenters, instead")
    parser.add_argument("--model", type=Path, help="where the weights (1.1 GB) are, or are to be kept")
    parser.add_argument("--wait-timeout", type=float, default=1800.0, help="seconds for a graph to come up")
    parser.add_argument("--out", type=Path, help="a file for all of it as JSON")
    args = parser.parse_args()
    names = args.engines.split(",")
    if unknown := [name for name in names if name not in CONFIG]:
        parser.error(f"there is no engine {', '.join(unknown)}: they are {', '.join(CONFIG)}")
    names, consoles = chosen(names), Consoles()
    if not names:
        return USAGE
    with ExitStack() as stack:
        directory = args.model or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdd-bench-")))
        directory.mkdir(parents=True, exist_ok=True)
        try:
            workload = read_workload(f"prompt={args.prompt},output={args.output},vocabulary=1000-40000")
            paths = write_model(directory.resolve())
            bandwidth = args.bandwidth or asyncio.run(line(paths["torch"], args.prompt))
            targets = [target(name, paths[name], bandwidth, consoles) for name in names]
        except PddError as error:
            consoles.error(error)
            return USAGE
        bars = Watching(consoles, args.requests)
        with bars:
            measured = asyncio.run(
                bench(targets, workload, args.requests, args.seed, load_plugins(), bars, args.wait_timeout)
            )
    made = report(workload, args.requests, args.seed, measured)
    agreements = {one.name: agreement(measured[0], one) for one in measured[1:]}
    if args.out is not None:
        load = {name: found._asdict() for name, found in bars.load.items()}
        whole = {**made.to_json(), "bandwidth": bandwidth, "agreement": agreements, "load": load}
        args.out.write_text(json.dumps(whole, indent=2) + "\n")
    consoles.out.print(tables(made))
    print(f"a line of {bandwidth}", words(agreements, bars.load, names[0]), sep="\n")
    for name, graph in made.graphs.items():
        if graph.first_error:
            print(f"{name}: {graph.errors} of {graph.requests} failed; the first: {graph.first_error}", file=sys.stderr)
    return FAILED if made.failed else OK


if __name__ == "__main__":
    sys.exit(main())
