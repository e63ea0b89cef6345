"""By which tools of this host know that they talk to a graph's own frontend."""

from __future__ import annotations

import ssl

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import Graph


def trusted(graph: Graph) -> ssl.SSLContext:
    """What an HTTP client is to verify: the very certificate that the frontend shows, whatever that is called, since it
    is reached at an address of this host. Nobody where the frontend is plain HTTP. Raises `GraphError`."""
    tls = graph.spec.frontend.tls
    # Not a client's default: loading the host's CAs takes tens of milliseconds, each time.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls is None:
        return context
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(tls.cert)
    except (OSError, ssl.SSLError) as error:
        raise GraphError("the frontend's certificate cannot be read", where=tls.cert, why=str(error)) from error
    return context
