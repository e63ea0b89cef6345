"""The report's deployments as scenarios of the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from parameters import parameters
from published import deployment
from pydantic import BaseModel

from pdd_runtime.graph import Graph
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate import LinkModel, Scenario
from pdd_runtime.plugins import PluginManager, load_plugins
from pdd_runtime.plugins.latency import LatencyModel

BATCH = 30
"""Sequences at which `Fitted.h100` and `h200` are."""
CHUNK = 16384
HELD = 1 << 30
"""Tokens of KV that a worker holds: all that is asked for."""


@dataclass(frozen=True)
class Fitted:
    """What the report leaves open. One set for all rows."""

    pass_time: float
    """Seconds of a prefill worker's pass, beside those of its tokens."""
    token_time: float
    """Seconds of a token there."""
    before: float
    """Seconds until a request is with its prefill worker, in which no worker is busy."""
    flow_rate: float
    """Bytes/s of one transfer over the WAN."""
    lacking: float
    """Share of a prompt that main must lack for a relay to be used: 1 less the report's H."""
    slots: int
    """Requests that a main worker on H100 decodes at once."""
    h200: float
    """Seconds of a main worker's decode step, at `BATCH` sequences."""
    h100: float
    """The same on three nodes of H100: IDC-PD's main workers."""
    relay: float
    """And the relay, on as many: the report says nowhere that it takes as long."""
    growth: float
    """Of those steps: the share that grows with the batch."""
    riding: float
    """Of an extend: the share of its time by which a main worker's other answers are delayed. The rest passes beside
    their steps, which read the weights all the same."""


class Affine(LatencyModel):
    """Passes and steps whose times are a constant, and some for each token or sequence."""

    name = "affine"

    class Config(BaseModel, frozen=True):
        pass_time: float
        token_time: float
        step: float
        growth: float

    config: Config

    def prefill(self, new: int, context: int) -> float:
        return self.config.pass_time + self.config.token_time * new

    def decode(self, batch: int, context: float) -> float:
        return self.config.step * (1.0 + self.config.growth * (batch / BATCH - 1.0))

    @property
    def source(self) -> str:
        return "fitted to the report's tables: examples/report"


def fitted(**changes: float) -> Fitted:
    """Those of parameters.yaml, but for `changes`."""
    return Fitted(**(parameters()["fitted"]["deployments"] | changes))


def scenario(name: str, numbers: Fitted, **changes: Any) -> Scenario:
    """A deployment as the report runs it: prompts one after the other, KV sent when it is whole, transfers that share
    the line as TCP does, and no admission. `changes` are of the scenario's fields."""
    given = parameters()["given"]
    wan = LinkModel(given["line"], parameters()["assumed"]["rtt"], numbers.flow_rate, discipline="fair")
    graph = deployment(name)
    settings: dict[str, Any] = {
        "graph": with_routing(graph, "hit-threshold", threshold=1.0 - numbers.lacking) if name == "pdd" else graph,
        "pools": pools(name, numbers),
        "plugins": plugins(),
        "links": dict.fromkeys(graph.spec.links, wan),
        "overlap": False,
        "admission": False,
    }
    return Scenario(**(settings | changes))


def pools(name: str, numbers: Fitted) -> Mapping[str, PoolModel]:
    prefill = Affine.Config(pass_time=numbers.pass_time, token_time=numbers.token_time, step=1.0, growth=0.0)
    models = {"prefill": _pool(prefill, 1)}
    for pool, declared in deployment(name).spec.pools.items():
        if declared.role != "prefill":
            on_h100 = "H100" in str(declared.hardware)
            step = numbers.relay if declared.role == "relay" else numbers.h100 if on_h100 else numbers.h200
            places = numbers.slots if on_h100 and declared.role == "main" else parameters()["assumed"]["batch"]
            models[pool] = _pool(_decoding(step, numbers), places)
    return models


def with_routing(graph: Graph, plugin: str, **config: Any) -> Graph:
    spec = graph.spec.model_copy(update={"routing": graph.spec.routing.model_copy(
        update={"plugin": plugin, "config": config})})  # fmt: skip
    return graph.model_copy(update={"spec": spec})


def _decoding(step: float, numbers: Fitted) -> Affine.Config:
    """Where tokens are decoded: a step is longer by a part of what an extend over 100 of them takes by the report's
    handoff. The simulator has one time for both, so the request itself waits less as well, while its relay goes on."""
    extend = parameters()["fitted"]["extend"]
    token_time = numbers.riding * (extend - step) / 100
    return Affine.Config(pass_time=step, token_time=token_time, step=step, growth=numbers.growth)


def _pool(config: Affine.Config, batch_limit: int) -> PoolModel:
    constant, token = parameters()["given"]["kv"]
    return PoolModel(Affine(config), batch_limit, CHUNK, HELD, 64, constant, token)


@cache
def plugins() -> PluginManager:
    return load_plugins()


def as_dict(numbers: Fitted) -> dict[str, float]:
    return asdict(numbers)
