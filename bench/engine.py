"""What the engines' passes cost, side by side, in one run.

    python bench/engine.py [--engines torch llamacpp torch-exact] [--source smollm2] [--dtype float32|bfloat16]
                           [--context 512 2048] [--repeats 5] [--format text|json]

One process, one thread, each model without an engine around it. Times are of that thread's CPU, and each is the best of
the repeats, which go round all measurements: so a busy machine spoils little. Ratios are to the first engine. An extend
is set against as many decode steps. `--dtype` is torch's; llama.cpp computes with the weights as the file has them, and
copies KV: out of its cells into the blocks in every pass, into its cells where a sequence begins with KV that is there.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

from pdd_llamacpp.config import LlamaCppConfig
from pdd_llamacpp.runner import LlamaCppRunner
from pdd_torch.runner import TorchRunner

from pdd_runtime.inprocess import Chunk, InProcessConfig, Runner
from pdd_runtime.kv import BlockStore
from pdd_runtime.plugins.engine import ModelSpec

BATCH = 16
EXTENDS = (8, 32, 64)


class Bench:
    """One engine's model with `BATCH` sequences of `context` tokens in its blocks."""

    def __init__(self, runner: Runner, config: InProcessConfig, context: int) -> None:
        self.runner, self.context, self.budget = runner, context, config.token_budget
        per_sequence = -(-(context + max(EXTENDS)) // config.block_size)
        store = BlockStore(runner.layout, BATCH * per_sequence)
        runner.open(store.buffer())
        self.tokens = tuple(random.Random(0).choices(range(runner.vocab), k=context + max(EXTENDS)))
        self.sequences = [tuple(store.allocate(per_sequence)) for _ in range(BATCH)]
        for number in range(BATCH):
            self.prefill(number)

    def prefill(self, number: int) -> None:
        for start in range(0, self.context, self.budget):
            self.runner.step([self.chunk(number, start, min(start + self.budget, self.context))])

    def behind(self, count: int, sequences: int = 1) -> None:
        """One pass that computes `count` tokens behind the context of so many sequences."""
        self.runner.step([self.chunk(number, self.context, self.context + count) for number in range(sequences)])

    def chunk(self, number: int, start: int, end: int) -> Chunk:
        return Chunk(number, self.tokens[start:end], start, self.sequences[number], samples=True)

    def prepare(self) -> None:
        """Bring the sequences to their context's end, as they were before the last measurement."""

    def measurements(self) -> dict[str, Callable[[], None]]:
        extends = {f"extend {n}": lambda n=n: self.behind(n) for n in EXTENDS}
        return {
            "prefill": lambda: self.prefill(0),
            "decode 1": lambda: self.behind(1),
            f"decode {BATCH}": lambda: self.behind(1, BATCH),
            **extends,
        }


class LlamaCppBench(Bench):
    runner: LlamaCppRunner

    def prepare(self) -> None:
        """It goes on only from where a sequence ends: all are copied in anew, uncounted."""
        for number in range(BATCH):
            self.copy_in(number)

    def copy_in(self, number: int = 0) -> None:
        self.runner.forget([number])
        self.number = self.runner.bring(self.chunk(number, self.context, self.context + 1))

    def copy_out(self) -> None:
        self.runner.save(self.chunk(BATCH - 1, 0, self.context), self.number)

    def measurements(self) -> dict[str, Callable[[], None]]:
        return {**super().measurements(), "copy in": self.copy_in, "copy out": self.copy_out}


def torch_bench(source: str, dtype: str, mode: str, context: int) -> Bench:
    config = InProcessConfig()
    return Bench(TorchRunner(config, ModelSpec(source=source, dtype=dtype, mode=mode)), config, context)


def llamacpp_bench(source: str, context: int) -> Bench:
    config = LlamaCppConfig(cells=BATCH * (context + max(EXTENDS)))
    return LlamaCppBench(LlamaCppRunner(config, ModelSpec(source=source)), config, context)


def measure(benches: dict[str, Bench], repeats: int) -> dict[str, dict[str, float]]:
    """CPU seconds of each measurement by engine."""
    best: dict[str, dict[str, float]] = {engine: {} for engine in benches}
    for _ in range(repeats):
        for engine, bench in benches.items():
            for name, run in bench.measurements().items():
                bench.prepare()
                begun = time.thread_time()
                run()
                best[engine][name] = min(time.thread_time() - begun, best[engine].get(name, float("inf")))
    return best


def summary(bench: Bench, seconds: dict[str, float]) -> dict[str, float]:
    decode, together = seconds["decode 1"], seconds[f"decode {BATCH}"]
    gigabytes = bench.context * bench.runner.layout.token_bytes / 1e9
    return {
        "prefill, tok/s": bench.context / seconds["prefill"],
        "decode, ms": decode * 1e3,
        f"decode, ms, batch {BATCH}": together * 1e3,
        f"tokens a step of {BATCH} makes in the time of one alone": BATCH * decode / together,
        **{f"extend {n}, ms": seconds[f"extend {n}"] * 1e3 for n in EXTENDS},
        **{f"extend {n} against {n} decode steps": n * decode / seconds[f"extend {n}"] for n in EXTENDS},
        **{f"KV {way}, GB/s": gigabytes / seconds[way] for way in ("copy in", "copy out") if way in seconds},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = ("torch", "torch-exact", "llamacpp")
    parser.add_argument("--engines", nargs="+", choices=choices, default=["torch", "llamacpp", "torch-exact"])
    parser.add_argument("--source", default="smollm2")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    args = parser.parse_args()
    make = {
        "torch": lambda context: torch_bench(args.source, args.dtype, "fast", context),
        "torch-exact": lambda context: torch_bench(args.source, args.dtype, "exact", context),
        "llamacpp": lambda context: llamacpp_bench(args.source, context),
    }
    results = {}
    for context in args.context:
        benches = {engine: make[engine](context) for engine in args.engines}
        best = measure(benches, args.repeats)
        results[context] = {engine: summary(bench, best[engine]) for engine, bench in benches.items()}
        for bench in benches.values():
            bench.runner.close()
        if args.format == "text":
            print(f"{args.source}, torch in {args.dtype}, one thread, at {context} tokens")
            show(results[context])
    if args.format == "json":
        print(json.dumps(results, indent=2))


def show(engines: dict[str, dict[str, float]]) -> None:
    first, *others = engines
    print(f"{'':58}{first:>12}" + "".join(f"{engine:>12}{'ratio':>8}" for engine in others))
    for name in dict.fromkeys(name for figures in engines.values() for name in figures):
        base = engines[first].get(name)
        line = f"{name:58}" + ("" if base is None else f"{base:.1f}").rjust(12)
        for engine in others:
            figure = engines[engine].get(name)
            line += ("" if figure is None else f"{figure:.1f}").rjust(12)
            line += (f"{figure / base:.2f}" if figure and base else "").rjust(8)
        print(line, flush=True)
    print()


if __name__ == "__main__":
    main()
