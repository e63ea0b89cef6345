from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from pdd_runtime.clock import now
from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, EngineError, RemoteError, RpcError
from pdd_runtime.rpc import Greeting, RpcConnection, RpcContext, RpcServer, RpcStream
from pdd_runtime.rpc.frames import FRAME_LIMIT, WINDOW, Call, Credit, Hello, encode, pack
from tests.waiting import PATIENCE, until

Dial = Callable[..., Awaitable[RpcConnection]]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    blocks: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    reason: str


async def collect(stream: RpcStream[Any], into: list[Any] | None = None) -> list[Any]:
    """All items, also those before an error."""
    into = [] if into is None else into
    async for item in stream:
        into.append(item)
    return into


class Counter:
    """Counts up for ever, and knows what became of it."""

    def __init__(self, item: object = None, pause: float = 0.0) -> None:
        self.item, self.pause = item, pause
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self.made = 0

    async def __call__(self, params: int, context: RpcContext) -> AsyncGenerator[object, None]:
        self.begun.set()
        try:
            while True:
                self.made += 1
                yield self.made if self.item is None else self.item
                if self.pause:
                    await asyncio.sleep(self.pause)
        finally:
            self.ended.set()


async def test_items_come_in_order_each_in_its_type(server: RpcServer, dial: Dial) -> None:
    async def handler(params: int, context: RpcContext) -> AsyncGenerator[Ready | Done, None]:
        for i in range(params):
            yield Ready(i)
        yield Done("length")

    server.stream("run", int, handler)
    stream = (await dial()).stream("run", 1000, Ready | Done, timeout=20)
    assert await collect(stream) == [*map(Ready, range(1000)), Done("length")]
    assert await collect(stream) == []
    assert server.calls == 0


async def test_a_hundred_streams_at_once_do_not_mix(server: RpcServer, dial: Dial) -> None:
    async def handler(params: int, context: RpcContext) -> AsyncGenerator[int, None]:
        for i in range(200):
            yield params * 1000 + i

    server.stream("run", int, handler)
    connection = await dial()

    async def read(n: int) -> list[int]:
        async with connection.stream("run", n, int, timeout=20) as items:
            return await collect(items)

    results = await asyncio.gather(*map(read, range(100)))
    assert results == [[n * 1000 + i for i in range(200)] for n in range(100)]


async def test_what_was_sent_before_an_error_is_given_out_before_it(server: RpcServer, dial: Dial) -> None:
    async def handler(params: int, context: RpcContext) -> AsyncGenerator[int, None]:
        yield 1
        yield 2
        raise EngineError("out of memory", where="main/0")

    server.stream("run", int, handler)
    got: list[int] = []
    stream = (await dial()).stream("run", 0, int, timeout=5)
    with pytest.raises(EngineError, match="main/0: out of memory"):
        await collect(stream, got)
    assert got == [1, 2]


async def test_a_crash_in_the_middle_keeps_type_and_message(server: RpcServer, dial: Dial) -> None:
    async def handler(params: int, context: RpcContext) -> AsyncGenerator[int, None]:
        yield 1
        raise ZeroDivisionError("batch of 0")

    server.stream("run", int, handler)
    with pytest.raises(RemoteError, match="ZeroDivisionError: batch of 0"):
        await collect((await dial()).stream("run", 0, int, timeout=5))


async def test_closing_a_stream_ends_the_handler_whose_finally_runs(server: RpcServer, dial: Dial) -> None:
    counter = Counter(pause=0.001)
    server.stream("count", int, counter)
    async with (await dial()).stream("count", 0, int, timeout=None) as items:
        assert [await anext(items) for _ in range(3)] == [1, 2, 3]
        assert server.calls == 1
    await asyncio.wait_for(counter.ended.wait(), PATIENCE)
    await until(lambda: server.calls == 0)
    with pytest.raises(StopAsyncIteration):
        await anext(items)


async def test_closing_before_the_first_item_ends_the_handler(server: RpcServer, dial: Dial) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handler(params: int, context: RpcContext) -> AsyncGenerator[int, None]:
        begun.set()
        try:
            await asyncio.sleep(60)
            yield 1
        finally:
            ended.set()

    server.stream("run", int, handler)
    async with (await dial()).stream("run", 0, int, timeout=None):
        await begun.wait()
    await asyncio.wait_for(ended.wait(), PATIENCE)
    await until(lambda: server.calls == 0)


async def test_closing_before_the_handler_began_leaves_nothing(server: RpcServer, dial: Dial) -> None:
    counter = Counter()
    server.stream("count", int, counter)
    connection = await dial()
    for _ in range(50):
        async with connection.stream("count", 0, int, timeout=None):
            pass
    untouched = connection.stream("count", 0, int, timeout=None)
    await untouched.aclose()
    await until(lambda: server.calls == 0)
    assert not counter.begun.is_set() or counter.ended.is_set()


