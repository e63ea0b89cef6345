"""Peers that break the protocol cost little, and never a wrong byte in a block."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import msgspec
import pytest
from pdd_tcp import wire

from pdd_runtime.clock import now
from pdd_runtime.errors import TransferError
from pdd_runtime.plugins.transport import Gone, Ready, Subscription
from pdd_runtime.testing.kv_parties import (
    LAYOUT,
    SECRET,
    StoreFeed,
    StoreSink,
    StoreSource,
    content,
    sequence,
    subscription,
)
from plugins.transport_tcp.tests.counting import Party

WANTED = sequence(2)
SIZE = LAYOUT.block_bytes


class Asked(NamedTuple):
    """What a receiver has said on a connection."""

    hello: wire.Hello
    subscribe: wire.Subscribe

    def frame(self, kind: int, bind: int, payload: bytes = b"", **fields: int) -> bytes:
        return wire.pack_frame(kind, bind, fetch=self.subscribe.number, payload=payload, **fields) + payload

    def binding(self, request_id: str = "") -> wire.Binding:
        return wire.Binding(self.hello.channel, self.subscribe.number, request_id or self.subscribe.request_id)

    def data(self, name: bytes, *, request_id: str = "", block: int = 0, **fields: int) -> bytes:
        """The whole block of that name."""
        bind = self.binding(request_id).block(name)
        return self.frame(wire.DATA, bind, content(name), block=block, **{"size": SIZE, **fields})


Script = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


async def read_message(reader: asyncio.StreamReader) -> bytes:
    length, _ = wire.unpack_prefix(await reader.readexactly(wire.PREFIX.size), wire.MESSAGE_LIMIT)
    return await reader.readexactly(length)


@contextlib.asynccontextmanager
async def false_sender(script: Script) -> AsyncIterator[str]:
    """Takes every subscription, and then does what `script` does."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            hello = wire.unpack_message(await read_message(reader))
            assert isinstance(hello, wire.Hello)
            writer.write(wire.pack(wire.Welcome(cluster="dc-a", streams=1, frame=256 << 10)))
            subscribe = wire.unpack_message(await read_message(reader))
            assert isinstance(subscribe, wire.Subscribe)
            await script(Asked(hello, subscribe), writer)
            await reader.read()
        except asyncio.CancelledError:
            pass  # By the end of the test; the server's own callback takes no cancelled task.
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


FAULTY: dict[str, Callable[[Asked], bytes]] = {
    "a frame of another request": lambda asked: asked.data(WANTED[0].name, request_id="req-2"),
    "a frame of another block": lambda asked: asked.data(WANTED[1].name, block=0),
    "a block never asked for": lambda asked: asked.data(WANTED[0].name, block=7),
    "a part that no block has": lambda asked: asked.data(WANTED[0].name, part=1),
    "the same block twice": lambda asked: asked.data(WANTED[0].name) * 2,
    "a block of another size": lambda asked: asked.data(WANTED[0].name, size=SIZE * 2),
    "a short block": lambda asked: asked.frame(
        wire.DATA, asked.binding().block(WANTED[0].name), bytes(100), block=0, size=SIZE
    ),
    "a block in an encoding that was not asked for": lambda asked: asked.data(WANTED[0].name, encoding=1),
    "a gone block with a payload": lambda asked: asked.frame(wire.GONE, 0, b"x"),
    "a gone block that came": lambda asked: (
        asked.data(WANTED[0].name) + asked.frame(wire.GONE, asked.binding().block(WANTED[0].name))
    ),
    "a frame of a fetch that there was not": lambda asked: wire.pack_frame(wire.GONE, 0, fetch=99),
    "a frame of no kind": lambda asked: asked.frame(9, 0),
    "an error of gigabytes": lambda asked: wire.seal(wire.ERROR, 0, 1, 0, 0, 0, 0, (1 << 32) - 1, 0),
    "a block of gigabytes": lambda asked: wire.seal(wire.DATA, 0, 1, 0, 0, 0, 0, (1 << 32) - 1, 0),
    "an error of another session": lambda asked: asked.frame(wire.ERROR, 1, wire.pack_error(TransferError("no"))),
    "a digest that is none": lambda asked: asked.frame(wire.END, asked.binding().session, b"x"),
    "a beat of another session": lambda asked: wire.pack_frame(wire.BEAT, 1),
    "a damaged header": lambda asked: asked.data(WANTED[0].name)[:20] + b"\xff" * 100,
    "noise": lambda asked: b"\xa5" * 1000,
}


