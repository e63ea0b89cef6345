"""The transport `tcp` keeps the contract, and the suite finds transports that do not."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pdd_tcp import wire
from pdd_tcp.config import TcpConfig
from pdd_tcp.transport import TcpTransport
from pydantic import BaseModel

from pdd_runtime.errors import TransferError
from pdd_runtime.plugins.transport import BlockSink, LinkTelemetry, Subscription, TransferReport
from pdd_runtime.rpc import Tls
from pdd_runtime.testing.transport_fixtures import TransportFixtures
from pdd_runtime.testing.transport_suite import TransportConformance
from tests.certificates import Issuer
from tests.testing.outcomes import outcomes


class TestTcp(TransportConformance):
    plugin = TcpTransport


class TestTcpWithOneStream(TransportConformance):
    plugin = TcpTransport

    @pytest.fixture
    def config(self) -> BaseModel:
        return TcpConfig(streams=1)


class TestTcpOverTls(TransportConformance):
    plugin = TcpTransport

    @pytest.fixture(autouse=True)
    def issuer(self, tmp_path: Path) -> None:
        self._issuer = Issuer("test", tmp_path)

    def tls(self, cluster: str) -> Tls:
        return self._issuer.tls(cluster)


class TestTcpWithCompression(TransportConformance):
    plugin = TcpTransport
    emulates = False  # The suite reckons with whole blocks, and these are small on the line.

    @pytest.fixture
    def config(self) -> BaseModel:
        pytest.importorskip("blosc2")
        return TcpConfig(compression="blosc2")


class Hoarder(TcpTransport):
    """Says that blocks are done before they are, keeps no error's class, and forgets what it began."""

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        sink.done(0)
        try:
            return await super().fetch(endpoint, subscription, sink)
        except Exception as error:
            raise RuntimeError("something failed") from error


class Faint(TcpTransport):
    """Gives up when a connection is lost."""

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        report = await super().fetch(endpoint, subscription, sink)
        if report.resumed:
            raise TransferError("the connection was lost")
        return report


class Forgetful(TcpTransport):
    """Begins again from nothing when a connection is lost, though it has blocks."""

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        report = await super().fetch(endpoint, subscription, sink)
        return await super().fetch(endpoint, subscription, sink) if report.resumed else report


class Trusting(TcpTransport):
    """Looks at no checksum: its test takes them away."""


class Conservative(TcpTransport):
    """Asks an address for ever by the first epoch it had."""

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self._epochs: dict[str, str] = {}

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        epoch = self._epochs.setdefault(endpoint, subscription.epoch)
        return await super().fetch(endpoint, msgspec.structs.replace(subscription, epoch=epoch), sink)


class Serial(TcpTransport):
    """Fetches one thing at a time."""

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self._turn = asyncio.Lock()

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        async with self._turn:
            return await super().fetch(endpoint, subscription, sink)


class Deaf(TcpTransport):
    """What the sink says is nothing to it."""

    class Anywhere:
        def __init__(self, sink: BlockSink, size: int) -> None:
            self._sink, self._nowhere = sink, memoryview(bytearray(size))

        def memory(self, index: int) -> memoryview:
            try:
                return self._sink.memory(index)
            except Exception:
                return self._nowhere

        def done(self, index: int) -> None:
            try:
                self._sink.done(index)
            except Exception:
                return

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        return await super().fetch(endpoint, subscription, self.Anywhere(sink, subscription.layout.block_bytes))


class ById(TcpTransport):
    """Knows a fetch by its request: who asks again has what the first was given."""

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self._known: dict[str, asyncio.Task[TransferReport]] = {}

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        if subscription.request_id not in self._known:
            fetch = super().fetch(endpoint, subscription, sink)
            self._known[subscription.request_id] = asyncio.create_task(fetch)
        return await self._known[subscription.request_id]


class Collector(TcpTransport):
    """Keeps a socket of every thirtieth fetch: too few to be seen by the hundredth."""

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self._kept: list[socket.socket] = []
        self._count = 0

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        self._count += 1
        if self._count % 30 == 0:
            self._kept.append(socket.socket())
        return await super().fetch(endpoint, subscription, sink)

    async def close(self) -> None:
        await super().close()
        for each in self._kept:
            each.close()


class Boaster(TcpTransport):
    """Counts what it sends twice."""

    def telemetry(self) -> tuple[LinkTelemetry, ...]:
        return tuple(msgspec.structs.replace(link, sent=2 * link.sent) for link in super().telemetry())


class Anxious(TcpTransport):
    """What has been in its queue is in it for ever."""

    def telemetry(self) -> tuple[LinkTelemetry, ...]:
        return tuple(msgspec.structs.replace(link, queue=link.queue + link.sent) for link in super().telemetry())


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.cls is None:
        monkeypatch.setattr(TransportFixtures, "patience", 3.0)


CUT = "test_a_cut_anywhere_is_resumed_with_what_is_missing"
FULL = "test_a_sink_out_of_memory_ends_its_fetch_with_its_error"
RESTART = "test_who_restarts_at_the_same_address_is_asked_by_its_new_epoch"
SLOW = "test_a_slow_sink_holds_up_no_other"
SAME_ID = "test_fetches_of_one_request_id_are_fetches_of_their_own"
CANCELLED = "test_a_fetch_that_is_cancelled_ends_no_other_of_its_id"
THOUSAND = "test_the_thousandth_fetch_finds_no_more_than_the_hundredth"
TELEMETRY = "test_telemetry_is_of_what_was_sent"


@pytest.mark.parametrize(
    ("cls", "caught"),
    [
        (
            Hoarder,
            {
                "test_blocks_arrive_whole_and_once",
                "test_a_refusal_reaches_the_receiver_with_its_words",
                "test_a_refused_layout_keeps_the_class_of_its_error",
                "test_the_deadline_holds_and_what_arrived_stays",
            },
        ),
        (Faint, {CUT}),
        (Forgetful, {CUT}),
        (Conservative, {RESTART}),
        (Serial, {SLOW, SAME_ID}),
        (Deaf, {FULL}),
        (ById, {SAME_ID, CANCELLED}),
        (Collector, {THOUSAND}),
        (Boaster, {TELEMETRY}),
        (Anxious, {TELEMETRY}),
    ],
)
def test_the_suite_finds_what_breaks_the_contract(cls: type[TcpTransport], caught: set[str]) -> None:
    assert outcomes(cls, caught).failed == caught


def test_the_suite_finds_who_looks_at_no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "checksum_of", lambda body: 0)
    assert outcomes(Trusting, ["test_a_damaged_byte_anywhere_is_never_taken_for_right"]).failed


def test_the_hundredth_does_not_find_a_slow_leak() -> None:
    assert not outcomes(Collector, ["test_100_fetches_leave_no_thread_and_no_socket"]).failed
