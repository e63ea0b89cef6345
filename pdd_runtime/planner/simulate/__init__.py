"""The graph under a workload, simulated: what `up` and `bench` would find, without the machines."""

from __future__ import annotations

from pdd_runtime.planner.simulate.histogram import Histogram
from pdd_runtime.planner.simulate.link import LinkModel
from pdd_runtime.planner.simulate.outcome import METRICS, Outcome
from pdd_runtime.planner.simulate.scenario import Failure, Scenario, SimulationError
from pdd_runtime.planner.simulate.simulated import LinkUse, Metric, PoolUse, Simulated
from pdd_runtime.planner.simulate.simulation import Repeated, repeat, simulate

__all__ = [
    "METRICS",
    "Failure",
    "Histogram",
    "LinkModel",
    "LinkUse",
    "Metric",
    "Outcome",
    "PoolUse",
    "Repeated",
    "Scenario",
    "Simulated",
    "SimulationError",
    "repeat",
    "simulate",
]
