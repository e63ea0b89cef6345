"""What a graph would do: workloads, models of latency, the simulator, cost, and the search for the best graph."""

from __future__ import annotations

from pdd_runtime.planner.distribution import Distribution
from pdd_runtime.planner.workload import Session, Turn, Workload, WorkloadError, read_workload

__all__ = ["Distribution", "Session", "Turn", "Workload", "WorkloadError", "read_workload"]