@pytest.mark.parametrize("fault", FAULTY)
async def test_wrong_frames_are_refused_until_the_sender_is_given_up(party: Party, fault: str) -> None:
    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        # Later subscriptions ask for less: what was sent before is not missing any more.
        whole = len(asked.subscribe.names) == 32
        writer.write(FAULTY[fault](asked) if whole else asked.frame(wire.DATA, 0, bytes(SIZE), size=SIZE))

    sink = StoreSink(WANTED)
    async with false_sender(script) as endpoint:
        with pytest.raises(TransferError, match="9 frames came damaged"):
            await party("dc-b", retry_delay="1ms").fetch(endpoint, subscription(WANTED), sink)
    assert len(sink.arrived) <= 1
    assert all(map(sink.right, sink.arrived)), "a block that was done is never written again"
    for index in {0, 1} - set(sink.arrived):
        assert not any(sink.memory(index)), "not a byte of a wrong frame was taken"


async def test_a_wrong_checksum_of_the_whole_ends_the_fetch(party: Party) -> None:
    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(asked.data(WANTED[0].name) + asked.data(WANTED[1].name, block=1))
        writer.write(asked.frame(wire.END, asked.binding().session, bytes(16)))

    async with false_sender(script) as endpoint:
        with pytest.raises(TransferError, match="checksum of all its frames"):
            await party("dc-b").fetch(endpoint, subscription(WANTED), StoreSink(WANTED))


