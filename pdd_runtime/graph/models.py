"""The graph's form: every key of the YAML, its default and its meaning. The one place for defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pdd_runtime.graph.units import Bandwidth, Duration, Size

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""Of graphs, clusters, links and pools: it becomes part of file names, labels and addresses."""
Role = Literal["prefill", "relay", "main", "aggregated"]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PluginRef(_Form):
    """A plugin by name, with its own config."""

    plugin: str
    """The plugin's name, as `pdd-runtime plugins` lists it."""
    config: dict[str, Any] = {}
    """Its settings; each plugin says which it knows."""


class Metadata(_Form):
    """What people call the graph."""

    name: Name
    """The graph's name: `ps`, `logs` and `down` take it, and its state directory is called so."""


class Model(_Form):
    """Which model is served, and how exactly. Defaults for every pool."""

    source: str
    """A name an engine plugin knows, a directory, or a GGUF file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The numbers it is computed in."""
    mode: Literal["fast", "exact"] = "fast"
    """`exact`: prefill, extend and decode are bit-identical at any batch, at some cost in speed."""


class Cluster(_Form):
    """One datacenter, with a fast network inside."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """The address on which its workers listen."""
    advertise: str | None = Field(default=None, min_length=1)
    """The address at which others reach them; by default `host`."""
    insecure: bool = False
    """Let what has no TLS leave the host in clear, without `security.tls` all of it: for a network that nobody else
    can read."""

    def reached(self, endpoint: str) -> str:
        """An endpoint on `host`, as others reach it."""
        if self.advertise is None:
            return endpoint
        return endpoint.replace(f"{_bracketed(self.host)}:", f"{_bracketed(self.advertise)}:")


def _bracketed(host: str) -> str:
    """As it stands before a port."""
    return f"[{host}]" if ":" in host else host


class Link(_Form):
    """A network between two clusters. One pair of clusters has at most one."""

    between: tuple[Name, Name]
    """The two clusters it joins."""
    bandwidth: Annotated[Bandwidth, Field(gt=0)]
    """In each direction, e.g. `200Mbit/s`."""
    rtt: Duration
    """There and back, e.g. `50ms`."""
    jitter: Duration = 0.0
    """How much longer there and back may take, e.g. `2ms`."""
    streams: int = Field(default=4, ge=1, le=64)
    """Connections that bulk KV is spread over."""
    price: float | None = Field(default=None, ge=0)
    """Dollars a GB sent, for the planner."""
    emulate: bool = False
    """Shape traffic in the sending process as if it crossed this link."""


class Pool(_Form):
    """Replicas of one role and engine in one cluster."""

    role: Role
    """What its workers do."""
    cluster: Name
    """Where they stand."""
    replicas: int = Field(default=1, ge=1, le=1024)
    """How many workers."""
    hardware: str | None = None
    """What each of its workers has, for simulator and planner: `h100`, `8xh100`, `4x8xh100`."""
    engine: PluginRef
    """The engine plugin that computes."""
    model: Model | None = None
    """Overrides `spec.model` whole."""
    env: dict[str, str] = {}
    """Environment of its workers. `${NAME}` and `${file:/PATH}` stand for secrets: docs/security.md."""


class Edge(_Form):
    """One pool feeds another."""

    source: Name = Field(alias="from")
    """The pool that gives."""
    target: Name = Field(alias="to")
    """The pool that takes."""
    carries: Literal["kv", "tokens"]
    """KV blocks in bulk, or token IDs only."""
    transport: PluginRef | None = None
    """The transport plugin, which moves `kv` block by block; none between engines that move it themselves."""
    link: Name | None = None
    """The link it crosses; an edge inside one cluster has none."""


class TlsFiles(_Form):
    """Where the processes of a graph find what proves that they are of it."""

    ca: str = Field(min_length=1)
    """The certificate of the CA that signs those of all clusters."""
    cert: str = Field(min_length=1)
    """The certificate of a cluster's processes, and any between it and the CA's. It names graph and cluster."""
    key: str = Field(min_length=1)
    """Its private key, without a password."""


class Security(_Form):
    """What keeps others out."""

    tls: TlsFiles | None = None
    """Mutual TLS 1.3 for the message plane and the transports; none: they are in clear."""


class Slo(_Form):
    """What users are promised, for planning and alarms."""

    ttft_p90: Duration | None = None
    """Time to the first token, 90th percentile."""
    tpot_p90: Duration | None = None
    """Time per output token after it, 90th percentile."""
    hit_rate_gap: float | None = Field(default=0.2, gt=0, le=1)
    """How far main's share of cached prompt tokens may fall behind prefill's before an alarm; none: no alarm."""


class PoolAdmission(_Form):
    """What each worker of a pool takes at once."""

    requests: int | None = Field(default=None, ge=1)
    """Requests; by default its engine's batch and a part of the next."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens of their prompts and answers; by default what its KV blocks hold."""


