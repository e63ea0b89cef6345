"""What tests of the planner share: a graph of pools whose workers compute as simply as can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from pdd_runtime.graph import Graph, loads
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate import Scenario
from pdd_runtime.plugins import PluginManager, load_plugins
from pdd_runtime.plugins.latency import LatencyModel
from tests.graphs import pdd

GRAPH = pdd("planned", prefill="replicas: 2", main="replicas: 2", wan="bandwidth: 8Gbit/s, rtt: 20ms", model="none")
SECONDS_A_TOKEN, STEP = 1e-3, 0.01


class Nothing(BaseModel):
    """No settings."""


class Simple(LatencyModel):
    """A millisecond for each token of a prompt, ten for each step, whatever is in it."""

    name = "simple"
    Config = Nothing

    def prefill(self, new: int, context: int) -> float:
        return new * SECONDS_A_TOKEN

    def decode(self, batch: int, context: float) -> float:
        return STEP

    @property
    def source(self) -> str:
        return "the tests"


@pytest.fixture(scope="session")
def plugins() -> PluginManager:
    return load_plugins()


@pytest.fixture
def graph() -> Callable[..., Graph]:
    """The graph above, with overrides as `--set` takes them."""

    def make(*overrides: str) -> Graph:
        return loads(GRAPH, overrides).graph

    return make


@pytest.fixture
def pool_model() -> Callable[..., PoolModel]:
    """How a worker behaves, with what differs from the simplest."""

    def make(**other: Any) -> PoolModel:
        simple: dict[str, Any] = {
            "latency": Simple(Nothing()), "batch_limit": 64, "chunk": 4096, "capacity": 1_000_000, "block": 8,
            "kv_constant": 0.0, "kv_token": 10_000.0,
        }  # fmt: skip
        return PoolModel(**simple | other)

    return make


@pytest.fixture
def scenario(
    graph: Callable[..., Graph], pool_model: Callable[..., PoolModel], plugins: PluginManager
) -> Callable[..., Scenario]:
    """The graph with overrides, its pools behaving as `pool_model` has it. `models` are those of single pools."""

    def make(*overrides: str, models: dict[str, PoolModel] | None = None, **other: Any) -> Scenario:
        made = graph(*overrides)
        pools = dict.fromkeys(made.spec.pools, pool_model()) | (models or {})
        return Scenario(graph=made, pools=pools, plugins=plugins, **other)

    return make
