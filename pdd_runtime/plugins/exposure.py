"""Addresses in plugins' settings, beyond this host, of what has no TLS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import LoadedGraph
from pdd_runtime.graph.exposure import leaves_host
from pdd_runtime.plugins.manager import PluginManager


@dataclass(frozen=True)
class InClear:
    """Beside the type of a setting, in `Annotated`: an address at which others reach what has no TLS, and knows nobody.
    Beyond the host it is allowed only in a cluster that says `insecure: true`."""

    what: str
    """That is to be had there."""


def exposed(loaded: LoadedGraph, plugins: PluginManager) -> Iterator[GraphError]:
    """Settings of engines that open something to a network which their cluster does not call its own."""
    spec = loaded.graph.spec
    for name, pool in spec.pools.items():
        route = ("spec", "pools", name, "engine", "config")
        config = plugins.configure(plugins.engine(pool.engine.plugin), pool.engine.config, loaded.locate(route))
        for setting, field in type(config).model_fields.items():
            value = getattr(config, setting)
            mark = next((each for each in field.metadata if isinstance(each, InClear)), None)
            if mark is None or not isinstance(value, str) or spec.clusters[pool.cluster].insecure:
                continue
            if leaves_host(value):
                yield GraphError(
                    f'pool "{name}" opens {mark.what} to {value}, beyond this host',
                    where=loaded.locate((*route, setting)),
                    why=f"engine {pool.engine.plugin} has no TLS there, and lets in whoever comes",
                    fix="in a network that nobody else can read (a VPN, WireGuard) write insecure: true beside cluster "
                    f'"{pool.cluster}"; else leave {setting} out, or take data_plane: pdd with transport tcp',
                )
