"""The transport `rdma` beside raw NIXL, over this host's shared memory, or what else UCX finds.

    python bench/transport_rdma.py [--blocks 1000] [--block-kib 256] [--repeats 15] [--tls all]

Two processes. Raw is one NIXL transfer of all the blocks, prepared before the clock starts: WRITE, and READ, which is
what the transport does. The transport's time is that of a whole fetch on a connection that is there: subscription,
offers, reads, checksums on both sides, blocks given back. The ways take turns, and medians are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from pdd_rdma.config import RdmaConfig
from pdd_rdma.library import Agent, load
from pdd_rdma.memory import Region
from pdd_rdma.transport import RdmaTransport
from transport import Sink, Source, cpu

from pdd_runtime.clock import now
from pdd_runtime.kv import BlockStore, KvLayout, chain, seed
from pdd_runtime.plugins.transport import Subscription, Wanted
from pdd_runtime.testing.kv_parties import SECRET, Context

CHECKED, UNCHECKED = "rdma", "rdma, checksums off"


class Run(NamedTuple):
    seconds: float
    cpu_here: float
    cpu_there: float


def filled(layout: KvLayout, blocks: int) -> BlockStore:
    """A store whose pages are all there: the first touch of memory is no transport's cost."""
    store = BlockStore(layout, blocks)
    for number in range(blocks):
        store.memory(number)[:] = number.to_bytes(4, "little") * (layout.block_bytes // 4)
    return store


def raw(config: RdmaConfig, store: BlockStore, name: str) -> Agent:
    agent = load(config)(name)
    agent.register_memory(Region.of(store.buffer()).row(), "DRAM")
    return agent


def there(pipe: Connection, config: RdmaConfig, layout: KvLayout, blocks: int) -> None:
    """The other process: its blocks are read, and written."""
    store = filled(layout, blocks)
    agent = raw(config, store, "there")

    async def serve() -> None:
        transport = RdmaTransport(config, Context("there", memory=store.buffer()))
        endpoint = await transport.serve(Source(store), "127.0.0.1")
        pipe.send((endpoint, agent.get_agent_metadata(), Region.of(store.buffer())))
        while True:
            if not await asyncio.to_thread(pipe.poll, 0.02):
                agent.get_new_notifs()
            elif pipe.recv() == "cpu":
                pipe.send(cpu())
            else:
                break
        await transport.close()

    asyncio.run(serve())


async def compare(pipe: Connection, config: RdmaConfig, layout: KvLayout, blocks: int, repeats: int) -> None:
    size = layout.block_bytes
    store = filled(layout, blocks)
    agent = raw(config, store, "here")
    endpoint, metadata, region = pipe.recv()
    agent.add_remote_agent(metadata)
    ours = agent.prep_xfer_dlist("", Region.of(store.buffer()).blocks(size), "DRAM")
    theirs = agent.prep_xfer_dlist("there", region.blocks(size), "DRAM")
    every = np.arange(blocks, dtype=np.int32)

    def raw_transfer(operation: str) -> Callable[[], Awaitable[None]]:
        async def transfer() -> None:
            handle = agent.make_prepped_xfer(operation, ours, every, theirs, every)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            assert state == "DONE"
            handle.release()

        return transfer

    context = Context("here", memory=store.buffer())
    transports = {
        CHECKED: RdmaTransport(config, context),
        UNCHECKED: RdmaTransport(config.model_copy(update={"checksums": False}), context),
    }
    named = chain(seed("bench", "bench"), range(blocks * layout.block_size), layout.block_size)
    subscription = Subscription(
        request_id="bench",
        blocks=tuple(Wanted(block.name, block.tokens) for block in named),
        layout=layout,
        fingerprint="bench",
        epoch="bench",
        cluster="here",
        secret=SECRET,
    )

    def fetch(transport: RdmaTransport) -> Callable[[], Awaitable[Any]]:
        return lambda: transport.fetch(endpoint, subscription, Sink(store))

    ways = {"raw WRITE": raw_transfer("WRITE"), "raw READ": raw_transfer("READ")}
    ways |= {name: fetch(transport) for name, transport in transports.items()}
    runs: dict[str, list[Run]] = defaultdict(list)
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            pipe.send("cpu")
            before, cpu_before, begun = pipe.recv(), cpu(), now()
            await way()
            seconds, cpu_here = now() - begun, cpu() - cpu_before
            pipe.send("cpu")
            if repeat:  # The first is for connecting.
                runs[name].append(Run(seconds, cpu_here, pipe.recv() - before))
            else:
                pipe.recv()
    pipe.send("end")
    for transport in transports.values():
        await transport.close()
    report(runs, size * blocks, f"{blocks} blocks of {size >> 10} KiB, UCX_TLS={config.tls}")


def report(runs: dict[str, list[Run]], size: int, title: str) -> None:
    print(f"{title}, {len(runs[CHECKED])} repeats, medians")
    print(f"{'way':24}{'GB/s':>8}{'of raw WRITE':>14}{'quartiles':>14}{'CPU-s/GB':>10}")
    base = [run.seconds for run in runs["raw WRITE"]]
    for name, each in runs.items():
        seconds = statistics.median(run.seconds for run in each)
        used = statistics.median(run.cpu_here + run.cpu_there for run in each) / size * 1e9
        ratios = [theirs / run.seconds for theirs, run in zip(base, each, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:24}{size / seconds / 1e9:8.2f}{middle:14.2f}{low:8.2f} {high:5.2f}{used:10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--block-kib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tls", default="all")
    options = parser.parse_args()
    layout = KvLayout(
        layers=1, kv_heads=1, head_dim=(options.block_kib << 10) // (2 * 4 * 16), dtype="float32", block_size=16
    )
    config = RdmaConfig(tls=options.tls)
    spawn = multiprocessing.get_context("spawn")
    here, other = spawn.Pipe()
    process = spawn.Process(target=there, args=(other, config, layout, options.blocks), daemon=True)
    process.start()
    asyncio.run(compare(here, config, layout, options.blocks, options.repeats))
    process.join()


if __name__ == "__main__":
    main()
