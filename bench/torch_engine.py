"""What the torch engine's passes cost, fast beside exact, in one run.

    python bench/torch_engine.py [--dtype float32|bfloat16] [--context 512 2048] [--repeats 5] [--format text|json]

One process, one thread, the model without an engine around it. Times are of that thread's CPU, and each is the best of
the repeats, which go round all measurements: so a busy machine spoils little. An extend is set against as many decode
steps.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

from pdd_torch.runner import TorchRunner

from pdd_runtime.inprocess import Chunk, InProcessConfig
from pdd_runtime.kv import BlockStore
from pdd_runtime.plugins.engine import ModelSpec

BATCH = 16
EXTENDS = (8, 32, 64)


class Bench:
    """One mode of the model with `BATCH` sequences of `context` tokens in its blocks."""

    def __init__(self, spec: ModelSpec, context: int) -> None:
        config = InProcessConfig()
        self.context, self.budget = context, config.token_budget
        self.runner = TorchRunner(config, spec)
        per_sequence = -(-(context + max(EXTENDS)) // config.block_size)
        store = BlockStore(self.runner.layout, BATCH * per_sequence)
        self.runner.open(store.buffer())
        self.tokens = tuple(random.Random(0).choices(range(self.runner.vocab), k=context + max(EXTENDS)))
        self.sequences = [tuple(store.allocate(per_sequence)) for _ in range(BATCH)]
        for blocks in self.sequences:
            self.prefill(blocks)

    def prefill(self, blocks: tuple[int, ...]) -> None:
        for start in range(0, self.context, self.budget):
            end = min(start + self.budget, self.context)
            self.runner.step([self.chunk(0, start, end, blocks)])

    def behind(self, count: int, sequences: int = 1) -> None:
        """One pass that computes `count` tokens behind the context of so many sequences."""
        end = self.context + count
        parts = enumerate(self.sequences[:sequences])
        self.runner.step([self.chunk(number, self.context, end, blocks) for number, blocks in parts])

    def chunk(self, number: int, start: int, end: int, blocks: tuple[int, ...]) -> Chunk:
        return Chunk(number, self.tokens[start:end], start, blocks, samples=True)

    def measurements(self) -> dict[str, Callable[[], None]]:
        extends = {f"extend {n}": lambda n=n: self.behind(n) for n in EXTENDS}
        return {
            "prefill": lambda: self.prefill(self.sequences[0]),
            "decode 1": lambda: self.behind(1),
            f"decode {BATCH}": lambda: self.behind(1, BATCH),
            **extends,
        }


def measure(benches: dict[str, Bench], repeats: int) -> dict[str, dict[str, float]]:
    """CPU seconds of each measurement by mode."""
    best: dict[str, dict[str, float]] = {mode: {} for mode in benches}
    for _ in range(repeats):
        for mode, bench in benches.items():
            for name, run in bench.measurements().items():
                begun = time.thread_time()
                run()
                best[mode][name] = min(time.thread_time() - begun, best[mode].get(name, float("inf")))
    return best


def summary(best: dict[str, dict[str, float]], context: int) -> dict[str, dict[str, float]]:
    return {
        mode: {
            "prefill tok/s": context / seconds["prefill"],
            "decode ms": seconds["decode 1"] * 1e3,
            f"decode ms, batch {BATCH}": seconds[f"decode {BATCH}"] * 1e3,
            f"tokens a step of {BATCH} makes in the time of one alone": BATCH
            * seconds["decode 1"]
            / seconds[f"decode {BATCH}"],
            **{f"extend {n} ms": seconds[f"extend {n}"] * 1e3 for n in EXTENDS},
            **{
                f"extend {n} against {n} decode steps": n * seconds["decode 1"] / seconds[f"extend {n}"]
                for n in EXTENDS
            },
        }
        for mode, seconds in best.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    args = parser.parse_args()
    results = {}
    for context in args.context:
        specs = {mode: ModelSpec(source=args.source, dtype=args.dtype, mode=mode) for mode in ("fast", "exact")}
        benches = {mode: Bench(spec, context) for mode, spec in specs.items()}
        results[context] = summary(measure(benches, args.repeats), context)
    if args.format == "json":
        print(json.dumps(results, indent=2))
        return
    for context, modes in results.items():
        print(f"{args.source} {args.dtype}, one thread, at {context} tokens")
        print(f"{'':58}{'fast':>9}{'exact':>9}{'exact/fast':>12}")
        for name, fast in modes["fast"].items():
            exact = modes["exact"][name]
            print(f"{name:58}{fast:9.1f}{exact:9.1f}{exact / fast:12.2f}")
        print()


if __name__ == "__main__":
    main()
