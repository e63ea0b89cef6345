"""What `pdd-runtime plugins check pdd-llamacpp` runs: the engine's conformance suite on a tiny model, in two number
formats, and with so few cells that sequences must give way to one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdd_llamacpp.engine import LlamaCppEngine
from pdd_llamacpp.testing import build_tiny_gguf
from pdd_runtime.plugins.engine import Engine, ModelSpec
from pdd_runtime.testing.engine_suite import EngineConformance
from pdd_runtime.testing.inprocess_suite import InProcessFaults


class LlamaCppConformance(EngineConformance):
    plugin = LlamaCppEngine

    @pytest.fixture
    def model(self, tmp_path: Path) -> ModelSpec:
        return ModelSpec(source=str(build_tiny_gguf(tmp_path / "tiny.gguf")))


class TestFloat16(InProcessFaults, LlamaCppConformance):
    @pytest.fixture
    def engine(self, model: ModelSpec) -> Engine:
        return LlamaCppEngine(LlamaCppEngine.Config(kv_blocks=64), model)


class TestBfloat16(LlamaCppConformance):
    @pytest.fixture
    def engine(self, model: ModelSpec) -> Engine:
        return LlamaCppEngine(LlamaCppEngine.Config(kv_blocks=64, block_size=8, kv_dtype="bfloat16"), model)


class TestFewCells(LlamaCppConformance):
    @pytest.fixture
    def engine(self, model: ModelSpec) -> Engine:
        config = LlamaCppEngine.Config(kv_blocks=64, kv_dtype="float32", cells=512, context_length=512)
        return LlamaCppEngine(config, model)
