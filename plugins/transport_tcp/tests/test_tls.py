"""The transport over TLS: whom it refuses, and that faults cost there what they cost in clear."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from pdd_runtime.errors import TransferError
from pdd_runtime.rpc import Tls
from pdd_runtime.testing.kv_parties import LAYOUT, StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.tcp_proxy import Fault, TcpProxy
from plugins.transport_tcp.tests.counting import Party
from tests.certificates import Issuer
from tests.waiting import until

BLOCK = LAYOUT.block_bytes
LARGE = msgspec.structs.replace(LAYOUT, layers=1024)


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer("test", tmp_path / "ours")


@pytest.fixture
def tls(issuer: Issuer) -> Tls:
    return issuer.tls("dc-a")


async def refused(party: Party, source: StoreSource, sender: Tls | None, receiver: Tls | None) -> str:
    """What the receiver's fetch ends with."""
    wanted = sequence(2)
    source.make(wanted)
    endpoint = await party("dc-a", tls=sender).serve(source, "127.0.0.1")
    with pytest.raises(TransferError) as caught:
        await party("dc-b", tls=receiver).fetch(endpoint, subscription(wanted), StoreSink(wanted))
    assert not source.opened, "nobody was asked for a block"
    return str(caught.value)


async def test_blocks_come_whole_over_several_connections(party: Party, issuer: Issuer, tls: Tls) -> None:
    source, wanted = StoreSource(LARGE, blocks=64), sequence(48, LARGE)
    source.make(wanted)
    sink = StoreSink(wanted, LARGE)
    endpoint = await party("dc-a", tls=tls).serve(source, "127.0.0.1")
    report = await party("dc-b", tls=issuer.tls("dc-b")).fetch(endpoint, subscription(wanted, layout=LARGE), sink)
    assert sink.whole
    assert (report.blocks, report.resumed) == (48, 0)


async def test_what_crosses_is_encrypted(party: Party, issuer: Issuer, tls: Tls) -> None:
    source, wanted = StoreSource(), sequence(10)
    source.make(wanted)
    sink = StoreSink(wanted)
    endpoint = await party("dc-a", tls=tls).serve(source, "127.0.0.1")
    seen = bytearray()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = endpoint.split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer), return_exceptions=True)

    proxy = await asyncio.start_server(between, "127.0.0.1", 0)
    host, port = proxy.sockets[0].getsockname()
    receiver = party("dc-b", tls=issuer.tls("dc-b"))
    await receiver.fetch(f"{host}:{port}", subscription(wanted), sink)
    await receiver.close()
    proxy.close()
    assert sink.whole
    assert len(seen) > 10 * BLOCK
    for index, block in enumerate(wanted):
        assert block.name not in seen
        assert bytes(sink.memory(index))[:64] not in seen


