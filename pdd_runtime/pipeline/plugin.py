"""What this package registers: the built-in routing policies and handoff strategies."""

from __future__ import annotations

from pdd_runtime.pipeline.handoff_strategies import Adaptive, CatchUp, KvTransfer, OneShot, Stay
from pdd_runtime.pipeline.routing_policies import AlwaysRelay, HitThreshold, NeverRelay, Predictive
from pdd_runtime.plugins import hookimpl
from pdd_runtime.plugins.handoff import HandoffStrategy
from pdd_runtime.plugins.routing import RoutingPolicy


@hookimpl
def pdd_register_routing_policies() -> list[type[RoutingPolicy]]:
    return [HitThreshold, Predictive, AlwaysRelay, NeverRelay]


@hookimpl
def pdd_register_handoff_strategies() -> list[type[HandoffStrategy]]:
    return [OneShot, CatchUp, Adaptive, Stay, KvTransfer]
