"""The transport `rdma` beside raw NIXL, over this host's shared memory, or what else UCX finds.

    python bench/transport_rdma.py [--blocks 1000] [--block-kib 256] [--repeats 15] [--tls all]

Raw is one NIXL transfer of all the blocks, prepared before the clock starts: WRITE, and READ, which is
what the transport does. The transport's time is that of a whole fetch on a connection that is there: subscription,
offers, reads, blocks given back, and, where it says so, checksums on both sides. Reader and sender are processes of
their own, raw NIXL's other end is another. The ways take turns; medians are printed, and quartiles of the ratio to the
same turn's WRITE.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from pdd_rdma.config import RdmaConfig
from pdd_rdma.library import Agent, load
from pdd_rdma.memory import Region
from pdd_rdma.transport import RdmaTransport
from transport import Sink, Source, cpu, filled

from pdd_runtime.clock import now
from pdd_runtime.kv import BlockStore, KvLayout, chain, seed
from pdd_runtime.plugins.transport import Subscription, Wanted
from pdd_runtime.testing.kv_parties import SECRET, Context

WAYS: dict[str, dict[str, Any]] = {
    "rdma": {"readers": 2},
    "  checksums": {"readers": 2, "checksums": True},
    "  1 reader": {"readers": 1},
    "  1 reader, checksums": {"readers": 1, "checksums": True},
}


class Run(NamedTuple):
    seconds: float
    cpu: float
    """Seconds of both sides."""


def raw(config: RdmaConfig, store: BlockStore, name: str) -> Agent:
    agent = load(config)(name)
    agent.register_memory(Region.of(store.buffer()).row(), "DRAM")
    return agent


def raw_end(pipe: Connection, config: RdmaConfig, layout: KvLayout, blocks: int) -> None:
    """The process whose memory raw NIXL reads and writes. It is called often while a transfer runs, and sleeps else."""
    store = filled(layout, blocks)
    agent = raw(config, store, "there")
    pipe.send((agent.get_agent_metadata(), Region.of(store.buffer())))
    while pipe.recv() != "end":
        while not pipe.poll(0.0002):
            agent.get_new_notifs()
        pipe.recv()
        pipe.send(cpu())


def sender(pipe: Connection, config: RdmaConfig, layout: KvLayout, blocks: int) -> None:
    """The process that the transport fetches from."""
    store = filled(layout, blocks)

    async def serve() -> None:
        transport = RdmaTransport(config, Context("there", memory=store.buffer()))
        pipe.send(await transport.serve(Source(store), "127.0.0.1"))
        while await asyncio.to_thread(pipe.recv) != "end":
            await asyncio.to_thread(pipe.recv)
            pipe.send(cpu())
        await transport.close()

    asyncio.run(serve())


async def compare(
    raw_pipe: Connection, pipe: Connection, config: RdmaConfig, layout: KvLayout, blocks: int, repeats: int
) -> dict[str, list[Run]]:
    size = layout.block_bytes
    store = filled(layout, blocks)
    agent = raw(config, store, "here")
    metadata, region = raw_pipe.recv()
    endpoint = pipe.recv()
    agent.add_remote_agent(metadata)
    ours = agent.prep_xfer_dlist("", Region.of(store.buffer()).blocks(size), "DRAM")
    theirs = agent.prep_xfer_dlist("there", region.blocks(size), "DRAM")
    every = np.arange(blocks, dtype=np.int32)

    async def raw_transfer(operation: str) -> None:
        handle = agent.make_prepped_xfer(operation, ours, every, theirs, every)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE"
        handle.release()

    context = Context("here", memory=store.buffer())
    transports = {name: RdmaTransport(config.model_copy(update=way), context) for name, way in WAYS.items()}
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
    ways: dict[str, tuple[Connection, Callable[[], Awaitable[Any]]]] = {
        f"raw {operation}": (raw_pipe, partial(raw_transfer, operation)) for operation in ("WRITE", "READ")
    }
    for name, transport in transports.items():
        ways[name] = pipe, partial(transport.fetch, endpoint, subscription, Sink(store))
    runs: dict[str, list[Run]] = defaultdict(list)
    spent = dict.fromkeys((raw_pipe, pipe), 0.0)
    for repeat in range(repeats + 1):
        for name, (other, way) in ways.items():
            other.send("begin")
            cpu_before, begun = cpu(), now()
            await way()
            seconds, cpu_here = now() - begun, cpu() - cpu_before
            other.send("done")
            cpu_there, spent[other] = -spent[other], other.recv()
            if repeat:  # The first is for connecting.
                runs[name].append(Run(seconds, cpu_here + cpu_there + spent[other]))
    raw_pipe.send("end")
    pipe.send("end")
    for transport in transports.values():
        await transport.close()
    return runs


def report(runs: dict[str, list[Run]], size: int) -> None:
    print(f"{'way':30}{'GB/s':>8}{'of raw WRITE':>14}{'quartiles':>14}{'CPU-s/GB':>10}")
    base = [run.seconds for run in runs["raw WRITE"]]
    for name, each in runs.items():
        seconds, used = (statistics.median(run[column] for run in each) for column in range(2))
        low, middle, high = statistics.quantiles(
            (theirs / run.seconds for theirs, run in zip(base, each, strict=True)), n=4
        )
        print(f"{name:30}{size / seconds / 1e9:8.2f}{middle:14.2f}{low:8.2f} {high:5.2f}{used / size * 1e9:10.3f}")


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
    pipes, processes = [], []
    for end in (raw_end, sender):
        here, there = spawn.Pipe()
        pipes.append(here)
        processes.append(spawn.Process(target=end, args=(there, config, layout, options.blocks), daemon=True))
        processes[-1].start()
    runs = asyncio.run(compare(pipes[0], pipes[1], config, layout, options.blocks, options.repeats))
    for process in processes:
        process.join()
    print(f"{options.blocks} blocks of {options.block_kib} KiB, tls: {options.tls}, {options.repeats} turns, medians")
    report(runs, layout.block_bytes * options.blocks)


if __name__ == "__main__":
    main()
