"""What `pdd-runtime plugins check pdd-torch` runs: the engine's conformance suite on a tiny model, in each mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdd_runtime.plugins.engine import Engine, ModelSpec
from pdd_runtime.testing.engine_suite import EngineConformance
from pdd_runtime.testing.inprocess_suite import InProcessFaults
from pdd_torch.engine import TorchEngine
from pdd_torch.testing import build_tiny_model


class TorchConformance(EngineConformance):
    plugin = TorchEngine

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        return build_tiny_model(tmp_path / "tiny")


class TestFast(InProcessFaults, TorchConformance):
    @pytest.fixture
    def engine(self, model: Path) -> Engine:
        return TorchEngine(TorchEngine.Config(kv_blocks=64), ModelSpec(source=str(model), mode="fast"))


class TestExact(TorchConformance):
    @pytest.fixture
    def engine(self, model: Path) -> Engine:
        return TorchEngine(TorchEngine.Config(kv_blocks=64), ModelSpec(source=str(model), mode="exact"))


class TestExactBfloat16(TorchConformance):
    @pytest.fixture
    def engine(self, model: Path) -> Engine:
        spec = ModelSpec(source=str(model), mode="exact", dtype="bfloat16")
        return TorchEngine(TorchEngine.Config(kv_blocks=64, block_size=8), spec)
