"""Whether the certificates of a graph are here, and for how long they serve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from pdd_runtime.cli.doctor.check import Check
from pdd_runtime.errors import GraphError
from pdd_runtime.graph import Graph
from pdd_runtime.plugins.certificate import tls_of

SOON = 30
"""Days."""
_DAY = 86400.0


def certificates(graph: Graph) -> Iterator[Check]:
    """One of each cluster: those of others need not be on this host, but one has to be."""
    files = graph.spec.security.tls
    if files is None:
        return
    here = [name for name in graph.spec.clusters if Path(files.cert.replace("{cluster}", name)).exists()]
    for cluster in here:
        yield _certificate(graph, cluster)
    if not here:
        fix = "make certificates with `pdd-runtime certs init`, or put those of this host's cluster there"
        yield Check("graph", "certificates", "fail", f"there is none at {files.cert}", fix)


def _certificate(graph: Graph, cluster: str) -> Check:
    try:
        tls = tls_of(graph, cluster)
    except GraphError as error:
        return Check("graph", "certificate", "fail", f"{cluster}: {error.what}: {error.why}", error.fix)
    assert tls is not None
    days = (tls.expires - time.time()) / _DAY
    found = f"{cluster}: valid for {days:.0f} more days" if days >= 2 else f"{cluster}: valid for {days * 24:.0f} hours"
    if days < SOON:
        fix = "replace the files: running processes read them anew, and no connection ends"
        return Check("graph", "certificate", "warn", found, fix)
    return Check("graph", "certificate", "ok", found)
