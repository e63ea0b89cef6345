"""The graph's links, with what the workers that send over them have seen."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pdd_runtime.graph import Graph
from pdd_runtime.plugins.routing import LinkView
from pdd_runtime.plugins.transport import LinkTelemetry


class Links:
    """Each link of the graph in both directions."""

    def __init__(self, graph: Graph) -> None:
        self._declared = [
            LinkView(name=name, source=source, target=target, bandwidth=link.bandwidth / 8, rtt=link.rtt)
            for name, link in graph.spec.links.items()
            for source, target in (link.between, link.between[::-1])
        ]

    def views(self, seen: Iterable[tuple[str, LinkTelemetry]]) -> tuple[LinkView, ...]:
        """`seen`: what every sender says, each with the cluster it sends from."""
        ways: dict[tuple[str, str], list[LinkTelemetry]] = {}
        for source, telemetry in seen:
            ways.setdefault((source, telemetry.cluster), []).append(telemetry)
        return tuple(_measured(link, ways.get((link.source, link.target), [])) for link in self._declared)


def _measured(link: LinkView, senders: list[LinkTelemetry]) -> LinkView:
    """Senders that have something to send share the line, so their goodputs add up. Where nobody has, the best that
    one has seen is what the next will get."""
    busy = [sender.goodput for sender in senders if sender.queue and sender.goodput]
    alone = max((sender.goodput for sender in senders if sender.goodput), default=None)
    rtts = [sender.rtt for sender in senders if sender.rtt is not None]
    return msgspec.structs.replace(
        link,
        rtt=min(rtts, default=link.rtt),
        goodput=sum(busy) if busy else alone,
        queue=sum(sender.queue for sender in senders),
        sent=sum(sender.sent for sender in senders),
        retransmits=sum(sender.retransmits for sender in senders),
    )
