"""The graph under a workload, simulated: what `up` and `bench` would find, without the machines."""

from __future__ import annotations

from pdd_runtime.planner.simulate.histogram import Histogram
from pdd_runtime.planner.simulate.link import LinkModel
from pdd_runtime.planner.simulate.outcome import METRICS, Outcome
from pdd_runtime.planner.simulate.repeated import LEVEL, Interval, Repeated
from pdd_runtime.planner.simulate.scenario import Failure, Scenario, SimulationError, measured_links
from pdd_runtime.planner.simulate.simulated import LinkUse, Metric, PoolUse, Simulated
from pdd_runtime.planner.simulate.simulation import repeat, simulate

__all__ = [
    "LEVEL",
    "METRICS",
    "Failure",
    "Histogram",
    "Interval",
    "LinkModel",
    "LinkUse",
    "Metric",
    "Outcome",
    "PoolUse",
    "Repeated",
    "Scenario",
    "Simulated",
    "SimulationError",
    "measured_links",
    "repeat",
    "simulate",
]
