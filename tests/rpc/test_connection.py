from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from pdd_runtime.clock import now
from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, RpcError
from pdd_runtime.rpc import Greeting, Heartbeat, Line, RpcConnection, RpcContext, RpcServer, connect
from pdd_runtime.rpc.frames import FRAME_LIMIT, Call, Hello, encode, pack
from tests.waiting import PATIENCE, until

Dial = Callable[..., Awaitable[RpcConnection]]
Make = Callable[..., Greeting]
TRUSTING = Heartbeat(dead_after=3600)
"""Takes no silence for a death: who is noticed dead was noticed by the closed socket."""

SERVER = """
import asyncio
from pdd_runtime.rpc import Greeting, RpcServer

async def hang(params, context):
    await asyncio.sleep(3600)

async def echo(params, context):
    return params

async def count(params, context):
    yield 1
    await asyncio.sleep(3600)

async def main():
    server = RpcServer(Greeting(graph="g", secret="hush-hush", cluster="dc-a", name="main/0"))
    server.unary("hang", int, hang)
    server.unary("echo", int, echo)
    server.stream("count", int, count)
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""

CLIENT = """
import asyncio, sys
from pdd_runtime.rpc import Greeting, connect

async def main():
    greeting = Greeting(graph="g", secret="hush-hush", cluster="dc-a", name="frontend/0")
    connection = await connect(sys.argv[1], greeting)
    async for item in connection.stream("count", 0, int, timeout=None):
        print(item, flush=True)

