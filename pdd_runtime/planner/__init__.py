"""What a graph would do: workloads, models of latency, the simulator, cost, and the search for the best graph."""

from __future__ import annotations

from pdd_runtime.planner.distribution import Distribution
from pdd_runtime.planner.session import Session, Spans, Turn
from pdd_runtime.planner.workload import Workload
from pdd_runtime.planner.workload_error import WorkloadError
from pdd_runtime.planner.workload_file import presets, read_workload

__all__ = ["Distribution", "Session", "Spans", "Turn", "Workload", "WorkloadError", "presets", "read_workload"]
