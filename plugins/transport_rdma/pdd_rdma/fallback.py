"""Another transport, for where RDMA cannot be had and the graph says that it may be used."""

from __future__ import annotations

from pdd_rdma.config import RdmaConfig
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.transport import Transport, TransportContext


def fallback_of(config: RdmaConfig, context: TransportContext) -> Transport | None:
    """By name, with its defaults: we know no other plugin. Raises `PluginError` where it is not installed."""
    if config.fallback is None:
        return None
    plugins = load_plugins(lazily=True)
    cls = plugins.transport(config.fallback)
    return cls(plugins.configure(cls, {}, "transport rdma, fallback"), context)
