"""The graph's form: every key of the YAML, its default and its meaning. The one place for defaults."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pdd_runtime.graph.units import Bandwidth, Duration

_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
Role = Literal["prefill", "relay", "main", "aggregated"]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PluginRef(_Form):
    """A plugin by name, with its own config."""

    plugin: str
    config: dict[str, Any] = {}


class Metadata(_Form):
    name: str = Field(pattern=_NAME)


class Model(_Form):
    """Defaults for every pool."""

    source: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    mode: Literal["fast", "exact"] = "fast"


class Cluster(_Form):
    """One datacenter."""


class Link(_Form):
    """A network between two clusters."""

    between: tuple[str, str]
    bandwidth: Bandwidth
    rtt: Duration
    jitter: Duration = 0.0
    streams: int = Field(4, ge=1, le=64)
    price: float | None = None
    emulate: bool = False
    """Shape traffic in the sending process as if it crossed this link."""


class Pool(_Form):
    role: Role
    cluster: str
    replicas: int = Field(1, ge=1, le=1024)
    hardware: str | None = None
    """What the planner prices and models."""
    engine: PluginRef
    model: Model | None = None
    """Overrides `spec.model` whole."""
    env: dict[str, str] = {}
    """Environment of its workers."""


class Edge(_Form):
    source: str = Field(alias="from")
    target: str = Field(alias="to")
    carries: Literal["kv", "tokens"]
    transport: PluginRef | None = None
    link: str | None = None


class Slo(_Form):
    ttft_p90: Duration | None = None
    tpot_p90: Duration | None = None


class Frontend(_Form):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    """0: any free port."""
    cluster: str | None = None
    """Where it stands; by default the prefill pool's cluster."""


class Spec(_Form):
    model: Model
    clusters: dict[str, Cluster]
    links: dict[str, Link] = {}
    pools: dict[str, Pool]
    edges: tuple[Edge, ...] = ()
    routing: PluginRef = PluginRef(plugin="hit-threshold")
    handoff: PluginRef = PluginRef(plugin="catch-up")
    slo: Slo = Slo()
    frontend: Frontend = Frontend()
    discovery: PluginRef = PluginRef(plugin="local")


class Graph(_Form):
    apiVersion: Literal["pdd/v1alpha1"]  # noqa: N815 - the YAML's key
    kind: Literal["InferenceGraph"]
    metadata: Metadata
    spec: Spec
