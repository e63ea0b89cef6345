"""The transport `tcp` keeps the contract, and the suite finds transports that do not."""

from __future__ import annotations

import pytest
from pdd_tcp.config import TcpConfig
from pdd_tcp.transport import TcpTransport
from pydantic import BaseModel

from pdd_runtime.plugins.transport import BlockSink, Subscription, TransferReport
from pdd_runtime.testing import transport_suite
from pdd_runtime.testing.transport_suite import TransportConformance
from tests.testing.outcomes import outcomes


class TestTcp(TransportConformance):
    plugin = TcpTransport


class TestTcpWithOneStream(TransportConformance):
    plugin = TcpTransport

    @pytest.fixture
    def config(self) -> BaseModel:
        return TcpConfig(streams=1)


class Hoarder(TcpTransport):
    """Says that blocks are done before they are, keeps no error's class, and forgets what it began."""

    name = "hoarder"

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        sink.done(0)
        try:
            return await super().fetch(endpoint, subscription, sink)
        except Exception as error:
            raise RuntimeError("something failed") from error


def test_the_suite_finds_what_breaks_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_suite, "PATIENCE", 3.0)
    failed = outcomes(Hoarder).failed
    assert {
        "test_blocks_arrive_whole_and_once",
        "test_a_refusal_reaches_the_receiver_with_its_words",
        "test_a_refused_layout_keeps_the_class_of_its_error",
        "test_the_deadline_holds_and_what_arrived_stays",
    } <= failed
