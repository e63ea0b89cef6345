"""What `pdd-runtime plugins check pdd-rdma` runs: the transports' suite over shared memory, and over TCP."""

from __future__ import annotations

import pytest

from pdd_rdma.config import RdmaConfig
from pdd_rdma.transport import RdmaTransport
from pdd_runtime.testing.transport_suite import TransportConformance


class RdmaConformance(TransportConformance):
    plugin = RdmaTransport
    in_band = False
    emulates = False


class TestSharedMemory(RdmaConformance):
    @pytest.fixture
    def config(self) -> RdmaConfig:
        return RdmaConfig(tls="all", readers=1)


class TestChecksums(RdmaConformance):
    @pytest.fixture
    def config(self) -> RdmaConfig:
        return RdmaConfig(tls="all", readers=1, checksums=True)


class TestTcp(RdmaConformance):
    @pytest.fixture
    def config(self) -> RdmaConfig:
        return RdmaConfig(tls="tcp", readers=1)