class LinkAdmission(_Form):
    """What a link is given in advance."""

    bytes: Annotated[Size, Field(ge=1)]
    """KV that may wait for it in each direction, e.g. `200MB`."""


class Admission(_Form):
    """How many requests are let in at once; the others wait in each frontend, or are told to come back."""

    queue: int = Field(default=1024, ge=0, le=100_000)
    """Requests that may wait."""
    max_wait: Annotated[Duration, Field(gt=0)] = 60.0
    """Who would wait longer is refused at once."""
    link_time: Annotated[Duration, Field(gt=0)] = 10.0
    """KV that may wait for a link: what it carries in so much time."""
    pools: dict[Name, PoolAdmission] = {}
    """Limits of pools that differ from the default, by name."""
    links: dict[Name, LinkAdmission] = {}
    """Limits of links that differ from `link_time`, by name."""
    shares: dict[str, Annotated[float, Field(gt=0, le=1000)]] = {}
    """Weights of tenants when they compete, by name of their API key; 1 where not given."""


class Recovery(_Form):
    """What a request goes through when workers fail it, before its user gets the error."""

    attempts: int = Field(default=3, ge=0)
    """How often it goes on elsewhere without a token in between."""
    wait: Duration = Field(default=60.0, ge=0)
    """How long it waits for a worker that can go on."""


class Admin(_Form):
    """Where operators ask: timelines, workers, metrics, cancellation."""

    host: str = "127.0.0.1"
    """The address it listens on."""
    port: int = Field(default=0, ge=0, le=65535)
    """The port it listens on; 0: any free one, which `ps` shows."""


class FrontendTls(_Form):
    """What clients of the HTTP API are shown."""

    cert: str = Field(min_length=1)
    """The certificate, and any between it and its CA's."""
    key: str = Field(min_length=1)
    """Its private key, without a password."""


class Frontend(_Form):
    """The OpenAI-compatible HTTP API."""

    host: str = "127.0.0.1"
    """The address it listens on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """The port it listens on; 0: any free one."""
    cluster: Name | Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Where it stands; by default with the first prefill pool, else with the first pool. In several clusters: one
    outlives the others' loss."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Processes that share the port, in each of its clusters; each has its own core to use."""
    keys: str | None = Field(default=None, min_length=1)
    """The file of API keys, as `pdd-runtime keys` writes it, or `${NAME}`, a variable that holds what would be in it;
    none: whoever reaches the port may ask."""
    share: bool = False
    """Requests of different API keys share cached KV."""
    insecure: bool = False
    """Let it listen beyond this host without keys: for a network where whoever reaches it may ask."""
    admin: Admin | None = None
    """Its own port for what operators ask; none: the API's port, or, where that is beyond this host, a free port of
    127.0.0.1."""
    tls: FrontendTls | None = None
    """HTTPS; none: plain HTTP."""
    deadline: Duration | None = Field(default=None, gt=0)
    """A request that has no whole answer by then is cancelled; a request may ask for less."""
    connections: int = Field(default=4096, ge=1)
    """Clients connected to a process at once; above it the one that has been idle longest gives way."""


class Variant(_Form):
    """One way to serve requests, beside others that the same traffic is split between: A/B, live."""

    weight: float = Field(default=1.0, ge=0, le=1e6, allow_inf_nan=False)
    """Its part of the requests, over the sum of all weights; 0: it gets none."""
    routing: PluginRef | None = None
    """Overrides `spec.routing`."""
    handoff: PluginRef | None = None
    """Overrides `spec.handoff`."""
    pools: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """The pools that its requests may take; none: all of the graph."""


class Guardrails(_Form):
    """What rolls a variant back by itself: being surely worse than the control, by more than this."""

    errors: float | None = Field(default=0.02, ge=0, lt=1)
    """By how much its share of failed requests may be above the control's, e.g. `0.02`: 2 of 100 more."""
    ttft_p90: float | None = Field(default=0.25, ge=0, le=100)
    """By which part its 90th percentile of the time to the first token may be above the control's: `0.25` is 25 %."""
    tpot_p90: float | None = Field(default=0.25, ge=0, le=100)
    """The same for the time per output token after it."""
    requests: int = Field(default=50, ge=1, le=1_000_000)
    """Fewer than so many requests of either in the window prove nothing."""
    window: Duration = Field(default=600.0, ge=1)
    """The time of late that counts."""
    confidence: float = Field(default=0.999, ge=0.9, lt=1)
    """How sure it must be, of 1, at each look."""