async def test_cancelling_the_reader_ends_the_handler_even_without_a_context_manager(
    server: RpcServer, dial: Dial
) -> None:
    counter = Counter(pause=60)
    server.stream("count", int, counter)
    connection = await dial()

    task = asyncio.create_task(collect(connection.stream("count", 0, int, timeout=None)))
    await counter.begun.wait()
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.wait_for(counter.ended.wait(), PATIENCE)
    await until(lambda: server.calls == 0)


async def test_a_slow_reader_holds_the_sender_back_at_the_window(server: RpcServer, dial: Dial) -> None:
    counter = Counter()
    server.stream("count", int, counter)
    async with (await dial()).stream("count", 0, int, timeout=None) as items:
        assert await anext(items) == 1
        await until(lambda: counter.made > WINDOW)
        await asyncio.sleep(0.1)
        assert counter.made == WINDOW + 1
        for expected in range(2, 5000):
            assert await anext(items) == expected
            assert counter.made - expected <= WINDOW + 1


async def test_a_window_of_big_items_is_bounded_in_bytes(server: RpcServer, dial: Dial) -> None:
    counter = Counter(item=bytes(2**18))
    server.stream("count", int, counter)
    async with (await dial()).stream("count", 0, bytes, timeout=None) as items:
        await anext(items)
        await asyncio.sleep(0.2)
        assert counter.made <= 6
        for _ in range(40):
            await anext(items)
        assert counter.made <= 46


async def test_cancelling_a_stream_that_is_blocked_by_flow_control_ends_the_handler(
    server: RpcServer, dial: Dial
) -> None:
    counter = Counter()
    server.stream("count", int, counter)
    async with (await dial()).stream("count", 0, int, timeout=None):
        await until(lambda: counter.made == WINDOW + 1)
    await asyncio.wait_for(counter.ended.wait(), PATIENCE)
    await until(lambda: server.calls == 0)


async def test_a_blocked_stream_holds_up_no_other_call(server: RpcServer, dial: Dial) -> None:
    async def echo(params: int, context: RpcContext) -> int:
        return params

    counter = Counter(item=bytes(2**16))
    server.stream("count", int, counter)
    server.unary("echo", int, echo)
    connection = await dial()
    async with connection.stream("count", 0, bytes, timeout=None) as items:
        await anext(items)
        assert await connection.call("echo", 7, int, timeout=PATIENCE) == 7


@pytest.mark.parametrize("tls", [None])
async def test_a_peer_that_grants_credit_but_reads_nothing_bounds_the_servers_memory(
    server: RpcServer, greeting: Callable[..., Greeting]
) -> None:
    counter = Counter(item=bytes(2**16))
    server.stream("count", int, counter)
    endpoint = await server.start("127.0.0.1")
    host, port = endpoint.split(":")
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(encode(Hello(greeting())))
        await asyncio.to_thread(peer.recv, 4096)
        peer.sendall(encode(Call(1, "count", pack(0), None, True)) + encode(Credit(1, 10**9)))
        await counter.begun.wait()
        made = 0
        while made < counter.made:
            made = counter.made
            await asyncio.sleep(0.3)
        assert made * 2**16 < 16 * 2**20
    await asyncio.wait_for(counter.ended.wait(), PATIENCE)


async def test_the_deadline_of_a_whole_stream_ends_it_in_the_middle_on_both_sides(
    server: RpcServer, dial: Dial
) -> None:
    counter = Counter(pause=0.02)
    server.stream("count", int, counter)
    connection = await dial()
    got: list[int] = []
    began = now()
    with pytest.raises(DeadlineExceeded, match="count"):
        await collect(connection.stream("count", 0, int, timeout=0.5), got)
    assert got
    assert now() - began > 0.48
    await asyncio.wait_for(counter.ended.wait(), PATIENCE)
    await until(lambda: server.calls == 0)


async def test_the_deadline_also_ends_a_stream_nobody_reads(server: RpcServer, dial: Dial) -> None:
    counter = Counter()
    server.stream("count", int, counter)
    async with (await dial()).stream("count", 0, int, timeout=0.5) as items:
        await asyncio.wait_for(counter.ended.wait(), PATIENCE)
        got: list[int] = []
        with pytest.raises(DeadlineExceeded):
            await collect(items, got)
        assert 0 < len(got) <= WINDOW