asyncio.run(main())
"""


@asynccontextmanager
async def process(code: str, *args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *args, stdout=asyncio.subprocess.PIPE)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def line_of(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    return (await asyncio.wait_for(child.stdout.readline(), PATIENCE)).decode().strip()


async def test_a_killed_server_is_noticed_at_once_by_every_call_and_stream(greeting: Make) -> None:
    async with process(SERVER) as child:
        connection = await connect(await line_of(child), greeting("frontend/0"), heartbeat=TRUSTING)
        calls = [asyncio.create_task(connection.call("hang", 0, int, timeout=60)) for _ in range(3)]
        async with connection.stream("count", 0, int, timeout=None) as items:
            assert await anext(items) == 1
            child.kill()
            with pytest.raises(ConnectionLost, match="main/0"):
                await anext(items)
            for call in calls:
                with pytest.raises(ConnectionLost, match="main/0"):
                    await call
            await connection.wait_closed()
        with pytest.raises(ConnectionLost):
            await connection.call("hang", 0, int, timeout=1)


async def test_a_killed_client_ends_its_handlers_at_once(greeting: Make) -> None:
    server = RpcServer(greeting(), heartbeat=TRUSTING)
    ended = asyncio.Event()

    async def count(params: int, context: RpcContext) -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.sleep(3600)
        finally:
            ended.set()

    server.stream("count", int, count)
    async with process(CLIENT, await server.start("127.0.0.1")) as child:
        assert await line_of(child) == "1"
        child.kill()
        await asyncio.wait_for(ended.wait(), PATIENCE)
    await server.close()


async def test_a_stopped_process_is_noticed_by_its_silence(greeting: Make) -> None:
    async with process(SERVER) as child:
        heartbeat = Heartbeat(interval=0.05, dead_after=0.5)
        # The server's own patience is the default: it must not end first.
        connection = await connect(await line_of(child), greeting("frontend/0"), heartbeat=heartbeat)
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(ConnectionLost, match="fell silent"):
            await connection.call("echo", 0, int, timeout=60)
        os.kill(child.pid, signal.SIGCONT)


async def test_a_silent_process_is_suspected_until_it_is_heard_again(greeting: Make) -> None:
    async with process(SERVER) as child:
        heartbeat = Heartbeat(interval=0.05, suspected_after=0.2, dead_after=3600)
        connection = await connect(await line_of(child), greeting("frontend/0"), heartbeat=heartbeat)
        assert not connection.suspected
        os.kill(child.pid, signal.SIGSTOP)
        await asyncio.wait_for(connection.wait_suspected(), PATIENCE)
        assert connection.suspected
        assert not connection.closed
        os.kill(child.pid, signal.SIGCONT)
        assert await connection.call("echo", 5, int, timeout=PATIENCE) == 5
        assert not connection.suspected
        child.kill()
        await asyncio.wait_for(connection.wait_closed(), PATIENCE)
        await asyncio.wait_for(connection.wait_suspected(), PATIENCE)


async def test_an_idle_connection_stays_alive(server: RpcServer, greeting: Make) -> None:
    beat = Heartbeat(interval=0.02, dead_after=0.2)
    server = RpcServer(greeting(), heartbeat=beat)
    connection = await connect(await server.start("127.0.0.1"), greeting(), heartbeat=beat)
    await asyncio.sleep(0.6)
    assert not connection.closed
    await connection.close()
    await server.close()


async def test_a_stall_of_this_process_does_not_make_its_peer_look_dead(greeting: Make) -> None:
    async with process(SERVER) as child:
        beat = Heartbeat(interval=0.5, dead_after=1.0)
        connection = await connect(await line_of(child), greeting("frontend/0"), heartbeat=beat)
        await asyncio.sleep(0.1)
        time.sleep(2.0)  # noqa: ASYNC251 - the stall
        assert await connection.call("echo", 5, int, timeout=PATIENCE) == 5
        await asyncio.sleep(0.2)
        assert not connection.closed
        await connection.close()


@pytest.mark.parametrize("tls", [None])
async def test_a_frame_over_the_limit_from_the_peer_closes_the_connection_with_the_reason_on_both_sides(
    server: RpcServer, greeting: Make, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = (await server.start("127.0.0.1")).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(encode(Hello(greeting("old/0"))))
    writer.write((FRAME_LIMIT + 1).to_bytes(4, "big") + bytes(100_000))
    answer = await asyncio.wait_for(reader.read(), PATIENCE)
    assert f"a frame of {FRAME_LIMIT + 1} bytes".encode() in answer
    assert "old/0" in caplog.text or "127.0.0.1" in caplog.text
    writer.close()


async def test_a_server_that_talks_nonsense_ends_the_connection_with_a_reason(greeting: Make) -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(encode(Hello(greeting("main/0"))))
        await reader.read(100)
        writer.write(b"\x00\x00\x00\x03abc")
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    connection = await connect(f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", greeting())
    with pytest.raises(ConnectionLost, match="sent what is no frame"):
        await connection.call("echo", 0, int, timeout=5)
    await connection.close()
    listener.close()


async def test_a_server_that_answers_nothing_is_given_up_at_the_deadline(greeting: Make) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(Hello(greeting("main/0"))))
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(mute, "127.0.0.1", 0)
    connection = await connect(f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", greeting())
    with pytest.raises(DeadlineExceeded, match=r"echo did not answer in 0\.1 s"):
        await connection.call("echo", 0, int, timeout=0.1)
    with pytest.raises(DeadlineExceeded, match=r"count did not end in 0\.1 s"):
        await anext(connection.stream("count", 0, int, timeout=0.1))
    await connection.close()
    listener.close()


@pytest.mark.parametrize("tls", [None])
async def test_a_client_that_gives_up_nothing_is_stopped_at_its_deadline(server: RpcServer, greeting: Make) -> None:
    ended = asyncio.Event()

    async def hang(params: int, context: RpcContext) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    server.unary("hang", int, hang)
    host, port = (await server.start("127.0.0.1")).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(encode(Hello(greeting("frontend/0"))))
    await reader.read(100)
    writer.write(encode(Call(1, "hang", pack(0), 0.5, False)))
    await asyncio.wait_for(ended.wait(), PATIENCE)
    assert b"deadline" in await reader.read(1000)
    writer.close()


async def test_a_client_that_breaks_the_protocol_ends_only_its_own_connection(server: RpcServer, dial: Dial) -> None:
    connection, other = await dial(), await dial()
    connection.send(Hello(Greeting(graph="g", secret="", cluster="", name="")))
    await asyncio.wait_for(connection.wait_closed(), PATIENCE)
    assert not other.closed
    with pytest.raises(ConnectionLost, match="may not send a hello frame"):
        await connection.call("echo", 0, int, timeout=5)


async def test_nodelay_is_on_at_both_ends(server: RpcServer, dial: Dial) -> None:
    connection = await dial()
    ends = [connection._channel, *server._channels]
    for channel in ends:
        assert channel._transport is not None
        sock = channel._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_closing_twice_is_as_good_as_once(dial: Dial, server: RpcServer) -> None:
    connection = await dial()
    await connection.close()
    await connection.close()
    await server.close()
    await server.close()


# Over an emulated line, both sides shaping what they send.


@asynccontextmanager
async def over(
    greeting: Make, there: Line | None, back: Line | None
) -> AsyncIterator[tuple[RpcServer, Callable[[], Awaitable[RpcConnection]]]]:
    server = RpcServer(greeting(cluster="dc-b"), lambda cluster: back if cluster == "dc-a" else None)
    connections: list[RpcConnection] = []

    async def dial() -> RpcConnection:
        mine = greeting("relay/0", cluster="dc-a")
        connections.append(await connect(endpoint, mine, line_to=lambda cluster: there if cluster == "dc-b" else None))
        return connections[-1]

    endpoint = await server.start("127.0.0.1")
    yield server, dial
    for connection in connections:
        await connection.close()
    await server.close()


async def stamp(params: int, context: RpcContext) -> float:
    return now()


async def test_each_way_of_a_call_takes_its_delay_and_the_greeting_takes_both(greeting: Make) -> None:
    async with over(greeting, Line(1e9, 0.1), Line(1e9, 0.05)) as (server, dial):
        server.unary("stamp", int, stamp)
        began = now()
        connection = await dial()
        assert now() - began >= 0.15
        began = now()
        arrived = await connection.call("stamp", 0, float, timeout=PATIENCE)
        assert arrived - began >= 0.1
        assert now() - arrived >= 0.05


async def test_bandwidth_is_counted_by_the_size_of_frames(greeting: Make) -> None:
    async def size(params: bytes, context: RpcContext) -> int:
        return len(params)

    async with over(greeting, Line(8e6, 0.0), None) as (server, dial):
        server.unary("size", bytes, size)
        connection = await dial()
        began = now()
        assert await connection.call("size", bytes(200_000), int, timeout=PATIENCE) == 200_000
        assert now() - began >= 0.2


async def test_items_over_a_jittery_line_stay_in_order_and_keep_their_pace(greeting: Make) -> None:
    async def count(params: int, context: RpcContext) -> AsyncGenerator[tuple[int, float], None]:
        for i in range(params):
            yield i, now()
            await asyncio.sleep(0.002)

    async with over(greeting, None, Line(1e9, 0.03, jitter=0.02, seed=1)) as (server, dial):
        server.stream("count", int, count)
        stream = (await dial()).stream("count", 60, tuple[int, float], timeout=PATIENCE)
        got = [(i, sent, now()) async for i, sent in stream]
    assert [i for i, _, _ in got] == list(range(60))
    assert all(came - sent >= 0.03 for _, sent, came in got)


async def test_a_slow_line_holds_a_stream_back_by_its_bandwidth_and_buffers_within_bounds(greeting: Make) -> None:
    made = 0

    async def big(params: int, context: RpcContext) -> AsyncGenerator[bytes, None]:
        nonlocal made
        while True:
            made += 1
            yield bytes(100_000)

    async with over(greeting, None, Line(80e6, 0.02)) as (server, dial):
        server.stream("big", int, big)
        async with (await dial()).stream("big", 0, bytes, timeout=None) as items:
            began = now()
            for got in range(1, 31):
                await anext(items)
                assert made - got <= 12
        assert now() - began >= 30 * 100_000 * 8 / 80e6


async def test_cancellation_crosses_the_line_after_its_delay(greeting: Make) -> None:
    ended: list[float] = []

    async def hang(params: int, context: RpcContext) -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.sleep(60)
        finally:
            ended.append(now())

    async with over(greeting, Line(1e9, 0.1), None) as (server, dial):
        server.stream("hang", int, hang)
        async with (await dial()).stream("hang", 0, int, timeout=None) as items:
            await anext(items)
            closed_at = now()
        await until(lambda: bool(ended))
    assert ended[0] - closed_at >= 0.1


async def test_what_was_sent_before_a_close_still_arrives(greeting: Make) -> None:
    notes: list[int] = []

    async def note(params: int, context: RpcContext) -> None:
        notes.append(params)

    async with over(greeting, Line(1e9, 0.1), Line(1e9, 0.1)) as (server, dial):
        server.unary("note", int, note)
        connection = await dial()
        task = asyncio.create_task(connection.call("note", 7, type(None), timeout=5))
        await asyncio.sleep(0)
        await connection.close()
        with pytest.raises(ConnectionLost):
            await task
        assert notes == [7]


async def test_a_refusal_crosses_the_line_too(greeting: Make) -> None:
    server = RpcServer(greeting(cluster="dc-b"), lambda cluster: Line(1e9, 0.1))
    endpoint = await server.start("127.0.0.1")
    began = now()
    with pytest.raises(RpcError, match="do not share a secret"):
        await connect(endpoint, msgspec.structs.replace(greeting("relay/0"), secret="wrong"))
    assert now() - began >= 0.1
    await server.close()


class WatchedLine(Line):
    """Knows how long each message waited for others, in seconds."""

    def __init__(self, bandwidth: float) -> None:
        super().__init__(bandwidth, 0.0)
        self.waits: dict[int, list[float]] = {}
        """By size, in bytes."""

    def reserve(self, nbytes: int, now: float) -> tuple[float, float]:
        leaves_at, arrives_at = super().reserve(nbytes, now)
        self.waits.setdefault(nbytes, []).append(leaves_at - now - nbytes * 8 / self.bandwidth)
        return leaves_at, arrives_at


async def test_a_token_message_overtakes_bulk_that_is_paced_on_the_same_line(greeting: Make) -> None:
    line = WatchedLine(8e6)
    chunk = 64 * 1024

    async def bulk() -> None:
        while True:
            leaves_at, _ = line.reserve(chunk, now())
            await asyncio.sleep(leaves_at - now())

    async with over(greeting, line, None) as (server, dial):
        server.unary("stamp", int, stamp)
        connection = await dial()
        task = asyncio.create_task(bulk())
        await until(lambda: chunk in line.waits)
        for _ in range(10):
            await connection.call("stamp", 0, float, timeout=PATIENCE)
        task.cancel()
    small = [wait for nbytes, waits in line.waits.items() if nbytes != chunk for wait in waits]
    assert len(small) > 10
    assert 0 < max(small) <= chunk * 8 / line.bandwidth + 0.001, "it waits for one chunk at most, and small ones"
