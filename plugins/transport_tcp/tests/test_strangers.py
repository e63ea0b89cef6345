"""Who is not to be let in by a sender of KV costs little, is told of in its log, and keeps nobody out; and what a
sender says, no receiver takes for its block."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdd_tcp import wire
from pdd_tcp.config import TcpConfig
from pdd_tcp.sender import STRANGERS
from pdd_tcp.transport import TcpTransport

from pdd_runtime.errors import TransferError
from pdd_runtime.testing.kv_parties import (
    LAYOUT,
    SECRET,
    Context,
    StoreSink,
    StoreSource,
    content,
    sequence,
    subscription,
)
from pdd_runtime.testing.strangers import crowd
from plugins.transport_tcp.tests.counting import Party, threads
from tests.waiting import PATIENCE, until

WANTED = sequence(2)
HELLO = wire.Hello(channel=bytes(range(16)), join=False, cluster="dc-b", secret=SECRET, beat=1.0, streams=1)
CORRECT = wire.pack(HELLO)


class Stranger(NamedTuple):
    says: bytes
    logs: str
    pause: float = 0.0
    """Seconds between its bytes."""


def prefix(length: int, body: bytes = b"", checksum: int = 0) -> bytes:
    return wire.PREFIX.pack(wire.MAGIC, wire.VERSION, length, checksum) + body


def damaged(message: bytes) -> bytes:
    return message[:-1] + bytes([message[-1] ^ 1])


def message(body: bytes) -> bytes:
    return prefix(len(body), body, wire.checksum_of(body))


SUBSCRIBED = wire.pack(wire.Subscribe.of(subscription(WANTED), 1))
CALLERS = {
    "of an earlier run": Stranger(wire.pack(msgspec.structs.replace(HELLO, secret="earlier")), "this graph's secret"),
    "2 GB before a greeting": Stranger(prefix(2 << 30), "a message of 2147483648 bytes"),
    "2 GB behind a greeting": Stranger(CORRECT + prefix(2 << 30), "a message of 2147483648 bytes"),
    "a forged checksum": Stranger(damaged(CORRECT), "not what its checksum says"),
    "a forged checksum behind a greeting": Stranger(CORRECT + damaged(SUBSCRIBED), "not what its checksum says"),
    "noise": Stranger(b"\xa5" * 5000, "does not speak this protocol"),
    "a web browser": Stranger(b"GET / HTTP/1.1\r\nHost: pdd\r\n\r\n", "does not speak this protocol"),
    "another version": Stranger(wire.PREFIX.pack(wire.MAGIC, 99, 0, 0), "version 99"),
    "nested 50,000 deep": Stranger(message(b"\x91" * 50_000), "cannot be meant"),
    "no message": Stranger(message(b"\xc0"), "cannot be meant"),
    "a subscription before a greeting": Stranger(SUBSCRIBED, "begins with a hello"),
    "nothing": Stranger(b"", "was not whole in time"),
    "byte by byte": Stranger(CORRECT, "was not whole in time", pause=0.05),
}


async def say(endpoint: str, stranger: Stranger) -> None:
    """Return when it is cut off."""
    host, _, port = endpoint.rpartition(":")
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection(host, int(port))
        hearing = asyncio.create_task(reader.read())
        with suppress(ConnectionError):
            if stranger.pause:
                for byte in stranger.says:
                    writer.write(bytes([byte]))
                    if (await asyncio.wait({hearing}, timeout=stranger.pause))[0]:
                        break
            else:
                writer.write(stranger.says)
            await hearing
        writer.close()


async def serves(party: Party, endpoint: str) -> None:
    sink = StoreSink(WANTED)
    await party("dc-b").fetch(endpoint, subscription(WANTED), sink)
    assert sink.whole


@pytest.mark.parametrize("who", CALLERS)
async def test_a_stranger_is_refused_with_a_line_in_the_log_and_others_are_served(
    party: Party, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = StoreSource()
    source.make(WANTED)
    endpoint = await party("dc-a", io_timeout="500ms").serve(source, "127.0.0.1")
    await say(endpoint, CALLERS[who])
    await serves(party, endpoint)
    await until(lambda: CALLERS[who].logs in caplog.text)
    assert SECRET not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_thousand_who_say_nothing_keep_nobody_out_and_do_not_fill_the_log(
    party: Party, caplog: pytest.LogCaptureFixture
) -> None:
    source = StoreSource()
    source.make(WANTED)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    host, _, port = endpoint.rpartition(":")
    async with crowd((host, int(port)), 1000) as idle:
        assert len(idle) == 1000
        await serves(party, endpoint)
        await until(lambda: len(threads()) <= STRANGERS + 20)
    assert f"and {STRANGERS} others have come" in caplog.text
    assert len(caplog.records) < 100


@asynccontextmanager
async def sending(source: StoreSource) -> AsyncIterator[str]:
    transport = TcpTransport(TcpConfig(io_timeout="500ms"), Context("dc-a"))
    try:
        yield await transport.serve(source, "127.0.0.1")
    finally:
        await transport.close()


messages = st.one_of(
    st.builds(wire.Cancel, st.integers(-(2**63), 2**64 - 1)),
    st.builds(
        lambda **changes: msgspec.structs.replace(wire.Subscribe.of(subscription(WANTED), 1), **changes),
        number=st.integers(-(2**63), 2**64 - 1),
        names=st.sampled_from([b"", b"x", b"x" * 16, b"x" * 32]),
        tokens=st.sampled_from([b"", bytes(4), b"\xff" * 8]),
        partial=st.dictionaries(st.integers(-1, 3), st.binary(max_size=3), max_size=2),
        deadline=st.floats() | st.just(5.0),
        waited=st.floats() | st.just(0.0),
        behind=st.integers(-1, 2**63),
        priority=st.integers(-(2**63), 2**63),
        opened=st.integers(-1, 2**63),
        secret=st.sampled_from([SECRET, "other"]),
    ),
    st.just(HELLO),
)


def test_whatever_a_receiver_of_the_graph_sends_the_next_one_is_served(caplog: pytest.LogCaptureFixture) -> None:
    parts = st.one_of(
        messages.map(wire.pack), st.binary(max_size=60).map(message), st.binary(max_size=60), st.just(damaged(CORRECT))
    )

    async def attack(endpoint: str, data: list[bytes]) -> None:
        host, _, port = endpoint.rpartition(":")
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(CORRECT + b"".join(data))
            with suppress(OSError):
                writer.write_eof()
                await reader.read()
            writer.close()

    with asyncio.Runner() as runner:
        source = StoreSource()
        source.make(WANTED)
        sender = sending(source)
        endpoint = runner.run(sender.__aenter__())

        @settings(max_examples=60)
        @given(st.lists(parts, max_size=5))
        def attacked(data: list[bytes]) -> None:
            runner.run(attack(endpoint, data))

        async def end() -> None:
            receiver, sink = TcpTransport(TcpConfig(), Context("dc-b")), StoreSink(WANTED)
            await receiver.fetch(endpoint, subscription(WANTED), sink)
            assert sink.whole
            await receiver.close()
            await asyncio.to_thread(source.wait_for_feeds, 0)
            await sender.__aexit__(None, None, None)

        attacked()
        runner.run(end())
    assert threads() == []
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors, errors[0].getMessage()


def test_whatever_a_sender_sends_no_block_is_taken_for_another(caplog: pytest.LogCaptureFixture) -> None:
    """Frames that are right but for one thing or several: what is done is right to the last byte."""
    size = LAYOUT.block_bytes

    def frame(
        channel: bytes, subscribe: wire.Subscribe, of: int, at: int, kind: int, part: int, cut: int, flip: int
    ) -> bytes:
        binding = wire.Binding(channel, subscribe.number, subscribe.request_id)
        body = content(WANTED[of].name)[: size - cut] if kind == wire.DATA else b""
        bind = binding.block(WANTED[of].name) if kind in (wire.DATA, wire.GONE) else binding.session
        whole = wire.pack_frame(kind, bind, fetch=subscribe.number, block=at, part=part, size=size, payload=body) + body
        data = bytearray(whole)
        if flip:
            data[flip % len(data)] ^= 0xFF
        return bytes(data)

    frames = st.tuples(
        st.integers(0, 1),
        st.integers(0, 1),
        st.sampled_from([wire.DATA, wire.DATA, wire.DATA, wire.GONE, wire.END, wire.ENDED, wire.ERROR, wire.BEAT]),
        st.sampled_from([0, 0, 1]),
        st.sampled_from([0, 0, 100]),
        st.integers(0, 3 * size).map(lambda flip: flip if flip < size else 0),
    )
    script: list[tuple[int, int, int, int, int, int]] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def read() -> wire.Message:
            length, _ = wire.unpack_prefix(await reader.readexactly(wire.PREFIX.size), wire.MESSAGE_LIMIT)
            return wire.unpack_message(await reader.readexactly(length))

        with suppress(OSError, asyncio.IncompleteReadError):
            hello = await read()
            assert isinstance(hello, wire.Hello)
            writer.write(wire.pack(wire.Welcome(cluster="dc-a", streams=1, frame=256 << 10)))
            subscribe = await read()
            if isinstance(subscribe, wire.Subscribe):
                for each in script:
                    writer.write(frame(hello.channel, subscribe, *each))
            writer.write_eof()
            await reader.read()
        writer.close()

    with asyncio.Runner() as runner:
        server = runner.run(asyncio.start_server(connected, "127.0.0.1", 0))
        host, port = server.sockets[0].getsockname()

        async def fetch() -> None:
            receiver = TcpTransport(TcpConfig(retry_delay="1ms", retry_delay_max="5ms"), Context("dc-b"))
            sink = StoreSink(WANTED)
            with suppress(TransferError):
                await receiver.fetch(f"{host}:{port}", subscription(WANTED, deadline=0.3), sink)
            await receiver.close()
            assert all(map(sink.right, sink.arrived))

        @settings(max_examples=40)
        @given(st.lists(frames, max_size=4))
        def sent(wanted: list[tuple[int, int, int, int, int, int]]) -> None:
            script[:] = wanted
            runner.run(fetch())

        async def end() -> None:
            server.close()
            await server.wait_closed()

        sent()
        runner.run(end())
    assert threads() == []
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
