"""The hooks a plugin may implement. Each only returns classes; nothing is started by loading a plugin."""

from __future__ import annotations

import pluggy

from pdd_runtime.plugins.discovery import Discovery
from pdd_runtime.plugins.engine import Engine
from pdd_runtime.plugins.handoff import HandoffStrategy
from pdd_runtime.plugins.latency import LatencyModel
from pdd_runtime.plugins.routing import RoutingPolicy
from pdd_runtime.plugins.transport import Transport

hookspec = pluggy.HookspecMarker("pdd_runtime")
hookimpl = pluggy.HookimplMarker("pdd_runtime")


@hookspec
def pdd_register_engines() -> list[type[Engine]]:  # type: ignore[empty-body]
    """Return engine classes."""


@hookspec
def pdd_register_transports() -> list[type[Transport]]:  # type: ignore[empty-body]
    """Return transport classes."""


@hookspec
def pdd_register_routing_policies() -> list[type[RoutingPolicy]]:  # type: ignore[empty-body]
    """Return routing policy classes."""


@hookspec
def pdd_register_handoff_strategies() -> list[type[HandoffStrategy]]:  # type: ignore[empty-body]
    """Return handoff strategy classes."""


@hookspec
def pdd_register_discoveries() -> list[type[Discovery]]:  # type: ignore[empty-body]
    """Return discovery classes."""


@hookspec
def pdd_register_latency_models() -> list[type[LatencyModel]]:  # type: ignore[empty-body]
    """Return latency model classes."""
