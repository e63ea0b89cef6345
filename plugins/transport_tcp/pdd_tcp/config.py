"""What an edge of the graph may set for this transport."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from pdd_runtime.graph.units import Duration, Size

MOST_STREAMS = 64


class TcpConfig(BaseModel, frozen=True, extra="forbid"):
    streams: int = Field(default=4, ge=1, le=MOST_STREAMS)
    """Connections to one sender at most. They are opened once, kept, and shared by all fetches from it. Inside a
    cluster there is one, and one more for each MiB that is asked for at once; an emulated link takes one."""
    peers: int = Field(default=64, ge=1)
    """Senders to which connections are kept at once. Beyond that the one idle for longest is let go."""
    keep: Duration = Field(default=60.0, gt=0.0)
    """How long connections are kept that no fetch uses."""
    io_timeout: Duration = Field(default=10.0, ge=0.1)
    """A peer from which nothing came, or to which nothing could be sent, for so long is given up: a hung process
    keeps its connections open."""
    retry_delay: Duration = Field(default=0.05, gt=0.0)
    """The pause before the first reconnect; it doubles while reconnects bring nothing."""
    retry_delay_max: Duration = Field(default=1.0, gt=0.0)
    """Where the doubling ends."""
    frame: Size = Field(default=1 << 20, ge=4 << 10, le=16 << 20)
    """The largest run of bytes with a checksum of its own, and the most that is sent again on a connection that
    breaks. On slow links frames are smaller: 20 ms of a stream's share."""
    order: Literal["shortest", "fifo"] = "shortest"
    """What a sender sends first: the transfer with the fewest bytes left, or the one that came first."""
    small: Size = Field(default=2 << 20, ge=0)
    """Transfers of at most so many bytes in all go before all others."""
    ageing: float = Field(default=0.1, ge=0.0, lt=1.0)
    """The share of a link that is the oldest transfer's, however small the others are: so each one ends."""
    compression: Literal["off", "blosc2", "auto"] = "off"
    """Whether blocks are compressed on their way, without loss: bfloat16 to some two thirds, for 2 CPU-s/GB. `auto`
    compresses on links of at most 1 Gbit/s, where both sides have the package blosc2
    (`pip install "pdd-tcp[compression]"`)."""
    quantize: Literal["off", "int8-channel"] = "off"
    """LOSSY. `int8-channel` sends each number of the KV as 8 bits, with a scale for each channel of a block: some 0.6
    of bfloat16's bytes with blocks of 16 tokens, with an error of less than 1 % of a channel's size. Tokens may differ
    from those without it. Both sides must ask for it."""
    congestion: str = Field(default="auto", pattern=r"^[a-z0-9_]+$")
    """The congestion control of a link's connections, by the kernel's name, such as `bbr` or `cubic`; `auto` is bbr
    where there is one, else cubic."""
