"""What an edge of the graph may set for this transport."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from pdd_runtime.graph.units import Duration


class RdmaConfig(BaseModel, frozen=True, extra="forbid"):
    tls: str = Field(default="", pattern=r"^\^?[a-z0-9_]*$")
    """What UCX may use: one of its transports or their families (`rc`, `ib`, `tcp`), or `all`. Empty: all, and an RDMA
    device must be here. Several at once are given in the environment, as UCX_TLS, which wins."""
    devices: tuple[str, ...] = ()
    """RDMA devices by name (`mlx5_0`); empty: every one there is."""
    progress_thread: bool = False
    """Have NIXL run a thread of its own beside ours. It takes a core: leave it off where cores are few."""
    readers: int | None = Field(default=None, ge=1, le=16)
    """Agents that read, with a thread each; each registers the worker's memory. Unset: one, as a device needs no more,
    or two where `tls` says that a processor may do it, as in shared memory."""
    checksums: bool = True
    """Hash every block on both sides before it counts as received. Without, a block counts once the sender has said
    that it was held until it had been read, which costs a round trip for each piece."""
    fallback: Literal["tcp"] | None = None
    """The transport to use where NIXL or a device is missing, on either side. Without: an error."""
    retry_delay: Duration = Field(default=0.05, gt=0.0)
    """The pause before the first new attempt; it doubles while attempts bring nothing."""
    retry_delay_max: Duration = Field(default=1.0, gt=0.0)
    """Where the doubling ends."""

    @property
    def agents(self) -> int:
        """That read."""
        return self.readers or (2 if self.tls else 1)
