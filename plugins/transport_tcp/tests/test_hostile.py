"""Peers that break the protocol cost little, and never a wrong byte in a block."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from pdd_tcp import wire
from pdd_tcp.transport import TcpTransport
from tcp_parties import LAYOUT, Sink, Source, SourceFeed, content, sequence, subscription

from pdd_runtime.clock import now
from pdd_runtime.errors import TransferError
from pdd_runtime.plugins.transport import Gone, Ready, Subscription

Party = Callable[..., TcpTransport]
Script = Callable[[wire.Subscribe, asyncio.StreamWriter], Awaitable[None]]


async def read_message(reader: asyncio.StreamReader) -> bytes:
    length, _ = wire.unpack_prefix(await reader.readexactly(wire.PREFIX.size), wire.HELLO_LIMIT)
    return await reader.readexactly(length)


@contextlib.asynccontextmanager
async def false_sender(script: Script) -> AsyncIterator[str]:
    """Accepts every subscription, and then does what `script` does."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        hello = wire.unpack_hello(await read_message(reader))
        assert isinstance(hello, wire.Subscribe)
        writer.write(wire.pack(wire.Accept(streams=1)))
        await script(hello, writer)
        await reader.read()
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


def data_frame(hello: wire.Subscribe, name: bytes, *, block: int = 0, request_id: str | None = None) -> bytes:
    binding = wire.Binding(hello.fetch, request_id or hello.request_id)
    payload = content(name)
    return wire.pack_frame(wire.DATA, binding.block(name), block=block, payload=payload) + payload


WANTED = sequence(2)
FAULTY = {
    "a frame of another request": lambda hello: data_frame(hello, WANTED[0].name, request_id="req-2"),
    "a frame of another block": lambda hello: data_frame(hello, WANTED[1].name, block=0),
    "a block never asked for": lambda hello: data_frame(hello, WANTED[0].name, block=7),
    "the same block twice": lambda hello: data_frame(hello, WANTED[0].name) * 2,
    "a block of another size": lambda hello: (
        wire.pack_frame(
            wire.DATA, wire.Binding(hello.fetch, hello.request_id).block(WANTED[0].name), payload=bytes(100)
        )
        + bytes(100)
    ),
    "a gone block with a payload": lambda hello: wire.pack_frame(wire.GONE, 0, payload=b"x"),
    "a frame of no kind": lambda hello: wire.pack_frame(9, 0),
    "an error of gigabytes": lambda hello: wire.pack_frame(wire.ERROR, 0)[:8] + b"\xff" * 20,
    "a beat of another session": lambda hello: wire.pack_frame(wire.BEAT, 1),
    "noise": lambda hello: b"\xa5" * 1000,
}


@pytest.mark.parametrize("fault", FAULTY)
async def test_wrong_frames_are_refused_until_the_sender_is_given_up(party: Party, fault: str) -> None:
    async def script(hello: wire.Subscribe, writer: asyncio.StreamWriter) -> None:
        # Later subscriptions ask for less: what was sent before is not missing any more.
        if len(hello.names) == 32:
            writer.write(FAULTY[fault](hello))
        else:
            writer.write(wire.pack_frame(wire.DATA, 0, payload=bytes(LAYOUT.block_bytes)))

    sink = Sink(WANTED)
    async with false_sender(script) as endpoint:
        with pytest.raises(TransferError, match="9 frames came damaged"):
            await party("dc-b", retry_delay="1ms").fetch(endpoint, subscription(WANTED), sink)
    assert len(sink.arrived) <= 1
    assert all(map(sink.right, sink.arrived)), "a block that was done is never written again"
    for index in {0, 1} - set(sink.arrived):
        assert not any(sink.memory(index)), "not a byte of a wrong frame was taken"


