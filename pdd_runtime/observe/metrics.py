"""Prometheus metrics of one frontend, fed with what has finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from pdd_runtime.observe.pace import Pace
from pdd_runtime.observe.timeline import Timeline
from pdd_runtime.plugins.routing import LinkView

# From a cached prompt inside one datacenter to a cold long one across a slow line; seconds.
_WAITS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
# From one decode step on an accelerator to a stall of the whole route; seconds.
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """Its own registry: two in one process do not meet."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        sessions: Callable[[], float],
        links: Callable[[], Iterable[LinkView]] = tuple,
        collectors: Iterable[Collector] = (),
        *,
        variants: bool = False,
    ) -> None:
        """Asked at each scrape: `sessions`, how many are in flight, `links`, what is known of the links, and
        `collectors`, who have series of their own. `variants`: requests are split between some, so what is counted by
        route or tier has a label that says whose it is."""
        self._variants = variants
        self.registry = registry = CollectorRegistry()
        for collector in (_Links(links), *collectors):
            registry.register(collector)
        self._requests = Counter(
            "pdd_requests", "Requests that ended, by HTTP status (499: the client left) and route",
            self._by("status", "route"), registry=registry,
        )  # fmt: skip
        self._ttft = self._times("pdd_ttft_seconds", "Arrival to the first token", _WAITS)
        self._tenth = self._times("pdd_tenth_token_seconds", "Arrival to the tenth token", _WAITS)
        self._e2e = self._times("pdd_e2e_seconds", "Arrival to the end of a whole answer", _WAITS)
        self._tpot = self._times("pdd_tpot_seconds", "Mean time per token after the first", _STEPS)
        self._gap = self._times("pdd_longest_gap_seconds", "Longest wait between tokens of one answer", _STEPS)
        self._handoff = Histogram(
            "pdd_handoff_gap_seconds", "From the relay's last token to main's first, as users got them",
            buckets=_STEPS, registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            "pdd_tokens", "Tokens that users got, by who made them", self._by("tier"), registry=registry
        )
        self._prompt = Counter("pdd_prompt_tokens", "Prompt tokens", registry=registry)
        self._cached = Counter(
            "pdd_cached_tokens", "Prompt tokens whose KV was there already", ("tier",), registry=registry
        )
        self._kv = Counter("pdd_kv_bytes", "KV that crossed an edge", ("edge",), registry=registry)
        self._saved = Counter(
            "pdd_kv_saved_bytes", "KV that needed not cross, for the target had it cached", ("edge",), registry=registry
        )
        self._recoveries = Counter(
            "pdd_recoveries", "Requests that went on without a worker that had failed them, by its role and why",
            ("role", "reason"), registry=registry,
        )  # fmt: skip
        Gauge("pdd_sessions", "Sessions in flight", registry=registry).set_function(sessions)
        # A transfer that failed never settles: the bound forgets it.
        self._open: deque[_Moving] = deque(maxlen=100)
        for tier in () if variants else ("prefill", "relay", "main"):
            # Zero is a value: a dashboard sees a tier before its first token.
            self._tokens.labels(tier)

    def ended(self, status: int, elapsed: float, pace: Pace | None = None, timeline: Timeline | None = None) -> None:
        """A request, or a session of one, ended for its user `elapsed` seconds after arrival. Without a timeline
        it never got as far as the driver."""
        route, own = "none", ("",) * self._variants
        if timeline is not None:
            body = timeline.body()
            route, own = body["route"] or route, (body["variant"],) * self._variants
            self._count(body)
            self._open.append(_Moving(timeline))
            self._settle()
        self._requests.labels(str(status), route, *own).inc()
        if pace is None or status != 200:
            # What failed or was given up says nothing about how long an answer takes.
            return
        self._e2e.labels(route, *own).observe(elapsed)
        for histogram, value in (
            (self._ttft, pace.ttft),
            (self._tenth, pace.tenth),
            (self._tpot, pace.tpot),
            (self._gap, pace.longest_gap),
        ):
            if value is not None:
                histogram.labels(route, *own).observe(value)

    def text(self) -> bytes:
        """What a scrape gets."""
        self._settle()
        return generate_latest(self.registry)

    def _count(self, body: dict[str, Any]) -> None:
        """What was made counts, however the request ended."""
        for tier, count in body["tokens"].items():
            self._tokens.labels(tier, *(body["variant"],) * self._variants).inc(count)
        for tier, count in body["cached"].items():
            self._cached.labels(tier).inc(count or 0)
        self._prompt.inc(body["prompt_tokens"])
        for recovery in body["recoveries"]:
            self._recoveries.labels(recovery["role"], recovery["reason"]).inc()
        for transfer in body["kv"]:
            self._saved.labels(transfer["edge"]).inc(transfer["bytes_cached"])
        if body["handoff"] is not None and body["handoff"]["gap"] is not None:
            self._handoff.observe(body["handoff"]["gap"])

    def _by(self, *labels: str) -> tuple[str, ...]:
        return (*labels, "variant") if self._variants else labels

    def _times(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, self._by("route"), buckets=buckets, registry=self.registry)

    def _settle(self) -> None:
        """Count the bytes that have come since the last time; KV may still move to main when the user has all."""
        for moving in list(self._open):
            for edge, size in moving.more().items():
                self._kv.labels(edge).inc(size)
            if moving.settled:
                self._open.remove(moving)


def labelled(texts: Mapping[str, bytes]) -> bytes:
    """What several processes say of themselves, by name, as one text: each series gets a label `replica`. They are not
    summed up: a process that starts again would make a sum go back."""
    registry = CollectorRegistry()
    registry.register(_Labelled(texts))
    return generate_latest(registry)


class _Labelled(Collector):
    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text.decode()):
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    whole.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        return families.values()


class _Links(Collector):
    """What those who send over the graph's links have seen."""

    def __init__(self, links: Callable[[], Iterable[LinkView]]) -> None:
        self._links = links

    def collect(self) -> Iterable[Metric]:
        labels = ("link", "source", "target")
        goodput = GaugeMetricFamily("pdd_link_goodput_bytes", "KV payload a second, while busy, of late", labels=labels)
        rtt = GaugeMetricFamily("pdd_link_rtt_seconds", "Round trip", labels=labels)
        queue = GaugeMetricFamily("pdd_link_queue_bytes", "KV that waits to be sent", labels=labels)
        # A sender that starts again begins at zero: sums over senders may fall, so they are gauges.
        sent = GaugeMetricFamily("pdd_link_sent_bytes", "KV sent by the senders that are there", labels=labels)
        retransmits = GaugeMetricFamily("pdd_link_retransmits", "TCP segments they sent again", labels=labels)
        for link in self._links():
            way = (link.name, link.source, link.target)
            if link.goodput is not None:
                goodput.add_metric(way, link.goodput)
            rtt.add_metric(way, link.rtt)
            queue.add_metric(way, link.queue)
            sent.add_metric(way, link.sent)
            retransmits.add_metric(way, link.retransmits)
        return (goodput, rtt, queue, sent, retransmits)


class _Moving:
    """A request whose KV may not all have arrived yet."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._counted: dict[str, int] = {}
        self.settled = False

    def more(self) -> dict[str, int]:
        """Bytes by edge that are not counted yet."""
        transfers = self._timeline.body()["kv"]
        self.settled = all(transfer["finished"] is not None for transfer in transfers)
        total: dict[str, int] = {}
        for transfer in transfers:
            total[transfer["edge"]] = total.get(transfer["edge"], 0) + transfer["bytes"]
        more = {edge: size - self._counted.get(edge, 0) for edge, size in total.items()}
        self._counted = total
        return more
