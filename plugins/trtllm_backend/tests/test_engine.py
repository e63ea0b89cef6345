from __future__ import annotations

from pdd_trtllm.conformance import (
    TestNative,
    TestNativeRanks,
    TestOneByOne,
    TestOverlapped,
    TestRealNative,
    TestRealServer,
)

__all__ = ["TestNative", "TestNativeRanks", "TestOneByOne", "TestOverlapped", "TestRealNative", "TestRealServer"]
