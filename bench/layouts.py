"""Conversion of KV blocks between layouts, against a plain copy of the same memory, in one run.

    python bench/layouts.py [--megabytes 256] [--repeats 7]

One thread, as in a worker, and its CPU time, so that who shares the machine counts less. Blocks of both sides lie in
memory that does not fit the caches. The ways take turns, and medians are printed: GB of source blocks per second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from pdd_runtime.kv import Conversion, KvLayout, Run
from pdd_runtime.kv.pool import BlockPool

MODELS = {
    "Llama-3-8B, bfloat16": KvLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16),
    "SmolLM2-135M, float32": KvLayout(layers=30, kv_heads=3, head_dim=64, dtype="float32", block_size=16),
}


def changes(source: KvLayout) -> dict[str, dict[str, object]]:
    everything = {"block_size": 32, "axes": "lkhtd", "rope": "interleaved"}
    return {
        "block size 16 → 32": {"block_size": 32},
        "block size 16 → 7": {"block_size": 7},
        "NHD → HND": {"axes": "lkhtd"},
        "K and V a layer → all K, all V": {"axes": "klthd"},
        f"TP 1 → {source.kv_heads}": {"tp_size": source.kv_heads},
        "RoPE half → interleaved": {"rope": "interleaved"},
        "→ float32": {"dtype": "float32"},
        "→ bfloat16": {"dtype": "bfloat16"},
        "→ float16": {"dtype": "float16"},
        "size, order, RoPE": everything,
        "size, order, RoPE, → float32": everything | {"dtype": "float32"},
        "size, order, RoPE, → bfloat16": everything | {"dtype": "bfloat16"},
    }


def filled(layout: KvLayout, tokens: int) -> BlockPool:
    """Blocks for so many tokens, of numbers like those of KV; every page is there."""
    pool = BlockPool(layout.block_bytes, -(-tokens // layout.block_size))
    numbers = np.random.default_rng(1).standard_normal(layout.block_bytes // 4).astype(np.float32)
    bits = numbers.view(np.uint32)
    if layout.dtype == "bfloat16":
        bits = np.repeat((bits >> 16).astype(np.uint16), 2)
    content = bits.tobytes()
    for number in range(pool.blocks):
        pool.memory(number)[:] = content[: layout.block_bytes]
    return pool


def empty(layout: KvLayout, tokens: int) -> BlockPool:
    """The same, of zeros."""
    pool = BlockPool(layout.block_bytes, -(-tokens // layout.block_size))
    pool.buffer()[:] = bytes(len(pool.buffer()))
    return pool


def copying(source: KvLayout, pool: BlockPool, tokens: int) -> Callable[[], None]:
    out = empty(source, tokens)

    def copy() -> None:
        for number in range(pool.blocks):
            out.memory(number)[:] = pool.memory(number)

    return copy


def converting(source: KvLayout, target: KvLayout, pool: BlockPool, tokens: int) -> Callable[[], None]:
    conversion, out = Conversion(source, target), empty(target, tokens)

    def convert() -> None:
        run = Run(conversion, 0, tokens)
        for number in range(pool.blocks):
            run.add(number * source.block_size, pool.memory(number), out.memory)

    return convert


def seconds(work: Callable[[], None]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def report(name: str, source: KvLayout, megabytes: int, repeats: int) -> None:
    tokens = max(1, int(megabytes * 1e6 / source.block_bytes)) * source.block_size
    pool = filled(source, tokens)
    ways = {"plain copy": copying(source, pool, tokens)}
    for change, changed in changes(source).items():
        if changed.get("dtype") != source.dtype:
            ways[change] = converting(source, msgspec.structs.replace(source, **changed), pool, tokens)
    took: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for way, work in ways.items():
            took[way].append(seconds(work))
    print(f"\n{name}: {pool.blocks} blocks of {source.block_bytes / 1024:.0f} KiB, {repeats} repeats, medians")
    print(f"{'':36}{'GB/s':>8}{'of a copy':>12}{'us a block':>12}")
    base = statistics.median(took["plain copy"])
    for way, times in took.items():
        median = statistics.median(times)
        rate = len(pool.buffer()) / median / 1e9
        print(f"{way:36}{rate:8.2f}{base / median:12.2f}{median / pool.blocks * 1e6:12.0f}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    for name, layout in MODELS.items():
        report(name, layout, options.megabytes, options.repeats)


if __name__ == "__main__":
    main()
