"""The graph's links, with what the workers that send over them have seen."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from pdd_runtime.graph import Graph
from pdd_runtime.pipeline.sender import Seen
from pdd_runtime.plugins.routing import LinkView

AGE = 30.0
"""Seconds after which a goodput that was measured, and is less than the graph says, counts for 1/e: what was slow once
is tried again."""


class Links:
    """Each link of the graph in both directions."""

    def __init__(self, graph: Graph) -> None:
        self._declared = [
            LinkView(name=name, source=source, target=target, bandwidth=link.bandwidth / 8, rtt=link.rtt)
            for name, link in graph.spec.links.items()
            for source, target in (link.between, link.between[::-1])
        ]

    def views(self, seen: Iterable[Seen]) -> tuple[LinkView, ...]:
        """With what every sender says of it."""
        ways: dict[tuple[str, str], list[Seen]] = {}
        for each in seen:
            ways.setdefault((each.source, each.telemetry.cluster), []).append(each)
        return tuple(
            _measured(link, senders) if (senders := ways.get((link.source, link.target))) else link
            for link in self._declared
        )


def _measured(link: LinkView, seen: list[Seen]) -> LinkView:
    """Senders that have something to send share the line, so their goodputs add up. Where nobody has, the best that
    one has seen is what the next will get. A line is stalled when it is for all who try."""
    senders = [each.telemetry for each in seen]
    busy = [sender.goodput for sender in senders if sender.queue and sender.goodput]
    alone = max((_aged(each, link.bandwidth) for each in seen if each.telemetry.goodput), default=None)
    return msgspec.structs.replace(
        link,
        rtt=min((sender.rtt for sender in senders if sender.rtt is not None), default=link.rtt),
        goodput=sum(busy) if busy else alone,
        queue=sum(sender.queue for sender in senders),
        stalled=min((each.stalled for each in seen if each.stalled is not None), default=0.0),
        sent=sum(sender.sent for sender in senders),
        retransmits=sum(sender.retransmits for sender in senders),
    )


def _aged(seen: Seen, declared: float) -> float:
    goodput = seen.telemetry.goodput or 0.0
    return goodput + max(0.0, declared - goodput) * (1.0 - math.exp(-seen.idle / AGE))
