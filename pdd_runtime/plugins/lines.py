"""The links on which one process sends to other clusters, and the lines that emulate them."""

from __future__ import annotations

import logging

import xxhash

from pdd_runtime.clock import now
from pdd_runtime.errors import RequestError
from pdd_runtime.graph.models import Graph
from pdd_runtime.plugins.messages import LineCut
from pdd_runtime.plugins.transport import LinkFacts
from pdd_runtime.rpc import Line, RpcContext, RpcServer

log = logging.getLogger(__name__)

LONGEST_CUT = 600.0
"""Seconds. A cut ends by itself, also where whoever made it is gone."""


class Lines:
    """One `Line` per link that is emulated and leads away from `cluster`; message plane and transports of a
    process share them."""

    def __init__(self, graph: Graph, cluster: str) -> None:
        self.cluster = cluster
        self._lines: dict[str, Line | None] = {}
        self._links: dict[str, LinkFacts] = {}
        for name, link in graph.spec.links.items():
            if cluster not in link.between:
                continue
            far = link.between[1] if link.between[0] == cluster else link.between[0]
            self._links.setdefault(far, LinkFacts(name, link.bandwidth, link.rtt, link.streams))
            # RTT and jitter are the graph's for a round trip: each direction has half of them.
            line = Line(
                link.bandwidth,
                delay=link.rtt / 2,
                jitter=link.jitter / 2,
                seed=xxhash.xxh32_intdigest(f"{name}/{cluster}".encode()),
            )
            self._lines.setdefault(far, line if link.emulate else None)

    def to(self, cluster: str) -> Line | None:
        """The line to `cluster`; None: the network as it is."""
        return self._lines.get(cluster) if cluster != self.cluster else None

    def link(self, cluster: str) -> LinkFacts | None:
        """What the graph says of the link to `cluster`; None: there is none, as inside a cluster."""
        return self._links.get(cluster)

    def serve(self, server: RpcServer) -> None:
        """Let those who have the graph's secret cut the lines that are emulated; where none is, there is no such
        method."""
        if any(self._lines.values()):
            server.unary("line.cut", LineCut, self._on_cut)

    async def _on_cut(self, cut: LineCut, context: RpcContext) -> None:
        line = self.to(cut.cluster)
        if line is None or not 0 < cut.seconds <= LONGEST_CUT:
            raise RequestError(
                f"the line to {cut.cluster} cannot be cut for {cut.seconds:g} s",
                why="it is not emulated here" if line is None else f"a cut takes at most {LONGEST_CUT:g} s",
            )
        log.warning("the line to %s is cut for %g s: %s asks for it", cut.cluster, cut.seconds, context.peer.name)
        line.cut(now() + cut.seconds)
