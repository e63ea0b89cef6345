"""What an edge of the graph may set for this transport."""

from __future__ import annotations

import ipaddress
import os
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
    checksums: bool | None = None
    """Hash every block on both sides before it counts as received. Without, a block counts once the sender has said
    that it was held until it had been read, which costs a round trip for each piece. Unset: where blocks may go over
    TCP, whose own check is weak. A device checks each packet from end to end, faster than processors hash, and memory
    of one host has no way to spoil it on."""
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

    def hashes(self, endpoint: str) -> bool:
        """Whether blocks from `endpoint` (host:port) have checksums."""
        if self.checksums is not None:
            return self.checksums
        ways = (os.environ.get("UCX_TLS") or self.tls).split(",")
        if ways[0].startswith("^"):
            ways = ["all"]
        return "tcp" in ways or ("all" in ways and not _is_here(endpoint))


def _is_here(endpoint: str) -> bool:
    """Whether it is an address of this host alone."""
    try:
        return ipaddress.ip_address(endpoint.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False
