"""Conformance suites of the built-in latency models, which need settings: what `pdd-runtime plugins check` runs."""

from __future__ import annotations

import pytest

from pdd_runtime.planner.latency import Grid, Roofline, RooflineConfig, Table, TableConfig
from pdd_runtime.plugins.latency import LatencyModel
from pdd_runtime.testing.latency_suite import LatencyConformance


class TestRoofline(LatencyConformance):
    plugin = Roofline

    @pytest.fixture(
        params=[("8xh200", "deepseek-v3"), ("4x8xh100", "deepseek-v4-pro"), ("h100", "llama-3.1-8b")], ids=" of ".join
    )
    def model(self, request: pytest.FixtureRequest) -> LatencyModel:
        hardware, name = request.param
        return Roofline(RooflineConfig(hardware=hardware, model=name))


class TestTable(LatencyConformance):
    """Of noisy figures with cells that were not measured."""

    plugin = Table

    @pytest.fixture(params=["noisy", "a point"])
    def model(self, request: pytest.FixtureRequest) -> LatencyModel:
        if request.param == "a point":
            point = Grid(tokens=[1], context=[0], seconds=[[0.01]])
            return Table(TableConfig(prefill=point, decode=point))
        prefill = Grid(
            tokens=[1, 16, 64, 256],
            context=[0, 128, 1024],
            seconds=[[0.010, 0.012, 0.011], [0.011, 0.009, 0.021], [0.020, 0.026, None], [0.080, None, None]],
        )
        decode = Grid(tokens=[1, 4], context=[64, 512], seconds=[[0.010, 0.009], [0.008, 0.021]])
        return Table(TableConfig(prefill=prefill, decode=decode, origin="figures of a test"))
