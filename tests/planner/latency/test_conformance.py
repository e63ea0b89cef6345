"""The built-in latency models keep the contract."""

from __future__ import annotations

from pdd_runtime.planner.latency.conformance import TestRoofline, TestTable

__all__ = ["TestRoofline", "TestTable"]
