"""The certificate that a process of a graph shows."""

from __future__ import annotations

from pdd_runtime.errors import GraphError, RpcError
from pdd_runtime.graph.models import Graph
from pdd_runtime.rpc import Tls


def tls_of(graph: Graph, cluster: str) -> Tls | None:
    """Of one that stands in `cluster`; None: the graph has no TLS. Raises `GraphError` where its files are of no use
    for that."""
    files = graph.spec.security.tls
    if files is None:
        return None
    ca, cert, key = (path.replace("{cluster}", cluster) for path in (files.ca, files.cert, files.key))
    try:
        return Tls(ca=ca, cert=cert, key=key, graph=graph.name, cluster=cluster)
    except RpcError as error:
        where = f"spec.security.tls: {error.where}"
        raise GraphError(error.what, where=where, why=error.why, fix=error.fix) from None
