"""What an edge of the graph may set for this transport."""

from __future__ import annotations

from pydantic import BaseModel, Field

from pdd_runtime.graph.units import Duration


class TcpConfig(BaseModel, frozen=True, extra="forbid"):
    streams: int = Field(default=4, ge=1, le=64)
    """Connections per fetch at most. A small fetch and an emulated link take fewer."""
    io_timeout: Duration = Field(default=10.0, ge=0.1)
    """A peer from which nothing came, or to which nothing could be sent, for so long is given up: a hung process
    keeps its connections open."""
    retry_delay: Duration = Field(default=0.05, gt=0.0)
    """The pause before the first reconnect; it doubles while reconnects bring nothing."""
    retry_delay_max: Duration = Field(default=1.0, gt=0.0)
    """Where the doubling ends."""
