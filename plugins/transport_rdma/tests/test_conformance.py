"""The transport `rdma` keeps the contract."""

from pdd_rdma.conformance import TestSharedMemory as TestSharedMemory
from pdd_rdma.conformance import TestTcp as TestTcp
