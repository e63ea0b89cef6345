"""The message plane's cost, beside a raw asyncio echo in the same run.

    python bench/rpc.py [--seconds 2] [--repeats 5]

Server and client are two processes on loopback. Per repeat, in turn: the raw echo (4-byte length and 60 bytes
over asyncio streams, no encoding), unary calls one after the other, and a stream of token-sized items. Printed are
medians over the repeats; the ratio of the two round trips is steadier than either. CPU is of both processes
together, in us per item. A token stream is measured twice: as fast as it goes (frames share writes), and one item a
millisecond, where each frame pays for its own wake-ups: beside it the same with raw asyncio streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from multiprocessing.connection import Connection

import msgspec

from pdd_runtime.plugins.engine import DecodeEvent, Extended, Token, Tokens
from pdd_runtime.rpc import Greeting, RpcConnection, RpcContext, RpcServer, connect

PAYLOAD = bytes(60)
MESSAGE = len(PAYLOAD).to_bytes(4, "big") + PAYLOAD
PACED, PAUSE = 1000, 0.001
"""Items of the paced streams, and the seconds between two."""


class Ask(msgspec.Struct, frozen=True):
    """How many items, and the pause between two, in seconds."""

    items: int
    pause: float = 0.0


def greeting(name: str) -> Greeting:
    return Greeting(graph="bench", secret="bench", cluster="", name=name)


async def serve(pipe: Connection) -> None:
    async def echo(params: bytes, context: RpcContext) -> bytes:
        return params

    async def cpu(params: None, context: RpcContext) -> float:
        return time.process_time()

    async def tokens(params: Ask, context: RpcContext) -> AsyncGenerator[DecodeEvent, None]:
        yield Extended(0, 0, 0)
        for position in range(params.items):
            if params.pause:
                await asyncio.sleep(params.pause)
            yield Tokens((Token(position, 11, -0.5),))

    async def raw_paced(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(PACED):
            await asyncio.sleep(PAUSE)
            writer.write(MESSAGE)
        writer.close()

    async def raw_echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readexactly(4)
                writer.write(head + await reader.readexactly(int.from_bytes(head, "big")))
        except asyncio.IncompleteReadError:
            writer.close()

    server = RpcServer(greeting("server"))
    server.unary("echo", bytes, echo)
    server.unary("cpu", type(None), cpu)
    server.stream("tokens", Ask, tokens)
    raws = [await asyncio.start_server(handler, "127.0.0.1", 0) for handler in (raw_echo, raw_paced)]
    pipe.send((await server.start("127.0.0.1"), [raw.sockets[0].getsockname()[1] for raw in raws]))
    await asyncio.to_thread(pipe.recv)
    await server.close()
    for raw in raws:
        raw.close()


def run_server(pipe: Connection) -> None:
    asyncio.run(serve(pipe))


async def round_trip(once: Callable[[], Awaitable[object]], seconds: float) -> float:
    """Median, in us."""
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        await once()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


async def cpu_of_both(connection: RpcConnection) -> float:
    return time.process_time() + await connection.call("cpu", None, float, timeout=10)


async def stream(connection: RpcConnection, ask: Ask) -> tuple[float, float]:
    """(items per second, us of CPU per item)"""
    cpu, began, got = await cpu_of_both(connection), time.perf_counter(), 0
    async with connection.stream("tokens", ask, DecodeEvent, timeout=None) as items:
        async for _ in items:
            got += 1
    took = time.perf_counter() - began
    return got / took, (await cpu_of_both(connection) - cpu) / got * 1e6


async def raw_stream(connection: RpcConnection, port: int) -> float:
    """us of CPU per message of a paced raw stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    cpu = await cpu_of_both(connection)
    for _ in range(PACED):
        head = await reader.readexactly(4)
        await reader.readexactly(int.from_bytes(head, "big"))
    used = await cpu_of_both(connection) - cpu
    writer.close()
    return used / PACED * 1e6


async def measure(endpoint: str, echo_port: int, paced_port: int, seconds: float, repeats: int) -> dict[str, float]:
    connection = await connect(endpoint, greeting("client"))
    reader, writer = await asyncio.open_connection("127.0.0.1", echo_port)

    async def raw() -> None:
        writer.write(MESSAGE)
        head = await reader.readexactly(4)
        await reader.readexactly(int.from_bytes(head, "big"))

    async def call() -> None:
        await connection.call("echo", PAYLOAD, bytes, timeout=10)

    rows: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        rows.setdefault(name, []).append(value)

    await stream(connection, Ask(10_000))
    for _ in range(repeats):
        note("raw_round_trip_us", await round_trip(raw, seconds))
        note("call_round_trip_us", await round_trip(call, seconds))
        rate, cpu = await stream(connection, Ask(int(50_000 * seconds)))
        note("stream_items_per_s", rate)
        note("stream_cpu_us_per_item", cpu)
        note("raw_paced_cpu_us_per_item", await raw_stream(connection, paced_port))
        _, cpu = await stream(connection, Ask(PACED, PAUSE))
        note("paced_cpu_us_per_item", cpu)
    writer.close()
    await connection.close()
    result = {name: statistics.median(values) for name, values in rows.items()}
    for ours, theirs in (
        ("call_round_trip_us", "raw_round_trip_us"),
        ("paced_cpu_us_per_item", "raw_paced_cpu_us_per_item"),
    ):
        ratios = [our / raw for our, raw in zip(rows[ours], rows[theirs], strict=True)]
        result[f"{ours.rpartition('_us')[0]}_over_raw"] = statistics.median(ratios)
    result["rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each part of each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_server, args=(there,), daemon=True)
    process.start()
    endpoint, (echo_port, paced_port) = here.recv()
    result = asyncio.run(measure(endpoint, echo_port, paced_port, options.seconds, options.repeats))
    here.send("done")
    process.join(5)
    print(json.dumps({name: round(value, 2) for name, value in result.items()}, indent=2))


if __name__ == "__main__":
    main()
