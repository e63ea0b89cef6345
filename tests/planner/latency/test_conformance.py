"""The built-in latency models keep the contract."""

from __future__ import annotations

from pdd_runtime.planner.latency.conformance import TestAiconfigurator, TestRoofline, TestTable

__all__ = ["TestAiconfigurator", "TestRoofline", "TestTable"]
