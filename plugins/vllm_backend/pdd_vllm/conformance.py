"""What `pdd-runtime plugins check pdd-vllm` runs: the engine's conformance suite on a tiny model, with real servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdd_runtime.plugins.engine import Engine, ModelSpec
from pdd_runtime.testing.engine_suite import EngineConformance
from pdd_runtime.testing.tiny_model import write_tiny_model
from pdd_vllm import testing
from pdd_vllm.engine import VllmEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSpec]:
    """Two servers have it."""
    config = testing.settings()
    directory = tmp_path_factory.mktemp("vllm")
    model = ModelSpec(source=str(write_tiny_model(directory / "tiny")))
    with testing.servers([config, config], model, directory):
        yield model


@pytest.mark.timeout(3600)
class TestVllm(EngineConformance):
    plugin = VllmEngine

    @pytest.fixture
    def engine(self, model: ModelSpec) -> Engine:
        return testing.AttachedEngine(testing.settings(), model)
