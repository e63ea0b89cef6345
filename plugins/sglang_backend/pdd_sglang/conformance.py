"""What `pdd-runtime plugins check pdd-sglang` runs: the conformance suites on a tiny model, with real servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdd_runtime.graph import Role
from pdd_runtime.plugins.engine import Engine, ModelSpec
from pdd_runtime.testing.engine_suite import EngineConformance
from pdd_runtime.testing.native_suite import NativeConformance
from pdd_runtime.testing.tiny_model import write_tiny_model
from pdd_sglang import testing
from pdd_sglang.config import SglangConfig
from pdd_sglang.engine import SglangEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSpec]:
    """Two servers have it."""
    config = testing.settings()
    directory = tmp_path_factory.mktemp("sglang")
    model = ModelSpec(source=str(write_tiny_model(directory / "tiny")))
    with testing.servers([config, config], model, directory):
        yield model


@pytest.mark.timeout(3600)
class TestSglang(EngineConformance):
    plugin = SglangEngine

    @pytest.fixture
    def engine(self, model: ModelSpec) -> Engine:
        return testing.AttachedEngine(testing.settings(), model)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Two servers that move KV themselves have it."""
    return ModelSpec(source=str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=3)))


@pytest.fixture(scope="module")
def transferring(tiny: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Role, SglangConfig]]:
    """How to attach to them."""
    with testing.transferring(tiny, tmp_path_factory.mktemp("transfer"), "prefill", "main") as attaching:
        yield attaching


@pytest.mark.timeout(3600)
class TestSglangTransfer(NativeConformance):
    @pytest.fixture
    def giver(self, transferring: dict[Role, SglangConfig], tiny: ModelSpec) -> Engine:
        return SglangEngine(transferring["prefill"], tiny)

    @pytest.fixture
    def reader(self, transferring: dict[Role, SglangConfig], tiny: ModelSpec) -> Engine:
        return SglangEngine(transferring["main"], tiny)
