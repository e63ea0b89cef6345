"""Conformance suites of the built-in latency models, which need settings: what `pdd-runtime plugins check` runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdd_runtime.planner.latency import (
    Aiconfigurator,
    Grid,
    Roofline,
    RooflineConfig,
    Table,
    TableConfig,
    aiconfigurator,
)
from pdd_runtime.planner.latency.grid_cache import ROOT
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


class Kernels:
    """Answers as a roofline does, a little bumpily."""

    def __init__(self, hardware: str, model: str) -> None:
        self._roofline = Roofline(RooflineConfig(hardware=hardware, model=model))

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        return 1e3 * self._roofline.prefill(isl - prefix, prefix) * (1 + 0.1 * (isl % 3))

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        return 1e3 * self._roofline.decode(bs, isl) * (1 + 0.1 * (bs % 3))


class TestAiconfigurator(LatencyConformance):
    """With the package, where it is installed; else with answers in its place."""

    plugin = Aiconfigurator

    @pytest.fixture
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LatencyModel]:
        config = Aiconfigurator.Config.model_validate({"hardware": "h100", "model": "meta-llama/Meta-Llama-3.1-8B"})
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ROOT, str(_cache(tmp_path_factory)))
            if not aiconfigurator.installed():
                patch.setattr(aiconfigurator, "version", lambda package: "0")
                patch.setattr(aiconfigurator, "compile_kernels", lambda config: Kernels(config.hardware, config.model))
            yield Aiconfigurator(config)


def _cache(factory: pytest.TempPathFactory) -> Path:
    """One for all tests: the package takes seconds to answer."""
    directory = factory.getbasetemp() / "latencies"
    directory.mkdir(exist_ok=True)
    return directory
