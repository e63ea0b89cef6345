"""What a bench found, as `--format json` prints it. Times are seconds, sizes are bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pdd_runtime.experiments.outcome import METRICS, Outcome
from pdd_runtime.experiments.statistics import LEVEL, Intervals, Summary, intervals, ratio, summary
from pdd_runtime.graph import Graph, link_between
from pdd_runtime.planner.workload import Workload

_TIERS = ("prefill", "relay", "main")


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Statistics(_Form):
    """None: no request had the metric."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class Rate(_Form):
    """Requests a second."""

    offered: float | None
    """As the workload has it; None: closed loop, where it is as many as are answered."""
    achieved: float | None
    """Answered ones over the time from the first request's due time to the last one's end."""


class GraphReport(_Form):
    """One graph under the workload."""

    requests: int
    errors: int
    first_error: str | None
    """The message of the first that failed."""
    ttft: Statistics
    tt10: Statistics
    tpot: Statistics
    longest_gap: Statistics
    handoff_gap: Statistics
    e2e: Statistics
    tokens: dict[str, int]
    """Output tokens by the tier that made them: prefill, relay, main."""
    link_bytes: dict[str, int]
    """KV bytes that crossed each link."""
    edge_bytes: dict[str, int]
    """KV bytes by edge, `source->target`, those inside a cluster among them."""
    output_tokens: int
    """As the client counted them."""
    prompt_tokens: int
    cached_tokens: dict[str, int]
    """Of the prompts' tokens, those whose KV was there already, at prefill and at main."""
    routes: dict[str, int]
    """Requests by the route they took."""
    timelines: int
    """Requests whose timeline was had: what `tokens`, bytes, routes and handoff gaps were read from."""
    rate: Rate
    seconds: float
    """From the first request's due time to the last one's end."""
    late: float
    """The most that a request was sent after its time, because the client was busy."""
    client_cpu: float
    """CPU seconds of the measuring process for each second: near 1 its own work is in the numbers."""


class Confidence(_Form):
    """Intervals of what stands at the same place in the report."""

    level: float = LEVEL
    graphs: dict[str, dict[str, dict[str, tuple[float, float] | None]]]
    ratios: dict[str, dict[str, dict[str, tuple[float, float] | None]]]


class Report(_Form):
    """The whole."""

    workload: Workload
    requests: int
    seed: int
    baseline: str
    """The graph that the others are compared with: the first."""
    graphs: dict[str, GraphReport]
    ratios: dict[str, dict[str, Statistics]]
    """Graph to metric to its statistics over the baseline's, by the requests that both answered."""
    ci: Confidence = Field(description="Bootstrap confidence intervals.")

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = self.model_dump(mode="json")
        return data

    @property
    def failed(self) -> bool:
        """A graph has answered nothing."""
        return any(graph.errors == graph.requests for graph in self.graphs.values())


class Measured:
    """What was measured at one graph."""

    def __init__(
        self, name: str, graph: Graph | None, outcomes: Sequence[Outcome], client_cpu: float = 0.0, failure: str = ""
    ) -> None:
        """`graph`: None where only its URL is known. `failure`: why it was not measured at all."""
        self.name, self.graph, self.client_cpu, self.failure = name, graph, client_cpu, failure
        self.outcomes = sorted(outcomes, key=lambda outcome: outcome.due)

    def values(self, metric: str) -> dict[tuple[int, int], float]:
        """The metric of each request that has it."""
        found = ((outcome.key, outcome.metric(metric)) for outcome in self.outcomes)
        return {key: value for key, value in found if value is not None}


def report(workload: Workload, requests: int, seed: int, measured: Sequence[Measured]) -> Report:
    """The first of `measured` is the baseline."""
    around: dict[str, dict[str, Intervals]] = {}
    ratios: dict[str, dict[str, Statistics]] = {}
    ratios_around: dict[str, dict[str, Intervals]] = {}
    base = measured[0]
    for one in measured:
        around[one.name] = {metric: intervals(list(one.values(metric).values())) for metric in METRICS}
        if one is not base:
            pairs = {metric: ratio(base.values(metric), one.values(metric)) for metric in METRICS}
            ratios[one.name] = {metric: _statistics(point) for metric, (point, _) in pairs.items()}
            ratios_around[one.name] = {metric: interval for metric, (_, interval) in pairs.items()}
    return Report(
        workload=workload,
        requests=requests,
        seed=seed,
        baseline=base.name,
        graphs={one.name: graph_report(one, workload, requests) for one in measured},
        ratios=ratios,
        ci=Confidence(graphs=around, ratios=ratios_around),
    )


def graph_report(one: Measured, workload: Workload, requests: int) -> GraphReport:
    """`requests`: that it was to be sent."""
    outcomes = one.outcomes
    answered = [outcome for outcome in outcomes if outcome.error is None]
    timelines = [outcome.timeline for outcome in outcomes if outcome.timeline is not None]
    seconds = max((outcome.ended for outcome in outcomes), default=0.0) - (outcomes[0].due if outcomes else 0.0)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    edges: Counter[str] = Counter()
    for timeline in timelines:
        for transfer in timeline["kv"]:
            edges[transfer["edge"]] += transfer["bytes"]
    statistics = {metric: _statistics(summary(list(one.values(metric).values()))) for metric in METRICS}
    return GraphReport(
        requests=requests,
        errors=requests - len(answered),
        first_error=one.failure or (errors[0] if errors else None),
        **statistics,
        tokens={tier: sum(timeline["tokens"][tier] for timeline in timelines) for tier in _TIERS},
        link_bytes=_by_link(edges, one.graph),
        edge_bytes=dict(edges),
        output_tokens=sum(len(outcome.tokens) for outcome in outcomes),
        prompt_tokens=sum(outcome.prompt for outcome in outcomes),
        cached_tokens={
            tier: sum(timeline["cached"][tier] or 0 for timeline in timelines) for tier in ("prefill", "main")
        },
        routes=dict(Counter(timeline["route"] or "none" for timeline in timelines)),
        timelines=len(timelines),
        rate=Rate(offered=workload.rate, achieved=len(answered) / seconds if seconds > 0 else None),
        seconds=seconds,
        late=max((outcome.sent - outcome.due for outcome in outcomes), default=0.0),
        client_cpu=one.client_cpu,
    )


def _by_link(edges: Counter[str], graph: Graph | None) -> dict[str, int]:
    """Every link of the graph. Where only the URL is known there are no links, only edges: see `edge_bytes`."""
    if graph is None:
        return {}
    pools = graph.spec.pools
    total = dict.fromkeys(graph.spec.links, 0)
    for edge, size in edges.items():
        source, _, target = edge.partition("->")
        if source in pools and target in pools:
            link = link_between(graph, pools[source].cluster, pools[target].cluster)
            if link is not None:
                total[link[0]] += size
    return total


def _statistics(values: Summary) -> Statistics:
    return Statistics.model_validate(values)