def _sticky(value: str) -> str:
    if re.fullmatch(r"key|user|conversation|header [A-Za-z0-9-]{1,64}", value) is None:
        raise ValueError(f"{value} is none of: key, user, conversation, header NAME")
    return value


class Experiment(_Form):
    """How requests are split between `spec.variants`, and what ends it early."""

    control: Name | None = None
    """The variant that others are compared with, and that serves what they cannot; by default the first."""
    sticky: tuple[Annotated[str, AfterValidator(_sticky)], ...] = ("conversation",)
    """What stays with one variant: `key` (the API key), `header NAME`, `user` (the request's field), `conversation`
    (how it began). The first that a request has counts; one that has none of them goes anywhere."""
    salt: str = ""
    """Another one shuffles who gets which variant."""
    guardrails: Guardrails | None = Guardrails()
    """What rolls a variant back; none: only people do."""


class Spec(_Form):
    """What runs."""

    model: Model
    """What is served."""
    clusters: dict[Name, Cluster] = Field(min_length=1)
    """Datacenters by name."""
    links: dict[Name, Link] = {}
    """Networks between clusters, by name."""
    pools: dict[Name, Pool] = Field(min_length=1)
    """Workers of a kind, by name."""
    edges: tuple[Edge, ...] = ()
    """Which pool feeds which; many to many."""
    routing: PluginRef = PluginRef(plugin="hit-threshold")
    """The routing policy: which workers a request takes."""
    handoff: PluginRef = PluginRef(plugin="catch-up")
    """The handoff strategy: when decoding passes from relay to main."""
    variants: dict[Name, Variant] = {}
    """Ways to serve requests that traffic is split between, by name."""
    experiment: Experiment = Experiment()
    """How it is split, and what ends that early."""
    slo: Slo = Slo()
    """What users are promised."""
    admission: Admission = Admission()
    """How many requests are let in at once."""
    recovery: Recovery = Recovery()
    """What a request goes through when workers fail it."""
    frontend: Frontend = Frontend()
    """Where users find it."""
    discovery: PluginRef = PluginRef(plugin="local")
    """How the processes find each other."""
    security: Security = Security()
    """What keeps others out of what they say to each other."""


class Graph(_Form):
    """The whole declaration."""

    apiVersion: Literal["pdd/v1alpha1"]  # noqa: N815 - the YAML's key
    """The form's version."""
    kind: Literal["InferenceGraph"]
    """What the file declares."""
    metadata: Metadata
    """What it is called."""
    spec: Spec
    """What runs."""

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def frontend_clusters(self) -> tuple[str, ...]:
        """The clusters in which a frontend, and the session driver in it, stand; at least one."""
        named = self.spec.frontend.cluster
        if named:
            return (named,) if isinstance(named, str) else named
        pools = list(self.spec.pools.values())
        return (next((pool.cluster for pool in pools if pool.role == "prefill"), pools[0].cluster),)

    @property
    def frontend_cluster(self) -> str:
        """The first of them."""
        return self.frontend_clusters[0]

    @property
    def frontends(self) -> tuple[str, ...]:
        """The cluster of each frontend process, in the order of their indices."""
        return tuple(name for name in self.frontend_clusters for _ in range(self.spec.frontend.replicas))

    @property
    def control(self) -> str:
        """The variant that others are compared with; empty where there are none."""
        return self.spec.experiment.control or next(iter(self.spec.variants), "")

    def beside(self, directory: Path) -> Graph:
        """With paths that are relative to `directory`, where its file is, made absolute."""

        def whole(path: str) -> str:
            return str(directory.absolute() / Path(path).expanduser())

        spec, frontend = self.spec, self.spec.frontend
        if spec.security.tls is not None:
            tls = spec.security.tls.model_copy(update={name: whole(path) for name, path in spec.security.tls})
            spec = spec.model_copy(update={"security": spec.security.model_copy(update={"tls": tls})})
        if frontend.tls is not None:
            shown = frontend.tls.model_copy(update={name: whole(path) for name, path in frontend.tls})
            frontend = frontend.model_copy(update={"tls": shown})
        if frontend.keys is not None and "${" not in frontend.keys:
            frontend = frontend.model_copy(update={"keys": whole(frontend.keys)})
        return self.model_copy(update={"spec": spec.model_copy(update={"frontend": frontend})})

    def model_of(self, pool: str) -> Model:
        """The model that `pool` serves."""
        return self.spec.pools[pool].model or self.spec.model