@pytest.mark.parametrize("after", [0, 10, 500, 1500, BLOCK // 2 + 1500, 3 * BLOCK, 7 * BLOCK + 77])
async def test_a_cut_is_resumed_with_what_is_missing(party: Party, issuer: Issuer, tls: Tls, after: int) -> None:
    source, wanted = StoreSource(), sequence(10)
    source.make(wanted)
    sink = StoreSink(wanted)
    async with TcpProxy(await party("dc-a", tls=tls).serve(source, "127.0.0.1"), Fault("cut", after)) as proxy:
        await party("dc-b", tls=issuer.tls("dc-b")).fetch(proxy.endpoint, subscription(wanted), sink)
    assert sink.whole, "each block came once"


@pytest.mark.parametrize("after", [1500, 2 * BLOCK, 5 * BLOCK])
async def test_a_changed_byte_breaks_the_connection_and_nothing_else(
    party: Party, issuer: Issuer, tls: Tls, after: int
) -> None:
    source, wanted = StoreSource(), sequence(10)
    source.make(wanted)
    sink = StoreSink(wanted)
    async with TcpProxy(await party("dc-a", tls=tls).serve(source, "127.0.0.1"), Fault("flip", after)) as proxy:
        receiver = party("dc-b", tls=issuer.tls("dc-b"), io_timeout="1s")
        await receiver.fetch(proxy.endpoint, subscription(wanted), sink)
        assert proxy.count >= 2
    assert sink.whole, "no block was done twice, or with a wrong byte"


@pytest.mark.parametrize("after", [0, 700, 7 * BLOCK // 2])
async def test_a_peer_that_hangs_is_given_up_and_the_rest_asked_for_again(
    party: Party, issuer: Issuer, tls: Tls, after: int
) -> None:
    source, wanted = StoreSource(), sequence(10)
    source.make(wanted)
    sink = StoreSink(wanted)
    async with TcpProxy(await party("dc-a", tls=tls).serve(source, "127.0.0.1"), Fault("freeze", after)) as proxy:
        receiver = party("dc-b", tls=issuer.tls("dc-b"), io_timeout="2s")
        await receiver.fetch(proxy.endpoint, subscription(wanted), sink)
    assert sink.whole


async def test_another_ca_is_refused_by_both(
    party: Party, tls: Tls, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Issuer("test", tmp_path / "other")
    assert "self-signed certificate" in await refused(party, StoreSource(), tls, other.tls("dc-b"))
    await until(lambda: "refused: no TLS connection with the peer" in caplog.text)


async def test_the_sender_refuses_one_of_another_ca_that_does_not_mind(
    party: Party, issuer: Issuer, tls: Tls, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thief = Issuer("test", tmp_path / "other").thief("dc-b", issuer)
    assert "refused this side's certificate or protocol: unknown ca" in await refused(party, StoreSource(), tls, thief)
    await until(lambda: "refused: no TLS connection with the peer" in caplog.text)


async def test_another_graph_is_refused_though_the_ca_is_the_same(party: Party, issuer: Issuer, tls: Tls) -> None:
    said = await refused(party, StoreSource(), tls, issuer.tls("dc-b", graph="h"))
    assert "a certificate of another graph was shown" in said


async def test_another_cluster_than_the_certificates_is_refused(party: Party, issuer: Issuer, tls: Tls) -> None:
    said = await refused(party, StoreSource(), tls, issuer.tls("dc-c"))
    assert "not where it says it is: in 'dc-b'" in said
    said = await refused(party, StoreSource(), issuer.tls("dc-c"), issuer.tls("dc-b"))
    assert "the sender is not where it says it is: in 'dc-a'" in said


async def test_plain_text_and_tls_do_not_meet_and_both_sides_say_so(
    party: Party, tls: Tls, issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    assert "no TLS connection with the peer" in await refused(party, StoreSource(), tls, None)
    await until(lambda: "it does not speak TLS" in caplog.text)
    assert "it does not speak TLS" in await refused(party, StoreSource(), None, issuer.tls("dc-b"))


async def test_one_without_a_certificate_is_refused(
    party: Party, issuer: Issuer, tls: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = await party("dc-a", tls=tls).serve(StoreSource(), "127.0.0.1")
    context = ssl.create_default_context(cafile=issuer.directory / "ca.pem")
    context.check_hostname = False
    host, port = endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
        await reader.read()
    writer.close()
    await until(lambda: "it has no certificate" in caplog.text)


async def test_handshakes_that_do_not_end_hold_up_nobody_and_end_at_a_deadline(
    party: Party, issuer: Issuer, tls: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    source, wanted = StoreSource(), sequence(4)
    source.make(wanted)
    sink = StoreSink(wanted)
    endpoint = await party("dc-a", tls=tls, io_timeout="1s").serve(source, "127.0.0.1")
    host, port = endpoint.split(":")
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(40)]
        for each in slow[::2]:
            each.sendall(b"\x16\x03\x01\x02\x00\x01")
        await party("dc-b", tls=issuer.tls("dc-b")).fetch(endpoint, subscription(wanted), sink)
        assert sink.whole
        await until(lambda: caplog.text.count("no TLS handshake in 1 s") == 40)


async def test_a_peer_that_is_gone_before_it_is_refused_is_refused_all_the_same(
    party: Party, tls: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = await party("dc-a", tls=tls).serve(StoreSource(), "127.0.0.1")
    host, port = endpoint.split(":")
    for _ in range(50):
        with socket.create_connection((host, int(port))) as sock:
            # What is left unread when it closes makes that a reset.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    await until(lambda: caplog.text.count("refused") >= 50)
    assert "Traceback" not in caplog.text