async def test_an_item_that_cannot_be_read_ends_the_stream_on_both_sides_and_only_it(
    server: RpcServer, dial: Dial
) -> None:
    counter = Counter(pause=0.001)
    server.stream("count", int, counter)
    connection = await dial()
    with pytest.raises(RpcError, match="an item of count cannot be read"):
        await collect(connection.stream("count", 0, str, timeout=5))
    await asyncio.wait_for(counter.ended.wait(), PATIENCE)
    assert not connection.closed


async def test_an_item_over_the_limit_fails_its_stream_and_the_connection_lives_on(
    server: RpcServer, dial: Dial
) -> None:
    counter = Counter(item=bytes(FRAME_LIMIT))
    server.stream("count", int, counter)
    connection = await dial()
    with pytest.raises(RpcError, match=r"item frame of .* over the limit"):
        await collect(connection.stream("count", 0, bytes, timeout=5))
    assert counter.ended.is_set()
    assert not connection.closed


async def test_a_request_over_the_limit_fails_its_stream_once_and_then_it_is_over(
    server: RpcServer, dial: Dial
) -> None:
    server.stream("count", int, Counter())
    stream = (await dial()).stream("count", bytes(FRAME_LIMIT), int, timeout=5)
    with pytest.raises(RpcError, match=r"call frame of .* over the limit"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_lost_connection_ends_its_streams_after_what_arrived_and_their_handlers(
    server: RpcServer, dial: Dial
) -> None:
    counter = Counter(pause=60)
    server.stream("count", int, counter)
    connection = await dial()
    async with connection.stream("count", 0, int, timeout=None) as items:
        await asyncio.sleep(0.05)
        await connection.close()
        assert await anext(items) == 1
        with pytest.raises(ConnectionLost):
            await anext(items)
    await asyncio.wait_for(counter.ended.wait(), PATIENCE)
    with pytest.raises(ConnectionLost):
        await anext(connection.stream("count", 0, int, timeout=None))


async def test_a_handler_that_fails_while_it_is_cancelled_harms_nobody(server: RpcServer, dial: Dial) -> None:
    async def handler(params: int, context: RpcContext) -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0.001)
        finally:
            raise OSError("cannot clean up")

    async def echo(params: int, context: RpcContext) -> int:
        return params

    server.stream("run", int, handler)
    server.unary("echo", int, echo)
    connection = await dial()
    async with connection.stream("run", 0, int, timeout=None) as items:
        await anext(items)
    await until(lambda: server.calls == 0)
    assert await connection.call("echo", 7, int, timeout=PATIENCE) == 7


async def test_two_readers_of_one_stream_are_refused(server: RpcServer, dial: Dial) -> None:
    server.stream("count", int, Counter(pause=60))
    async with (await dial()).stream("count", 0, int, timeout=None) as items:
        await anext(items)
        first = asyncio.create_task(anext(items))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two tasks"):
            await anext(items)
        first.cancel()


async def test_fed_items_come_in_order_and_none_is_lost_when_the_reader_has_enough(
    server: RpcServer, dial: Dial
) -> None:
    counter = Counter()
    server.stream("count", int, counter)
    async with (await dial()).stream("count", 0, int, timeout=20) as numbers:
        assert await anext(numbers) == 1
        fed: list[int] = []

        def put(number: int) -> bool:
            fed.append(number)
            return number == 4 * WINDOW

        assert await numbers.feed(put)
        assert fed == list(range(2, 4 * WINDOW + 1))
        assert await anext(numbers) == 4 * WINDOW + 1
    async with asyncio.timeout(10):
        await counter.ended.wait()


async def test_feeding_ends_with_the_stream_and_raises_its_error_behind_what_arrived(
    server: RpcServer, dial: Dial
) -> None:
    async def three(fails: bool, context: RpcContext) -> AsyncGenerator[int, None]:
        for number in range(3):
            yield number
        if fails:
            raise EngineError("out of numbers")

    server.stream("three", bool, three)
    connection = await dial()
    fed: list[int] = []

    def put(number: int) -> bool:
        fed.append(number)
        return False

    async with connection.stream("three", False, int, timeout=20) as numbers:
        assert not await numbers.feed(put)
    async with connection.stream("three", True, int, timeout=20) as numbers:
        with pytest.raises(EngineError, match="out of numbers"):
            await numbers.feed(put)
    assert fed == [0, 1, 2] * 2


async def test_what_the_fed_raises_reaches_the_reader_and_ends_the_handler(server: RpcServer, dial: Dial) -> None:
    counter = Counter(pause=0.001)
    server.stream("count", int, counter)

    def put(number: int) -> bool:
        raise ValueError(f"no more than {number}")

    async with (await dial()).stream("count", 0, int, timeout=20) as numbers:
        await anext(numbers)
        with pytest.raises(ValueError, match="no more than"):
            await numbers.feed(put)
    async with asyncio.timeout(10):
        await counter.ended.wait()
