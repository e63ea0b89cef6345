from __future__ import annotations

from pathlib import Path

import pytest
from pdd_torch.engine import TorchEngine
from pdd_torch.testing import build_tiny_model

from pdd_runtime.plugins.engine import Engine, ModelSpec
from pdd_runtime.testing.engine_suite import EngineConformance


class TestExactEngine(EngineConformance):
    @pytest.fixture
    def engine(self, tmp_path: Path) -> Engine:
        return TorchEngine(
            TorchEngine.Config(kv_blocks=64), ModelSpec(source=str(build_tiny_model(tmp_path)), mode="exact")
        )


class TestFastEngine(EngineConformance):
    @pytest.fixture
    def engine(self, tmp_path: Path) -> Engine:
        return TorchEngine(
            TorchEngine.Config(kv_blocks=64), ModelSpec(source=str(build_tiny_model(tmp_path)), mode="fast")
        )
