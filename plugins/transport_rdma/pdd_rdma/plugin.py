"""What the runtime finds through the entry point."""

from __future__ import annotations

from pdd_rdma.transport import RdmaTransport
from pdd_runtime.plugins.hookspecs import hookimpl
from pdd_runtime.plugins.transport import Transport


@hookimpl
def pdd_register_transports() -> list[type[Transport]]:
    """The transport `rdma`."""
    return [RdmaTransport]
