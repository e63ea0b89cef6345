"""How one worker of a pool behaves: all that a simulation needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from pdd_runtime.graph import Graph, PluginRef
from pdd_runtime.planner.context_limit import ContextLimit, context_limit
from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.hardware import Hardware, counted
from pdd_runtime.planner.model_spec import ModelFigures, model_figures
from pdd_runtime.planner.profile import PoolProfile, Profile, ProfileError
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.latency import LatencyModel

FROM_FIGURES = "roofline"
"""The latency model of a pool that has `hardware` and no profile."""


@dataclass(frozen=True, slots=True)
class PoolModel:
    """Of each worker of a pool."""

    latency: LatencyModel
    batch_limit: int
    """Requests it decodes at once."""
    chunk: int
    """Prompt tokens of one pass."""
    capacity: int
    """Tokens of KV it holds."""
    block: int
    """Tokens of a block."""
    kv_constant: float
    """Bytes of a request's KV: this, and `kv_token` for each of its tokens."""
    kv_token: float
    overhead: float = 0.0
    """Seconds added to each request's first token there: message plane, scheduling."""
    context: ContextLimit | None = None
    """The longest sequence that it takes; None: any."""

    def kv_bytes(self, tokens: int) -> float:
        """Bytes of the KV of `tokens` tokens of one request."""
        return self.kv_constant + self.kv_token * tokens

    def prompt(self, new: int, context: int) -> float:
        """Seconds to compute `new` tokens behind `context` known ones, in as many passes as that takes, alone."""
        whole, rest = divmod(new, self.chunk)
        seconds = sum(self.latency.prefill(self.chunk, context + self.chunk * number) for number in range(whole))
        return seconds + (self.latency.prefill(rest, context + self.chunk * whole) if rest else 0.0)


@runtime_checkable
class KnowsMemory(Protocol):
    """A latency model that knows what it computes on, too."""

    kv_constant: float
    kv_token: float

    def capacity(self, requests: int) -> int:
        """Tokens of KV that fit, when `requests` requests are there. Raises `FigureError`."""
        ...


def pool_models(
    graph: Graph,
    plugins: PluginManager,
    profile: Profile | None = None,
    *,
    hardware: Mapping[str, Hardware] | None = None,
    models: Mapping[str, ModelFigures] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, PoolModel]:
    """Of all pools of `graph`: as the profile says; where it does not, from what `hardware:` and the model's name say,
    with `hardware` and `models` beside what is known, and `settings` for the latency model. Raises `ProfileError`
    where neither says it, `FigureError` and `PluginError`."""
    found: dict[str, PoolModel] = {}
    for name, pool in graph.spec.pools.items():
        measured = profile.pools.get(name) if profile is not None else None
        if measured is not None:
            found[name] = pool_model(measured, plugins, f"pool {name} of the profile")
        elif pool.hardware is not None:
            config = _config(pool.hardware, graph.model_of(name).source, hardware or {}, models or {})
            ref = PluginRef(plugin=FROM_FIGURES, config={**config, **(settings or {})})
            try:
                found[name] = pool_model(PoolProfile(latency=ref), plugins, f"pool {name}")
            except FigureError as error:
                fix = f"{error.fix}; or measure what is there: `pdd-runtime profile GRAPH`"
                raise FigureError(error.what, where=f"pool {name}", why=error.why, fix=fix) from None
        else:
            said = "the profile has no such pool" if profile is not None else "no profile is given"
            raise ProfileError(
                f"nothing says how fast the workers of pool {name} are",
                where=f"spec.pools.{name}",
                why=f"{said}, and the graph does not say its hardware",
                fix="measure it with `pdd-runtime profile GRAPH`, or say e.g. `hardware: 8xh100`",
            )
        figures = _figures(graph.model_of(name).source, models or {})
        found[name] = replace(found[name], context=context_limit(graph, name, plugins, measured, figures))
    return found


def pool_model(said: PoolProfile, plugins: PluginManager, where: str) -> PoolModel:
    """Of a pool whose profile says `said`; `where` it stands, for messages. Raises `ProfileError`, `FigureError` and
    `PluginError`."""
    cls = plugins.latency(said.latency.plugin)
    latency = cls(plugins.configure(cls, said.latency.config, where))
    knows = latency if isinstance(latency, KnowsMemory) else None
    values = (said.capacity, said.kv_constant, said.kv_token)
    if knows is None and None in values:
        names = ("capacity", "kv_constant", "kv_token")
        missing = ", ".join(name for name, value in zip(names, values, strict=True) if value is None)
        raise ProfileError(
            f"{missing} must be given",
            where=where,
            why=f"the latency model {said.latency.plugin} knows neither memory nor KV",
            fix="`pdd-runtime profile GRAPH` measures them",
        )
    if knows is not None:
        values = (
            knows.capacity(said.batch_limit) if said.capacity is None else said.capacity,
            knows.kv_constant if said.kv_constant is None else said.kv_constant,
            knows.kv_token if said.kv_token is None else said.kv_token,
        )
    capacity, kv_constant, kv_token = values
    assert capacity is not None
    assert kv_constant is not None
    assert kv_token is not None
    return PoolModel(
        latency=latency,
        batch_limit=said.batch_limit,
        chunk=said.chunk,
        capacity=capacity,
        block=said.block,
        kv_constant=kv_constant,
        kv_token=kv_token,
        overhead=said.overhead,
    )


def _figures(model: str, own: Mapping[str, ModelFigures]) -> ModelFigures | None:
    """None: of a model whose pools were measured nothing needs to be known."""
    try:
        return model_figures(model, own)
    except FigureError:
        return None


def _config(
    hardware: str, model: str, own_hardware: Mapping[str, Hardware], own_models: Mapping[str, ModelFigures]
) -> dict[str, Any]:
    """Of the latency model that goes by figures."""
    config: dict[str, Any] = {"hardware": hardware, "model": model}
    chip = counted(hardware)[1]
    if chip in own_hardware:
        config["chip"] = own_hardware[chip]
    if model in own_models:
        config["figures"] = own_models[model]
    return config
