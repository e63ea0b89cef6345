from __future__ import annotations

from pdd_trtllm.conformance import TestOneByOne, TestOverlapped, TestRealServer

__all__ = ["TestOneByOne", "TestOverlapped", "TestRealServer"]
