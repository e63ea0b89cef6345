"""Measures graphs under a workload, and compares them."""

from __future__ import annotations

from pdd_runtime.experiments.bench import bench
from pdd_runtime.experiments.html import to_html
from pdd_runtime.experiments.outcome import METRICS, Outcome
from pdd_runtime.experiments.report import GraphReport, Measured, Report, Statistics, report
from pdd_runtime.experiments.statistics import require_scipy
from pdd_runtime.experiments.target import Target, Watcher
from pdd_runtime.planner import Session, Turn, Workload, WorkloadError, read_workload

__all__ = [
    "METRICS",
    "GraphReport",
    "Measured",
    "Outcome",
    "Report",
    "Session",
    "Statistics",
    "Target",
    "Turn",
    "Watcher",
    "Workload",
    "WorkloadError",
    "bench",
    "read_workload",
    "report",
    "require_scipy",
    "to_html",
]
