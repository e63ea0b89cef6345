"""What a handler knows of its call."""

from __future__ import annotations

from dataclasses import dataclass

from pdd_runtime.clock import now
from pdd_runtime.rpc.greeting import Greeting


@dataclass(frozen=True, slots=True)
class RpcContext:
    """Cancellation needs no field: the handler's task is cancelled, its generator closed."""

    peer: Greeting
    """The client, without its secret."""
    deadline: float | None
    """On `pdd_runtime.clock.now`; the handler is cancelled then. None: none."""

    @property
    def remaining(self) -> float | None:
        """Seconds left, never negative; None: no deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - now())
