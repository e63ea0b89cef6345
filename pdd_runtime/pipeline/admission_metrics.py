"""What admission shows in `/metrics`."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from pdd_runtime.pipeline.admission import Admission

_WAITS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)


class AdmissionCounts:
    """Counted as it happens."""

    def __init__(self) -> None:
        self.waits = Histogram(
            "pdd_queue_wait_seconds", "How long those waited who did before they were let in", ("tenant",),
            buckets=_WAITS, registry=None,
        )  # fmt: skip
        self.refused = Counter(
            "pdd_refused",
            "Requests refused: full (the queue), long (the wait would be), waited (in vain)",
            ("tenant", "reason"),
            registry=None,
        )


class AdmissionCollector(Collector):
    """Asked at each scrape."""

    def __init__(self, *admissions: Admission) -> None:
        """Those of one process; what they count is counted by all together."""
        self._admission, self._admissions = admissions[0], admissions
        self._tenants: set[str] = {""}

    def collect(self) -> Iterable[Metric]:
        yield from self._admission.counts.waits.collect()
        yield from self._admission.counts.refused.collect()
        yield self._queue()
        yield from self._pools()
        yield from self._links()
        yield from self._gaps()

    def _queue(self) -> Metric:
        lengths: collections.Counter[str] = collections.Counter()
        for admission in self._admissions:
            lengths.update(admission.queue.lengths())
        self._tenants |= lengths.keys()
        queue = GaugeMetricFamily("pdd_queue_length", "Requests that wait to be let in", labels=("tenant",))
        for tenant in sorted(self._tenants):
            queue.add_metric((tenant,), lengths[tenant])
        return queue

    def _pools(self) -> Iterable[Metric]:
        room = self._admission.room
        taken: dict[str, int] = {}
        most: dict[str, int] = {}
        for worker in self._admission.view().workers:
            pool = worker.key.pool
            taken[pool] = taken.get(pool, 0) + room.queued(worker)
            most[pool] = most.get(pool, 0) + room.most(worker)
        yield _by("pool", "pdd_pool_requests", "Requests on a pool's workers, of all frontends", taken)
        yield _by("pool", "pdd_pool_requests_limit", "Requests that they take at once", most)

    def _links(self) -> Iterable[Metric]:
        labels = ("link", "source")
        room = self._admission.room
        waiting = GaugeMetricFamily(
            "pdd_link_promised_bytes", "KV that requests in flight will send, and KV that waits", labels=labels
        )
        limit = GaugeMetricFamily("pdd_link_promised_limit_bytes", "How much may", labels=labels)
        for link in self._admission.view().links:
            way = (link.name, link.source)
            waiting.add_metric(way, max(link.queue, room.bytes[way]))
            limit.add_metric(way, room.most_bytes(link.name))
        return waiting, limit

    def _gaps(self) -> Iterable[Metric]:
        rates = self._admission.hit_rates
        gaps = {pool: prefill - main for pool, (prefill, main) in rates.rates().items()}
        alarms = {pool: float(pool in rates.alarms) for pool in gaps}
        yield _by("pool", "pdd_hit_rate_gap", "Cached share of prompts, prefill's less this main pool's, of late", gaps)
        yield _by("pool", "pdd_hit_rate_gap_alarm", "1: it is above spec.slo.hit_rate_gap", alarms)


def _by(label: str, name: str, text: str, values: dict[str, float] | dict[str, int]) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=(label,))
    for each, value in values.items():
        gauge.add_metric((each,), value)
    return gauge