async def test_a_peer_that_accepts_and_says_nothing_is_given_up_at_the_deadline(party: Party) -> None:
    async def nothing(hello: wire.Subscribe, writer: asyncio.StreamWriter) -> None:
        await writer.drain()

    async with false_sender(nothing) as endpoint:
        with pytest.raises(TransferError, match=r"(?s)deadline of 0.6 s.*nothing came from the peer"):
            await party("dc-b", io_timeout="200ms").fetch(endpoint, subscription(WANTED, deadline=0.6), Sink(WANTED))


async def test_another_protocol_is_named(party: Party) -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(http, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(TransferError, match=r"(?s)does not speak this protocol.*HTTP"):
            await party("dc-b").fetch(f"{host}:{port}", subscription(WANTED), Sink(WANTED))


async def answer_to(endpoint: str, data: bytes) -> wire.Answer:
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        return wire.unpack_answer(await read_message(reader))
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_hello_that_promises_gigabytes_is_refused_without_them(party: Party) -> None:
    endpoint = await party("dc-a").serve(Source(), "127.0.0.1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for length in (wire.HELLO_LIMIT + 1, (1 << 32) - 1):
        answer = await answer_to(endpoint, wire.PREFIX.pack(wire.MAGIC, wire.VERSION, length, 0))
        assert isinstance(answer, wire.Refuse)
        assert "are allowed" in answer.error["why"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10, "in KiB"


async def test_another_version_is_answered_with_both_versions(party: Party) -> None:
    endpoint = await party("dc-a").serve(Source(), "127.0.0.1")
    answer = await answer_to(endpoint, wire.PREFIX.pack(wire.MAGIC, 2, 10, 0) + bytes(10))
    assert isinstance(answer, wire.Refuse)
    assert "version 2 of the protocol, and this side version 1" in answer.error["what"]


async def test_a_stream_for_an_unknown_fetch_is_refused(party: Party) -> None:
    endpoint = await party("dc-a").serve(Source(), "127.0.0.1")
    answer = await answer_to(endpoint, wire.pack(wire.Attach(bytes(16))))
    assert isinstance(answer, wire.Refuse)
    assert "no such fetch" in answer.error["what"]


async def test_a_greeting_that_never_ends_is_ended(party: Party) -> None:
    """And others are served meanwhile."""
    source, wanted = Source(), sequence(2)
    source.make(wanted)
    endpoint = await party("dc-a", io_timeout="500ms").serve(source, "127.0.0.1")
    host, _, port = endpoint.rpartition(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
    for _, writer in silent[4:]:
        writer.write(wire.PREFIX.pack(wire.MAGIC, wire.VERSION, wire.HELLO_LIMIT, 0))
    sink = Sink(wanted)
    await party("dc-b").fetch(endpoint, subscription(wanted), sink)
    assert sink.whole
    begun = now()
    for reader, writer in silent:
        assert await reader.read() == b""
        writer.close()
    assert now() - begun < 10


async def test_a_source_that_fails_is_told_to_the_receiver(party: Party) -> None:
    class Broken(Source):
        def open(self, subscription: Subscription) -> SourceFeed:
            raise ZeroDivisionError("a bug")

    endpoint = await party("dc-a").serve(Broken(), "127.0.0.1")
    with pytest.raises(Exception, match="ZeroDivisionError: a bug"):
        await party("dc-b").fetch(endpoint, subscription(WANTED), Sink(WANTED))


async def test_a_source_with_blocks_of_another_size_sends_none(party: Party) -> None:
    class Short(SourceFeed):
        def next(self, timeout: float) -> Ready | Gone | None:
            item = super().next(timeout)
            return Ready(item.index, item.memory[:100]) if isinstance(item, Ready) else item

    source = Source()
    source.feed_class = Short
    source.make(WANTED)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    with pytest.raises(TransferError, match="block of the wrong size"):
        await party("dc-b").fetch(endpoint, subscription(WANTED), Sink(WANTED))
    await asyncio.to_thread(source.wait_for_feeds, 0)
    assert source.pinned == 0