async def test_a_peer_that_accepts_and_says_nothing_is_given_up_at_the_deadline(party: Party) -> None:
    async def nothing(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await writer.drain()

    asked = subscription(WANTED, deadline=2.0)
    async with false_sender(nothing) as endpoint:
        with pytest.raises(TransferError, match=r"(?s)deadline of 2 s.*nothing came from the peer"):
            await party("dc-b", io_timeout="200ms").fetch(endpoint, asked, StoreSink(WANTED))


async def test_another_protocol_is_named(party: Party) -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(http, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(TransferError, match=r"(?s)does not speak this protocol.*HTTP"):
            await party("dc-b").fetch(f"{host}:{port}", subscription(WANTED), StoreSink(WANTED))


async def answer_to(endpoint: str, data: bytes) -> wire.Answer:
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        return wire.unpack_answer(await read_message(reader))
    finally:
        writer.close()
        await writer.wait_closed()


def hello(**changes: object) -> wire.Hello:
    plain = wire.Hello(channel=bytes(16), join=False, cluster="dc-b", secret=SECRET, beat=1.0, streams=1)
    return msgspec.structs.replace(plain, **changes)


async def test_a_hello_that_promises_gigabytes_is_refused_without_them(party: Party) -> None:
    endpoint = await party("dc-a").serve(StoreSource(), "127.0.0.1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for length in (wire.HELLO_LIMIT + 1, (1 << 32) - 1):
        answer = await answer_to(endpoint, wire.PREFIX.pack(wire.MAGIC, wire.VERSION, length, 0))
        assert isinstance(answer, wire.Refuse)
        assert "are allowed" in answer.error["why"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10, "in KiB"


async def test_another_version_is_answered_with_both_versions(party: Party) -> None:
    endpoint = await party("dc-a").serve(StoreSource(), "127.0.0.1")
    answer = await answer_to(endpoint, wire.PREFIX.pack(wire.MAGIC, 1, 10, 0) + bytes(10))
    assert isinstance(answer, wire.Refuse)
    assert "version 1 of the protocol, and this side version 2" in answer.error["what"]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (hello(join=True), "no such channel"),
        (hello(secret="another"), "secret"),
        (hello(channel=b"short"), "cannot be meant"),
        (hello(beat=float("nan")), "cannot be meant"),
        (wire.Cancel(1), "cannot be meant"),
    ],
)
async def test_a_greeting_that_does_not_fit_is_refused(party: Party, message: wire.Message, why: str) -> None:
    endpoint = await party("dc-a").serve(StoreSource(), "127.0.0.1")
    answer = await answer_to(endpoint, wire.pack(message))
    assert isinstance(answer, wire.Refuse)
    assert why in answer.error["what"]


@contextlib.asynccontextmanager
async def connected(endpoint: str, *messages: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """After a good hello, and those messages."""
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(wire.pack(hello()) + b"".join(messages))
        assert isinstance(wire.unpack_answer(await read_message(reader)), wire.Welcome)
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "messages",
    [
        (wire.pack(hello(channel=bytes(range(16)))),),
        (wire.pack(wire.Subscribe.of(subscription(WANTED), 1)),) * 2,
        (b"\xa5" * 100,),
        (wire.PREFIX.pack(wire.MAGIC, wire.VERSION, wire.MESSAGE_LIMIT + 1, 0),),
        (wire.PREFIX.pack(wire.MAGIC, wire.VERSION, 100, 0),),
    ],
    ids=["a second hello", "a number twice", "noise", "a message of gigabytes", "a message that does not end"],
)
async def test_a_receiver_that_breaks_the_protocol_is_cut(party: Party, messages: tuple[bytes, ...]) -> None:
    source = StoreSource()
    endpoint = await party("dc-a", io_timeout="500ms").serve(source, "127.0.0.1")
    async with asyncio.timeout(10), connected(endpoint, *messages) as reader:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
    await asyncio.to_thread(source.wait_for_feeds, 0)


async def test_a_subscription_of_too_many_frames_is_refused(party: Party) -> None:
    large = msgspec.structs.replace(LAYOUT, layers=1 << 18)
    endpoint = await party("dc-a").serve(StoreSource(), "127.0.0.1")
    with pytest.raises(TransferError, match="cannot be meant"):
        await party("dc-b").fetch(endpoint, subscription(WANTED, layout=large), StoreSink(WANTED))


async def test_a_greeting_that_never_ends_is_ended(party: Party) -> None:
    """And others are served meanwhile."""
    source, wanted = StoreSource(), sequence(2)
    source.make(wanted)
    endpoint = await party("dc-a", io_timeout="500ms").serve(source, "127.0.0.1")
    host, _, port = endpoint.rpartition(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
    for _, writer in silent[4:]:
        writer.write(wire.PREFIX.pack(wire.MAGIC, wire.VERSION, wire.HELLO_LIMIT, 0))
    sink = StoreSink(wanted)
    await party("dc-b").fetch(endpoint, subscription(wanted), sink)
    assert sink.whole
    begun = now()
    for reader, writer in silent:
        assert await reader.read() == b""
        writer.close()
    assert now() - begun < 10


async def test_a_source_that_fails_is_told_to_the_receiver(party: Party) -> None:
    class Broken(StoreSource):
        def open(self, subscription: Subscription) -> StoreFeed:
            raise ZeroDivisionError("a bug")

    endpoint = await party("dc-a").serve(Broken(), "127.0.0.1")
    with pytest.raises(TransferError, match="ZeroDivisionError: a bug"):
        await party("dc-b").fetch(endpoint, subscription(WANTED), StoreSink(WANTED))


async def test_a_source_with_blocks_of_another_size_sends_none(party: Party) -> None:
    class Short(StoreFeed):
        def next(self, timeout: float) -> Ready | Gone | None:
            item = super().next(timeout)
            return Ready(item.index, item.memory[:100]) if isinstance(item, Ready) else item

    class Shorts(StoreSource):
        def feed(self, subscription: Subscription) -> StoreFeed:
            return Short(self, subscription)

    source = Shorts()
    source.make(WANTED)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    with pytest.raises(TransferError, match="block of the wrong size"):
        await party("dc-b").fetch(endpoint, subscription(WANTED), StoreSink(WANTED))
    await asyncio.to_thread(source.wait_for_feeds, 0)
    assert source.pinned == 0
