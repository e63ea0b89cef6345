"""Bulk KV over loopback: the transport `tcp` against a plain blocking-socket copy, in one run.

    python bench/transport_tcp.py [--gigabytes 1] [--repeats 5] [--block-kib 720]

Two processes; the ways take turns, and medians are printed. The plain copy is `sendall` of the same blocks and
`recv_into` the same memory: no names, no checksums, no resume. iperf3 is run beside them where it is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import shutil
import socket
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

from pdd_tcp.config import TcpConfig
from pdd_tcp.transport import TcpTransport

from pdd_runtime.kv import BlockStore, KvLayout, chain, seed
from pdd_runtime.plugins.transport import Gone, Ready, Subscription, Wanted
from pdd_runtime.testing.kv_parties import Context

ROOT = seed("bench", "bench")


class Run(NamedTuple):
    seconds: float
    cpu_send: float
    cpu_receive: float


class Source:
    """Every block is ready."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store

    def open(self, subscription: Subscription) -> Feed:
        return Feed(self.store, len(subscription.blocks))


class Feed:
    def __init__(self, store: BlockStore, blocks: int) -> None:
        self._store, self._left, self._lock = store, iter(range(blocks)), threading.Lock()

    def next(self, timeout: float) -> Ready | Gone | None:
        with self._lock:
            index = next(self._left, None)
        return None if index is None else Ready(index, self._store.memory(index))

    def sent(self, index: int) -> None:
        pass

    def close(self) -> None:
        pass


class Sink:
    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def memory(self, index: int) -> memoryview:
        return self._store.memory(index)

    def done(self, index: int) -> None:
        pass


def layout_of(block_bytes: int) -> KvLayout:
    return KvLayout(layers=1, kv_heads=1, head_dim=block_bytes // (2 * 4 * 16), dtype="float32", block_size=16)


def filled(layout: KvLayout, blocks: int) -> BlockStore:
    """A store whose pages are all there: the first touch of memory is no transport's cost."""
    store = BlockStore(layout, blocks)
    for number in range(blocks):
        store.memory(number)[:] = number.to_bytes(4, "little") * (layout.block_bytes // 4)
    return store


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def sender(pipe: Connection, block_bytes: int, blocks: int) -> None:
    """The sending process: answers `cpu` with its CPU seconds until `end`."""
    store = filled(layout_of(block_bytes), blocks)
    listener = socket.create_server(("127.0.0.1", 0))

    def plain() -> None:
        while True:
            sock, _ = listener.accept()
            with sock:
                for number in range(blocks):
                    sock.sendall(store.memory(number))

    threading.Thread(target=plain, daemon=True).start()

    async def serve() -> None:
        transport = TcpTransport(TcpConfig(), Context("here"))
        pipe.send((await transport.serve(Source(store), "127.0.0.1"), listener.getsockname()))
        while await asyncio.to_thread(pipe.recv) == "cpu":
            pipe.send(cpu())
        await transport.close()

    asyncio.run(serve())


def plain_copy(address: tuple[str, int], store: BlockStore) -> None:
    with socket.create_connection(address) as sock:
        for number in range(store.blocks):
            memory = store.memory(number)
            while memory:
                memory = memory[sock.recv_into(memory) :]


def tcp_copy(endpoint: str, store: BlockStore, streams: int) -> None:
    named = chain(ROOT, range(store.blocks * store.layout.block_size), store.layout.block_size)
    subscription = Subscription(
        request_id="bench",
        blocks=tuple(Wanted(block.name, block.tokens) for block in named),
        layout=store.layout,
        fingerprint="bench",
        epoch="bench",
        cluster="here",
    )

    async def fetch() -> None:
        transport = TcpTransport(TcpConfig(streams=streams), Context("here"))
        await transport.fetch(endpoint, subscription, Sink(store))
        await transport.close()

    asyncio.run(fetch())


def iperf(gigabytes: float) -> float | None:
    """Bytes per second, or None without iperf3."""
    if shutil.which("iperf3") is None:
        return None
    server = subprocess.Popen(["iperf3", "-s", "-1", "-p", "5299"], stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.3)
        client = ["iperf3", "-c", "127.0.0.1", "-p", "5299", "-n", str(int(gigabytes * 1e9)), "-J"]
        out = subprocess.run(client, capture_output=True, check=True, text=True).stdout
        return float(json.loads(out)["end"]["sum_received"]["bits_per_second"]) / 8
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--block-kib", type=int, default=720)
    options = parser.parse_args()
    block_bytes = options.block_kib << 10
    blocks = max(1, int(options.gigabytes * 1e9 / block_bytes))
    size = block_bytes * blocks

    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=sender, args=(there, block_bytes, blocks), daemon=True
    )
    process.start()
    store = filled(layout_of(block_bytes), blocks)
    endpoint, address = here.recv()

    def sender_cpu() -> float:
        here.send("cpu")
        answer = here.recv()
        assert isinstance(answer, float)
        return answer

    ways: dict[str, Callable[[], None]] = {
        "plain blocking sockets": lambda: plain_copy(address, store),
        "tcp, 1 stream": lambda: tcp_copy(endpoint, store, 1),
        "tcp, 4 streams": lambda: tcp_copy(endpoint, store, 4),
    }
    runs: dict[str, list[Run]] = defaultdict(list)
    rates = []
    for _ in range(options.repeats):
        for name, way in ways.items():
            sent, received, begun = sender_cpu(), cpu(), time.perf_counter()
            way()
            runs[name].append(Run(time.perf_counter() - begun, sender_cpu() - sent, cpu() - received))
        rates.append(iperf(options.gigabytes))
    here.send("end")
    process.join()

    base = statistics.median(run.seconds for run in runs["plain blocking sockets"])
    print(f"{blocks} blocks of {options.block_kib} KiB, {options.repeats} repeats, medians")
    print(f"{'way':24}{'GB/s':>8}{'of plain':>10}{'CPU-s/GB send':>16}{'receive':>10}")
    for name, each in runs.items():
        seconds = statistics.median(run.seconds for run in each)
        send, receive = (statistics.median(run[column] for run in each) / size * 1e9 for column in (1, 2))
        print(f"{name:24}{size / seconds / 1e9:8.2f}{base / seconds:10.2f}{send:16.3f}{receive:10.3f}")
    if rates[0] is not None:
        print(f"{'iperf3':24}{statistics.median(rate for rate in rates if rate) / 1e9:8.2f}")


if __name__ == "__main__":
    main()
