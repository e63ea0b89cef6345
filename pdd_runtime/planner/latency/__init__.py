"""Sources of latency: what was measured, what follows from figures of chips and models, what others have measured."""

from __future__ import annotations

from pdd_runtime.planner.latency.aiconfigurator import Aiconfigurator, AiconfiguratorConfig
from pdd_runtime.planner.latency.roofline import Roofline, RooflineConfig
from pdd_runtime.planner.latency.table import Grid, Table, TableConfig
from pdd_runtime.plugins import hookimpl
from pdd_runtime.plugins.latency import LatencyModel

__all__ = ["Aiconfigurator", "AiconfiguratorConfig", "Grid", "Roofline", "RooflineConfig", "Table", "TableConfig"]


@hookimpl
def pdd_register_latency_models() -> list[type[LatencyModel]]:
    return [Aiconfigurator, Roofline, Table]
